use std::any::TypeId;
use std::future::ready;
use std::time::{Duration, Instant};

use diesel::PgConnection;
use diesel::r2d2::{self, ConnectionManager, ManageConnection, PooledConnection};

use super::{Pool, PoolConnection};
use crate::error::{Error, Result};
use crate::mode::Blocking;
use crate::sealed::Sealed;
use crate::session::Session;

/// Diesel's r2d2 pool.
pub type PgPool = r2d2::Pool<ConnectionManager<PgConnection>>;

/// r2d2 adds the timeout to the current time, which overflows for a very long one. So it is capped.
const YEAR: Duration = Duration::from_secs(366 * 24 * 60 * 60);

impl<M: ManageConnection<Connection = PgConnection>> Sealed for r2d2::Pool<M> {}

impl<M: ManageConnection<Connection = PgConnection>> Sealed for PooledConnection<M> {}

impl<M: ManageConnection<Connection = PgConnection>> Pool for r2d2::Pool<M> {
    type Mode = Blocking;
    type Pinned = PooledConnection<M>;

    fn check_out(
        &self,
        deadline: Option<Instant>,
    ) -> impl Future<Output = Result<Self::Pinned>> + Send {
        let longest = self.connection_timeout().min(YEAR);
        let rest = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let checked_out = self.get_timeout(rest.map_or(longest, |rest| rest.min(longest)));
        ready(checked_out.map_err(|error| Error::Pool(error.into())))
    }

    fn can_spare(&self) -> bool {
        let state = self.state();
        state.idle_connections > 0 || state.connections < self.max_size()
    }

    fn idle(&self) -> usize {
        self.state().idle_connections as usize
    }

    fn max_size(&self) -> usize {
        Self::max_size(self) as usize
    }
}

impl<M: ManageConnection<Connection = PgConnection>> PoolConnection for PooledConnection<M> {
    /// Nothing may be sent after the mark: a reply would clear it.
    fn discard(mut self) {
        self.mark_broken();
    }

    fn is_surely_closed() -> bool {
        TypeId::of::<M>() == TypeId::of::<ConnectionManager<PgConnection>>()
    }
}
