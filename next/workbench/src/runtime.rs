//! The runtime of asynchronous tests.

use std::sync::OnceLock;

use tokio::runtime::{Builder, Runtime};

/// The runtime that all tests of a process share. It has four threads, and never ends.
pub fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        Builder::new_multi_thread()
            .worker_threads(4)
            .enable_all()
            .build()
            .unwrap_or_else(|error| panic!("cannot make a runtime: {error}"))
    })
}

/// Runs a future on the calling thread, which must not be one of a runtime; what it spawns runs on [`runtime`].
pub fn block_on<F: Future>(future: F) -> F::Output {
    runtime().block_on(future)
}
