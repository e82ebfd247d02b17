//! The header `Idempotency-Key` of draft-ietf-httpapi-idempotency-key-header.

use std::error::Error as AnyError;
use std::fmt;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use diesel_interlock::once::{Begun, Once};
use http::request::Parts;
use http::{HeaderName, HeaderValue, Request, Response, StatusCode, header};
use http_body::Body as HttpBody;
use http_body_util::{BodyExt, Either, Full, LengthLimitError, Limited};
use tower_layer::Layer;
use tower_service::Service;

use crate::transaction::Ends;
use crate::{Body, Pool, Reply, Transaction, failed, mistake, reply, stored};

/// Does each request that has an `Idempotency-Key` once, and replies to its repetitions with the
/// stored response.
///
/// The handler finds a [`Transaction`] in the extensions of the request, and writes on its
/// connection. If the response has a status below 500, its status, some of its header fields and
/// its body are stored, in the same transaction, and then it is sent. Everything else rolls back: a
/// status of 500 or more, an error of the service, a panic, a client that hangs up, and a response
/// that is too large.
///
/// After a failed statement PostgreSQL commits nothing of the transaction, so the reply is 500, also
/// if the handler replies something else. Run a statement that may fail, such as an insert that
/// meets a unique constraint, in a savepoint: `locked.conn().transaction(…)`.
///
/// | the request | the reply |
/// |---|---|
/// | a repetition | the stored response |
/// | a repetition while the first one is at work | 409 with `Retry-After` |
/// | another method, path, query or body under the same key | 422 |
/// | a key that is empty, too long or given twice | 400 |
/// | a body that is too large | 413 |
/// | the database is away | 503 |
///
/// Put authentication and limits outside of this layer: what is inside has its responses stored, a
/// 401 and a 429, too. Inside a router that axum nests, the path lacks the prefix of that router, so
/// `/charges` and `/refunds` may look alike: put the layer outside of `nest`, or give each router a
/// [`Once`] with a name of its own.
///
/// GET, HEAD, OPTIONS and TRACE pass as they are. So does a request without a key, unless it
/// [is required](Self::required); the handler then finds no `Transaction`.
///
/// Each request with a key keeps a connection of the pool until its end. A handler that takes a
/// second connection from the same pool may wait for itself.
pub struct IdempotencyLayer<P: Pool, C> {
    shared: Arc<(Once<P>, P, C)>,
    headers: Arc<[HeaderName]>,
    largest: usize,
    is_required: bool,
}

impl<P: Pool, C: Fn(&Parts) -> String> IdempotencyLayer<P, C> {
    /// Makes the layer. The function names the client of a request, for example the customer that
    /// an earlier layer has authenticated: each client has its own keys.
    pub fn new(once: Once<P>, pool: P, client: C) -> Self {
        Self {
            shared: Arc::new((once, pool, client)),
            headers: Arc::new([
                header::CONTENT_TYPE,
                header::CONTENT_ENCODING,
                header::LOCATION,
            ]),
            largest: 1 << 20,
            is_required: false,
        }
    }

    /// Refuses a request without a key with 400.
    #[must_use]
    pub fn required(mut self) -> Self {
        self.is_required = true;
        self
    }

    /// Sets which header fields are stored with a response: by default `Content-Type`,
    /// `Content-Encoding` and `Location`.
    #[must_use]
    pub fn headers(mut self, names: impl IntoIterator<Item = HeaderName>) -> Self {
        self.headers = names.into_iter().collect();
        self
    }

    /// Sets how many bytes the body of a request or of a response may have: by default 1 MiB. Both
    /// are kept in memory.
    #[must_use]
    pub fn largest_body(mut self, bytes: usize) -> Self {
        self.largest = bytes;
        self
    }
}

impl<P: Pool, C> Clone for IdempotencyLayer<P, C> {
    fn clone(&self) -> Self {
        Self {
            shared: self.shared.clone(),
            headers: self.headers.clone(),
            ..*self
        }
    }
}

impl<P: Pool, C> fmt::Debug for IdempotencyLayer<P, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyLayer").finish_non_exhaustive()
    }
}

impl<S, P: Pool, C> Layer<S> for IdempotencyLayer<P, C> {
    type Service = Idempotency<S, P, C>;

    fn layer(&self, inner: S) -> Self::Service {
        let settings = self.clone();
        Idempotency { inner, settings }
    }
}

/// A service behind an [`IdempotencyLayer`].
pub struct Idempotency<S, P: Pool, C> {
    inner: S,
    settings: IdempotencyLayer<P, C>,
}

impl<S: Clone, P: Pool, C> Clone for Idempotency<S, P, C> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            settings: self.settings.clone(),
        }
    }
}

impl<S, P: Pool, C> fmt::Debug for Idempotency<S, P, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Idempotency").finish_non_exhaustive()
    }
}

impl<S, P, C, Q, B> Service<Request<Q>> for Idempotency<S, P, C>
where
    S: Service<Request<Q>, Response = Response<B>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send,
    P: Pool,
    C: Fn(&Parts) -> String + Send + Sync + 'static,
    Q: HttpBody<Error: Into<Box<dyn AnyError + Send + Sync>>> + From<Bytes> + Send + 'static,
    Q::Data: Send,
    B: HttpBody<Error: Into<Box<dyn AnyError + Send + Sync>>> + Send + 'static,
    B::Data: Send,
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
            let key = match settings.key(&request) {
                Ok(Some(key)) => key,
                Ok(None) => return Ok(inner.call(request).await?.map(Either::Left)),
                Err(text) => return Ok(reply(StatusCode::BAD_REQUEST, text)),
            };
            let (mut parts, body) = request.into_parts();
            let body = match settings.collect(body).await {
                Ok(body) => body,
                Err(status) => return Ok(reply(status, "the body is too large or incomplete")),
            };
            let transaction = match settings.begin(&parts, &key, &body).await {
                Ok(transaction) => transaction,
                Err(response) => return Ok(*response),
            };
            parts.extensions.insert(transaction.clone());
            let ends = Ends(transaction);
            let response = inner.call(Request::from_parts(parts, body.into())).await?;
            Ok(settings.end(&ends.0, response).await)
        })
    }
}

impl<P: Pool, C: Fn(&Parts) -> String> IdempotencyLayer<P, C> {
    /// The key of a request. `None` if it passes as it is, and an error if it is refused.
    fn key<Q>(&self, request: &Request<Q>) -> Result<Option<String>, &'static str> {
        if request.method().is_safe() {
            return Ok(None);
        }
        let mut keys = request.headers().get_all("idempotency-key").iter();
        match (keys.next().map(HeaderValue::to_str), keys.next()) {
            (None, _) if self.is_required => Err("the header Idempotency-Key is missing"),
            (None, _) => Ok(None),
            (Some(Ok(key)), None) if !key.is_empty() => Ok(Some(key.to_owned())),
            _ => Err("the header Idempotency-Key is not valid"),
        }
    }

    async fn collect<B>(&self, body: B) -> Result<Bytes, StatusCode>
    where
        B: HttpBody<Error: Into<Box<dyn AnyError + Send + Sync>>>,
    {
        match Limited::new(body, self.largest).collect().await {
            Ok(body) => Ok(body.to_bytes()),
            Err(error) if error.is::<LengthLimitError>() => Err(StatusCode::PAYLOAD_TOO_LARGE),
            Err(_) => Err(StatusCode::BAD_REQUEST),
        }
    }

    /// Begins the work of a request, or returns the reply to it.
    async fn begin<B>(
        &self,
        request: &Parts,
        key: &str,
        body: &[u8],
    ) -> Result<Transaction<P>, Box<Response<Body<B>>>> {
        let (once, pool, client) = &*self.shared;
        let client = client(request);
        // The length says where the client ends, so that no two pairs are written alike.
        let key = format!("{} {client} {key}", client.len());
        // Without the host: HTTP/2 names it in the URI, and HTTP/1.1 does not.
        let path = request
            .uri
            .path_and_query()
            .map_or("", |path| path.as_str());
        let mut work = format!("{} {path}\n", request.method).into_bytes();
        work.extend_from_slice(body);
        let once = once.key(key).fingerprint(work);
        let begun: Reply<'_, Begun<P>> = once.begin(pool);
        let response = match begun.await {
            Ok(Begun::First(doing)) => return Ok(Transaction::new(doing)),
            Ok(Begun::Before(bytes)) => stored::read(bytes).unwrap_or_else(|| {
                let text = "what is stored under the key is not a response";
                mistake(text, None)
            }),
            Ok(Begun::Busy) => {
                let text = "the same request is at work: try again in a moment";
                let mut busy = reply(StatusCode::CONFLICT, text);
                let second = HeaderValue::from_static("1");
                busy.headers_mut().insert(header::RETRY_AFTER, second);
                busy
            }
            Err(error) => failed(&error),
        };
        Err(Box::new(response))
    }

    /// Stores the response and commits, or rolls back.
    async fn end<B>(&self, transaction: &Transaction<P>, response: Response<B>) -> Response<Body<B>>
    where
        B: HttpBody<Error: Into<Box<dyn AnyError + Send + Sync>>>,
    {
        let (parts, body) = response.into_parts();
        if parts.status.as_u16() >= 500 {
            if let Some(doing) = transaction.end() {
                doing.roll_back().await;
            }
            return Response::from_parts(parts, Either::Left(body));
        }
        let body = self.collect(body).await;
        let Some(doing) = transaction.end() else {
            let text = "the handler still uses the connection of the request";
            return mistake(text, None);
        };
        let Ok(body) = body else {
            doing.roll_back().await;
            let text = "the response is too large to be stored, or incomplete";
            return mistake(text, None);
        };
        let stored = stored::write(&parts, &self.headers, &body);
        let finished: Reply<'_, ()> = doing.finish(stored);
        match finished.await {
            Ok(()) => Response::from_parts(parts, Either::Right(Full::new(body))),
            Err(error) => failed(&error),
        }
    }
}
