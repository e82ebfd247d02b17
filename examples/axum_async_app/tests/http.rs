//! What the application promises, over HTTP.

http_tests::tests!(env!("CARGO_BIN_EXE_axum_async_app"));
