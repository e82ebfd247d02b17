//! An application's own migrations, on a blocking connection of the application.

use diesel::prelude::*;
use diesel_interlock::{Error, migrations};
use workbench::Database;

use crate::assert_matches;
use crate::support::{Observer, Own, Step};

const ONE: Own = Own(&[("1_users", Step::Sql("CREATE TABLE users ()"))]);

#[test]
fn inside_a_transaction_migrations_are_refused() {
    let database = Database::new();
    let conn = &mut database.connect();
    conn.transaction(|conn| {
        let refused = migrations::run_pending(conn, ONE);
        assert_matches!(refused, Err(Error::InsideTransaction));
        QueryResult::Ok(())
    })
    .unwrap();
    assert_eq!(migrations::run_pending(conn, ONE).unwrap(), ["1"]);
}

#[test]
fn after_migrations_the_session_is_usable_and_holds_nothing() {
    let database = Database::new();
    let conn = &mut database.pool(1).get().unwrap();
    assert_eq!(migrations::run_pending(&mut **conn, ONE).unwrap(), ["1"]);
    diesel::sql_query("INSERT INTO users DEFAULT VALUES")
        .execute(conn)
        .unwrap();
    assert_eq!(Observer::of(&database).all_held(), 0);
}
