//! The rate limit of each client.

use diesel_interlock::Spent;
use diesel_interlock::asynchronous::RateLimit;

use super::App;
use crate::error::AppError;
use crate::limits::{self, Client, Limiting};

impl Limiting for App {
    /// If the client hangs up, this future is dropped, and the unit may be spent.
    async fn spend(&self, client: Client) -> Result<Option<Spent>, AppError> {
        let limit = RateLimit::from(limits::of(&client, &self.config));
        limits::decide(limit.check(&self.pool).await, self.config.when_away)
    }
}
