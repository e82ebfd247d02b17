//! What the crate promises, over r2d2: all of `suite`, as over deadpool, and `blocking`.

#[path = "half/blocking.rs"]
#[macro_use]
mod half;
mod support;

mod blocking;
mod suite;
