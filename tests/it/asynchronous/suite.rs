//! The files of the suite that are compiled three times: for the blocking half by `main.rs`, and for the asynchronous half over
//! each of its pools. They take each name that differs between the halves from `crate::half`.
//!
//! The others belong to `main.rs` alone:
//!
//! - They test what has one form: keys of other languages (`other_languages`), the documents (`documents`, `architecture`,
//!   `primitives`), queries (`functions`, `joins`, `monitor`, `monitored_rate_limits`, `monitored_tables`), installation
//!   (`adoption`, `installation`, `migrations`, `releases`, `roles`, `uninstallation`), processes (`processes`), types
//!   (`unused_outcomes`).
//! - They test what only the blocking half has, `rate_limit_waits`, or the server, `rate_limit_crashes`.
//! - They test libpq, Diesel's names of prepared statements or r2d2: `copies`, `copied_files`, `prepared_names`,
//!   `handlers_under_test`.
//! - They count what a client sends: tokio-postgres prepares in a round trip of its own, and a drop has sent nothing when it
//!   returns (`round_trips`). They collect the events of a thread, and a drop logs on a thread of the runtime (`events`).
//!   `tests/asynchronous` has both.
//! - `errors` and `properties` are not shared yet.

macro_rules! suite {
    () => {
        mod borrowed_connections;
        mod crowds;
        mod fences;
        mod keys;
        mod moved_sessions;
        mod nested_guards;
        mod permits;
        mod pooled_connections;
        mod rate_limits;
        mod semaphore_claims;
        mod semaphore_contention;
        mod semaphore_faults;
        mod semaphore_input;
        mod semaphore_log;
        mod semaphore_permits;
        mod semaphore_settings;
        mod semaphore_waiting;
        mod semaphores;
        mod server_settings;
        mod session_locks;
        mod standby;
        mod support;
        #[cfg(feature = "testing")]
        mod testing;
        mod throttle_contention;
        mod throttled_keys;
        mod throttled_resources;
        mod throttles;
        mod transaction_locks;
        mod waiting;
        mod watches;
        mod ways_out;
    };
}
