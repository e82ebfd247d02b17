//! PostgreSQL's own functions, composed in queries.

use diesel::dsl::select;
use diesel::prelude::*;
use diesel_interlock::functions::*;
use workbench::Database;

use crate::support::Observer;

#[test]
fn the_whole_family_runs_in_both_key_forms() {
    let database = Database::new();
    let conn = &mut database.connect();
    let mut observer = Observer::of(&database);
    let mut held = || observer.all_held();

    assert_eq!(select(pg_advisory_lock(1_i64)).get_result(conn), Ok(()));
    assert_eq!(select(pg_advisory_lock_pair(1, 1)).get_result(conn), Ok(()));
    assert_eq!(
        select(pg_advisory_lock_shared(2_i64)).get_result(conn),
        Ok(())
    );
    assert_eq!(
        select(pg_advisory_lock_shared_pair(2, 2)).get_result(conn),
        Ok(())
    );
    assert_eq!(
        select(pg_try_advisory_lock(3_i64)).get_result(conn),
        Ok(true)
    );
    assert_eq!(
        select(pg_try_advisory_lock_pair(3, 3)).get_result(conn),
        Ok(true)
    );
    assert_eq!(
        select(pg_try_advisory_lock_shared(4_i64)).get_result(conn),
        Ok(true)
    );
    assert_eq!(
        select(pg_try_advisory_lock_shared_pair(4, 4)).get_result(conn),
        Ok(true)
    );
    assert_eq!(held(), 8);

    assert_eq!(select(pg_advisory_unlock(1_i64)).get_result(conn), Ok(true));
    assert_eq!(
        select(pg_advisory_unlock(1_i64)).get_result(conn),
        Ok(false)
    );
    assert_eq!(
        select(pg_advisory_unlock_pair(1, 1)).get_result(conn),
        Ok(true)
    );
    assert_eq!(
        select(pg_advisory_unlock_shared(2_i64)).get_result(conn),
        Ok(true)
    );
    assert_eq!(
        select(pg_advisory_unlock_shared_pair(2, 2)).get_result(conn),
        Ok(true)
    );
    assert_eq!(held(), 4);
    assert_eq!(select(pg_advisory_unlock_all()).get_result(conn), Ok(()));
    assert_eq!(held(), 0);

    conn.transaction(|conn| {
        select(pg_advisory_xact_lock(1_i64)).execute(conn)?;
        select(pg_advisory_xact_lock_pair(1, 1)).execute(conn)?;
        select(pg_advisory_xact_lock_shared(2_i64)).execute(conn)?;
        select(pg_advisory_xact_lock_shared_pair(2, 2)).execute(conn)?;
        assert_eq!(
            select(pg_try_advisory_xact_lock(3_i64)).get_result(conn),
            Ok(true)
        );
        assert_eq!(
            select(pg_try_advisory_xact_lock_pair(3, 3)).get_result(conn),
            Ok(true)
        );
        assert_eq!(
            select(pg_try_advisory_xact_lock_shared(4_i64)).get_result(conn),
            Ok(true)
        );
        assert_eq!(
            select(pg_try_advisory_xact_lock_shared_pair(4, 4)).get_result(conn),
            Ok(true)
        );
        assert_eq!(held(), 8);
        QueryResult::Ok(())
    })
    .unwrap();
    assert_eq!(held(), 0);
}

#[test]
fn the_exclusive_unlock_does_not_release_a_shared_lock() {
    let database = Database::new();
    let conn = &mut database.connect();
    select(pg_advisory_lock_shared(1_i64))
        .execute(conn)
        .unwrap();
    assert_eq!(
        select(pg_advisory_unlock(1_i64)).get_result(conn),
        Ok(false)
    );
    assert_eq!(Observer::of(&database).all_held(), 1);
}

#[test]
fn they_compose_with_a_users_own_tables() {
    diesel::table! { jobs (id) { id -> BigInt, } }
    let database = Database::new();
    let conn = &mut database.connect();
    diesel::sql_query("CREATE TABLE jobs AS SELECT generate_series(1, 3)::bigint AS id")
        .execute(conn)
        .unwrap();
    let locked: Vec<(i64, bool)> = jobs::table
        .select((jobs::id, pg_try_advisory_lock(jobs::id)))
        .order(jobs::id)
        .load(conn)
        .unwrap();
    assert_eq!(locked, [(1, true), (2, true), (3, true)]);
    assert_eq!(Observer::of(&database).all_held(), 3);
}
