//! The warning of a wait that lasts long, whatever it is for.
//!
//! **A program may wait for itself**: it takes a lock that it holds on another connection, or wants
//! a second connection of a pool of one while a guard has the first. PostgreSQL finds no deadlock
//! there, because a part of the cycle is in the program. So the crate remembers the locks that the
//! guards and scopes of this process hold, and the warning says whether it is one of them.
//!
//! **Another thread watches what cannot look at the time itself**: a wait inside one statement or
//! one check-out. The thread exists only while there are such waits, and it costs a waiter no
//! statement and no timer.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex};
use std::time::Duration;

#[cfg(feature = "tracing")]
pub(crate) use self::logged::{Watched, warn};
#[cfg(not(feature = "tracing"))]
pub(crate) use self::unlogged::{Watched, warn};
use crate::alarm::lock;
use crate::key::LockId;

/// A wait that lasts longer is logged, once.
pub(crate) const LONG: Duration = Duration::from_secs(5);

/// The pids of the sessions that hold a lock for a guard or scope of this process. A transaction's
/// is unknown, and `None`.
static HELD: LazyLock<Mutex<HashMap<LockId, Vec<Option<i32>>>>> = LazyLock::new(Mutex::default);

/// A lock that a guard or scope of this process holds, until this is dropped.
#[derive(Debug)]
pub(crate) struct HeldHere(LockId, Option<i32>);

impl HeldHere {
    pub(crate) fn new(id: LockId, pid: Option<i32>) -> Self {
        lock(&HELD).entry(id).or_default().push(pid);
        Self(id, pid)
    }
}

impl Drop for HeldHere {
    fn drop(&mut self) {
        let mut held = lock(&HELD);
        let Some(pids) = held.get_mut(&self.0) else {
            return;
        };
        if let Some(i) = pids.iter().position(|pid| *pid == self.1) {
            pids.swap_remove(i);
        }
        if pids.is_empty() {
            held.remove(&self.0);
        }
    }
}

/// What is waited for.
#[derive(Debug)]
#[cfg_attr(not(feature = "tracing"), allow(dead_code))]
pub(crate) enum Awaited {
    /// A lock, and the session that holds it, where a query has found that out.
    Lock(LockId, Option<i32>),
    /// A slot of a semaphore, the first of which expires in this time.
    Slot(Duration),
    /// A connection of a pool of this size.
    Connection(usize),
}

#[cfg(not(feature = "tracing"))]
mod unlogged {
    use std::time::Duration;

    use super::Awaited;
    use crate::event::Subject;

    pub(crate) const fn warn(_: Subject, _: &Awaited, _: Duration) {}

    pub(crate) struct Watched;

    impl Watched {
        pub(crate) const fn new(_: Subject, _: Awaited) -> Option<Self> {
            None
        }
    }
}

#[cfg(feature = "tracing")]
mod logged {
    use std::collections::VecDeque;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Mutex;
    use std::thread;
    use std::time::{Duration, Instant};

    use tracing::{Dispatch, Level, Span, dispatcher};

    use super::{Awaited, HELD, LONG};
    use crate::alarm::lock;
    use crate::event::Subject;

    impl Awaited {
        /// Why it is not there, and the session that holds it.
        fn reason(&self) -> (String, Option<i32>) {
            match *self {
                Self::Lock(id, holder) => {
                    let held = lock(&HELD).get(&id).cloned().unwrap_or_default();
                    let is_here = holder.map_or(!held.is_empty(), |_| held.contains(&holder));
                    let pid = holder.or_else(|| held.into_iter().flatten().next());
                    let session = pid.map_or_else(
                        || "another session".to_owned(),
                        |pid| format!("the session with pid {pid}"),
                    );
                    let whose = if is_here {
                        ", of this process itself,"
                    } else {
                        ""
                    };
                    (format!("{session}{whose} holds it"), pid)
                }
                Self::Slot(retry_after) => {
                    let first = "no slot is free, and the first expires in";
                    (format!("{first} {retry_after:.1?}"), None)
                }
                Self::Connection(size) => {
                    let locks = lock(&HELD).values().flatten().flatten().count();
                    let reason = format!(
                        "none of its {size} is free; this process has {locks} locks on \
                         connections of this pool or of others"
                    );
                    (reason, None)
                }
            }
        }
    }

    /// Warns of a wait that has lasted for long.
    pub(crate) fn warn(subject: Subject, awaited: &Awaited, waited: Duration) {
        let Subject { primitive, name } = subject;
        let took_us = waited.as_micros() as u64;
        let (reason, holder) = awaited.reason();
        tracing::warn!(
            target: "diesel_interlock", primitive, name, outcome = "waiting", took_us, holder,
            "waiting for the {primitive} {name:?}: {reason}"
        );
    }

    /// A wait inside one call, of which a thread warns if it takes long. Its drop ends it.
    pub(crate) struct Watched(u64);

    struct Wait {
        number: u64,
        since: Instant,
        subject: Subject,
        awaited: Awaited,
        /// Where the caller logs.
        span: Span,
        dispatch: Dispatch,
    }

    /// The waits that are watched.
    struct Waits {
        /// The oldest first.
        waits: VecDeque<Wait>,
        last: u64,
        has_thread: bool,
    }

    static WAITS: Mutex<Waits> = Mutex::new(Waits {
        waits: VecDeque::new(),
        last: 0,
        has_thread: false,
    });

    impl Watched {
        /// `None` where nobody would hear of it.
        pub(crate) fn new(subject: Subject, awaited: Awaited) -> Option<Self> {
            if !tracing::enabled!(target: "diesel_interlock", Level::WARN) {
                return None;
            }
            let (span, dispatch) = (Span::current(), dispatcher::get_default(Clone::clone));
            let mut waits = lock(&WAITS);
            waits.last += 1;
            let number = waits.last;
            waits.waits.push_back(Wait {
                number,
                since: Instant::now(),
                subject,
                awaited,
                span,
                dispatch,
            });
            if !waits.has_thread {
                let thread = thread::Builder::new().name("diesel_interlock".into());
                waits.has_thread = thread.spawn(warn_of_all).is_ok();
            }
            Some(Self(number))
        }
    }

    impl Drop for Watched {
        fn drop(&mut self) {
            let mut waits = lock(&WAITS);
            let i = waits
                .waits
                .binary_search_by_key(&self.0, |wait| wait.number);
            // Not there if it was logged. Dropped outside the mutex, because a subscriber is
            // foreign code.
            let wait = i.ok().and_then(|i| waits.waits.remove(i));
            drop(waits);
            drop(wait);
        }
    }

    /// Warns of the waits that are long, until there are none. Begins and ends seldom, because it
    /// looks at them only after the first may be long.
    fn warn_of_all() {
        let mut pause = LONG;
        loop {
            thread::sleep(pause);
            let mut waits = lock(&WAITS);
            let Some(first) = waits.waits.front() else {
                waits.has_thread = false;
                return;
            };
            let waited = first.since.elapsed();
            pause = LONG.saturating_sub(waited);
            let long = if pause.is_zero() {
                waits.waits.pop_front()
            } else {
                None
            };
            drop(waits);
            if let Some(wait) = long {
                // A subscriber is foreign code. If it panics, the other waits are still watched.
                let _ = catch_unwind(AssertUnwindSafe(|| {
                    dispatcher::with_default(&wait.dispatch, || {
                        wait.span
                            .in_scope(|| warn(wait.subject, &wait.awaited, waited));
                    });
                }));
            }
        }
    }
}
