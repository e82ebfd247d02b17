//! An application's own migrations, over an asynchronous connection that is given to the crate.

use diesel_async::{AsyncConnection, AsyncPgConnection};
use diesel_interlock::migrations;
use workbench::{Database, block_on};

use crate::half::{block_on_one_thread, polled};
use crate::support::{Observer, Own, Step, eventually, run};

const TWO: Own = Own(&[
    ("1_users", Step::Sql("CREATE TABLE users ()")),
    ("2_orders", Step::Alone("CREATE TABLE orders ()")),
]);

async fn run_pending(url: String) -> usize {
    let conn = AsyncPgConnection::establish(&url).await.unwrap();
    migrations::run_pending(conn, TWO).await.unwrap().len()
}

#[test]
fn a_future_that_is_dropped_at_any_poll_leaves_no_lock_and_no_half_migration() {
    let database = Database::new();
    let mut observer = Observer::of(&database);
    for polls in 0.. {
        run(observer.conn(), &format!("CREATE SCHEMA s{polls}"));
        let url = database.url_with("options", &format!("-c search_path=s{polls}"));
        let ran = block_on_one_thread(polled(polls, run_pending(url.clone())));
        eventually("nothing is held", || observer.all_held() == 0);
        eventually("the session has ended", || observer.sessions() == 0);
        // Each migration has either run and is recorded, or runs now.
        assert!(block_on(run_pending(url)) <= 2);
        if ran.is_some() {
            assert!(
                polls > 4,
                "the future was never dropped while it held the lock"
            );
            return;
        }
    }
}

#[test]
fn migrations_run_in_a_runtime_with_one_thread() {
    let database = Database::new();
    assert_eq!(block_on_one_thread(run_pending(database.url())), 2);
}
