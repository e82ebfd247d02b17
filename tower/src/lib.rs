//! Layers for axum and other [tower](https://docs.rs/tower) services over
//! [`diesel_interlock`], its asynchronous half.
//!
//! - [`RateLimitLayer`]: a rate limit in front of a service, the same on all instances.
//! - [`IdempotencyLayer`]: a request with an `Idempotency-Key` has its effect once. The handler
//!   writes on the [`Transaction`] that it finds in the request, so its rows and the stored
//!   response commit together.
#![doc = include_str!("../README.md")]

mod idempotency;
mod rate_limit;
mod stored;
mod transaction;

use bytes::Bytes;
use diesel_interlock::{Async, Error, Operation};
use http::{Response, StatusCode, header};
use http_body_util::{Either, Full};

pub use self::idempotency::{Idempotency, IdempotencyLayer};
pub use self::rate_limit::{Limit, RateLimitLayer, RateLimited};
pub use self::transaction::{Locked, Transaction};

/// The body of a response: that of the service, or one that a layer has made.
pub type Body<B> = Either<B, Full<Bytes>>;

/// A reply of a layer itself, with a text for a person.
fn reply<B>(status: StatusCode, text: &'static str) -> Response<Body<B>> {
    let mut response = Response::new(Either::Right(Full::from(text)));
    *response.status_mut() = status;
    let plain = http::HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, plain);
    response
}

/// The reply to a request that a mistake in the program or its set-up has made fail. Nobody else
/// gets the error, so it is logged.
fn mistake<B>(text: &'static str, error: Option<&Error>) -> Response<Body<B>> {
    #[cfg(feature = "tracing")]
    tracing::warn!(
        error = error.map(|error| error as &(dyn std::error::Error + 'static)),
        "a layer has replied 500: {text}"
    );
    #[cfg(not(feature = "tracing"))]
    let _ = error;
    reply(StatusCode::INTERNAL_SERVER_ERROR, text)
}

/// The reply to a request whose operation has failed: 400 for a key that is not valid, 422 for
/// another request under the same key, 503 if the database is away, and 500 for everything else.
fn failed<B>(error: &Error) -> Response<Body<B>> {
    match error {
        error if error.is_input() => reply(StatusCode::BAD_REQUEST, "the key is not valid"),
        Error::OtherRequest(_) => reply(
            StatusCode::UNPROCESSABLE_ENTITY,
            "the key was used for another request",
        ),
        error if error.is_unavailable() => reply(
            StatusCode::SERVICE_UNAVAILABLE,
            "the database is away: try again later",
        ),
        error => mistake("an internal error", Some(error)),
    }
}

/// A pool of the asynchronous half.
pub trait Pool: diesel_interlock::Pool<Mode = Async> {}

impl<P: diesel_interlock::Pool<Mode = Async>> Pool for P {}

/// What an operation on such a pool returns.
type Reply<'a, T> = Operation<'a, diesel_interlock::Result<T>>;
