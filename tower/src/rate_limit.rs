//! A rate limit in front of a service.

use std::fmt;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use diesel_interlock::rate_limit::{LocalRateLimit, RateLimit};
use diesel_interlock::{Error, LocalCheck, Result};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use http_body_util::Either;
use tower_layer::Layer;
use tower_service::Service;

use crate::{Body, Pool, Reply, failed, reply};

/// A limit that decides for a [`RateLimitLayer`]: a [`RateLimit`] with its pool, or a
/// [`LocalRateLimit`].
pub trait Limit: Send + Sync + 'static {
    /// Spends a unit of this key. Returns whether one was available, and the header fields that
    /// tell the client about it.
    fn check(&self, key: String) -> impl Future<Output = Result<(bool, HeaderMap)>> + Send;
}

impl<P: Pool> Limit for (RateLimit<P>, P) {
    async fn check(&self, key: String) -> Result<(bool, HeaderMap)> {
        let check = self.0.key(key).check(&self.1).await?;
        Ok((check.is_allowed(), check.header_map()))
    }
}

/// It knows no number of units that are left, so an allowed request has no field, and a refused one
/// has `Retry-After` only.
impl<P: Pool> Limit for LocalRateLimit<P> {
    async fn check(&self, key: String) -> Result<(bool, HeaderMap)> {
        let check: Reply<'_, LocalCheck> = Self::check(self, &key);
        let check = check.await?;
        let after = check.retry_after_secs().map(HeaderValue::from);
        let fields = after.map(|after| (header::RETRY_AFTER, after));
        Ok((check.is_allowed(), fields.into_iter().collect()))
    }
}

/// Limits the requests to a service, by a key of each request.
///
/// Each decision is on the response, as the fields `RateLimit-Policy` and `RateLimit` of
/// draft-ietf-httpapi-ratelimit-headers. A request beyond the limit is answered 429 with
/// `Retry-After`, one whose key is not valid 400, and one that cannot be counted because the
/// database is away 503, unless the layer [lets it through](Self::let_through_if_away).
pub struct RateLimitLayer<L, K> {
    shared: Arc<(L, K)>,
    lets_through: bool,
}

impl<L: Limit, K: Fn(&Parts) -> String> RateLimitLayer<L, K> {
    /// Makes the layer of a limit: `(limit, pool)`, or a [`LocalRateLimit`]. The function names who
    /// shares a quota, for example the customer that an earlier layer has put into the extensions.
    pub fn new(limit: L, key: K) -> Self {
        Self {
            shared: Arc::new((limit, key)),
            lets_through: false,
        }
    }

    /// Lets requests through while the database is away or the pool is exhausted, uncounted and
    /// without fields. A key that others keep locked is no such case, because a client can keep its
    /// own key busy.
    #[must_use]
    pub fn let_through_if_away(self) -> Self {
        Self {
            lets_through: true,
            ..self
        }
    }
}

impl<L, K> Clone for RateLimitLayer<L, K> {
    fn clone(&self) -> Self {
        Self {
            shared: self.shared.clone(),
            lets_through: self.lets_through,
        }
    }
}

impl<L, K> fmt::Debug for RateLimitLayer<L, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimitLayer").finish_non_exhaustive()
    }
}

impl<S, L, K> Layer<S> for RateLimitLayer<L, K> {
    type Service = RateLimited<S, L, K>;

    fn layer(&self, inner: S) -> Self::Service {
        let settings = self.clone();
        RateLimited { inner, settings }
    }
}

fn is_away(error: &Error) -> bool {
    error.is_unavailable() && !matches!(error, Error::KeyLocked(_))
}

/// A service behind a [`RateLimitLayer`].
pub struct RateLimited<S, L, K> {
    inner: S,
    settings: RateLimitLayer<L, K>,
}

impl<S: Clone, L, K> Clone for RateLimited<S, L, K> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            settings: self.settings.clone(),
        }
    }
}

impl<S, L, K> fmt::Debug for RateLimited<S, L, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimited").finish_non_exhaustive()
    }
}

impl<S, L, K, Q, B> Service<Request<Q>> for RateLimited<S, L, K>
where
    S: Service<Request<Q>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send,
    L: Limit,
    K: Fn(&Parts) -> String + Send + Sync + 'static,
    Q: Send + 'static,
{
    type Response = Response<Body<B>>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        // The clone was not asked whether it is ready, so it stays for the next request.
        let clone = self.inner.clone();
        let mut inner = mem::replace(&mut self.inner, clone);
        let settings = self.settings.clone();
        Box::pin(async move {
            let (parts, body) = request.into_parts();
            let key = (settings.shared.1)(&parts);
            let request = Request::from_parts(parts, body);
            let (is_allowed, fields) = match settings.shared.0.check(key).await {
                Ok(checked) => checked,
                Err(error) if settings.lets_through && is_away(&error) => (true, HeaderMap::new()),
                Err(error) => return Ok(failed(&error)),
            };
            let mut response = if is_allowed {
                inner.call(request).await?.map(Either::Left)
            } else {
                reply(StatusCode::TOO_MANY_REQUESTS, "too many requests")
            };
            // Beside the fields of another layer, which names its own limit.
            for (name, value) in &fields {
                response.headers_mut().append(name, value.clone());
            }
            Ok(response)
        })
    }
}
