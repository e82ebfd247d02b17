//! The end of `main`: waiting for what drops have left to the background.
//!
//! An asynchronous drop can only leave its release to a task, and a runtime that ends drops its
//! tasks. So without `drain`, a permit or a term would stay held for the rest of its lease after a
//! regular end of the program.

use std::time::{Duration, Instant};

use crate::mode::{self, Mode};
use crate::unfinished::has_drained;

async fn wait<M: Mode>(limit: Duration) -> bool {
    let deadline = Instant::now().checked_add(limit);
    while !has_drained() {
        if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            return false;
        }
        mode::pause::<M>(Duration::from_millis(1)).await;
    }
    true
}

/// The documentation of both halves.
macro_rules! docs {
    () => {
        "Waits until everything that was dropped in this process is released.

Guards, permits, terms, ticks and unfinished futures may leave their release to a task or a
thread when they are dropped. Returns `true` if all were released within `limit`: each release
was confirmed, or what it releases has expired, or its connection was closed over a second ago.
By then the server has noticed the closed connection, unless its
`client_connection_check_interval` is longer.

`drain` sends nothing itself. While the database is away, releases are retried until what they
release has expired. What was dropped on the caller's connection (`with_on`, `transaction`,
`Once::run`) is not waited for: it ends with its statement, or with the connection.

Call it at the end of `main`, or of a test. Without it, the end of a runtime drops its tasks,
and the end of a process its threads: a permit or a leader's term would then be free only when
its time is over. After you abort a task, await its handle before you call `drain`: only then
has the task dropped what it held."
    };
}

#[doc = docs!()]
#[cfg(feature = "r2d2")]
pub fn drain(limit: Duration) -> bool {
    mode::Blocking::drive(wait::<mode::Blocking>(limit))
}

#[doc = docs!()]
#[doc = ""]
#[cfg_attr(
    feature = "deadpool",
    doc = r#"
```
use std::time::Duration;

use diesel_interlock::deadpool::{Leader, PgPool, drain};

static DISPATCHER: Leader = Leader::named("dispatcher", Duration::from_secs(15));

async fn run(pool: PgPool, shutdown: impl Future<Output = ()>) {
    tokio::select! {
        _ = DISPATCHER.lead(&pool, |_| std::future::pending()) => {}
        () = shutdown => {}
    }
    drain(Duration::from_secs(5)).await;
}
# use diesel::{QueryDsl, RunQueryDsl};
# use diesel_async::{AsyncPgConnection, pooled_connection::AsyncDieselConnectionManager};
# use diesel_interlock::monitor::views::leader;
# let database = workbench::Database::new();
# diesel_interlock::migrations::install(&database.pool(1))?;
# let conn = &mut database.connect();
# let mut leaders = || leader::table.count().get_result::<i64>(conn).unwrap();
# let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
# runtime.block_on(async {
#     let manager = AsyncDieselConnectionManager::<AsyncPgConnection>::new(database.url());
#     let pool = PgPool::builder(manager).build().unwrap();
#     let shutdown = async {
#         while leaders() == 0 {
#             tokio::time::sleep(Duration::from_millis(5)).await;
#         }
#     };
#     run(pool, shutdown).await;
# });
# drop(runtime);
# assert_eq!(leaders(), 0);
# Ok::<(), Box<dyn std::error::Error>>(())
```
"#
)]
#[cfg(feature = "async")]
pub async fn drain_async(limit: Duration) -> bool {
    wait::<mode::Async>(limit).await
}
