//! The check of the sessions behind an r2d2 pool.

use std::time::Duration;

use diesel::pg::PgConnection;

use super::{Sessions, compare};
use crate::clock::Deadline;
use crate::error::{Error, Result};
use crate::pool::{self, PgPool, PooledPgConnection};
use crate::session::{Blocking, now};
use crate::transaction::{self, Transaction};

/// How long a lock waits for a second connection to be opened.
const PATIENCE: Duration = Duration::from_millis(200);

/// How long [`probe_sessions`] waits for it.
const PATIENCE_OF_PROBE: Duration = Duration::from_secs(1);

/// How long to wait before a look at whether the pool is at its full size.
const LOOK: Duration = Duration::from_millis(10);

/// Tests whether the connections of the pool have their own server sessions.
///
/// Call it when a program starts. The methods of [`AdvisoryLock`](crate::AdvisoryLock) that take a pool run the same test,
/// once per connection, and return [`Error::SharedSessions`].
///
/// It takes two connections from the pool, compares their `pg_backend_pid()`, and compares again while a transaction is open
/// on one of them, and after it: seven round trips. The transaction is rolled back, at the latest after five seconds
/// (`idle_in_transaction_session_timeout`). A busy pooler can pass this test by chance. In that case a later operation returns
/// [`Error::SessionMoved`].
///
/// # Blocking
///
/// Waits for the first connection as long as the pool's `connection_timeout` allows. The second one is an idle connection. If none
/// is idle, and the pool has room for another, this waits at most a second for it to be opened. r2d2 tests an idle connection at
/// its check-out (`test_on_check_out`, on by default). If a NAT or a firewall has silently dropped that connection, the test waits
/// as any other check-out does: as long as the connection string's `tcp_user_timeout` and `keepalives_*` settings allow. Without
/// them this takes minutes, so set them if such a device may be in between.
///
/// # Errors
///
/// - [`Error::TransactionInPool`] if an earlier user had left one of the two connections in a transaction. The connection is
///   discarded, and nothing of that transaction is committed.
/// - [`Error::Pool`] and [`Error::Database`].
///
/// # Examples
///
/// ```
/// use diesel_interlock::{Sessions, probe_sessions};
///
/// # let database = workbench::Database::new();
/// # let pool = database.pool(2);
/// if probe_sessions(&pool)? == Sessions::Shared {
///     eprintln!("connect past the pooler, or use transaction locks and semaphores only");
/// }
/// # Ok::<(), diesel_interlock::Error>(())
/// ```
pub fn probe_sessions(pool: &PgPool) -> Result<Sessions> {
    let mut conn = pool::check_out(pool, None)?;
    match second(pool, &mut conn, PATIENCE_OF_PROBE) {
        Some(mut other) => compare_now(&mut conn, &mut other),
        None => Ok(Sessions::Unknown),
    }
}

/// Refuses a connection whose session is shared. The result is stored with the connection and with those that were compared
/// with it. Waits for at most `limit` for a second connection to be opened.
pub(crate) fn require_own(
    pool: &PgPool,
    conn: &mut PooledPgConnection,
    limit: Option<Duration>,
) -> Result<()> {
    let patience = limit.map_or(PATIENCE, |limit| limit.min(PATIENCE));
    let sessions = match stored(conn) {
        Some(sessions) => sessions,
        None => find_out(pool, conn, patience)?,
    };
    match sessions {
        Sessions::Shared => Err(Error::SharedSessions),
        Sessions::Own | Sessions::Unknown => Ok(()),
    }
}

/// Returns an error of the connection itself, but none of the connection that it is compared with.
fn find_out(pool: &PgPool, conn: &mut PooledPgConnection, patience: Duration) -> Result<Sessions> {
    if pool.max_size() < 2 || transaction::of(conn) != Transaction::None {
        return Ok(Sessions::Unknown);
    }
    let Some(mut other) = second(pool, conn, patience) else {
        return Ok(Sessions::Unknown);
    };
    let sessions = match stored(&other) {
        Some(sessions) => sessions,
        None => match compare_now(conn, &mut other) {
            Err(error) if transaction::of(conn) != Transaction::None => return Err(error),
            compared => compared.unwrap_or(Sessions::Unknown),
        },
    };
    if sessions != Sessions::Unknown {
        PooledPgConnection::extensions_mut(conn).insert(sessions);
        PooledPgConnection::extensions_mut(&mut other).insert(sessions);
    }
    Ok(sessions)
}

/// Marks a connection for which the pool could not open a second one in time.
#[derive(Debug)]
struct Alone;

/// Takes a second connection from the pool. If none is idle, and the pool is not at its full size, waits for it to open one: once
/// for each connection, because a pool that cannot open another would delay every lock.
fn second(
    pool: &PgPool,
    conn: &mut PooledPgConnection,
    patience: Duration,
) -> Option<PooledPgConnection> {
    if let Some(idle) = pool.try_get() {
        return Some(idle);
    }
    if PooledPgConnection::extensions(conn)
        .get::<Alone>()
        .is_some()
        || patience.is_zero()
    {
        return None;
    }
    let deadline = Deadline::after(patience);
    // Threads that have all connections of the pool between them must not wait for each other.
    while pool.state().connections < pool.max_size() {
        // r2d2 opens a connection only for a caller that waits.
        if let Ok(opened) = pool::check_out(pool, Some(LOOK.min(deadline.remaining()))) {
            return Some(opened);
        }
        if deadline.remaining().is_zero() {
            PooledPgConnection::extensions_mut(conn).insert(Alone);
            return None;
        }
    }
    pool.try_get()
}

fn stored(conn: &PooledPgConnection) -> Option<Sessions> {
    PooledPgConnection::extensions(conn).get().copied()
}

fn compare_now(conn: &mut PgConnection, other: &mut PgConnection) -> Result<Sessions> {
    now(compare(
        &mut Blocking::pooled(conn),
        &mut Blocking::pooled(other),
    ))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::sync::{Arc, Barrier};

    use diesel::connection::SimpleConnection;
    use diesel::r2d2::{CustomizeConnection, Error as R2D2Error, HandleEvent, Pool, event};
    use workbench::Database;

    use super::*;

    #[test]
    fn a_pool_without_an_idle_connection_opens_one_for_the_comparison() {
        let database = Database::new();
        let pool = Pool::builder()
            .max_size(2)
            .min_idle(Some(0))
            .build(database.manager());
        let pool = pool.unwrap();
        assert_eq!(probe_sessions(&pool).unwrap(), Sessions::Own);
        assert_eq!(pool.state().connections, 2);
    }

    /// Only the first connection can be opened. Counts the check-outs that ended without a connection.
    #[derive(Debug, Clone, Default)]
    struct OneOnly {
        is_open: Arc<AtomicBool>,
        timeouts: Arc<AtomicUsize>,
    }

    impl CustomizeConnection<PgConnection, R2D2Error> for OneOnly {
        fn on_acquire(&self, conn: &mut PgConnection) -> std::result::Result<(), R2D2Error> {
            if self.is_open.swap(true, Ordering::SeqCst) {
                let refused = conn.batch_execute("SELECT 1 / 0");
                refused.map_err(R2D2Error::QueryError)?;
            }
            Ok(())
        }
    }

    impl HandleEvent for OneOnly {
        fn handle_timeout(&self, _: event::TimeoutEvent) {
            self.timeouts.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_pool_that_cannot_open_another_connection_is_waited_for_once() {
        let database = Database::new();
        let one_only = OneOnly::default();
        let pool = Pool::builder()
            .max_size(2)
            .min_idle(Some(0))
            .error_handler(Box::new(diesel::r2d2::NopErrorHandler))
            .connection_customizer(Box::new(one_only.clone()))
            .event_handler(Box::new(one_only.clone()))
            .build(database.manager())
            .unwrap();
        let mut only = pool::check_out(&pool, None).unwrap();
        let mut waits = |limit| {
            let before = one_only.timeouts.load(Ordering::SeqCst);
            require_own(&pool, &mut only, limit).unwrap();
            assert_eq!(stored(&only), None);
            one_only.timeouts.load(Ordering::SeqCst) - before
        };
        assert_eq!(waits(Some(Duration::ZERO)), 0);
        assert!(waits(None) > 0);
        assert_eq!(waits(None), 0);
    }

    #[test]
    fn threads_that_take_all_connections_of_a_pool_do_not_wait_for_more() {
        let database = Database::new();
        let pool = Pool::builder().max_size(4).min_idle(Some(0));
        let pool = &pool.build(database.manager()).unwrap();
        let all_have_one = &Barrier::new(4);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(move || {
                    let mut conn = pool::check_out(pool, None).unwrap();
                    all_have_one.wait();
                    require_own(pool, &mut conn, None).unwrap();
                    assert!(
                        PooledPgConnection::extensions(&conn)
                            .get::<Alone>()
                            .is_none()
                    );
                });
            }
        });
    }
}
