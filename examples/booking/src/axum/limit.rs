//! The layer that limits each client.

use std::net::SocketAddr;

use axum::extract::{ConnectInfo, Request, State};
use axum::http::HeaderValue;
use axum::middleware::Next;
use axum::response::Response;

use super::append;
use crate::error::AppError;
use crate::limits::{API_KEY, Client, Limiting};

/// Returns the client that a request counts for.
pub type ClientOf = fn(&Request) -> Result<Client, AppError>;

/// Returns the client that sent the request.
pub fn client(request: &Request) -> Result<Client, AppError> {
    let api_key = request.headers().get(API_KEY);
    let peer = request.extensions().get::<ConnectInfo<SocketAddr>>();
    Client::of(
        api_key.map(HeaderValue::as_bytes),
        peer.map(|peer| peer.0.ip()),
    )
}

/// Refuses what is above the limit of its client, and adds the header fields of the limit to every other response. For
/// `axum::middleware::from_fn_with_state`, which makes a tower layer of it.
///
/// A unit is spent before the handler runs, and stays spent, also if the handler fails.
pub async fn limit<A: Limiting>(
    State((app, client_of)): State<(A, ClientOf)>,
    request: Request,
    next: Next,
) -> Result<Response, AppError> {
    let client = client_of(&request)?;
    let spent = app.spend(client).await?;
    let mut response = next.run(request).await;
    if let Some(spent) = spent {
        // Not instead of the fields of a semaphore, which the handler may have set.
        for (name, value) in spent.headers().fields() {
            append(&mut response, name, value);
        }
    }
    Ok(response)
}
