//! What came of work that is done once.

/// What came of work that is done once: the bytes that it has returned, this time or before.
#[must_use = "the outcome may be that of another request with the same key"]
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Done {
    /// This call has done the work, and committed it.
    First(Vec<u8>),
    /// It was done before, and this is what it returned then.
    Before(Vec<u8>),
}

impl Done {
    /// Returns whether this call has done the work.
    pub const fn is_first(&self) -> bool {
        matches!(self, Self::First(_))
    }

    /// Returns what the work has returned when it was done.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::First(bytes) | Self::Before(bytes) => bytes,
        }
    }

    /// Returns what the work has returned when it was done.
    pub fn into_bytes(self) -> Vec<u8> {
        match self {
            Self::First(bytes) | Self::Before(bytes) => bytes,
        }
    }
}
