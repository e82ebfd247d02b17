//! Fences on an asynchronous connection.

use diesel_async::AsyncPgConnection;

use crate::error::Result;
use crate::session::Asynchronous;

/// Protects data in the database from a holder that has lost its lock or its slot without noticing.
///
/// The same fence as [`diesel_interlock::Fence`](crate::Fence), for asynchronous connections.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[must_use = "a fence protects nothing until it is passed"]
pub struct Fence(crate::Fence);

impl From<crate::Fence> for Fence {
    fn from(fence: crate::Fence) -> Self {
        Self(fence)
    }
}

impl Fence {
    /// Makes a fence, named after the data that it protects. As [`Fence::named`](crate::Fence::named).
    pub const fn named(name: &'static str) -> Self {
        Self(crate::Fence::named(name))
    }

    /// As [`named`](Self::named), for a name that is known only at run time.
    pub fn new(name: impl Into<String>) -> Self {
        Self(crate::Fence::new(name))
    }

    /// Returns the name, without the prefix of a test.
    pub fn name(&self) -> &str {
        self.0.name()
    }

    /// Passes the fence with a token, unless a larger token has passed it. As
    /// [`Fence::pass`](crate::Fence#method.pass).
    ///
    /// If the future is dropped, the token may have passed, which counts only if the transaction of the caller commits.
    ///
    /// # Errors
    ///
    /// As in the blocking half.
    ///
    /// # Examples
    ///
    /// ```
    /// use diesel_async::AsyncConnection;
    /// use diesel_interlock::Error;
    /// use diesel_interlock::asynchronous::{AdvisoryLock, Fence};
    ///
    /// static IMPORT: AdvisoryLock = AdvisoryLock::named("import").fenced();
    /// static IMPORTED: Fence = Fence::named("imported rows");
    ///
    /// # let database = workbench::Database::new();
    /// # diesel_interlock::migrations::install(&mut database.connect())?;
    /// # let pool = database.deadpool(2);
    /// # let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    /// # runtime.block_on(async {
    /// let mut guard = IMPORT.acquire(&pool).await?;
    /// let token = guard.fencing_token().await?;
    /// // … on this connection or any other, minutes later:
    /// let conn = &mut pool.get().await?;
    /// conn.transaction(async |conn| {
    ///     IMPORTED.pass(conn, token).await?; // Err(Fenced) if a later holder has passed
    ///     // … write
    ///     Ok::<_, Error>(())
    /// })
    /// .await?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub async fn pass(&self, conn: &mut AsyncPgConnection, token: i64) -> Result<()> {
        self.0.pass_in(&mut Asynchronous::lent(conn), token).await
    }
}
