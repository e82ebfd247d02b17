//! The tests of `interlock`, in one program, because most of them wait, and so wait concurrently.

#[path = "../support/mod.rs"]
mod support;

mod doctor;
mod hostile;
mod operate;
mod run;
mod terminal;
