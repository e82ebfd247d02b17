//! The connection of a request: the open transaction of its work, for the handler and the layer.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use diesel_interlock::once::Doing;
use diesel_interlock::{ConnectionOf, Error};
use tokio::sync::{Mutex, OwnedMutexGuard};

use crate::Pool;

/// The transaction of a request with an idempotency key. The [layer](crate::IdempotencyLayer) puts
/// it into the extensions of the request, where axum's `Extension` finds it, and commits it
/// together with the response.
pub struct Transaction<P: Pool>(Arc<Shared<P>>);

struct Shared<P: Pool> {
    doing: Arc<Mutex<Option<Doing<P>>>>,
    /// Whether the layer has ended the request. Then nobody gets the connection any more.
    is_over: AtomicBool,
}

/// Ends the transaction when it is dropped, also if the client has hung up or the handler panics.
pub(crate) struct Ends<P: Pool>(pub(crate) Transaction<P>);

impl<P: Pool> Drop for Ends<P> {
    fn drop(&mut self) {
        drop(self.0.end());
    }
}

/// The connection of a [`Transaction`], for as long as this value exists.
pub struct Locked<P: Pool> {
    doing: OwnedMutexGuard<Option<Doing<P>>>,
    transaction: Transaction<P>,
}

impl<P: Pool> Transaction<P> {
    pub(crate) fn new(doing: Doing<P>) -> Self {
        Self(Arc::new(Shared {
            doing: Arc::new(Mutex::new(Some(doing))),
            is_over: AtomicBool::new(false),
        }))
    }

    /// Waits until no other part of the handler uses the connection, and returns it. It is inside
    /// the open transaction.
    ///
    /// # Errors
    ///
    /// [`Error::TransactionEnded`] if the request has ended.
    pub async fn lock(&self) -> Result<Locked<P>, Error> {
        let doing = self.0.doing.clone().lock_owned().await;
        let transaction = self.clone();
        // In this order, so that a guard that comes too late gives the connection back, too.
        let locked = Locked { doing, transaction };
        if locked.doing.is_none() || self.0.is_over.load(Ordering::SeqCst) {
            return Err(Error::TransactionEnded);
        }
        Ok(locked)
    }

    /// Takes the work from the handler, at the end of the request. `None` if a part of the handler
    /// still uses the connection: its transaction is rolled back when that part drops it.
    pub(crate) fn end(&self) -> Option<Doing<P>> {
        self.0.is_over.store(true, Ordering::SeqCst);
        self.0.doing.try_lock().ok()?.take()
    }
}

impl<P: Pool> Clone for Transaction<P> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<P: Pool> Locked<P> {
    /// Returns the connection. Leave the end of its transaction to the layer.
    pub fn conn(&mut self) -> &mut ConnectionOf<P> {
        match &mut *self.doing {
            Some(doing) => doing.conn(),
            None => unreachable!("only the end of the request takes it, when nobody uses it"),
        }
    }
}

impl<P: Pool> Drop for Locked<P> {
    fn drop(&mut self) {
        if self.transaction.0.is_over.load(Ordering::SeqCst) {
            drop(self.doing.take());
        }
    }
}

impl<P: Pool> fmt::Debug for Transaction<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transaction").finish_non_exhaustive()
    }
}

impl<P: Pool> fmt::Debug for Locked<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Locked").finish_non_exhaustive()
    }
}
