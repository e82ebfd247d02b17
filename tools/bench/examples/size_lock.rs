//! The program of `size_diesel.rs` under a lock.

use std::error::Error;

use diesel::prelude::*;
use diesel::r2d2::{ConnectionManager, Pool};
use diesel_interlock::AdvisoryLock;

static NIGHTLY: AdvisoryLock = AdvisoryLock::named("nightly");

fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::var("DATABASE_URL")?;
    let pool = Pool::new(ConnectionManager::<PgConnection>::new(url))?;
    let mut guard = NIGHTLY.acquire(&pool)?;
    diesel::sql_query("SELECT 1").execute(guard.conn())?;
    guard.release()?;
    Ok(())
}
