//! Releases that found no idle connection, and the thread that delivers them.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use diesel::pg::PgConnection;

use super::{handover, query};
use crate::background::Background;
use crate::error::Result;
use crate::events;
use crate::pool::{self, PgPool};
use crate::transaction;

/// How long the thread waits before it tries again what it could not deliver.
const PAUSE: Duration = Duration::from_millis(10);

/// The release of a request that is still to be delivered.
pub(super) struct Release {
    pub(super) service: Cow<'static, str>,
    pub(super) id: i64,
    pub(super) pool: PgPool,
    /// From when on the request has timed out, and there is nothing to release.
    pub(super) deadline: Option<Instant>,
}

impl Release {
    /// Answers whether there is nothing more to do. Waits for a connection at most that long.
    fn deliver(&self, patience: Duration) -> bool {
        // A panic is the caller's instrumentation's; what it hit is tried again.
        catch_unwind(AssertUnwindSafe(|| self.deliver_within(patience))).unwrap_or(false)
    }

    fn deliver_within(&self, patience: Duration) -> bool {
        if self.deadline.is_some_and(|end| end <= Instant::now()) {
            events::release_given_up(self.id);
            return true;
        }
        // Unlike a plain try, this makes a pool whose connections were lost open new ones.
        let Ok(mut conn) = pool::check_out(&self.pool, Some(patience)) else {
            return false;
        };
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

/// Leaves the release to the thread. Where none can be started, the request ends by its time-out.
pub(super) fn deliver(release: Release) {
    static THREAD: Background<Release> = Background::new("late releases", run);
    THREAD.send(release);
}

fn run(receiver: &Receiver<Release>) {
    let mut pending = VecDeque::new();
    loop {
        if pending.is_empty() {
            match receiver.recv() {
                Ok(release) => pending.push_back(release),
                Err(_) => return,
            }
        } else if let Ok(release) = receiver.recv_timeout(PAUSE) {
            pending.push_back(release);
        }
        pending.extend(receiver.try_iter());
        pending.retain(|release| !release.deliver(Duration::ZERO));
        // In a pool whose connections are wanted all the time none is ever idle: one release after the
        // other stands in line for a moment.
        if let Some(release) = pending.pop_front() {
            if !release.deliver(PAUSE) {
                pending.push_back(release);
            }
        }
    }
}
