//! The rows of docs/pools.md, *Another pool or connection*: every operation on a connection, on what
//! each pool gives out, and a small pool beside a foreign one for the rest.

use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_bb8_diesel::AsyncConnection;
use diesel::connection::{InstrumentationEvent, SimpleConnection};
use diesel::prelude::*;
use diesel::r2d2::{self, ConnectionManager, ManageConnection, Pool, R2D2Connection};
use diesel_interlock::{
    Admission, AdvisoryLock, Attempt, Error, Fence, Once, PgPool, Quota, RateLimit, Semaphore,
    Throttle, advisory, migrations, semaphore,
};
use diesel_migrations::FileBasedMigrations;
use rocket::local::asynchronous::Client;
use workbench::Database;

const HOUR: Duration = Duration::from_secs(3600);
static LOCK: AdvisoryLock = AdvisoryLock::named("nightly");
static MAIL: Throttle = Throttle::named("mail", HOUR);
static API: RateLimit = RateLimit::named("api", Quota::once_per(HOUR));
static CHARGE: Once = Once::named("charge");
static ROWS: Fence = Fence::named("rows");
static GEOCODER: Semaphore = Semaphore::named("geocoder", 1, HOUR);

/// Whether another session can take the lock.
fn is_free(other: &mut PgConnection) -> Result<bool, Error> {
    let tried = LOCK.try_with_on(other, |_| Ok::<_, Error>(()))?;
    Ok(tried.is_acquired())
}

/// Runs each operation on a connection, and looks from another session at what it did.
fn run_each_operation(conn: &mut PgConnection, other: &mut PgConnection) -> Result<(), Error> {
    assert!(!LOCK.with_on(conn, |_| is_free(other))?);
    assert!(is_free(other)?);
    assert!(matches!(
        LOCK.try_with_on(conn, |_| is_free(other))?,
        Attempt::Acquired(false)
    ));
    assert!(!LOCK.transaction(conn, |_| is_free(other))?);
    let free = conn.transaction(|conn| {
        LOCK.acquire_xact(conn)?;
        is_free(other)
    });
    assert!(!free?);
    assert!(is_free(other)?);

    assert!(MAIL.attempt_on(conn)?.is_granted());
    assert!(MAIL.attempt_on(other)?.is_denied());
    assert!(API.check_on(conn)?.is_allowed());
    assert!(API.check_on(other)?.is_limited());

    assert!(
        CHARGE
            .key(1)
            .run(conn, |_| Ok::<_, Error>("charged"))?
            .is_first()
    );
    let again = CHARGE
        .key(1)
        .run(other, |_| -> Result<&str, Error> { unreachable!() })?;
    assert_eq!(again.bytes(), b"charged");
    let work = |_: &mut PgConnection| Ok::<_, Error>("charged");
    let done = CHARGE.key(2).try_run(conn, work)?;
    assert!(done.acquired().is_some_and(|done| done.is_first()));

    conn.transaction(|conn| ROWS.pass(conn, 2))?;
    let late = other.transaction(|other| ROWS.pass(other, 1));
    assert!(matches!(late, Err(Error::Fenced { .. })), "{late:?}");

    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../service/migrations");
    let source = || FileBasedMigrations::from_path(directory).expect("the directory is there");
    assert_eq!(migrations::run_pending(&mut *conn, source())?.len(), 1);
    assert!(migrations::run_pending(&mut *other, source())?.is_empty());
    Ok(())
}

/// A small pool beside a foreign one, as the page has it, with the schema.
fn beside(database: &Database) -> PgPool {
    let manager = ConnectionManager::new(database.url());
    let pool = Pool::builder()
        .max_size(2)
        .min_idle(Some(0))
        .test_on_check_out(false);
    let pool = pool.build(manager).unwrap();
    migrations::install(&pool).unwrap();
    pool
}

/// What needs a pool, and the operations on a connection, see one another.
#[test]
fn a_small_pool_beside_a_foreign_one_does_what_needs_a_pool() {
    let database = Database::new();
    let pool = beside(&database);
    let foreign = &mut database.connect();
    let guard = LOCK.acquire(&pool).unwrap();
    assert!(!is_free(foreign).unwrap());
    guard.release().unwrap();
    assert!(is_free(foreign).unwrap());
    let permit = GEOCODER.try_acquire(&pool).unwrap();
    assert!(matches!(permit, Admission::Admitted(_)));
    let full = GEOCODER.try_acquire(&pool).unwrap();
    assert!(!matches!(full, Admission::Admitted(_)));
}

/// A manager of the application's own, which counts what its connections are asked.
struct Counting {
    url: String,
}

static QUERIES: AtomicUsize = AtomicUsize::new(0);

impl ManageConnection for Counting {
    type Connection = PgConnection;
    type Error = r2d2::Error;

    fn connect(&self) -> Result<PgConnection, r2d2::Error> {
        let conn = PgConnection::establish(&self.url);
        let mut conn = conn.map_err(r2d2::Error::ConnectionError)?;
        conn.set_instrumentation(|event: InstrumentationEvent<'_>| {
            if matches!(event, InstrumentationEvent::StartQuery { .. }) {
                QUERIES.fetch_add(1, Ordering::Relaxed);
            }
        });
        Ok(conn)
    }

    fn is_valid(&self, conn: &mut PgConnection) -> Result<(), r2d2::Error> {
        conn.batch_execute("SELECT 1")
            .map_err(r2d2::Error::QueryError)
    }

    fn has_broken(&self, conn: &mut PgConnection) -> bool {
        std::thread::panicking() || conn.is_broken()
    }
}

#[test]
fn a_manager_of_the_applications_own() {
    type Own = Pool<Counting>;
    static NIGHTLY: advisory::AdvisoryLock<Own> = advisory::AdvisoryLock::named("nightly");
    static SLOTS: semaphore::Semaphore<Own> = semaphore::Semaphore::named("own", 1, HOUR);
    let database = Database::new();
    let pool = Own::builder()
        .max_size(2)
        .build(Counting {
            url: database.url(),
        })
        .unwrap();
    migrations::install(&pool).unwrap();
    let before = QUERIES.load(Ordering::Relaxed);
    let guard = NIGHTLY.acquire(&pool).unwrap();
    assert!(!is_free(&mut database.connect()).unwrap());
    guard.release().unwrap();
    assert!(is_free(&mut database.connect()).unwrap());
    assert!(QUERIES.load(Ordering::Relaxed) > before);
    assert!(matches!(
        SLOTS.try_acquire(&pool).unwrap(),
        Admission::Admitted(_)
    ));
    run_each_operation(&mut pool.get().unwrap(), &mut database.connect()).unwrap();
}

#[test]
fn a_newtype_around_a_pool() {
    struct App(PgPool);

    impl Deref for App {
        type Target = PgPool;

        fn deref(&self) -> &PgPool {
            &self.0
        }
    }

    let database = Database::new();
    let app = App(database.pool(2));
    migrations::install(&*app).unwrap();
    let guard = LOCK.acquire(&app).unwrap();
    assert!(!is_free(&mut app.get().unwrap()).unwrap());
    drop(guard);
    assert!(LOCK.try_acquire(&app.0).unwrap().is_acquired());
    run_each_operation(&mut app.get().unwrap(), &mut database.connect()).unwrap();
}

#[tokio::test]
async fn deadpool_diesel() {
    use ::deadpool_diesel::Runtime;
    use ::deadpool_diesel::postgres::{Manager, Pool};

    let database = Database::new();
    drop(beside(&database));
    let pool = Pool::builder(Manager::new(database.url(), Runtime::Tokio1));
    let conn = pool.max_size(1).build().unwrap().get().await.unwrap();
    let mut other = database.connect();
    let done = conn.interact(move |conn| run_each_operation(conn, &mut other));
    done.await.unwrap().unwrap();
}

#[tokio::test]
async fn async_bb8_diesel() {
    use ::async_bb8_diesel::{Connection, ConnectionManager};

    let database = Database::new();
    drop(beside(&database));
    let manager = ConnectionManager::<PgConnection>::new(database.url());
    let pool = bb8::Pool::builder()
        .max_size(1)
        .build(manager)
        .await
        .unwrap();
    let conn = pool.get().await.unwrap();
    let conn: &Connection<PgConnection> = &conn;
    let mut other = database.connect();
    conn.run(move |conn| run_each_operation(conn, &mut other))
        .await
        .unwrap();
}

#[rocket_sync_db_pools::database("main")]
struct Main(PgConnection);

#[tokio::test]
async fn rocket_sync_db_pools() {
    let database = Database::new();
    drop(beside(&database));
    let config = rocket::Config::figment();
    let config = config.merge(("databases.main.url", database.url()));
    let config = config.merge(("databases.main.pool_size", 1));
    let app = rocket::custom(config).attach(Main::fairing());
    let client = Client::untracked(app).await.unwrap();
    let conn = Main::get_one(client.rocket()).await.unwrap();
    let mut other = database.connect();
    conn.run(move |conn| run_each_operation(conn, &mut other))
        .await
        .unwrap();
}

#[derive(diesel::MultiConnection)]
enum Any {
    Postgres(PgConnection),
    Sqlite(SqliteConnection),
}

#[test]
fn a_multi_connection() {
    let database = Database::new();
    drop(beside(&database));
    let pool = Pool::builder().max_size(1);
    let pool = pool
        .build(ConnectionManager::<Any>::new(database.url()))
        .unwrap();
    match &mut *pool.get().unwrap() {
        Any::Postgres(conn) => run_each_operation(conn, &mut database.connect()).unwrap(),
        Any::Sqlite(_) => panic!("the URL is of PostgreSQL"),
    }
}
