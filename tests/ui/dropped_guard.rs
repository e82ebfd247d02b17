#![deny(unused_must_use)]

use diesel_interlock::{AdvisoryLock, Error, PgPool};

static LOCK: AdvisoryLock = AdvisoryLock::named("lock");

fn runs_unprotected(pool: &PgPool) -> Result<(), Error> {
    LOCK.acquire(pool)?;
    Ok(())
}

fn main() {}
