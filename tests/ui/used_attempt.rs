#![deny(warnings)]

use diesel::prelude::*;
use diesel_interlock::{AdvisoryLock, Attempt, Error, LockKey, PgPool};

static LOCK: AdvisoryLock = AdvisoryLock::named("lock");
static READERS: AdvisoryLock = AdvisoryLock::new(LockKey::pair(1, 2)).shared();

pub fn nightly(pool: &PgPool) -> Result<(), Error> {
    let Attempt::Acquired(mut guard) = LOCK.try_acquire(pool)? else {
        return Ok(());
    };
    guard.conn().transaction(|_| QueryResult::Ok(()))?;
    guard.release()
}

pub fn readers(pool: &PgPool) -> QueryResult<()> {
    let _guard = READERS.acquire(pool)?;
    LOCK.with(pool, |_| Ok(()))
}

fn main() {}
