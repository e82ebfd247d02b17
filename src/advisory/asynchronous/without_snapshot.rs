//! Acquisition of a session lock without a wait on the server, for migrations.

use diesel_async::AsyncPgConnection;

use super::{
    Acquisition, AdvisoryLock, Borrowed, BorrowedGuard, GuardConnection, Pooled, PooledGuard,
};
use crate::advisory::operations;
use crate::error::Result;
use crate::events::{self, Outcome};
use crate::pool::asynchronous::{self as pool, Pool};
use crate::runtime;
use crate::sessions;

impl AdvisoryLock {
    /// Takes the lock on a connection from the pool. Waits indefinitely, by polling, so the session has no snapshot meanwhile.
    pub(crate) async fn acquire_without_snapshot<P: Pool>(
        &self,
        pool: &P,
    ) -> Result<PooledGuard<P>> {
        let runtime = runtime::current()?;
        let acquire = async {
            let mut conn = pool::check_out(pool, None).await?;
            sessions::asynchronous::require_own(pool, &mut conn).await?;
            let mut acquisition = Acquisition::of(self, Pooled::new(conn.into_inner(), runtime))?;
            acquisition.poll().await?;
            Ok(acquisition.into_guard())
        };
        events::observe("acquire", self.subject(), acquire, |_| Outcome::Acquired).await
    }

    /// As [`acquire_without_snapshot`](Self::acquire_without_snapshot), on the given connection.
    pub(crate) async fn acquire_without_snapshot_on<'conn>(
        &self,
        conn: &'conn mut AsyncPgConnection,
    ) -> Result<BorrowedGuard<'conn>> {
        runtime::current()?;
        let acquire = async {
            let mut acquisition = Acquisition::of(self, Borrowed::new(conn))?;
            acquisition.poll().await?;
            Ok(acquisition.into_guard())
        };
        events::observe("acquire", self.subject(), acquire, |_| Outcome::Acquired).await
    }
}

impl<C: GuardConnection> Acquisition<C> {
    async fn poll(&mut self) -> Result<()> {
        let (mut session, doubt) = self.pinned.session();
        let held = &mut self.held;
        operations::poll_for_session_lock(&mut session, doubt, held, tokio::time::sleep).await?;
        self.is_granted = true;
        Ok(())
    }
}
