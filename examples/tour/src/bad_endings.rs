//! Guards whose work ends badly.

use std::error::Error;
use std::panic::{self, AssertUnwindSafe};

use diesel::connection::SimpleConnection;
use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::Bool;
use workbench::Database;

use crate::NIGHTLY;
use crate::observer::{assert_free, assert_held_by, assert_pool_is_whole};
use crate::screen::{good, note, say, title};

pub(crate) fn three_guards_that_end_badly(database: &Database) -> Result<(), Box<dyn Error>> {
    title("3. However the work under a guard ends, the lock is freed");
    let pool = database.pool(2);
    let mut observer = database.connect();

    say("The work panics");
    let guard = NIGHTLY.acquire(&pool)?;
    assert_held_by(guard.backend_pid(), &mut observer)?;
    let message = panic_message_of(move || {
        let _guard = guard;
        panic!("out of paper");
    });
    note(format!("panicked: {message}"));
    assert_free(&mut observer)?;
    assert_pool_is_whole(&pool)?;

    say("The guard is dropped inside an aborted transaction");
    let mut guard = NIGHTLY.acquire(&pool)?;
    assert_held_by(guard.backend_pid(), &mut observer)?;
    let conn = guard.conn();
    conn.batch_execute("BEGIN")?; // Diesel does not know of it
    let error = conn.batch_execute("SELECT 1 / 0").unwrap_err();
    let aborted = conn.batch_execute("SELECT 1").is_err();
    assert!(aborted);
    note(format!("BEGIN; SELECT 1 / 0: {error}"));
    drop(guard);
    assert_free(&mut observer)?;
    assert_pool_is_whole(&pool)?;

    say("The server ends the session that has the lock");
    let mut guard = NIGHTLY.acquire(&pool)?;
    assert_held_by(guard.backend_pid(), &mut observer)?;
    let killed: bool = diesel::select(sql::<Bool>(&format!(
        "pg_terminate_backend({})",
        guard.backend_pid()
    )))
    .get_result(&mut observer)?;
    assert!(killed);
    note(format!("pg_terminate_backend({})", guard.backend_pid()));
    assert_free(&mut observer)?;
    assert!(!guard.is_held()?);
    good("guard.is_held() returns false: the work can tell that it has lost the lock");
    let error = guard.release().unwrap_err();
    good("guard.release() returns an error:");
    note(error);
    assert_pool_is_whole(&pool)
}

/// Runs work that panics, without Rust's report of it on the screen.
fn panic_message_of(work: impl FnOnce()) -> &'static str {
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    let outcome = panic::catch_unwind(AssertUnwindSafe(work));
    panic::set_hook(hook);
    let payload = outcome.expect_err("the work panics");
    payload
        .downcast_ref::<&str>()
        .expect("its message is a literal")
}
