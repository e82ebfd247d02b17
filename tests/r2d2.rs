//! What the crate promises, over r2d2. `suite` is compiled over deadpool and bb8, too.

#[path = "half/blocking.rs"]
#[macro_use]
mod half;
mod support;

mod blocking;
mod suite;
