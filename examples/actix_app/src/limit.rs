//! The middleware that limits each client.

use actix_web::body::MessageBody;
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::header::{HeaderValue, TryIntoHeaderPair};
use actix_web::middleware::Next;
use actix_web::web::Data;
use actix_web::{Error, HttpRequest};
use booking::AppError;
use booking::blocking::App;
use booking::limits::{API_KEY, Client, Limiting};

use crate::failure::Failure;

/// Returns the client that sent the request.
pub fn client(request: &HttpRequest) -> Result<Client, AppError> {
    let api_key = request.headers().get(API_KEY);
    let peer = request.peer_addr();
    Client::of(api_key.map(HeaderValue::as_bytes), peer.map(|it| it.ip()))
}

/// Refuses what is above the limit of its client, and adds the header fields of the limit to every other response. For
/// `actix_web::middleware::from_fn`.
///
/// A unit is spent before the handler runs, and stays spent, also if the handler fails.
pub async fn limit(
    app: Data<App>,
    request: ServiceRequest,
    next: Next<impl MessageBody>,
) -> Result<ServiceResponse<impl MessageBody>, Error> {
    let client = client(request.request()).map_err(Failure::from)?;
    let spent = app.spend(client).await.map_err(Failure::from)?;
    let mut response = next.call(request).await?;
    if let Some(spent) = spent {
        // Not instead of the fields of a semaphore, which the handler may have set.
        for field in spent.headers().fields() {
            if let Ok((name, value)) = field.try_into_pair() {
                response.headers_mut().append(name, value);
            }
        }
    }
    Ok(response)
}
