use diesel::prelude::*;
use diesel_interlock::{AdvisoryLock, Error, PgPool};

static LOCK: AdvisoryLock = AdvisoryLock::named("lock");

fn releases_too_early(pool: &PgPool) -> Result<(), Error> {
    let mut guard = LOCK.acquire(pool)?;
    guard.conn().transaction(|_| {
        drop(guard);
        Ok(())
    })
}

fn main() {}
