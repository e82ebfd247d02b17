//! The numbers of the events, for the facade [`metrics`](::metrics). Without the feature there is nothing in here.

#[cfg(feature = "metrics")]
use ::metrics::{
    Counter, Gauge, Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge,
    histogram,
};

#[cfg(feature = "metrics")]
use crate::event::Event;
use crate::event::Subject;

const OPERATIONS: &str = "interlock_operations_total";
const LOST: &str = "interlock_lost_total";
const WAIT: &str = "interlock_wait_seconds";
const HELD_FOR: &str = "interlock_held_seconds";
const WAITING: &str = "interlock_waiting";
const HELD: &str = "interlock_held";

/// Describes the metrics of this crate, with their units, to the recorder that is installed. Call it once, after that.
///
/// | Metric | Type | Labels |
/// |---|---|---|
/// | `interlock_operations_total` | counter | `kind`, `name`, `outcome` |
/// | `interlock_lost_total` | counter | `kind`, `name` |
/// | `interlock_wait_seconds`, `interlock_held_seconds` | histograms | `kind`, `name` |
/// | `interlock_waiting`, `interlock_held` | gauges | `kind`, `name` |
///
/// `kind` is the primitive, such as `lock` or `rate limit`. `name` is the name that the program has as a constant, and never a key.
#[cfg(feature = "metrics")]
pub fn describe_metrics() {
    describe_counter!(OPERATIONS, Unit::Count, "Operations, by what they came to.");
    describe_counter!(
        LOST,
        Unit::Count,
        "Locks, permits, terms and runs that were lost while they were held."
    );
    describe_histogram!(
        WAIT,
        Unit::Seconds,
        "How long the operations took that may wait, whatever they came to."
    );
    describe_histogram!(
        HELD_FOR,
        Unit::Seconds,
        "For how long locks, permits, terms and runs were held."
    );
    describe_gauge!(
        WAITING,
        Unit::Count,
        "Operations that may wait and are under way, and candidates for a leadership."
    );
    describe_gauge!(
        HELD,
        Unit::Count,
        "Locks, permits, terms and runs that are held."
    );
}

/// Counts an event.
#[cfg(feature = "metrics")]
pub(crate) fn count(event: &Event<'_>) {
    let (kind, name) = (event.primitive, event.name);
    counter!(OPERATIONS, "kind" => kind, "name" => name, "outcome" => event.outcome).increment(1);
    if event.is_lost() {
        counter!(LOST, "kind" => kind, "name" => name).increment(1);
    }
    if event.waits {
        histogram!(WAIT, "kind" => kind, "name" => name).record(event.took);
    }
    if let Some(held) = event.held {
        histogram!(HELD_FOR, "kind" => kind, "name" => name).record(held);
    }
}

/// Raises a gauge until it is dropped, which lowers the very same one, on any thread and under any recorder.
#[derive(Debug)]
pub(crate) struct Raised {
    #[cfg(feature = "metrics")]
    gauge: Gauge,
}

impl Raised {
    pub(crate) fn waiting(subject: Subject) -> Self {
        Self::new(WAITING, subject)
    }

    pub(crate) fn held(subject: Subject) -> Self {
        Self::new(HELD, subject)
    }

    #[cfg(not(feature = "metrics"))]
    const fn new(_: &'static str, _: Subject) -> Self {
        Self {}
    }

    #[cfg(feature = "metrics")]
    fn new(gauge: &'static str, subject: Subject) -> Self {
        let gauge = gauge!(gauge, "kind" => subject.primitive, "name" => subject.name);
        gauge.increment(1.0);
        Self { gauge }
    }
}

#[cfg(feature = "metrics")]
impl Drop for Raised {
    fn drop(&mut self) {
        self.gauge.decrement(1.0);
    }
}
