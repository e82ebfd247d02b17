//! Releases that found no idle connection, and the threads that deliver them, one for each pool.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use diesel::pg::PgConnection;

use super::{handover, query};
use crate::background::{Background, Chore, Mark};
use crate::error::Result;
use crate::events::{self, Event, Outcome, Subject};
use crate::pool::{PgPool, PooledPgConnection};
use crate::transaction;

/// How long the thread waits before it tries again what it could not deliver.
const PAUSE: Duration = Duration::from_millis(10);

/// The release of a request that is still to be delivered.
#[derive(Debug)]
pub(super) struct Release {
    pub(super) service: Cow<'static, str>,
    pub(super) id: i64,
    /// From when on the request has timed out, and there is nothing to release. By the monotonic clock alone: a release
    /// that comes too late changes nothing, and one that is given up too early, since the wall clock was set forward,
    /// keeps the slot taken.
    pub(super) deadline: Option<Instant>,
}

impl Chore for Release {
    /// In a pool whose connections are wanted all the time none is ever idle: it stands in line for a moment.
    const PATIENCE: Duration = PAUSE;

    fn pause(&self) -> Duration {
        PAUSE
    }

    fn is_over(&self) -> bool {
        let is_over = self.deadline.is_some_and(|end| end <= Instant::now());
        if is_over {
            let request = Subject::Semaphore {
                service: &self.service,
                id: Some(self.id),
            };
            events::record(&Event::new("release", request, Outcome::TimedOut));
        }
        is_over
    }

    fn attend(&self, mut conn: PooledPgConnection) -> bool {
        let completed = complete(&mut conn, self.id).is_ok();
        drop(conn);
        if completed {
            handover::wake_one(&self.service);
        }
        completed
    }
}

/// Ends the request on a connection out of its pool; answers whether this ended it.
pub(super) fn complete(conn: &mut PgConnection, id: i64) -> Result<bool> {
    transaction::refuse_left_open(conn, |conn| query::complete(conn, id))
}

/// Leaves the release to the thread of the pool. Where none can be started, the request ends by its time-out.
pub(super) fn deliver(pool: &PgPool, mark: Mark, release: Release) {
    static LATE_RELEASES: Background<Release> = Background::new("late releases");
    LATE_RELEASES.start(pool, Some(mark), Arc::new(release));
}
