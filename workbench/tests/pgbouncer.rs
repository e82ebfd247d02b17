//! A pooler in front of a database. Needs `PgBouncer`: `cargo test -p workbench --test pgbouncer`.

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use workbench::{Database, PgBouncer, PoolMode, RoundTrips};

fn pid(conn: &mut PgConnection) -> i32 {
    let pid = diesel::dsl::sql::<diesel::sql_types::Integer>("pg_backend_pid()");
    diesel::select(pid).get_result(conn).unwrap()
}

#[test]
fn clients_share_sessions_in_transaction_mode_only() {
    let database = Database::new();
    for (mode, are_shared) in [(PoolMode::Transaction, true), (PoolMode::Session, false)] {
        let pooler = PgBouncer::in_front_of(&database, mode, 2);
        let (mut one, mut other) = (pooler.connect(), pooler.connect());
        assert_eq!(pid(&mut one) == pid(&mut other), are_shared);
    }
}

#[test]
fn a_pooler_in_front_of_a_proxy_serves_again_after_a_crash() {
    let database = Database::new();
    let proxy = RoundTrips::in_front_of(&database);
    let mut pooler = PgBouncer::in_front_of(&proxy, PoolMode::Session, 2);
    let mut conn = pooler.connect();
    pooler.crash();
    assert!(conn.batch_execute("SELECT 1").is_err());
    assert!(proxy.count(|| drop(pooler.connect())) > 0);
}
