//! Whose events and numbers they are.

/// A handle, as events and metrics name it. Both are constants of the program, and never keys.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Subject {
    /// `lock`, `throttle`, `semaphore`, `rate limit` …
    pub(crate) primitive: &'static str,
    /// The name of the handle, and nothing where the program made it at run time.
    pub(crate) name: &'static str,
}
