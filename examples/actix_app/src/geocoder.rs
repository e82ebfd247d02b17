//! A service that takes four calls at a time, from all instances together.

use diesel_interlock::{Admission, Semaphore};
use serde::{Deserialize, Serialize};
use ureq::Agent;

use crate::app::App;
use crate::config::Config;
use crate::error::AppError;

/// What the semaphore is called.
pub const SERVICE: &str = "geocoder";

/// How many calls the service can take.
pub const SLOTS: usize = 4;

/// A client of the service.
#[derive(Debug)]
pub struct Geocoder {
    semaphore: Semaphore,
    agent: Agent,
    url: String,
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
                .details(&config.instance),
            agent: Agent::new_with_defaults(),
            url: format!("{backend}/geocode"),
        }
    }

    /// Asks the service, if it can take one more call.
    ///
    /// The call is made to its end, or to that of its permit, also if the client hangs up: the service
    /// does not notice that nobody waits any more, so neither may the permit.
    pub fn locate(&self, app: &App, question: &str) -> Result<Place, AppError> {
        let permit = match self.semaphore.admit(&app.pool)? {
            Admission::Admitted(permit) => permit,
            Admission::Full(full) => return Err(AppError::Full(full)),
        };
        let call = self.agent.get(&self.url).query("q", question);
        let call = call
            .config()
            .timeout_global(Some(permit.remaining()))
            .build();
        let place = call.call()?.body_mut().read_json()?;
        permit.release()?;
        Ok(place)
    }
}
