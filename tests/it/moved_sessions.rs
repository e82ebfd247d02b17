//! A different session replies than the one that took the lock, as behind a pooler in transaction mode.

use diesel::connection::SimpleConnection;

use crate::half::{AdvisoryLock, Database, Error};
use crate::support::{Observer, assert_matches, assert_pool_whole, backend_pid};

static LOCK: AdvisoryLock = AdvisoryLock::named("moved");

#[test]
fn a_release_on_another_session_is_an_error_and_unlocks_nothing_there() {
    let database = Database::new();
    let pool = database.pool(1);
    let mut observer = Observer::of(&database);
    let readers = LOCK.clone().shared();

    // The other session holds the same lock for another guard.
    let mut elsewhere = database.connect();
    let theirs = readers.acquire_on(&mut elsewhere).unwrap();
    let replied_by = theirs.backend_pid();
    std::mem::forget(theirs);

    let mut guard = readers.acquire(&pool).unwrap();
    let taken_by = guard.backend_pid();
    std::mem::swap(guard.conn(), &mut elsewhere);
    assert!(!guard.is_held().unwrap());
    match guard.release() {
        Err(Error::SessionMoved {
            taken_by: taken,
            replied_by: replied,
            ..
        }) => assert_eq!((taken, replied), (taken_by, replied_by)),
        other => panic!("{other:?}"),
    }
    // One of the two sessions was discarded and is gone. Nothing was unlocked on either.
    observer.assert_ended(replied_by);
    assert_eq!(backend_pid(&mut elsewhere), taken_by);
    assert_eq!(observer.holders(LOCK.key()), 1);
    drop(elsewhere);
    observer.assert_free(LOCK.key());
    assert_pool_whole(&pool, &database);
}

#[test]
fn a_borrowed_connection_is_marked_and_nothing_is_unlocked_there() {
    use crate::half::AnsiTransactionManager;
    use diesel::connection::TransactionManager;
    let database = Database::new();
    let (mut one, mut two) = (database.connect(), database.connect());
    let readers = LOCK.clone().shared();
    std::mem::forget(readers.acquire_on(&mut two).unwrap());
    let mut guard = readers.acquire_on(&mut one).unwrap();
    std::mem::swap(guard.conn(), &mut two);
    assert_matches!(guard.release(), Err(Error::SessionMoved { .. }));
    assert!(AnsiTransactionManager::is_broken_transaction_manager(
        &mut one
    ));
    assert_eq!(Observer::of(&database).holders(LOCK.key()), 2);
}

#[test]
fn a_token_that_another_session_draws_is_none() {
    let database = Database::new();
    let (mut one, mut two) = (database.connect(), database.connect());
    let readers = LOCK.clone().shared();
    std::mem::forget(readers.acquire_on(&mut two).unwrap());
    let mut guard = readers.acquire_on(&mut one).unwrap();
    std::mem::swap(guard.conn(), &mut two);
    let token = guard.fencing_token();
    assert_matches!(token, Err(Error::LockLost { source: None, .. }));
}

#[test]
fn what_another_session_unlocks_once_its_transaction_was_rolled_back_is_not_ours() {
    let database = Database::new();
    let (mut one, mut two) = (database.connect(), database.connect());
    let mut guard = LOCK.acquire_on(&mut one).unwrap();
    two.batch_execute("BEGIN; SELECT 1 / 0").unwrap_err();
    std::mem::swap(guard.conn(), &mut two);
    let released = guard.release();
    assert_matches!(released, Err(Error::ReleaseFailed { .. }));
    assert_eq!(Observer::of(&database).holders(LOCK.key()), 1);
}
