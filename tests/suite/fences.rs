//! A fence refuses an earlier holder.

use crate::assert_matches;
use crate::half::{AdvisoryLock, Error, Fence, execute, on_one, pool, wait};
use crate::support::{installed, number, truth};

static FENCE: Fence = Fence::named("rows");

fn pass(pool: &crate::half::PgPool, fence: &Fence, token: i64) -> Result<(), Error> {
    on_one(pool, |conn| {
        wait(execute(conn, "SELECT 1")).unwrap();
        wait(
            AdvisoryLock::named("any")
                .transaction(conn, work!(|conn| reply!(fence.pass(conn, token)))),
        )
    })
}

#[test]
fn a_smaller_token_is_refused() {
    let database = installed();
    let pool = pool(&database, 1);
    pass(&pool, &FENCE, 7).unwrap();
    pass(&pool, &FENCE, 7).unwrap();
    assert_matches!(pass(&pool, &FENCE, 6), Err(Error::Fenced { token: 6, .. }));
    pass(&pool, &FENCE, 8).unwrap();
    assert_matches!(pass(&pool, &FENCE, 7), Err(Error::Fenced { token: 7, .. }));
    pass(&pool, &FENCE.key(1), 1).unwrap();
    pass(&pool, &FENCE.key(2), i64::MIN).unwrap();
}

#[test]
fn a_pass_that_is_rolled_back_does_not_count() {
    let database = installed();
    let pool = pool(&database, 1);
    let rolled_back: Result<(), Error> = on_one(&pool, |conn| {
        wait(AdvisoryLock::named("any").transaction(
            conn,
            work!(|conn| {
                reply!(FENCE.pass(conn, 9))?;
                Err(Error::TimedOut)
            }),
        ))
    });
    assert_matches!(rolled_back, Err(Error::TimedOut));
    pass(&pool, &FENCE, 1).unwrap();
}

#[test]
fn outside_a_transaction_a_pass_is_an_error() {
    let database = installed();
    let pool = pool(&database, 1);
    on_one(&pool, |conn| {
        assert_matches!(wait(FENCE.pass(conn, 1)), Err(Error::OutsideTransaction));
        for bad in [Fence::named(""), FENCE.key("")] {
            assert_matches!(wait(bad.pass(conn, 1)), Err(Error::Input(_)));
        }
    });
    assert_eq!(
        number(
            &mut database.connect(),
            "(SELECT count(*) FROM resource_control.fence)"
        ),
        0
    );
}

#[test]
fn the_tokens_of_a_lock_grow() {
    let database = installed();
    let pool = pool(&database, 2);
    let lock = AdvisoryLock::named("import");
    let mut last = 0;
    for _ in 0..3 {
        let mut guard = wait(lock.acquire(&pool)).unwrap();
        let token = wait(guard.fencing_token()).unwrap();
        assert!(token > last);
        pass(&pool, &FENCE, token).unwrap();
        last = token;
        wait(guard.release()).unwrap();
    }
    assert!(truth(
        &mut database.connect(),
        &format!("NOT resource_control.pass_fence('rows', {})", last - 1)
    ));
}

/// The session of the former holder still lives, but a later holder may have drawn a token already.
#[test]
fn a_former_holder_draws_no_token() {
    let database = installed();
    let pool = pool(&database, 2);
    for lock in [
        AdvisoryLock::named("former"),
        AdvisoryLock::all([&AdvisoryLock::named("former"), &AdvisoryLock::named("too")]),
    ] {
        let mut guard = wait(lock.acquire(&pool)).unwrap();
        wait(execute(guard.conn(), "SELECT pg_advisory_unlock_all()")).unwrap();
        assert_matches!(wait(guard.fencing_token()), Err(Error::LockLost(_)));
        assert_matches!(wait(guard.release()), Err(Error::LockLost(_)));
    }
}
