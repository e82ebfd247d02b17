//! What `interlock` promises, in one program: its tests mostly wait, and so they wait side by side.

#[path = "../support/mod.rs"]
mod support;

mod doctor;
mod hostile;
mod operate;
mod run;
mod terminal;
