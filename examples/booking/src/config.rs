//! The configuration, by environment variables.

use std::env::{self, VarError};
use std::io;
use std::num::NonZeroU32;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use diesel_interlock::Quota;

use crate::limits::WhenAway;

/// The requests of a client per minute, if the environment has no other number.
const API_LIMIT: NonZeroU32 = NonZeroU32::new(6000).unwrap();

/// What the environment says; README.md has the list.
#[derive(Debug, Clone)]
pub struct Config {
    pub database_url: String,
    pub listen: String,
    pub instance: String,
    pub host: String,
    pub pool_size: u32,
    /// The URL of the fragile service; none to start one in this process.
    pub backend: Option<String>,
    pub request_timeout: Duration,
    pub geocode_timeout: Duration,
    /// The rate limit of each client.
    pub api_limit: Quota,
    /// What happens to a limited request while the database is away.
    pub when_away: WhenAway,
    /// How long a reservation takes between its check and its insert.
    pub reservation_pause: Duration,
    /// How long the report takes for each night.
    pub report_pause: Duration,
    /// Whether there is a route that panics, for tests.
    pub chaos: bool,
}

impl Config {
    /// Reads the environment of this program.
    pub fn from_env(program: &str) -> anyhow::Result<Self> {
        let host = gethostname::gethostname().to_string_lossy().into_owned();
        let instance = format!("{program} on {host}, pid {}", std::process::id());
        Ok(Self {
            database_url: variable("DATABASE_URL")?
                .context("DATABASE_URL is not set: say postgres://user@host/database, or start with examples/run")?,
            listen: or("LISTEN", "127.0.0.1:3000".to_owned())?,
            instance: or("INSTANCE", instance)?,
            host,
            pool_size: or("POOL_SIZE", 16)?,
            backend: variable("BACKEND")?,
            request_timeout: seconds("REQUEST_TIMEOUT_SECS", 30.0)?,
            geocode_timeout: seconds("GEOCODE_TIMEOUT_SECS", 10.0)?,
            api_limit: Quota::per_minute(or("API_LIMIT_PER_MINUTE", API_LIMIT)?.get()),
            when_away: or("RATE_LIMIT_WHEN_AWAY", WhenAway::Pass)?,
            reservation_pause: seconds("RESERVATION_PAUSE_SECS", 1.0)?,
            report_pause: seconds("REPORT_PAUSE_SECS", 0.2)?,
            chaos: or("CHAOS", false)?,
        })
    }

    /// The error of a program that cannot listen where it is told to.
    pub fn cannot_listen(&self, error: io::Error) -> anyhow::Error {
        let listen = &self.listen;
        let context = format!(
            "cannot listen at LISTEN={listen}: with LISTEN=127.0.0.1:0 the system picks a free port"
        );
        anyhow!(error).context(context)
    }
}

/// A variable that is empty is as one that is not set.
fn variable(name: &str) -> anyhow::Result<Option<String>> {
    match env::var(name) {
        Ok(value) => Ok(Some(value).filter(|value| !value.is_empty())),
        Err(VarError::NotPresent) => Ok(None),
        Err(VarError::NotUnicode(_)) => bail!("{name} is not UTF-8"),
    }
}

fn or<T: FromStr>(name: &str, default: T) -> anyhow::Result<T>
where
    T::Err: std::error::Error + Send + Sync + 'static,
{
    match variable(name)? {
        Some(value) => value.parse().with_context(|| format!("{name}={value}")),
        None => Ok(default),
    }
}

fn seconds(name: &str, default: f64) -> anyhow::Result<Duration> {
    Duration::try_from_secs_f64(or(name, default)?).with_context(|| name.to_owned())
}
