//! The halves of the crate.

/// The half that a worker uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Half {
    Blocking,
    Asynchronous,
}

impl Half {
    pub(crate) const ALL: [Self; 2] = [Self::Blocking, Self::Asynchronous];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Blocking => "blocking",
            Self::Asynchronous => "asynchronous",
        }
    }
}
