//! A connection that is lent to a guard.

use std::sync::atomic::{AtomicBool, Ordering};

use diesel_async::{AsyncPgConnection, SimpleAsyncConnection};
use diesel_interlock::asynchronous::PoolConnection;

use super::pools::AnyConnection;

/// Whether a transaction was begun by plain SQL, and not ended.
#[derive(Debug, Default)]
pub(super) struct LeftOpen(AtomicBool);

impl LeftOpen {
    pub(super) fn set(&self, is_left_open: bool) {
        self.0.store(is_left_open, Ordering::Relaxed);
    }

    fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// A pooled connection that is lent. A transaction that was left open there is the lender's, so the connection does not go back
/// to its pool with one.
pub(super) struct Lender<'a> {
    /// `None` only while dropping.
    conn: Option<AnyConnection>,
    left_open: &'a LeftOpen,
}

impl<'a> Lender<'a> {
    pub(super) fn new(conn: AnyConnection, left_open: &'a LeftOpen) -> Self {
        Self {
            conn: Some(conn),
            left_open,
        }
    }

    pub(super) fn conn(&mut self) -> &mut AsyncPgConnection {
        self.conn.as_mut().expect("it is there until it is dropped")
    }

    /// Ends the transaction that was left open, if there is one.
    pub(super) async fn roll_back(&mut self) {
        if self.left_open.get() && self.conn().batch_execute("ROLLBACK").await.is_ok() {
            self.left_open.set(false);
        }
    }
}

impl Drop for Lender<'_> {
    fn drop(&mut self) {
        if self.left_open.get()
            && let Some(conn) = self.conn.take()
        {
            conn.discard();
        }
    }
}
