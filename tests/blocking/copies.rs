//! After a `COPY … TO STDOUT` on the guard's connection, the lock is still held, and can be
//! released.

use std::io::{BufRead, Read};

use diesel::pg::CopyFormat;
use workbench::Database;

use crate::half::{AdvisoryLock, pool};
use crate::support::{Observer, assert_pool_whole, run};

diesel::table! {
    letter (id) {
        id -> Integer,
    }
}

static LOCK: AdvisoryLock = AdvisoryLock::named("copies");

#[test]
fn after_a_copy_out_of_a_table_the_lock_is_held_and_can_be_released() {
    let database = Database::new();
    run(
        &mut database.connect(),
        "CREATE TABLE letter AS SELECT generate_series(1, 100000) AS id",
    );
    let pool = pool(&database, 1);
    let mut observer = Observer::of(&database);
    // The next statement is prepared in the first round, and cached in the others.
    for (is_read_to_its_end, asks_is_held) in [
        (true, true),
        (true, true),
        (true, false),
        (false, true),
        (false, false),
    ] {
        let mut guard = LOCK.acquire(&pool).unwrap();
        let pid = guard.backend_pid();
        let copy = diesel::copy_to(letter::table).with_format(CopyFormat::Csv);
        let mut rows = copy.load_raw(guard.conn()).unwrap();
        let mut text = String::new();
        if is_read_to_its_end {
            rows.read_to_string(&mut text).unwrap();
            assert_eq!(text.lines().count(), 100_000);
        } else {
            rows.read_line(&mut text).unwrap();
        }
        drop(rows);
        if asks_is_held {
            assert!(guard.is_held().unwrap());
        }
        assert_eq!(observer.holders(LOCK.lock_key()), 1);
        guard.release().unwrap();
        assert_eq!(observer.holders(LOCK.lock_key()), 0);
        assert!(observer.is_alive(pid));
    }
    assert_pool_whole(&pool, &database);
}
