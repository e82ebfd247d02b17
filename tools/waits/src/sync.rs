//! The items of `src/sync.rs`, under shuttle's scheduler and over the clock of the model.

use std::any::Any;
use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, LockResult, PoisonError};
use std::time::Duration;

pub(crate) use shuttle::sync::atomic::{AtomicBool, Ordering};

pub(crate) use crate::clock::Instant;
use crate::clock::{Parker, lock, me};

/// A mutex whose guard knows it, so that [`Condvar`] can lock it again.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

#[derive(Debug)]
pub(crate) struct MutexGuard<'a, T> {
    mutex: &'a Mutex<T>,
    guard: shuttle::sync::MutexGuard<'a, T>,
}

impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(shuttle::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        let guard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(MutexGuard { mutex: self, guard })
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

/// A condition variable whose timeouts follow the clock of the model.
#[derive(Debug, Default)]
pub(crate) struct Condvar(std::sync::Mutex<Vec<Arc<Parker>>>);

impl Condvar {
    pub(crate) const fn new() -> Self {
        Self(std::sync::Mutex::new(Vec::new()))
    }

    pub(crate) fn notify_one(&self) {
        let waiting = lock(&self.0).pop();
        if let Some(waiting) = waiting {
            waiting.unpark();
        }
    }

    pub(crate) fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
        Ok(self.wait_until(guard, None))
    }

    pub(crate) fn wait_timeout<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        timeout: Duration,
    ) -> LockResult<(MutexGuard<'a, T>, ())> {
        Ok((self.wait_until(guard, Some(Instant::now() + timeout)), ()))
    }

    fn wait_until<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        end: Option<Instant>,
    ) -> MutexGuard<'a, T> {
        let (mutex, me) = (guard.mutex, me());
        lock(&self.0).push(me.clone());
        drop(guard);
        me.park(end);
        lock(&self.0).retain(|other| !Arc::ptr_eq(other, &me));
        mutex.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

thread_local! {
    /// The statics of an execution, by their addresses. Each execution leaks its own.
    static STATICS: RefCell<HashMap<usize, &'static dyn Any>> = RefCell::default();
}

/// Forgets the statics of the last execution.
pub(crate) fn reset() {
    STATICS.take();
}

/// A static that is new in each execution.
pub(crate) struct LazyLock<T>(fn() -> T);

impl<T> LazyLock<T> {
    pub(crate) const fn new(value: fn() -> T) -> Self {
        Self(value)
    }
}

impl<T: Any> Deref for LazyLock<T> {
    type Target = T;

    fn deref(&self) -> &T {
        STATICS.with_borrow_mut(|statics| {
            let address = std::ptr::from_ref(self).addr();
            let make = || Box::leak(Box::new((self.0)())) as &'static dyn Any;
            let any: &'static dyn Any = *statics.entry(address).or_insert_with(make);
            any.downcast_ref().unwrap()
        })
    }
}

/// A static number that begins at 0 in each execution.
pub(crate) struct AtomicUsize(LazyLock<shuttle::sync::atomic::AtomicUsize>);

impl AtomicUsize {
    pub(crate) const fn new(zero: usize) -> Self {
        assert!(zero == 0);
        Self(LazyLock::new(Default::default))
    }
}

impl Deref for AtomicUsize {
    type Target = shuttle::sync::atomic::AtomicUsize;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}
