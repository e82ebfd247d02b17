//! The prefix of a test, of a pool and of a process, with the feature `testing`.

use std::cell::RefCell;
use std::fmt;
use std::future::{Future, poll_fn};
use std::marker::PhantomData;
use std::pin::pin;
use std::sync::{Arc, LazyLock};

#[cfg(feature = "postgres")]
use diesel::connection::{
    Connection, Instrumentation, InstrumentationEvent, get_default_instrumentation,
};
#[cfg(feature = "postgres")]
use diesel::pg::PgConnection;

/// The environment variable that prefixes the names of a whole process: see [`KeyPrefix`].
pub const KEY_PREFIX_VARIABLE: &str = "DIESEL_INTERLOCK_KEY_PREFIX";

/// Separates the names of one test from those of other tests that run at the same time on the same database.
///
/// Under the prefix `orders`, a lock named `geocoder` is the lock `orders geocoder`. In the prefix, `\` becomes `\\` and a space
/// becomes `\ `, as in [`LockKey::parts`](crate::LockKey::parts). Names under different prefixes therefore always differ.
///
/// The prefix reaches the locks of [`LockKey::named`](crate::LockKey::named) and [`LockKey::parts`](crate::LockKey::parts), the
/// services of semaphores, the [keys](crate::Throttle::key) of throttles, and the names of [rate limits](crate::RateLimit) and of
/// [fences](crate::Fence). It does not reach lock keys that are numbers or that other ecosystems share, and it does not reach a
/// throttle without a key, because such a throttle is one row for the whole database. A test that takes such a throttle needs its
/// own database, or a test transaction while no other test uses the throttle.
///
/// What was acquired, claimed or spent under a prefix keeps its name. It is released or given back under that name, wherever that
/// is done. The units that a local rate limit has in memory are not told apart by prefix, so make one for each test.
///
/// A connection, a task, a thread or a process can have a prefix. The first of them that has one counts:
///
/// 1. The **connection**, if its pool was built with the prefix as its `connection_customizer`, or if
///    [`carry_on`](Self::carry_on) was called with it. It works on every thread, so use it for handlers, which run on threads
///    that the test does not own, such as those of tokio's `spawn_blocking` or actix-web's `web::block`.
///    An asynchronous connection cannot carry a prefix.
/// 2. The **task**, within [`scope`](Self::scope). Use it for asynchronous tests.
/// 3. The **thread**, from [`enter`](Self::enter) on. Use it for a test that works on its own thread, and for calls without a
///    connection, such as [`LockKey::id`](crate::LockKey::id), the expressions of [`monitor`](crate::monitor) and
///    [`prefixed`](crate::testing::prefixed).
/// 4. The **process**, by the environment variable `DIESEL_INTERLOCK_KEY_PREFIX`, which is read once. Use it for a server that
///    a test starts as a process. The server must be built with the feature `testing`, as `cargo test` builds a package's
///    binaries if the feature is among its dev-dependencies.
///
/// Prefixes are not combined. Give a test's pool and its own thread the same prefix, because both then
/// mean the same lock.
///
/// # Examples
///
/// A handler that works on another thread:
///
/// ```
/// use diesel::r2d2::Pool;
/// use diesel_interlock::{AdvisoryLock, Error, PgPool, testing};
///
/// static NIGHTLY: AdvisoryLock = AdvisoryLock::named("nightly report");
///
/// fn handler(pool: &PgPool) -> Result<bool, Error> {
///     Ok(!NIGHTLY.try_acquire(pool)?.is_busy())
/// }
///
/// # let database = workbench::Database::new();
/// # let beside = NIGHTLY.acquire(&database.pool(1))?;
/// let prefix = testing::KeyPrefix::new("the handler reports");
/// let pool = Pool::builder()
///     .max_size(2)
///     .connection_customizer(Box::new(prefix.clone()))
///     .build(database.manager())?;
/// let handled = std::thread::scope(|threads| threads.spawn(|| handler(&pool)).join());
/// assert!(handled.unwrap()?, "other tests may hold the lock without the prefix");
///
/// let _prefix = prefix.enter(); // the test's own thread uses the same prefix
/// testing::assert_not_held(&mut *pool.get()?, &NIGHTLY);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A server that a test starts as a process:
///
/// ```no_run
/// # use std::process::Command;
/// use diesel_interlock::testing::{KEY_PREFIX_VARIABLE, KeyPrefix};
///
/// let prefix = KeyPrefix::new("the server refuses a fifth");
/// let server = Command::new("target/debug/server")
///     .env(KEY_PREFIX_VARIABLE, prefix.as_str())
///     .spawn()?;
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct KeyPrefix(Arc<str>);

impl KeyPrefix {
    /// Makes a prefix, which does nothing until a connection carries it or a thread enters it.
    pub fn new(prefix: impl Into<String>) -> Self {
        Self(prefix.into().into())
    }

    /// Returns the prefix as a text, for the environment of a process.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Prefixes the names that are used on this thread until the returned value is dropped.
    ///
    /// A thread that is started meanwhile does not inherit the prefix, and can enter a clone. A thread of tokio enters it for
    /// its lifetime by `on_thread_start(move || std::mem::forget(prefix.enter()))`.
    pub fn enter(&self) -> EnteredPrefix {
        EnteredPrefix::entering(self.clone())
    }

    /// Runs a future under the prefix, on whichever thread it is polled. Use it for a test that is a task, and for the tasks
    /// that it spawns.
    ///
    /// The prefix counts before that of the thread which polls the future. A spawned task inherits nothing, and can be handed a
    /// clone. Inside the future, use `scope` rather than [`enter`](Self::enter), which does not outlast an `await`.
    ///
    /// Guards, permits and spent units keep the name that was sent, so they may be dropped or given back outside. The future itself
    /// may be dropped outside, too.
    ///
    /// # Examples
    ///
    /// ```
    /// use diesel_interlock::testing::{KeyPrefix, prefixed};
    ///
    /// # let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    /// # runtime.block_on(async {
    /// let prefix = KeyPrefix::new("this test");
    /// let handler = tokio::spawn(prefix.clone().scope(async {
    ///     tokio::task::yield_now().await;
    ///     prefixed("geocoder").into_owned()
    /// }));
    /// assert_eq!(handler.await?, r"this\ test geocoder");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn scope<F: Future>(&self, future: F) -> impl Future<Output = F::Output> + use<F> {
        let prefix = self.clone();
        async move {
            let mut future = pin!(future);
            poll_fn(|context| {
                let entered = prefix.enter();
                let polled = future.as_mut().poll(context);
                entered.end_with_later_ones();
                polled
            })
            .await
        }
    }

    /// Prefixes the names that are used with this connection, on every thread, until it is closed.
    ///
    /// Use it for connections that no r2d2 pool opens, and in your own `connection_customizer`. No round trip. The
    /// prefix is stored in the connection's [instrumentation](diesel::connection::Instrumentation), so it replaces an
    /// instrumentation that was set on this connection before, and one that is set afterwards removes the prefix. The
    /// [default](diesel::connection::set_default_instrumentation) instrumentation is still called.
    ///
    /// # Examples
    ///
    /// Beside r2d2's `TestCustomizer`:
    ///
    /// ```
    /// use diesel::PgConnection;
    /// use diesel::r2d2::{CustomizeConnection, Error, TestCustomizer};
    /// use diesel_interlock::testing::KeyPrefix;
    ///
    /// #[derive(Debug)]
    /// struct InTest(KeyPrefix);
    ///
    /// impl CustomizeConnection<PgConnection, Error> for InTest {
    ///     fn on_acquire(&self, conn: &mut PgConnection) -> Result<(), Error> {
    ///         self.0.carry_on(conn);
    ///         TestCustomizer.on_acquire(conn)
    ///     }
    /// }
    /// # let database = workbench::Database::new();
    /// # InTest(KeyPrefix::new("p")).on_acquire(&mut database.connect()).unwrap();
    /// ```
    #[cfg(feature = "postgres")]
    pub fn carry_on(&self, conn: &mut PgConnection) {
        conn.set_instrumentation(Carried {
            prefix: self.clone(),
            default: get_default_instrumentation(),
        });
    }
}

/// As the `connection_customizer` of a pool, sets the prefix on every connection that the pool opens.
#[cfg(feature = "r2d2")]
impl diesel::r2d2::CustomizeConnection<PgConnection, diesel::r2d2::Error> for KeyPrefix {
    fn on_acquire(&self, conn: &mut PgConnection) -> Result<(), diesel::r2d2::Error> {
        self.carry_on(conn);
        Ok(())
    }
}

/// Prefixes the names that are used on this thread until the returned value is dropped. The same as [`KeyPrefix::new`] and
/// [`enter`](KeyPrefix::enter), for a test that works only on its own thread.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use diesel_interlock::{Semaphore, testing};
///
/// static GEOCODER: Semaphore = Semaphore::named("geocoder", 1, Duration::from_secs(30));
///
/// # let database = workbench::Database::new();
/// # let pool = database.pool(2);
/// # diesel_interlock::migrations::install(&mut database.connect())?;
/// let permit = GEOCODER.try_acquire(&pool)?;
/// let _prefix = testing::key_prefix("a test beside this one");
/// assert!(!GEOCODER.try_acquire(&pool)?.is_full());
/// # drop(permit);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn key_prefix(prefix: impl Into<String>) -> EnteredPrefix {
    KeyPrefix::new(prefix).enter()
}

/// A prefix that is set on this thread. Dropping it ends the prefix, and the names have the prefix that was entered last of those
/// that are left.
#[must_use = "if unused the prefix ends at once"]
pub struct EnteredPrefix {
    place: u64,
    _of_this_thread: PhantomData<*const ()>,
}

impl EnteredPrefix {
    fn entering(prefix: KeyPrefix) -> Self {
        let place = OF_THREAD.try_with(|entered| entered.borrow_mut().enter(prefix));
        Self {
            // A thread that ends has no place for a prefix any more.
            place: place.unwrap_or_default(),
            _of_this_thread: PhantomData,
        }
    }

    /// Ends the prefix, and those that were entered after it, because they were entered by a future that is suspended now.
    fn end_with_later_ones(self) {
        let _ = OF_THREAD.try_with(|entered| entered.borrow_mut().leave_from(self.place));
    }
}

impl Drop for EnteredPrefix {
    fn drop(&mut self) {
        let _ = OF_THREAD.try_with(|entered| entered.borrow_mut().leave(self.place));
    }
}

impl fmt::Debug for EnteredPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let prefix = OF_THREAD.try_with(|entered| entered.borrow().at(self.place));
        let prefix = prefix.unwrap_or_default();
        f.debug_tuple("EnteredPrefix").field(&prefix).finish()
    }
}

/// The prefixes that a thread has entered. They may end in any order, so each has a place of its own.
struct Entered {
    places: u64,
    /// In the order of their places.
    prefixes: Vec<(u64, KeyPrefix)>,
}

impl Entered {
    fn enter(&mut self, prefix: KeyPrefix) -> u64 {
        self.places += 1;
        self.prefixes.push((self.places, prefix));
        self.places
    }

    fn leave(&mut self, place: u64) {
        self.prefixes.retain(|(other, _)| *other != place);
    }

    fn leave_from(&mut self, place: u64) {
        self.prefixes.retain(|(other, _)| *other < place);
    }

    fn at(&self, place: u64) -> Option<KeyPrefix> {
        let at_place =
            |(other, prefix): &(u64, KeyPrefix)| (*other == place).then(|| prefix.clone());
        self.prefixes.iter().find_map(at_place)
    }
}

thread_local! {
    static OF_THREAD: RefCell<Entered> = const {
        RefCell::new(Entered {
            places: 0,
            prefixes: Vec::new(),
        })
    };
}

static OF_PROCESS: LazyLock<Option<KeyPrefix>> = LazyLock::new(|| {
    let prefix = std::env::var_os(KEY_PREFIX_VARIABLE)?;
    (!prefix.is_empty()).then(|| KeyPrefix::new(prefix.to_string_lossy()))
});

/// Returns the prefix that this thread entered last, or that of the process. A thread that ends has none any more.
pub(crate) fn current() -> Option<KeyPrefix> {
    let last = |entered: &RefCell<Entered>| {
        let entered = entered.borrow();
        entered.prefixes.last().map(|(_, prefix)| prefix.clone())
    };
    let of_thread = OF_THREAD.try_with(last).ok().flatten();
    of_thread.or_else(|| OF_PROCESS.clone())
}

/// The prefix of a connection. It is an instrumentation, because Diesel stores one with each connection and lends it. The
/// alternatives do not work: r2d2's extensions are not reachable from a `&mut PgConnection`, `try_get` does not call r2d2's
/// `handle_checkout`, and a setting of the session would cost a round trip before each lock.
#[cfg(feature = "postgres")]
struct Carried {
    prefix: KeyPrefix,
    default: Option<Box<dyn Instrumentation>>,
}

#[cfg(feature = "postgres")]
impl Instrumentation for Carried {
    fn on_connection_event(&mut self, event: InstrumentationEvent<'_>) {
        self.default.on_connection_event(event);
    }
}

/// Enters the prefix of the connection, if it has one.
#[cfg(feature = "postgres")]
pub(crate) fn enter_carried(conn: &mut PgConnection) -> Option<EnteredPrefix> {
    let carried: &Carried = conn.instrumentation().downcast_ref()?;
    Some(carried.prefix.enter())
}
