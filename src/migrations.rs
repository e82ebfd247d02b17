//! Running migrations once, though many instances of an application start at the same time: the
//! application's own, and this crate's.
//!
//! Diesel's own `run_pending_migrations` takes no lock: two instances that start together both find
//! a migration pending, both run it, and one of them fails. [`run_pending`] runs them under a lock.
//!
//! # This crate's own schema
//!
//! comes into a database in one of two ways. Either way the schema itself knows what was run: each
//! migration writes its own row into `resource_control.installed_migration`.
//!
//! | | By [`install`], at start-up | By files among the application's own |
//! |---|---|---|
//! | Begin | call [`install`] at start-up | call [`write_to`], then `diesel migration run` |
//! | After an upgrade of this crate | nothing to do | call [`write_to`] again, then `diesel migration run` |
//! | `diesel migration run`, `list`, `revert`, `redo`, with `--all` or without | do not know of it | treat it as the oldest of the application's migrations |
//! | Remove | [`uninstall`] | `revert` them and delete the files, or [`uninstall`] and delete the files |
//! | Change to the other way | call [`write_to`], then `diesel migration run` | delete the files, then call [`take_over`] once per database |
//!
//! Both ways together are allowed, one after the other and at the same moment. Each `up.sql` does nothing
//! where its version is recorded in `installed_migration`, and holds an advisory lock until its
//! transaction ends, so two sessions never run one at the same time. A program may therefore call
//! [`install`] and then [`run_pending`] on a directory that contains the files, on a fresh database, too.
//! Diesel then records in `__diesel_schema_migrations` what [`install`] has run, and `diesel migration
//! revert` and `redo` work. Two limits remain:
//! - If [`install`] has run a migration whose file [`write_to`] has not written yet, `diesel migration
//!   revert --all` and `redo --all` fail at the older files, because newer objects are in the schema.
//! - If the default isolation level is stricter than READ COMMITTED, Diesel's own runner may fail with
//!   "already exists" where [`install`] runs the same migration at that moment. Nothing is changed then;
//!   run it again.
//!
//! `down.sql` drops the tables with everything that was put on them, such as indexes and triggers.
//! [`uninstall`] names it instead.
//!
//! A schema `resource_control` that was made by hand, or copied without its rows, is
//! [adopted](install#a-schema-without-recorded-versions) by [`install`].
//!
//! # Between releases
//!
//! of this crate, its tables and functions only grow: a migration that was released never changes, a
//! column that is added can be left out of an INSERT, and a function with another signature or
//! result is a new function. So
//! - an old program runs on the schema of a newer release, during a rolling deployment and after a
//!   rollback of the program: it overlooks what it does not know, and [`install`] leaves it alone;
//! - a new program on the schema of an older release answers [`Schema::NotInstalled`](crate::Error)
//!   where it needs something newer, and works where it does not. Whoever may install does so first.
//!
//! [`uninstall`] of an older release refuses the schema of a newer one.

mod adopt;
mod contents;
mod diesels_table;
mod install;
mod ours;
mod rights;
mod run_pending;
mod uninstall;
mod write_to;

pub use self::diesels_table::take_over;
pub use self::install::install;
pub use self::ours::LOCK;
pub use self::run_pending::run_pending;
pub use self::uninstall::uninstall;
pub use self::write_to::write_to;
