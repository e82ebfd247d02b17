//! The background threads of this crate: one for each pool that has periodic tasks, as long as it has any.
//!
//! A query to a server that hangs blocks its thread, so each pool has its own thread. A pool has no identity, but a
//! connection never leaves its pool. So the threads mark the connections that they check out. A thread that finds the mark of
//! an older one hands its tasks over, and ends. It cannot know of the other before it has had a connection, so for a while
//! there may be as many threads as tasks.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::panics::{caught, lock, unpoisoned};
use crate::pool::{self, PgPool, PooledPgConnection};

/// A task that is repeated over a pool until it is over.
pub(crate) trait Chore: Send + Sync + 'static {
    /// How long the thread may wait for a connection.
    fn patience(&self) -> Duration;

    /// How long to pause before the next repetition: at most [`LONGEST_PAUSE`].
    fn pause(&self) -> Duration;

    /// Returns whether the task is over, without a connection. Records it, if that is an event.
    fn is_over(&self) -> bool;

    /// Does the task once. Returns whether it is over.
    fn attend(&self, conn: PooledPgConnection) -> bool;
}

/// Short enough that no clock overflows.
const LONGEST_PAUSE: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// Identifies the pool of a connection. One pool may have several marks, but no two pools have the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Mark(u64);

impl Mark {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// Returns the mark of a connection. Sets one if it has none.
    pub(crate) fn of(conn: &mut PooledPgConnection) -> Self {
        let marks = PooledPgConnection::extensions_mut(conn);
        match marks.get::<Self>() {
            Some(mark) => *mark,
            None => {
                let mark = Self::new();
                marks.insert(mark);
                mark
            }
        }
    }

    fn replace_that_of(self, conn: &mut PooledPgConnection) {
        PooledPgConnection::extensions_mut(conn).insert(self);
    }
}

/// The tasks of one kind, and the threads that run them.
#[derive(Debug)]
pub(crate) struct Background<T> {
    name: &'static str,
    threads: Mutex<BTreeMap<Mark, Vec<Entry<T>>>>,
    changed: Condvar,
}

#[derive(Debug)]
struct Entry<T> {
    chore: Arc<T>,
    pool: PgPool,
    due: Instant,
}

/// The result of doing a task once.
enum Attended {
    Over,
    ToBeRepeated,
    /// An older thread of the same pool has this task now, and all others of this thread.
    HandedOver,
}

impl<T: Chore> Background<T> {
    pub(crate) const fn new(name: &'static str) -> Self {
        Self {
            name,
            threads: Mutex::new(BTreeMap::new()),
            changed: Condvar::new(),
        }
    }

    /// Repeats a task from now on. `mark` is that of a connection of the pool, if the caller had one: with it, no second
    /// thread is started for the pool. If no thread can be started, nothing is done.
    pub(crate) fn start(&'static self, pool: &PgPool, mark: Option<Mark>, chore: Arc<T>) {
        let mark = mark.unwrap_or_else(Mark::new);
        let entry = Entry {
            chore,
            pool: pool.clone(),
            due: Instant::now(),
        };
        let mut threads = lock(&self.threads);
        if let Some(entries) = threads.get_mut(&mark) {
            entries.push(entry);
            self.changed.notify_all();
            return;
        }
        threads.insert(mark, vec![entry]);
        let thread = thread::Builder::new().name(self.name.into());
        let dropped = match thread.spawn(move || self.run(mark)) {
            Ok(_) => None,
            Err(_) => threads.remove(&mark),
        };
        drop(threads);
        drop(dropped);
    }

    /// Stops a task, and drops its pool. A repetition that is in progress is completed.
    pub(crate) fn stop(&self, chore: &Arc<T>) {
        let is_it = |entry: &Entry<T>| Arc::ptr_eq(&entry.chore, chore);
        let mut stopped = None;
        let mut threads = lock(&self.threads);
        for entries in threads.values_mut() {
            if let Some(at) = entries.iter().position(is_it) {
                stopped = Some(entries.swap_remove(at));
            }
        }
        self.changed.notify_all();
        drop(threads);
        // Its pool may be dropped with it, which takes time.
        drop(stopped);
    }

    /// Runs a thread: it does the task that is due first, until no task is left.
    fn run(&self, me: Mark) {
        let mut threads = lock(&self.threads);
        while let Some(entries) = threads.get_mut(&me) {
            let Some(next) = entries.iter_mut().min_by_key(|entry| entry.due) else {
                threads.remove(&me);
                return;
            };
            let wait = next.due.saturating_duration_since(Instant::now());
            if !wait.is_zero() {
                threads = unpoisoned(self.changed.wait_timeout(threads, wait)).0;
                continue;
            }
            let (chore, pool) = (Arc::clone(&next.chore), next.pool.clone());
            drop(threads);
            // A task whose end was recorded must not be repeated after a panic.
            if caught(|| chore.is_over()).unwrap_or(true) {
                self.stop(&chore);
            } else {
                match caught(|| self.attend(me, &*chore, &pool)) {
                    Some(Attended::Over) => self.stop(&chore),
                    Some(Attended::HandedOver) => return,
                    Some(Attended::ToBeRepeated) | None => {}
                }
            }
            drop(pool);
            threads = lock(&self.threads);
            let entries = threads.values_mut().flatten();
            for entry in entries.filter(|entry| Arc::ptr_eq(&entry.chore, &chore)) {
                entry.due = Instant::now() + chore.pause().min(LONGEST_PAUSE);
            }
        }
    }

    /// Does a task once, if the pool has a connection.
    fn attend(&self, me: Mark, chore: &T, pool: &PgPool) -> Attended {
        // Unlike `try_get`, this makes the pool open one more connection, up to its size.
        let Ok(mut conn) = pool::check_out(pool, Some(chore.patience())) else {
            return Attended::ToBeRepeated;
        };
        let mark = Mark::of(&mut conn);
        if mark < me && self.hand_over(me, mark) {
            return Attended::HandedOver;
        }
        me.replace_that_of(&mut conn);
        // It may have ended while this waited for the connection.
        if chore.is_over() || chore.attend(conn) {
            Attended::Over
        } else {
            Attended::ToBeRepeated
        }
    }

    /// Gives all tasks of this thread to an older thread of the same pool, if that still runs.
    fn hand_over(&self, me: Mark, older: Mark) -> bool {
        let mut threads = lock(&self.threads);
        if !threads.contains_key(&older) {
            return false;
        }
        let mine = threads.remove(&me).unwrap_or_default();
        threads.entry(older).or_default().extend(mine);
        self.changed.notify_all();
        true
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::thread::ThreadId;

    use diesel::dsl::sql;
    use diesel::prelude::*;
    use diesel::sql_types::BigInt;
    use workbench::Database;

    use super::*;

    /// Records which threads did it, and how often.
    #[derive(Debug, Default)]
    struct Told {
        by: Mutex<Vec<ThreadId>>,
        panics: bool,
        /// Once a year.
        rarely: bool,
    }

    impl Told {
        fn times(&self) -> usize {
            lock(&self.by).len()
        }
    }

    impl Chore for Told {
        fn patience(&self) -> Duration {
            Duration::ZERO
        }

        fn pause(&self) -> Duration {
            if self.rarely {
                Duration::MAX
            } else {
                Duration::from_millis(1)
            }
        }

        fn is_over(&self) -> bool {
            false
        }

        fn attend(&self, conn: PooledPgConnection) -> bool {
            lock(&self.by).push(thread::current().id());
            assert!(!self.panics, "as a caller's instrumentation may");
            drop(conn);
            false
        }
    }

    /// The tasks of one test, which end with it.
    struct Started {
        on: &'static Background<Told>,
        chores: Vec<Arc<Told>>,
    }

    impl Started {
        fn none() -> Self {
            Self {
                on: Box::leak(Box::new(Background::new("chores of a test"))),
                chores: Vec::new(),
            }
        }

        fn start(&mut self, pool: &PgPool, mark: Option<Mark>, told: Told) -> Arc<Told> {
            let told = Arc::new(told);
            self.on.start(pool, mark, Arc::clone(&told));
            self.chores.push(Arc::clone(&told));
            told
        }

        fn threads(&self) -> usize {
            lock(&self.on.threads).len()
        }

        fn stop_all(&mut self) {
            for chore in self.chores.drain(..) {
                self.on.stop(&chore);
            }
        }
    }

    impl Drop for Started {
        fn drop(&mut self) {
            self.stop_all();
        }
    }

    /// A pool with an idle connection.
    fn pool(database: &Database, size: u32) -> PgPool {
        let pool = database.pool(size);
        drop(pool.get().unwrap());
        pool
    }

    fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
        let end = Instant::now() + Duration::from_secs(20);
        while !is_so() {
            assert!(Instant::now() < end, "not within twenty seconds: {what}");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_pool_has_one_thread_and_another_pool_another() {
        let database = Database::new();
        let (several, one) = (pool(&database, 3), pool(&database, 1));
        let mut started = Started::none();
        let chores = [(); 5].map(|()| started.start(&several.clone(), None, Told::default()));
        let apart = started.start(&one, None, Told::default());
        eventually("the threads of the pool are one", || started.threads() == 2);
        // The threads that did it before have ended.
        let all = || chores.iter().chain([&apart]);
        all().for_each(|chore| lock(&chore.by).clear());
        eventually("all are done again and again", || {
            all().all(|chore| chore.times() > 20)
        });
        let last = |chore: &Arc<Told>| *lock(&chore.by).last().unwrap();
        let by: HashSet<_> = chores.iter().map(last).collect();
        assert_eq!(by.len(), 1);
        assert!(!by.contains(&last(&apart)));

        started.stop_all();
        eventually("no thread is left", || started.threads() == 0);
    }

    /// Is over once it was asked, as a task that ends while its thread waits for a connection.
    #[derive(Debug, Default)]
    struct EndsWhileWaiting {
        asked: AtomicU64,
        attended: AtomicU64,
    }

    impl Chore for EndsWhileWaiting {
        fn patience(&self) -> Duration {
            Duration::from_secs(60)
        }

        fn pause(&self) -> Duration {
            Duration::ZERO
        }

        fn is_over(&self) -> bool {
            self.asked.fetch_add(1, Ordering::SeqCst) > 0
        }

        fn attend(&self, _: PooledPgConnection) -> bool {
            self.attended.fetch_add(1, Ordering::SeqCst);
            true
        }
    }

    #[test]
    fn a_task_that_ended_while_its_thread_waited_is_not_done() {
        let database = Database::new();
        let pool = pool(&database, 1);
        let background: &'static Background<EndsWhileWaiting> =
            Box::leak(Box::new(Background::new("chores of a test")));
        let only = pool.get().unwrap();
        let chore = Arc::new(EndsWhileWaiting::default());
        background.start(&pool, None, Arc::clone(&chore));
        eventually("the thread has begun", || {
            chore.asked.load(Ordering::SeqCst) > 0
        });
        drop(only);
        eventually("no thread is left", || lock(&background.threads).is_empty());
        assert_eq!(chore.attended.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn a_mark_leads_to_the_thread_of_its_pool_also_where_no_connection_is_idle() {
        let database = Database::new();
        let pool = database.pool(1);
        let mut only = pool.get().unwrap();
        let mark = Mark::of(&mut only);
        let mut started = Started::none();
        for _ in 0..50 {
            started.start(&pool, Some(mark), Told::default());
        }
        assert_eq!(started.threads(), 1);
    }

    #[test]
    fn a_panic_ends_neither_the_thread_nor_what_else_it_does() {
        let database = Database::new();
        let pool = pool(&database, 2);
        let mut started = Started::none();
        let panics = Told {
            panics: true,
            // Repeated panics would fill the screen.
            rarely: true,
            ..Told::default()
        };
        let panics = started.start(&pool, None, panics);
        eventually("it panics", || panics.times() == 1);
        let other = started.start(&pool, None, Told::default());
        eventually("the other one is done", || other.times() > 3);
    }

    #[test]
    fn an_absurd_pause_ends_no_thread() {
        let database = Database::new();
        let pool = pool(&database, 1);
        let mut started = Started::none();
        let absurd = Told {
            rarely: true,
            ..Told::default()
        };
        let absurd = started.start(&pool, None, absurd);
        eventually("it is done once", || absurd.times() == 1);
        let other = started.start(&pool, None, Told::default());
        eventually("the other one is done", || other.times() > 3);
        assert_eq!(absurd.times(), 1);
    }

    #[test]
    fn no_pool_is_kept_for_what_was_stopped() {
        let database = Database::new();
        let pool = pool(&database, 1);
        let mut started = Started::none();
        let rarely = Told {
            rarely: true,
            ..Told::default()
        };
        let rarely = started.start(&pool, None, rarely);
        eventually("it is done", || rarely.times() == 1);
        drop(pool);
        started.stop_all();
        let looking = &mut database.connect();
        eventually("the connections of the pool are closed", || {
            sessions(looking) == 0
        });
        eventually("no thread is left", || started.threads() == 0);
    }

    fn sessions(conn: &mut PgConnection) -> i64 {
        let count = "(SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
            AND pid <> pg_backend_pid() AND backend_type = 'client backend')";
        diesel::select(sql::<BigInt>(count))
            .get_result(conn)
            .unwrap()
    }
}
