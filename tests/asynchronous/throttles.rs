//! Throttles: the same operations, awaited.

use std::time::Duration;

use diesel_async::{AsyncConnection, AsyncPgConnection, SimpleAsyncConnection};
use diesel_interlock::asynchronous;
use diesel_interlock::error::{Input, Misplaced, Schema};
use diesel_interlock::{
    Decision, Error, ResourceLabel, Throttle, migrations, sync, throttled_resources,
};
use workbench::Database;

use crate::run;

throttled_resources! {
    enum Resource {
        CacheRebuild = "cache rebuild" every Duration::from_secs(3600),
    }
}

fn database() -> Database {
    let database = Database::new();
    let conn = &mut database.connect();
    migrations::install(conn).unwrap();
    let _ = sync::<Resource>(conn).unwrap();
    database
}

#[test]
fn the_second_attempt_of_a_spawned_task_is_denied() {
    let database = database();
    let url = database.async_url();
    run(async move {
        let conn = &mut AsyncPgConnection::establish(&url).await.unwrap();
        let rebuild = Throttle::of(Resource::CacheRebuild).details("web-3");
        let rebuild = asynchronous::Throttle::from(rebuild.clone());
        let grant = rebuild.attempt_on(conn).await.unwrap().granted();
        let denied = rebuild.attempt_on(conn).await.unwrap().denied().unwrap();
        assert_eq!(denied.holder.as_deref(), Some("web-3"));
        assert_eq!(denied.held_since, grant.map(|grant| grant.granted_at));
        assert_eq!(denied.retry_after_secs(), 3600);
    });
}

#[test]
fn both_halves_exclude_each_other() {
    let database = database();
    let url = database.async_url();
    let tenant = |key| Throttle::of(Resource::CacheRebuild).key(key).details("us");
    let blocking = &mut database.connect();
    assert!(!tenant(7).attempt_on(blocking).unwrap().is_denied());
    run(async move {
        let conn = &mut AsyncPgConnection::establish(&url).await.unwrap();
        let seventh = asynchronous::Throttle::from(tenant(7))
            .attempt_on(conn)
            .await
            .unwrap();
        assert!(seventh.is_denied());
        let eighth = asynchronous::Throttle::from(tenant(8))
            .attempt_on(conn)
            .await
            .unwrap();
        assert!(!eighth.is_denied());
    });
    assert!(tenant(8).attempt_on(blocking).unwrap().is_denied());
}

#[test]
fn work_runs_after_the_grant_and_not_after_a_denial() {
    let database = database();
    let url = database.async_url();
    run(async move {
        let conn = &mut AsyncPgConnection::establish(&url).await.unwrap();
        let rebuild = Throttle::of(Resource::CacheRebuild).details("web-3");
        for expected in [Some(7), None] {
            let decision = asynchronous::Throttle::from(rebuild.clone())
                .run_on(conn, async |conn, _| {
                    conn.batch_execute("SELECT 1").await?;
                    Ok::<_, Error>(7)
                })
                .await;
            let value = match decision.unwrap() {
                Decision::Granted(value) => Some(value),
                Decision::Denied(_) => None,
            };
            assert_eq!(value, expected);
        }
    });
}

#[test]
fn the_errors_are_those_of_the_blocking_half() {
    let database = database();
    let url = database.async_url();
    run(async move {
        let conn = &mut AsyncPgConnection::establish(&url).await.unwrap();
        let unknown = Throttle::of(ResourceLabel("unknown".to_owned())).details("web-3");
        let error = asynchronous::Throttle::from(unknown.clone())
            .attempt_on(conn)
            .await
            .unwrap_err();
        assert!(
            matches!(&error, Error::Schema(Schema::UnknownResource { label }) if label == "unknown"),
            "{error}"
        );
        let silent = Throttle::of(Resource::CacheRebuild);
        let error = asynchronous::Throttle::from(silent.clone())
            .attempt_on(conn)
            .await
            .unwrap_err();
        assert!(
            matches!(error, Error::Input(Input::EmptyDetails)),
            "{error}"
        );
        let rebuild = Throttle::of(Resource::CacheRebuild).details("web-3");
        let refused = conn
            .transaction(async |conn| {
                asynchronous::Throttle::from(rebuild.clone())
                    .run_on(conn, async |_, _| Ok::<_, Error>(()))
                    .await
            })
            .await;
        assert!(
            matches!(
                refused,
                Err(Error::Misplaced(Misplaced::GrantInTransaction))
            ),
            "{refused:?}"
        );
    });
}
