//! What is left for clients, and the quotas that operators set.

use diesel::prelude::*;
use diesel_async::{AsyncPgConnection, RunQueryDsl};
use diesel_interlock::asynchronous::RateLimit;
use diesel_interlock::schema::resource_control::rate_limit_override;

use super::App;
use crate::error::AppError;
use crate::limits::{self, Client};
use crate::quotas::{self, Change, Form, Left, Quotas, Seen};

/// Reads what is left for a client. Spends nothing.
pub async fn left(app: &App, client: &Client) -> Result<Left, AppError> {
    let limit = RateLimit::from(limits::of(client, &app.config));
    Ok(Left::of(client, limit.peek(&app.pool).await?))
}

/// Reads what the page of the operators shows, over one connection.
pub async fn quotas(app: &App) -> Result<Quotas, AppError> {
    let seen = look(&mut *app.pool.get().await?).await?;
    Ok(Quotas::of(&app.config, seen))
}

async fn look(conn: &mut AsyncPgConnection) -> QueryResult<Seen> {
    let overrides = quotas::overrides().load(conn).await?;
    let clients = quotas::clients_of(&overrides);
    Ok(Seen {
        most: quotas::spent().load(conn).await?,
        overridden: quotas::spent_by(clients).load(conn).await?,
        overrides,
    })
}

/// Sets or deletes the quota of a client, or that of all clients. Each instance heeds it from its next check on.
pub async fn change(app: &App, form: &Form) -> Result<(), AppError> {
    let change = form.checked()?;
    let conn = &mut *app.pool.get().await?;
    match &change {
        Change::Set(new) => {
            diesel::insert_into(rate_limit_override::table)
                .values(new)
                .on_conflict((rate_limit_override::name, rate_limit_override::scope))
                .do_update()
                .set(new)
                .execute(conn)
                .await?
        }
        Change::Delete { scope } => {
            diesel::delete(rate_limit_override::table.find((limits::NAME, scope)))
                .execute(conn)
                .await?
        }
    };
    tracing::info!(?change, "an operator changed a quota");
    Ok(())
}
