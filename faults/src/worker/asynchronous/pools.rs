//! The pools of asynchronous workers. Either kind is used through the same code.

use std::ops::{Deref, DerefMut};
use std::time::{Duration, Instant};

use diesel_async::pooled_connection::{
    AsyncDieselConnectionManager, ManagerConfig, RecyclingMethod, bb8, deadpool,
};
use diesel_async::{AsyncConnection, AsyncPgConnection, SimpleAsyncConnection};
use diesel_interlock::Error;
use diesel_interlock::asynchronous::{Pool, PoolConnection};
use tokio::time::timeout;

use crate::worker::{CONNECTIONS, IMPATIENCE, PoolKind, Settings};

/// How long a check-out may take.
const CHECKING_OUT: Duration = Duration::from_secs(2);

#[derive(Clone)]
pub(super) enum AnyPool {
    Deadpool(deadpool::Pool<AsyncPgConnection>),
    Bb8(bb8::Pool<AsyncPgConnection>),
}

pub(super) enum AnyConnection {
    Deadpool(deadpool::Object<AsyncPgConnection>),
    Bb8(bb8::PooledConnection<'static, AsyncPgConnection>),
}

impl AnyPool {
    pub(super) fn new(settings: &Settings, url: &str) -> Self {
        let manager = manager(settings, url);
        if settings.pool == PoolKind::Bb8 {
            let builder = bb8::Pool::builder()
                .max_size(CONNECTIONS)
                .test_on_check_out(settings.tests_connections)
                .connection_timeout(CHECKING_OUT);
            return Self::Bb8(builder.build_unchecked(manager));
        }
        let builder = deadpool::Pool::builder(manager).max_size(CONNECTIONS as usize);
        Self::Deadpool(
            builder
                .build()
                .expect("the pool has no timeouts of its own"),
        )
    }
}

fn manager(settings: &Settings, url: &str) -> AsyncDieselConnectionManager<AsyncPgConnection> {
    let mut config = ManagerConfig::default();
    // A check would hide what is left on a connection.
    config.recycling_method = if settings.tests_connections {
        RecyclingMethod::Verified
    } else {
        RecyclingMethod::Fast
    };
    let is_impatient = settings.impatient;
    config.custom_setup = Box::new(move |url| {
        Box::pin(async move {
            let mut conn = AsyncPgConnection::establish(url).await?;
            if is_impatient {
                conn.batch_execute(IMPATIENCE)
                    .await
                    .map_err(diesel::ConnectionError::CouldntSetupConfiguration)?;
            }
            Ok(conn)
        })
    });
    AsyncDieselConnectionManager::new_with_config(url, config)
}

impl Pool for AnyPool {
    type Connection = AnyConnection;

    async fn check_out(&self) -> Result<AnyConnection, Error> {
        Ok(match self {
            Self::Deadpool(pool) => AnyConnection::Deadpool(
                timeout(CHECKING_OUT, pool.check_out())
                    .await
                    .map_err(|error| Error::Pool(error.into()))??,
            ),
            Self::Bb8(pool) => AnyConnection::Bb8(pool.check_out().await?),
        })
    }

    async fn try_check_out(&self) -> Option<AnyConnection> {
        Some(match self {
            Self::Deadpool(pool) => AnyConnection::Deadpool(pool.try_check_out().await?),
            Self::Bb8(pool) => AnyConnection::Bb8(pool.try_check_out().await?),
        })
    }

    fn size(&self) -> u32 {
        match self {
            Self::Deadpool(pool) => pool.size(),
            Self::Bb8(pool) => pool.size(),
        }
    }

    fn is_contended(&self) -> bool {
        match self {
            Self::Deadpool(pool) => pool.is_contended(),
            Self::Bb8(pool) => pool.is_contended(),
        }
    }
}

impl PoolConnection for AnyConnection {
    fn discard(self) {
        match self {
            Self::Deadpool(conn) => conn.discard(),
            Self::Bb8(conn) => conn.discard(),
        }
    }

    fn opened_at(&self) -> Option<Instant> {
        match self {
            Self::Deadpool(conn) => conn.opened_at(),
            Self::Bb8(conn) => conn.opened_at(),
        }
    }
}

impl Deref for AnyConnection {
    type Target = AsyncPgConnection;

    fn deref(&self) -> &AsyncPgConnection {
        match self {
            Self::Deadpool(conn) => conn,
            Self::Bb8(conn) => conn,
        }
    }
}

impl DerefMut for AnyConnection {
    fn deref_mut(&mut self) -> &mut AsyncPgConnection {
        match self {
            Self::Deadpool(conn) => conn,
            Self::Bb8(conn) => conn,
        }
    }
}
