//! What stands for the numbers of the events without the feature `metrics`: nothing.

use std::time::Duration;

use crate::subject::Subject;

pub(crate) const fn count(
    _: Subject,
    _: &'static str,
    _: bool,
    _: Option<Duration>,
    _: Option<Duration>,
) {
}

#[derive(Debug, Default)]
pub(crate) struct Counters {}

impl Counters {
    pub(crate) const fn count(&self, _: Subject, _: bool, _: &'static str) {}
}

#[derive(Debug)]
pub(crate) struct Raised;

impl Raised {
    pub(crate) const fn waiting(_: Subject) -> Self {
        Self
    }

    pub(crate) const fn held(_: Subject) -> Self {
        Self
    }
}
