//! The metrics of this process, from a Prometheus exporter.

use std::sync::OnceLock;

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};

/// The current export. The first call installs the recorder, so call it before the operations to be
/// counted.
pub(crate) fn exported() -> String {
    static EXPORTER: OnceLock<PrometheusHandle> = OnceLock::new();
    EXPORTER
        .get_or_init(|| {
            let exporter = PrometheusBuilder::new().install_recorder().unwrap();
            diesel_interlock::describe_metrics();
            exporter
        })
        .render()
}

/// The metrics of a name that only one test uses.
pub(crate) struct Metrics(pub(crate) &'static str);

impl Metrics {
    /// The sum of a metric over the series with this name, and with this outcome.
    fn sum(&self, metric: &str, outcome: Option<&str>) -> f64 {
        let name = format!("name=\"{}\"", self.0);
        let outcome = outcome.map(|outcome| format!("outcome=\"{outcome}\""));
        let value = |line: &str| {
            let (series, value) = line.rsplit_once(' ')?;
            let labels = series.strip_prefix(metric)?.strip_prefix('{')?;
            let is_it = labels.contains(&name)
                && outcome
                    .as_ref()
                    .is_none_or(|outcome| labels.contains(outcome));
            is_it.then(|| value.parse::<f64>().unwrap())
        };
        exported().lines().filter_map(value).sum()
    }

    /// How many operations had this outcome.
    pub(crate) fn operations(&self, outcome: &str) -> f64 {
        self.sum("interlock_operations_total", Some(outcome))
    }

    pub(crate) fn held(&self) -> f64 {
        self.sum("interlock_held", None)
    }

    pub(crate) fn waiting(&self) -> f64 {
        self.sum("interlock_waiting", None)
    }

    pub(crate) fn lost(&self) -> f64 {
        self.sum("interlock_lost_total", None)
    }

    /// The number of measured waits.
    pub(crate) fn waits(&self) -> f64 {
        self.sum("interlock_wait_seconds_count", None)
    }

    /// The number of measured holdings.
    pub(crate) fn holdings(&self) -> f64 {
        self.sum("interlock_held_seconds_count", None)
    }

    /// The total time of holding, in seconds.
    pub(crate) fn held_seconds(&self) -> f64 {
        self.sum("interlock_held_seconds_sum", None)
    }
}
