//! Running migrations once, although many instances of an application start at the same time. This covers the
//! application's own migrations and those of this crate.
//!
//! Diesel's own `run_pending_migrations` takes no lock. If two instances start together, both find a migration pending,
//! both run it, and one of them fails. [`run_pending`] runs the migrations under a lock.
//!
//! # Installation of this crate's schema
//!
//! There are two ways to install the schema `resource_control`: at start-up, or by files among the application's own
//! migrations. In both, the schema itself records what was run, because each migration inserts its own row into
//! `resource_control.installed_migration`.
//!
//! | | By [`install`], at start-up | By files among the application's own |
//! |---|---|---|
//! | Start | call [`install`] at start-up | call [`write_to`], then `diesel migration run` |
//! | After an upgrade of this crate | nothing to do | call [`write_to`] again, then `diesel migration run` |
//! | `diesel migration run`, `list`, `revert`, `redo`, with or without `--all` | do not know of it | treat it as the oldest of the application's migrations |
//! | Remove | [`uninstall`] | `revert` them and delete the files, or [`uninstall`] and delete the files |
//! | Change to the other way | call [`write_to`], then `diesel migration run` | delete the files, then call [`take_over`] once per database |
//!
//! Both ways may be used together, one after the other or at the same moment. Each `up.sql` does nothing if its version is
//! recorded in `installed_migration`, and holds an advisory lock until its transaction ends, so two sessions never run one
//! at the same time. A program may therefore call [`install`] and then [`run_pending`] on a directory that contains the
//! files, also on a fresh database. Diesel then records in `__diesel_schema_migrations` what [`install`] has run, and
//! `diesel migration revert` and `redo` work. Two limits remain:
//! - If [`install`] has run a migration whose file [`write_to`] has not written yet, `diesel migration revert --all` and
//!   `redo --all` fail at the older files, because newer objects are in the schema.
//! - If the default isolation level is stricter than READ COMMITTED, Diesel's own runner may fail with "already exists"
//!   while [`install`] runs the same migration. Nothing is changed then. Run it again.
//!
//! `down.sql` drops the tables together with the objects that an application put on them, such as indexes and triggers.
//! [`uninstall`] instead refuses, and names these objects.
//!
//! [`install`] [adopts](install#adoption-of-a-schema-without-recorded-versions) a schema `resource_control` that was
//! created by hand, or copied without its rows.
//!
//! # Compatibility between releases
//!
//! Tables and functions only grow from release to release of this crate. A released migration never changes, an added column
//! can be left out of an INSERT, and a function with another signature or result is a new function. Two combinations
//! therefore work:
//! - An old program runs on the schema of a newer release, during a rolling deployment and after a rollback of the program.
//!   It ignores what it does not know, and [`install`] leaves it alone.
//! - A new program runs on the schema of an older release. Operations that need something newer return
//!   [`Schema::NotInstalled`](crate::error::Schema::NotInstalled), and the others work. So install before you deploy.
//!
//! [`uninstall`] of an older release refuses the schema of a newer one.
//!
//! # Connections
//!
//! All functions here but [`write_to`] take a blocking connection. With the feature `async`, `asynchronous::migrations` has the
//! same functions for the pools of diesel-async.

mod adopt;
#[cfg(feature = "async")]
pub(crate) mod asynchronous;
mod contents;
mod diesels_table;
mod install;
mod ours;
mod rights;
#[cfg(any(feature = "postgres", feature = "async"))]
mod run_each;
#[cfg(feature = "postgres")]
mod run_pending;
mod uninstall;
mod write_to;

#[cfg(feature = "postgres")]
pub use self::diesels_table::take_over;
#[cfg(feature = "postgres")]
pub use self::install::install;
pub use self::ours::LOCK;
#[cfg(feature = "postgres")]
pub use self::run_pending::run_pending;
#[cfg(feature = "postgres")]
pub use self::uninstall::uninstall;
pub use self::write_to::write_to;
