//! A service that takes four calls at a time, from all instances together.

use std::time::Duration;

use diesel_interlock::Semaphore;
use serde::{Deserialize, Serialize};
use ureq::Agent;

use crate::config::Config;
use crate::error::AppError;

/// The name of the semaphore.
pub const SERVICE: &str = "geocoder";

/// How many calls the service can take.
pub const SLOTS: usize = 4;

/// A client of the service.
#[derive(Debug)]
pub struct Geocoder {
    pub(crate) semaphore: Semaphore,
    agent: Agent,
    url: String,
}

/// What a client asks for.
#[derive(Debug, Deserialize)]
pub struct Question {
    q: String,
}

impl Question {
    pub(crate) fn checked(self) -> Result<String, AppError> {
        if self.q.trim().is_empty() || self.q.len() > 200 {
            return Err(AppError::Invalid("q must have 1 to 200 bytes".to_owned()));
        }
        Ok(self.q)
    }
}

/// The reply to a question.
#[derive(Debug, Serialize)]
pub struct Located {
    q: String,
    place: Place,
}

/// Where something is.
#[derive(Debug, Serialize, Deserialize)]
pub struct Place {
    lat: f64,
    lon: f64,
}

impl Geocoder {
    /// A client of the service at `backend`.
    pub fn new(config: &Config, backend: &str) -> Self {
        Self {
            semaphore: Semaphore::named(SERVICE, SLOTS as u32, config.geocode_timeout)
                .details(config.instance.clone()),
            agent: Agent::new_with_defaults(),
            url: format!("{backend}/geocode"),
        }
    }

    /// Asks the service. Blocks.
    pub(crate) fn ask(&self, question: String, at_most: Duration) -> Result<Located, AppError> {
        let call = self.agent.get(&self.url).query("q", &question);
        let call = call.config().timeout_global(Some(at_most)).build();
        let place = call.call()?.body_mut().read_json()?;
        Ok(Located { q: question, place })
    }
}
