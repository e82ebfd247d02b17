//! A streaming standby grants advisory locks that exclude nobody on the primary.

use std::time::Duration;

use crate::half::prelude::*;
use crate::half::{AdvisoryLock, Cluster, Error};
use crate::support::{assert_matches, eventually, foreign_try};

static LOCK: AdvisoryLock = AdvisoryLock::named("standby");

#[test]
fn a_standby_refuses_until_it_is_promoted() {
    let primary = Cluster::start();
    let database = primary.database();
    let standby = primary.standby();
    let id = LOCK.key().id().unwrap();
    let connect = || PgConnection::establish(&standby.url(database.name())).unwrap();

    // The reason for the refusal: PostgreSQL itself grants the same lock on both.
    assert!(foreign_try(&mut database.connect(), id));
    assert!(foreign_try(&mut connect(), id));

    let conn = &mut connect();
    assert_matches!(LOCK.try_acquire_on(conn), Err(Error::Standby));
    assert_matches!(LOCK.acquire_on(conn), Err(Error::Standby));
    let timeout = Duration::from_millis(1);
    let waited = LOCK.acquire_timeout_on(conn, timeout).map(drop);
    assert_matches!(waited, Err(Error::Standby));
    let shared = LOCK.clone().shared();
    assert_matches!(shared.try_acquire_on(conn), Err(Error::Standby));
    let fenced = LOCK.clone().fenced();
    assert_matches!(fenced.try_acquire_on(conn), Err(Error::Standby));
    let refused = LOCK.transaction(conn, |_| Ok::<_, Error>(()));
    assert_matches!(refused, Err(Error::Standby));
    let mut looking = connect();
    // The session that has tried the lock at the beginning may still be ending.
    eventually("nothing is held", || held(&mut looking) == 0);

    standby.promote();
    LOCK.try_acquire_on(conn)
        .unwrap()
        .acquired()
        .unwrap()
        .release()
        .unwrap();
    LOCK.transaction(conn, |_| Ok::<_, Error>(())).unwrap();
}

fn held(conn: &mut PgConnection) -> i64 {
    diesel::table! {
        pg_locks (pid) {
            pid -> Integer,
            locktype -> Text,
        }
    }
    pg_locks::table
        .filter(pg_locks::locktype.eq("advisory"))
        .count()
        .get_result(conn)
        .unwrap()
}
