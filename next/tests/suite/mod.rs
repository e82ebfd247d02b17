//! One module per behaviour, the same over each pool.

mod fences;
mod rate_limits;
mod throttles;
