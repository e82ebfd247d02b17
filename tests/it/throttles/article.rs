//! The psql session of the article about throttled resources.

use diesel::connection::SimpleConnection;

use super::{age, database};

use crate::half::prelude::*;

#[derive(QueryableByName)]
struct Row {
    #[diesel(sql_type = diesel::sql_types::Nullable<diesel::sql_types::Bool>)]
    granted: Option<bool>,
}

/// The boolean function, as psql and any other language call it.
fn lock_throttled_resource(conn: &mut PgConnection, resource: &str, details: &str) -> Option<bool> {
    diesel::sql_query(format!(
        "SELECT resource_control.lock_throttled_resource({resource}, '{details}') AS granted"
    ))
    .get_result::<Row>(conn)
    .unwrap()
    .granted
}

#[test]
fn the_articles_psql_session_gets_the_articles_results() {
    const CACHE: &str = "'Expensive Cache Rebuild #1'";
    let database = database();
    let (conn, other) = (&mut database.connect(), &mut database.connect());
    conn.batch_execute(
        "ALTER TYPE resource_control.throttled_resource_enum ADD VALUE 'Expensive Cache Rebuild #1'; ",
    )
    .unwrap();
    conn.batch_execute(
        "INSERT INTO resource_control.throttled_resource (resource_id, throttle_interval) \
         VALUES ('Expensive Cache Rebuild #1', '15 seconds')",
    )
    .unwrap();

    // Serially.
    conn.batch_execute("BEGIN").unwrap();
    assert_eq!(
        lock_throttled_resource(conn, CACHE, "apphost 1 pid 1234"),
        Some(true)
    );
    conn.batch_execute("COMMIT; BEGIN").unwrap();
    assert_eq!(
        lock_throttled_resource(conn, CACHE, "apphost 1 pid 5435"),
        Some(false)
    );
    conn.batch_execute("COMMIT").unwrap();

    // Concurrently: denied while the other transaction is open, granted when it is long over.
    age(conn, "16 seconds");
    conn.batch_execute("BEGIN").unwrap();
    assert_eq!(
        lock_throttled_resource(conn, CACHE, "apphost 2 pid 543"),
        Some(true)
    );
    assert_eq!(
        lock_throttled_resource(other, CACHE, "concurrent caller"),
        Some(false)
    );
    conn.batch_execute("COMMIT").unwrap();
    assert_eq!(
        lock_throttled_resource(other, CACHE, "concurrent caller"),
        Some(false)
    );
    age(conn, "120 seconds");
    assert_eq!(
        lock_throttled_resource(other, CACHE, "concurrent caller"),
        Some(true)
    );

    // A rollback: as if never taken.
    age(conn, "16 seconds");
    conn.batch_execute("BEGIN").unwrap();
    assert_eq!(
        lock_throttled_resource(conn, CACHE, "half-hearted"),
        Some(true)
    );
    conn.batch_execute("ROLLBACK").unwrap();
    assert_eq!(lock_throttled_resource(other, CACHE, "next"), Some(true));

    // Nothing, and a label without a row.
    assert_eq!(lock_throttled_resource(conn, "NULL", "x"), None);
    conn.batch_execute("ALTER TYPE resource_control.throttled_resource_enum ADD VALUE 'rowless'")
        .unwrap();
    assert_eq!(lock_throttled_resource(conn, "'rowless'", "x"), Some(false));
}
