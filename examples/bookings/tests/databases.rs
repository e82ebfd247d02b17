//! A database for each test, made from a template that the application's own start-up brings up to date. The tests run on
//! threads (`cargo test`) or in a process each (`cargo nextest run`); a server is that of `DATABASE_URL`.

use std::error::Error;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode};
use bookings::{asynchronous, blocking};
use diesel::r2d2::{ConnectionManager, Pool};
use diesel_async::AsyncPgConnection;
use diesel_async::pooled_connection::AsyncDieselConnectionManager;
use diesel_interlock::testing::Database;
use diesel_interlock::{PgPool, deadpool};
use tower::ServiceExt;

type Outcome = Result<(), Box<dyn Error>>;

fn connect(url: &str) -> Result<PgPool, Box<dyn Error>> {
    let manager = ConnectionManager::new(url);
    Ok(Pool::builder().max_size(2).build(manager)?)
}

fn connect_async(url: &str) -> Result<deadpool::PgPool, Box<dyn Error>> {
    let manager = AsyncDieselConnectionManager::<AsyncPgConnection>::new(url);
    Ok(deadpool::PgPool::builder(manager).max_size(2).build()?)
}

async fn book(router: &Router, server: i32) -> StatusCode {
    let request = Request::post(format!("/servers/{server}/bookings"));
    let request = request.body(Body::empty()).unwrap();
    router.clone().oneshot(request).await.unwrap().status()
}

/// In a database of another test, the server is not booked.
async fn is_booked_once(router: &Router) {
    assert_eq!(book(router, 345).await, StatusCode::CREATED);
    assert_eq!(book(router, 345).await, StatusCode::CONFLICT);
}

fn a_booking() -> Outcome {
    let server = workbench::Database::new(); // your program has the URL of the database `postgres`
    let url = |name: &str| server.url_with("dbname", name);
    let maintenance = connect(&url("postgres"))?;
    let database = Database::<PgPool>::from_template(&maintenance, "bookings blocking", |name| {
        let pool = connect(&url(name))?;
        blocking::start_up(&pool, &url(name))?;
        Ok::<_, Box<dyn Error>>(pool)
    })?;
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(is_booked_once(&blocking::router(database.pool().clone())));
    Ok(())
}

async fn an_async_booking() -> Outcome {
    let server = workbench::Database::new();
    let url = |name: &str| server.url_with("dbname", name);
    let maintenance = connect_async(&url("postgres"))?;
    let open = async |name: &str| {
        let pool = connect_async(&url(name))?;
        asynchronous::start_up(&pool, &url(name)).await?;
        Ok::<_, Box<dyn Error>>(pool)
    };
    let database =
        Database::<deadpool::PgPool>::from_template(&maintenance, "bookings async", open).await?;
    is_booked_once(&asynchronous::router(database.pool().clone())).await;
    drop(database);
    // The runtime of the test ends with it, so wait until the database is dropped.
    assert!(deadpool::drain(Duration::from_secs(60)).await);
    Ok(())
}

macro_rules! eight_times {
    ($($name:ident $name_async:ident)*) => {
        $(
            #[test]
            fn $name() -> Outcome {
                a_booking()
            }

            #[tokio::test]
            async fn $name_async() -> Outcome {
                an_async_booking().await
            }
        )*
    };
}

eight_times! {
    first first_async
    second second_async
    third third_async
    fourth fourth_async
}
