//! How late a timer is, which tells how responsive a runtime is.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const PERIOD: Duration = Duration::from_millis(10);

/// How late each timer was, in ascending order.
pub(crate) struct Lateness(Vec<Duration>);

/// Sets one timer after the other.
pub(crate) async fn measure(is_over: Arc<AtomicBool>) -> Lateness {
    let mut late = Vec::new();
    while !is_over.load(Ordering::Relaxed) {
        let began = Instant::now();
        tokio::time::sleep(PERIOD).await;
        late.push(began.elapsed().saturating_sub(PERIOD));
    }
    late.sort_unstable();
    Lateness(late)
}

impl Lateness {
    /// The lateness that this share of the timers does not exceed.
    pub(crate) fn quantile(&self, share: f64) -> Duration {
        let at = share * self.0.len().saturating_sub(1) as f64;
        self.0.get(at.ceil() as usize).copied().unwrap_or_default()
    }
}
