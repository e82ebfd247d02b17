//! What is left for clients, and the quotas that operators set.

use diesel::prelude::*;
use diesel_interlock::schema::resource_control::rate_limit_override;

use super::App;
use crate::error::AppError;
use crate::limits::{self, Client};
use crate::quotas::{self, Change, Form, Left, Quotas, Seen};

/// Reads what is left for a client. Spends nothing.
pub fn left(app: &App, client: &Client) -> Result<Left, AppError> {
    let state = limits::of(client, &app.config).peek(&app.pool)?;
    Ok(Left::of(client, state))
}

/// Reads what the page of the operators shows, over one connection.
pub fn quotas(app: &App) -> Result<Quotas, AppError> {
    let seen = look(&mut *app.pool.get()?)?;
    Ok(Quotas::of(&app.config, seen))
}

fn look(conn: &mut PgConnection) -> QueryResult<Seen> {
    let overrides = quotas::overrides().load(conn)?;
    Ok(Seen {
        most: quotas::spent().load(conn)?,
        overridden: quotas::spent_by(quotas::clients_of(&overrides)).load(conn)?,
        overrides,
    })
}

/// Sets or deletes the quota of a client, or that of all clients. Each instance heeds it from its next check on.
pub fn change(app: &App, form: &Form) -> Result<(), AppError> {
    let change = form.checked()?;
    let conn = &mut *app.pool.get()?;
    match &change {
        Change::Set(new) => diesel::insert_into(rate_limit_override::table)
            .values(new)
            .on_conflict((rate_limit_override::name, rate_limit_override::scope))
            .do_update()
            .set(new)
            .execute(conn)?,
        Change::Delete { scope } => {
            diesel::delete(rate_limit_override::table.find((limits::NAME, scope))).execute(conn)?
        }
    };
    tracing::info!(?change, "an operator changed a quota");
    Ok(())
}
