//! Migrations of this crate. Those of the application take a pool in the asynchronous half, so their tests are not shared.

use diesel::migration::MigrationVersion;
use diesel_interlock::Result;
use diesel_interlock::asynchronous::migrations;
pub(crate) use diesel_interlock::migrations::LOCK;

use super::{PgConnection, block_on};

type Versions = Vec<MigrationVersion<'static>>;

pub(crate) fn install(conn: &mut PgConnection) -> Result<Versions> {
    block_on(migrations::install_on(&mut conn.0))
}

pub(crate) fn uninstall(conn: &mut PgConnection) -> Result<Versions> {
    block_on(migrations::uninstall_on(&mut conn.0))
}

pub(crate) fn take_over(conn: &mut PgConnection) -> Result<Versions> {
    block_on(migrations::take_over_on(&mut conn.0))
}
