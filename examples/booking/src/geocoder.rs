//! A service that takes four calls at a time, from all instances together.

use std::time::Duration;

use diesel_interlock::{Admission, Semaphore};
use serde::{Deserialize, Serialize};
use ureq::Agent;

use crate::app::App;
use crate::config::Config;
use crate::error::AppError;

/// The name of the semaphore.
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

/// What a client asks for.
#[derive(Debug, Deserialize)]
pub struct Question {
    q: String,
}

/// The answer to a question.
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

    /// Asks the service, if it can take one more call.
    ///
    /// The call is made to its end, or to that of its permit, also if the client hangs up: the service
    /// does not notice that nobody waits any more, so neither may the permit.
    pub fn locate(&self, app: &App, Question { q }: Question) -> Result<Located, AppError> {
        if q.trim().is_empty() || q.len() > 200 {
            return Err(AppError::Invalid("q must have 1 to 200 bytes".to_owned()));
        }
        let permit = match self.semaphore.try_acquire(&app.pool)? {
            Admission::Admitted(permit) => permit,
            Admission::Full(full) => return Err(AppError::Full(full)),
        };
        let place = self.ask(&q, permit.remaining()).map_err(AppError::from);
        if let Err(AppError::BackendTimedOut) = place {
            // The service may be at it for longer: the slot is left to its own time-out.
            let _nobodys = permit.into_claim();
            return Err(AppError::BackendTimedOut);
        }
        permit.release()?;
        Ok(Located { q, place: place? })
    }

    fn ask(&self, question: &str, at_most: Duration) -> Result<Place, ureq::Error> {
        let call = self.agent.get(&self.url).query("q", question);
        let call = call.config().timeout_global(Some(at_most)).build();
        call.call()?.body_mut().read_json()
    }
}
