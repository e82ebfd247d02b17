//! The metrics of the events, for the facade crate `metrics`. Without the feature of that name
//! nothing is counted.
//!
//! **The code that raises a gauge keeps its handle**, and lowers the same gauge. A look-up at the
//! end could find the gauge of another recorder, or a gauge that the exporter has forgotten and
//! created anew, and lower it below zero.

/// The labels of a handle in events and metrics. Both are constants of the program, and never keys.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Subject {
    /// `lock`, `throttle`, `semaphore`, `rate limit` …
    pub(crate) primitive: &'static str,
    /// The name of the handle, and empty if the program made it at run time.
    pub(crate) name: &'static str,
}

#[cfg(feature = "metrics")]
pub use self::facade::describe_metrics;
pub(crate) use self::facade::{Counters, Raised, count};

#[cfg(feature = "metrics")]
mod facade {
    use std::sync::OnceLock;
    use std::time::Duration;

    use ::metrics::{
        Counter, Gauge, Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge,
        histogram,
    };

    use super::Subject;

    const OPERATIONS: &str = "interlock_operations_total";
    const LOST: &str = "interlock_lost_total";
    const WAIT: &str = "interlock_wait_seconds";
    const HELD_FOR: &str = "interlock_held_seconds";
    const WAITING: &str = "interlock_waiting";
    const HELD: &str = "interlock_held";

    /// Describes this crate's metrics, with their units, to the recorder of the program.
    ///
    /// Call it once, after you have installed the recorder.
    ///
    /// | Metric | Type | Labels |
    /// |---|---|---|
    /// | `interlock_operations_total` | counter | `kind`, `name`, `outcome` |
    /// | `interlock_lost_total` | counter | `kind`, `name` |
    /// | `interlock_wait_seconds`, `interlock_held_seconds` | histograms | `kind`, `name` |
    /// | `interlock_waiting`, `interlock_held` | gauges | `kind`, `name` |
    ///
    /// `kind` is the primitive, such as `lock` or `rate limit`. `name` is the name that the program
    /// has as a constant, and never a key.
    ///
    /// Install the recorder before the first operation. Waits and holdings that began before are
    /// missing from the gauges, and a [`LocalRateLimit`](crate::rate_limit::LocalRateLimit) keeps
    /// the counters that it has first counted with.
    pub fn describe_metrics() {
        let (count, seconds) = (Unit::Count, Unit::Seconds);
        describe_counter!(OPERATIONS, count, "Operations, by outcome.");
        describe_counter!(
            LOST,
            count,
            "Locks, permits, terms and runs that were lost while they were held."
        );
        describe_histogram!(
            WAIT,
            seconds,
            "How long operations took that may wait, with every outcome."
        );
        describe_histogram!(
            HELD_FOR,
            seconds,
            "For how long locks, permits, terms and runs were held."
        );
        describe_gauge!(
            WAITING,
            count,
            "Operations under way that may wait, and candidates for leadership."
        );
        describe_gauge!(
            HELD,
            count,
            "Locks, permits, terms and runs that are held now."
        );
    }

    /// Counts an operation, how long it took if it may wait, and for how long something was held,
    /// at its end.
    pub(crate) fn count(
        subject: Subject,
        outcome: &'static str,
        is_lost: bool,
        waited: Option<Duration>,
        held: Option<Duration>,
    ) {
        let (kind, name) = (subject.primitive, subject.name);
        counter!(OPERATIONS, "kind" => kind, "name" => name, "outcome" => outcome).increment(1);
        if is_lost {
            lost_counter(kind, name).increment(1);
        }
        if let Some(waited) = waited {
            histogram!(WAIT, "kind" => kind, "name" => name).record(waited);
        }
        if let Some(held) = held {
            histogram!(HELD_FOR, "kind" => kind, "name" => name).record(held);
        }
    }

    fn lost_counter(kind: &'static str, name: &'static str) -> Counter {
        counter!(LOST, "kind" => kind, "name" => name)
    }

    /// The counters of an operation with two outcomes that decides in memory. They are looked up
    /// once, because a look-up takes longer than the operation.
    #[derive(Debug, Default)]
    pub(crate) struct Counters([OnceLock<Counter>; 2]);

    impl Counters {
        pub(crate) fn count(&self, subject: Subject, is_first: bool, outcome: &'static str) {
            let (kind, name) = (subject.primitive, subject.name);
            let look_up =
                || counter!(OPERATIONS, "kind" => kind, "name" => name, "outcome" => outcome);
            self.0[usize::from(is_first)]
                .get_or_init(look_up)
                .increment(1);
        }
    }

    /// Raises a gauge, and lowers the same gauge when it is dropped, on any thread and under any
    /// recorder.
    #[derive(Debug)]
    pub(crate) struct Raised(Gauge);

    impl Raised {
        pub(crate) fn waiting(subject: Subject) -> Self {
            Self::new(WAITING, subject)
        }

        pub(crate) fn held(subject: Subject) -> Self {
            // The counter of losses exists before the first loss, so that an alert on its increase
            // sees that loss, too.
            lost_counter(subject.primitive, subject.name).increment(0);
            Self::new(HELD, subject)
        }

        fn new(gauge: &'static str, subject: Subject) -> Self {
            let raised = gauge!(gauge, "kind" => subject.primitive, "name" => subject.name);
            raised.increment(1.0);
            Self(raised)
        }
    }

    impl Drop for Raised {
        fn drop(&mut self) {
            self.0.decrement(1.0);
        }
    }
}

#[cfg(not(feature = "metrics"))]
mod facade {
    use super::Subject;

    type Time = Option<std::time::Duration>;

    pub(crate) const fn count(_: Subject, _: &'static str, _: bool, _: Time, _: Time) {}

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
}
