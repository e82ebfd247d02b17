//! How much memory a lock, a guard and a permit take in the client.

// A global allocator cannot be written without.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use diesel_interlock::{AdvisoryLock, LockKey, Permit, PooledGuard, Semaphore};

use crate::Bench;
use crate::report::Report;
use crate::semaphores;

/// The system's allocator, which counts for each thread what it has.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    // A thread that is ending has no counter any more.
    let _ = LIVE.try_with(|live| live.set(live.get() + bytes));
}

// SAFETY: all of it is the system's allocator, whose contract is the same; counting does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's contract is the system's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's contract is the system's, which has allocated it.
        unsafe { System.dealloc(pointer, layout) }
    }
}

pub(crate) fn run(bench: &Bench, report: &mut Report) {
    let database = bench.server.database();
    let pool = database.pool(1);
    let lock = AdvisoryLock::new(LockKey::parts(["nightly report", "7"]));
    let semaphore = semaphores::semaphore();
    report.scenario("memory in the client", 1);
    // The first of each prepares statements, which the connection keeps.
    lock.try_acquire(&pool)
        .unwrap()
        .acquired()
        .unwrap()
        .release()
        .unwrap();
    semaphore
        .try_acquire(&pool)
        .unwrap()
        .admitted()
        .unwrap()
        .release()
        .unwrap();

    let with_guard = growth(|| lock.try_acquire(&pool).unwrap().acquired().unwrap());
    report.figure(
        "guard: its own size, its connection included",
        "bytes",
        size_of::<PooledGuard>() as f64,
    );
    report.figure("guard: on the heap beyond that", "bytes", with_guard);
    let with_permit = growth(|| semaphore.try_acquire(&pool).unwrap().admitted().unwrap());
    report.figure("permit: its own size", "bytes", size_of::<Permit>() as f64);
    report.figure("permit: on the heap beyond that", "bytes", with_permit);
    report.figure(
        "AdvisoryLock: its own size",
        "bytes",
        size_of::<AdvisoryLock>() as f64,
    );
    report.figure(
        "Semaphore: its own size",
        "bytes",
        size_of::<Semaphore>() as f64,
    );
}

/// How much this thread has more of while it holds that.
fn growth<T>(make: impl FnOnce() -> T) -> f64 {
    let before = LIVE.get();
    let made = make();
    let grown = LIVE.get() - before;
    drop(made);
    grown as f64
}
