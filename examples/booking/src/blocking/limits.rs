//! The rate limit of each client.

use diesel_interlock::Spent;

use super::App;
use crate::error::AppError;
use crate::limits::{self, Client, Limiting};

impl Limiting for App {
    /// On a thread that may block. If the client hangs up, the unit stays spent.
    async fn spend(&self, client: Client) -> Result<Option<Spent>, AppError> {
        let app = self.clone();
        let check = self.spawn_blocking(move || {
            let check = limits::of(&client, &app.config).check(&app.pool);
            limits::decide(check, app.config.when_away)
        });
        check
            .await
            .map_err(|panic| AppError::Panicked(panic.to_string()))?
    }
}
