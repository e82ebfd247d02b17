#![deny(unused_must_use)]

use diesel_interlock::{AdvisoryLock, Error, PgPool};

static LOCK: AdvisoryLock = AdvisoryLock::named("lock");

fn runs_unprotected(pool: &PgPool) -> Result<(), Error> {
    LOCK.try_acquire(pool)?;
    Ok(())
}

fn runs_unprotected_too(pool: &PgPool) -> Result<(), Error> {
    LOCK.try_acquire(pool)?.acquired();
    Ok(())
}

fn main() {}
