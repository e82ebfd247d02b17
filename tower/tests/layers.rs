//! The layers over HTTP: axum behind a socket, and a client that speaks HTTP/1.1 over another one.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::extract::Extension;
use axum::http::request::Parts;
use axum::http::{HeaderMap, Request, Response, StatusCode};
use axum::routing::{get, post};
use axum::{BoxError, Router};
use diesel::result::Error as DieselError;
use diesel_async::{AsyncConnection, AsyncPgConnection, SimpleAsyncConnection};
use diesel_interlock::deadpool::{Once, PgPool, RateLimit, drain};
use diesel_interlock::{Quota, migrations};
use diesel_interlock_tower::{IdempotencyLayer, RateLimitLayer, Transaction};
use http_body_util::{BodyExt, Full};
use hyper::body::Frame;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Barrier, Notify};
use workbench::{Database, block_on};

static CHARGE: Once = Once::named("charge");
static API: RateLimit = RateLimit::named("api", Quota::per_day(24).burst(2));
const INSERT: &str = "INSERT INTO effect DEFAULT VALUES";

type Work = Transaction<PgPool>;

struct Setup {
    database: Database,
    pool: PgPool,
}

impl Setup {
    fn new(connections: u32) -> Self {
        let database = Database::new();
        migrations::install(&database.pool(1)).unwrap();
        let setup = Self {
            pool: database.deadpool(connections),
            database,
        };
        setup.sql("CREATE TABLE effect (id serial)");
        setup
    }

    fn sql(&self, sql: &str) {
        use diesel::connection::SimpleConnection;
        self.database.connect().batch_execute(sql).unwrap();
    }

    fn count(&self, sql: &str) -> i64 {
        use diesel::RunQueryDsl;
        diesel::select(diesel::dsl::sql::<diesel::sql_types::BigInt>(sql))
            .get_result(&mut self.database.connect())
            .unwrap()
    }

    /// The number of rows that handlers have written, and of stored responses.
    fn effects_and_responses(&self) -> (i64, i64) {
        let of = |table: &str| self.count(&format!("(SELECT count(*) FROM {table})"));
        (of("effect"), of("resource_control.once"))
    }

    /// The pid of the session of the pool, which has one connection.
    async fn session(&self) -> i32 {
        use diesel_async::RunQueryDsl;
        let pid = diesel::dsl::sql::<diesel::sql_types::Integer>("pg_backend_pid()");
        let mut conn = self.pool.get().await.unwrap();
        diesel::select(pid).get_result(&mut conn).await.unwrap()
    }

    fn layer(&self) -> IdempotencyLayer<PgPool, fn(&Parts) -> String> {
        IdempotencyLayer::new(
            CHARGE.clone(),
            self.pool.clone(),
            client as fn(&Parts) -> String,
        )
    }
}

/// The client that a request names. A real one authenticates it.
fn client(request: &Parts) -> String {
    let client = request
        .headers
        .get("x-client")
        .map(|it| it.to_str().unwrap());
    client.unwrap_or_default().to_owned()
}

/// Serves on a socket, and returns its address.
async fn serve(router: Router) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

struct Reply {
    status: StatusCode,
    headers: HeaderMap,
    body: Bytes,
}

impl Reply {
    #[track_caller]
    fn is(&self, status: u16, body: &str) {
        assert_eq!(
            (self.status.as_u16(), &self.body[..]),
            (status, body.as_bytes())
        );
    }

    fn field(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .map_or("", |value| value.to_str().unwrap())
    }
}

/// Sends a request on a connection of its own. `None` if the server closes it without a reply.
async fn send<B>(address: &str, request: Request<B>) -> Option<Reply>
where
    B: http_body::Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    let stream = TokioIo::new(TcpStream::connect(address).await.unwrap());
    let (mut sender, connection) = http1::handshake(stream).await.unwrap();
    let connection = tokio::spawn(connection);
    let response = sender.send_request(request).await.ok()?;
    let (parts, body) = response.into_parts();
    let body = body.collect().await.ok()?.to_bytes();
    drop(sender);
    connection.abort();
    Some(Reply {
        status: parts.status,
        headers: parts.headers,
        body,
    })
}

fn request(path: &str, client: &str, key: &str, body: &str) -> Request<Full<Bytes>> {
    let request = Request::post(path)
        .header("host", "layers")
        .header("x-client", client);
    let request = match key {
        "" => request,
        key => request.header("idempotency-key", key),
    };
    request.body(Full::from(body.to_owned())).unwrap()
}

async fn charge(address: &str, key: &str, body: &str) -> Reply {
    send(address, request("/", "a", key, body)).await.unwrap()
}

async fn write(work: &Work) {
    let mut locked = work.lock().await.unwrap();
    locked.conn().batch_execute(INSERT).await.unwrap();
}

/// Writes a row, and replies with a number that no other reply has.
async fn created(Extension(work): Extension<Work>, body: String) -> Response<Body> {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    write(&work).await;
    let number = NUMBER.fetch_add(1, Ordering::SeqCst);
    Response::builder()
        .status(StatusCode::CREATED)
        .header("location", format!("/{number}"))
        .header("set-cookie", "secret")
        .body(format!("{body} {number}").into())
        .unwrap()
}

#[test]
fn a_repetition_gets_the_stored_response_and_has_no_effect() {
    block_on(async {
        let setup = Setup::new(1);
        let router = Router::new().route("/", post(created).put(created));
        let address = serve(router.layer(setup.layer())).await;
        let first = charge(&address, "k", "4200").await;
        assert_eq!(first.status, StatusCode::CREATED);
        assert_eq!(first.field("set-cookie"), "secret");
        for _ in 0..2 {
            let again = charge(&address, "k", "4200").await;
            assert_eq!((again.status, &again.body), (first.status, &first.body));
            for name in ["location", "content-type", "content-length"] {
                assert_eq!(again.field(name), first.field(name));
            }
            assert_eq!(
                again.field("set-cookie"),
                "",
                "the header is not on the allow-list"
            );
        }
        // As a request of HTTP/2, whose URI contains the host.
        let absolute = request("http://another-host/", "a", "k", "4200");
        let again = send(&address, absolute).await.unwrap();
        assert_eq!((again.status, &again.body), (first.status, &first.body));
        assert_eq!(setup.effects_and_responses(), (1, 1));
        // Another request under the same key differs in its body, its path or its method.
        charge(&address, "k", "9900")
            .await
            .is(422, "the key was used for another request");
        let other = request("/?a", "a", "k", "4200");
        assert_eq!(send(&address, other).await.unwrap().status.as_u16(), 422);
        let mut other = request("/", "a", "k", "4200");
        *other.method_mut() = http::Method::PUT;
        assert_eq!(send(&address, other).await.unwrap().status.as_u16(), 422);
        assert_eq!(setup.effects_and_responses(), (1, 1));
    });
}

#[test]
fn different_pairs_of_client_and_key_do_not_collide() {
    block_on(async {
        let setup = Setup::new(1);
        let address = serve(Router::new().route("/", post(created)).layer(setup.layer())).await;
        let pairs = [
            ("a b", "c"),
            ("a", "b c"),
            ("a b c", "1"),
            ("", "a b c"),
            ("3 a b", "c"),
            ("a", "b  c"),
        ];
        for (number, (client, key)) in (1..).zip(pairs) {
            let reply = send(&address, request("/", client, key, "1"))
                .await
                .unwrap();
            assert_eq!(reply.status, StatusCode::CREATED, "{client:?} {key:?}");
            assert_eq!(setup.effects_and_responses(), (number, number));
        }
    });
}

#[test]
fn while_the_first_request_is_at_work_a_twin_is_409_and_later_gets_its_response() {
    block_on(async {
        let setup = Setup::new(2);
        let (is_inside, may_end) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let handler = {
            let (is_inside, may_end) = (is_inside.clone(), may_end.clone());
            move |Extension(work): Extension<Work>| async move {
                write(&work).await;
                is_inside.notify_one();
                may_end.notified().await;
                "done"
            }
        };
        let address = serve(Router::new().route("/", post(handler)).layer(setup.layer())).await;
        let first = tokio::spawn({
            let address = address.clone();
            async move { charge(&address, "k", "1").await }
        });
        is_inside.notified().await;
        let twin = charge(&address, "k", "1").await;
        assert_eq!(
            (twin.status.as_u16(), twin.field("retry-after")),
            (409, "1")
        );
        may_end.notify_one();
        first.await.unwrap().is(200, "done");
        charge(&address, "k", "1").await.is(200, "done");
        assert_eq!(setup.effects_and_responses(), (1, 1));
    });
}

#[test]
fn of_many_concurrent_twins_one_has_an_effect() {
    block_on(async {
        let setup = Setup::new(4);
        let address = serve(Router::new().route("/", post(created)).layer(setup.layer())).await;
        let start = Arc::new(Barrier::new(20));
        let twins: Vec<_> = (0..20)
            .map(|_| {
                let (address, start) = (address.clone(), start.clone());
                tokio::spawn(async move {
                    start.wait().await;
                    loop {
                        let reply = charge(&address, "k", "1").await;
                        if reply.status != StatusCode::CONFLICT {
                            break (reply.status.as_u16(), reply.body);
                        }
                    }
                })
            })
            .collect();
        let mut replies = Vec::new();
        for twin in twins {
            replies.push(twin.await.unwrap());
        }
        assert!(
            replies
                .iter()
                .all(|reply| reply.0 == 201 && *reply == replies[0])
        );
        assert_eq!(setup.effects_and_responses(), (1, 1));
    });
}

/// Whether the connection may have been replaced: a rollback after a drop waits two seconds for its
/// reply, and then closes the connection.
fn is_slow(began: Instant) -> bool {
    began.elapsed() > Duration::from_secs(2)
}

/// Sends a request that fails, and asserts that it has no effect. Asserts that the next request
/// with the same key has its effect, on the same session.
async fn assert_undone(router: impl Fn(bool) -> Router, setup: &Setup, first: Option<u16>) {
    let (fails, works) = (serve(router(true)).await, serve(router(false)).await);
    let (session, began) = (setup.session().await, Instant::now());
    let reply = send(&fails, request("/", "a", "k", "1")).await;
    assert_eq!(reply.map(|reply| reply.status.as_u16()), first);
    assert!(drain(Duration::from_secs(60)).await);
    assert_eq!(setup.effects_and_responses(), (0, 0));
    assert_eq!(charge(&works, "k", "1").await.status.as_u16(), 201);
    assert_eq!(setup.effects_and_responses(), (1, 1));
    let is_same = setup.session().await == session;
    assert!(is_same || is_slow(began), "the session was replaced");
}

/// Returns the router for `true` with a handler that writes and then fails, and for `false` with
/// one that succeeds.
fn failing<F: Future<Output = Response<Body>> + Send + 'static>(
    setup: &Setup,
    fails: impl Fn(Work) -> F + Clone + Send + Sync + 'static,
) -> impl Fn(bool) -> Router {
    let layer = setup.layer().largest_body(1000);
    move |is_failing| {
        let fails = fails.clone();
        let handler = move |Extension(work): Extension<Work>| async move {
            write(&work).await;
            if is_failing {
                fails(work).await
            } else {
                status(201, "created")
            }
        };
        Router::new().route("/", post(handler)).layer(layer.clone())
    }
}

fn status(status: u16, body: impl Into<Body>) -> Response<Body> {
    Response::builder()
        .status(status)
        .body(body.into())
        .unwrap()
}

#[test]
fn a_status_of_500_or_more_is_sent_and_rolled_back() {
    block_on(async {
        for code in [500, 503, 599] {
            // The second body is too large to be stored.
            for length in [5, 5000] {
                let (setup, body) = (Setup::new(1), "x".repeat(length));
                let text = body.clone();
                let router = failing(&setup, move |_| {
                    let text = text.clone();
                    async move { status(code, text) }
                });
                let address = serve(router(true)).await;
                charge(&address, "k", "1").await.is(code, &body);
                assert_undone(router, &setup, Some(code)).await;
            }
        }
    });
}

#[test]
fn a_status_below_500_is_stored() {
    block_on(async {
        let setup = Setup::new(1);
        let router = failing(&setup, |_| async { status(402, "the card is declined") });
        let address = serve(router(true)).await;
        for _ in 0..2 {
            charge(&address, "k", "1")
                .await
                .is(402, "the card is declined");
        }
        assert_eq!(setup.effects_and_responses(), (1, 1));
    });
}

#[test]
fn a_panic_is_rolled_back() {
    block_on(async {
        let setup = Setup::new(1);
        let router = failing(&setup, |_| async { panic!("in the handler") });
        assert_undone(router, &setup, None).await;
    });
}

#[test]
fn a_response_that_is_too_large_or_ends_early_is_rolled_back() {
    block_on(async {
        let setup = Setup::new(1);
        let router = failing(&setup, |_| async { status(201, "x".repeat(1001)) });
        assert_undone(router, &setup, Some(500)).await;

        let setup = Setup::new(1);
        let router = failing(&setup, |_| async {
            let frame = Ok(Frame::data(Bytes::from("x")));
            let frames = [frame, Err(BoxError::from("broken"))];
            status(201, Body::new(Frames(frames.into())))
        });
        assert_undone(router, &setup, Some(500)).await;
    });
}

#[test]
fn a_statement_that_has_failed_is_not_committed() {
    block_on(async {
        let setup = Setup::new(1);
        let router = failing(&setup, |work| async move {
            let mut locked = work.lock().await.unwrap();
            assert!(locked.conn().batch_execute("SELECT 1/0").await.is_err());
            status(400, "the error is hidden")
        });
        assert_undone(router, &setup, Some(500)).await;
    });
}

#[test]
fn a_statement_that_fails_in_a_savepoint_leaves_the_rest_to_be_committed() {
    async fn attempts(Extension(work): Extension<Work>) -> StatusCode {
        let mut locked = work.lock().await.unwrap();
        locked.conn().batch_execute(INSERT).await.unwrap();
        let failing = async |conn: &mut AsyncPgConnection| conn.batch_execute("SELECT 1/0").await;
        let failed = locked.conn().transaction(failing).await;
        assert!(matches!(failed, Err(DieselError::DatabaseError(..))));
        StatusCode::CONFLICT
    }
    block_on(async {
        let setup = Setup::new(1);
        let router = Router::new().route("/", post(attempts));
        let address = serve(router.layer(setup.layer())).await;
        for _ in 0..2 {
            charge(&address, "k", "1").await.is(409, "");
            assert_eq!(setup.effects_and_responses(), (1, 1));
        }
    });
}

/// The session serves the next request.
#[test]
fn a_client_that_hangs_up_is_rolled_back() {
    block_on(async {
        let setup = Setup::new(1);
        let is_inside = Arc::new(Notify::new());
        let router = {
            let is_inside = is_inside.clone();
            failing(&setup, move |work| {
                let is_inside = is_inside.clone();
                async move {
                    // A task that the handler has spawned may still have the transaction.
                    tokio::spawn(async move {
                        let _work = work;
                        std::future::pending::<()>().await;
                    });
                    is_inside.notify_one();
                    std::future::pending().await
                }
            })
        };
        let address = serve(router(true)).await;
        for _ in 0..5 {
            let (session, began) = (setup.session().await, Instant::now());
            let waiting = tokio::spawn({
                let address = address.clone();
                async move { charge(&address, "k", "1").await }
            });
            is_inside.notified().await;
            waiting.abort();
            let _ = waiting.await;
            // The pool has one connection, so this waits until it is back.
            let is_same = setup.session().await == session;
            assert!(is_same || is_slow(began), "the session was replaced");
        }
        let address = serve(router(false)).await;
        assert_eq!(charge(&address, "k", "1").await.status.as_u16(), 201);
        assert_eq!(setup.effects_and_responses(), (1, 1));
    });
}

#[test]
fn a_handler_may_ignore_the_connection() {
    block_on(async {
        let setup = Setup::new(1);
        let router = Router::new()
            .route("/", post(async || "done"))
            .layer(setup.layer());
        let address = serve(router).await;
        for _ in 0..2 {
            charge(&address, "k", "1").await.is(200, "done");
        }
        assert_eq!(setup.effects_and_responses(), (0, 1));
    });
}

/// Statements of the spawned task before the end of the request are rolled back, and later ones are
/// refused.
#[test]
fn a_handler_that_keeps_the_connection_is_rolled_back() {
    block_on(async {
        let setup = Setup::new(1);
        let (kept, got) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let router = {
            let (kept, got) = (kept.clone(), got.clone());
            failing(&setup, move |work| {
                let (kept, got) = (kept.clone(), got.clone());
                async move {
                    let mut locked = work.lock().await.unwrap();
                    tokio::spawn(async move {
                        kept.notified().await;
                        locked.conn().batch_execute(INSERT).await.unwrap();
                        drop(locked);
                        assert!(work.lock().await.is_err());
                        got.notify_one();
                        // The connection is back in its pool, although this task still has the
                        // transaction.
                        std::future::pending::<()>().await;
                        drop(work);
                    });
                    status(201, "too early")
                }
            })
        };
        let address = serve(router(true)).await;
        assert_eq!(charge(&address, "k", "1").await.status.as_u16(), 500);
        kept.notify_one();
        got.notified().await;
        assert!(drain(Duration::from_secs(60)).await);
        assert_eq!(setup.effects_and_responses(), (0, 0));
        let address = serve(router(false)).await;
        assert_eq!(charge(&address, "k", "1").await.status.as_u16(), 201);
    });
}

/// A body that comes in pieces, without a length.
struct Frames<E>(std::collections::VecDeque<Result<Frame<Bytes>, E>>);

impl<E> Frames<E> {
    fn new(pieces: usize, piece: &'static [u8]) -> Self {
        Self(
            (0..pieces)
                .map(|_| Ok(Frame::data(Bytes::from_static(piece))))
                .collect(),
        )
    }
}

impl<E: Unpin> http_body::Body for Frames<E> {
    type Data = Bytes;
    type Error = E;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<Frame<Bytes>, E>>> {
        std::task::Poll::Ready(self.0.pop_front())
    }
}

#[test]
fn streamed_bodies_are_collected_in_both_directions() {
    block_on(async {
        let setup = Setup::new(1);
        let handler = async |Extension(work): Extension<Work>, body: String| {
            write(&work).await;
            assert_eq!(body, "ab".repeat(100));
            Body::new(Frames::<Infallible>::new(50, b"cd"))
        };
        let address = serve(Router::new().route("/", post(handler)).layer(setup.layer())).await;
        for _ in 0..2 {
            let body = Frames::<Infallible>::new(100, b"ab");
            let request = request("/", "a", "k", "").map(|_| body);
            send(&address, request)
                .await
                .unwrap()
                .is(200, &"cd".repeat(50));
        }
        assert_eq!(setup.effects_and_responses(), (1, 1));
    });
}

#[test]
fn a_request_that_is_too_large_is_refused_before_the_work() {
    block_on(async {
        let setup = Setup::new(1);
        let layer = setup.layer().largest_body(100);
        let address = serve(Router::new().route("/", post(created)).layer(layer)).await;
        assert_eq!(
            charge(&address, "k", &"x".repeat(101))
                .await
                .status
                .as_u16(),
            413
        );
        let streamed = request("/", "a", "k", "").map(|_| Frames::<Infallible>::new(101, b"x"));
        assert_eq!(send(&address, streamed).await.unwrap().status.as_u16(), 413);
        assert_eq!(setup.effects_and_responses(), (0, 0));
        assert_eq!(
            charge(&address, "k", &"x".repeat(50)).await.status.as_u16(),
            201
        );
    });
}

#[test]
fn without_a_key_a_request_passes_unless_it_is_required() {
    block_on(async {
        let setup = Setup::new(1);
        let handler = async |work: Option<Extension<Work>>| work.is_some().to_string();
        let router = || Router::new().route("/", post(handler).get(handler));
        let address = serve(router().layer(setup.layer())).await;
        charge(&address, "", "1").await.is(200, "false");
        charge(&address, "k", "1").await.is(200, "true");
        let address = serve(router().layer(setup.layer().required())).await;
        assert_eq!(charge(&address, "", "1").await.status.as_u16(), 400);
        let read = Request::get("/")
            .header("host", "layers")
            .body(Full::<Bytes>::default());
        send(&address, read.unwrap())
            .await
            .unwrap()
            .is(200, "false");
    });
}

#[test]
fn a_key_that_is_not_valid_is_400() {
    block_on(async {
        let setup = Setup::new(1);
        let address = serve(Router::new().route("/", post(created)).layer(setup.layer())).await;
        let mut empty = request("/", "a", "", "1");
        empty
            .headers_mut()
            .append("idempotency-key", "".parse().unwrap());
        let mut two = request("/", "a", "k", "1");
        two.headers_mut()
            .append("idempotency-key", "k".parse().unwrap());
        for request in [request("/", "a", &"x".repeat(1001), "1"), empty, two] {
            assert_eq!(send(&address, request).await.unwrap().status.as_u16(), 400);
        }
        assert_eq!(setup.effects_and_responses(), (0, 0));
    });
}

#[test]
fn an_outcome_that_another_program_has_stored_is_500() {
    block_on(async {
        let setup = Setup::new(1);
        let address = serve(Router::new().route("/", post(created)).layer(setup.layer())).await;
        setup.sql("INSERT INTO resource_control.once VALUES ('charge', '1 a k', 'done')");
        assert_eq!(charge(&address, "k", "1").await.status.as_u16(), 500);
        assert_eq!(setup.effects_and_responses(), (0, 1));
    });
}

#[test]
fn each_response_has_the_limit_and_beyond_it_a_request_is_429() {
    block_on(async {
        let setup = Setup::new(2);
        let layer = RateLimitLayer::new((API.clone(), setup.pool.clone()), client);
        let address = serve(Router::new().route("/", post(async || "done")).layer(layer)).await;
        for left in ["r=1", "r=0"] {
            let reply = charge(&address, "", "").await;
            reply.is(200, "done");
            assert_eq!(reply.field("ratelimit-policy"), r#""api";q=2;w=7200"#);
            assert!(
                reply.field("ratelimit").contains(left),
                "{}",
                reply.field("ratelimit")
            );
            assert_eq!(reply.field("retry-after"), "");
        }
        let refused = charge(&address, "", "").await;
        assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS);
        assert!(refused.field("ratelimit").contains("r=0"));
        assert!(refused.field("retry-after").parse::<u32>().unwrap() > 0);
        // Each key has a quota of its own.
        let other = send(&address, request("/", "b", "", "")).await.unwrap();
        other.is(200, "done");
        let invalid = send(&address, request("/", &"x".repeat(1001), "", ""))
            .await
            .unwrap();
        assert_eq!(invalid.status, StatusCode::BAD_REQUEST);
    });
}

#[test]
fn a_response_has_the_fields_of_each_limit() {
    static ALL: RateLimit = RateLimit::named("all", Quota::per_day(24).burst(9));
    block_on(async {
        let setup = Setup::new(2);
        let limit = |limit: &RateLimit| {
            let everyone: fn(&Parts) -> String = |_| "everyone".to_owned();
            RateLimitLayer::new((limit.clone(), setup.pool.clone()), everyone)
        };
        let router = Router::new().route("/", post(async || "done"));
        let address = serve(router.layer(limit(&API)).layer(limit(&ALL))).await;
        let mut statuses = Vec::new();
        for _ in 0..3 {
            let reply = charge(&address, "", "").await;
            statuses.push(reply.status.as_u16());
            for name in ["ratelimit-policy", "ratelimit"] {
                let fields = reply.headers.get_all(name).iter();
                let limits = fields.map(|field| field.to_str().unwrap().split(';').next().unwrap());
                assert_eq!(
                    limits.collect::<Vec<_>>(),
                    [r#""api""#, r#""all""#],
                    "{name}"
                );
            }
            assert_eq!(
                reply.headers.get_all("retry-after").iter().count(),
                statuses.len() / 3
            );
        }
        assert_eq!(statuses, [200, 200, 429]);
    });
}

#[test]
fn a_local_limit_works_in_the_layer() {
    block_on(async {
        let setup = Setup::new(2);
        let layer = RateLimitLayer::new(API.local(setup.pool.clone(), 2), client);
        let address = serve(Router::new().route("/", post(async || "done")).layer(layer)).await;
        for _ in 0..2 {
            charge(&address, "", "").await.is(200, "done");
        }
        let refused = charge(&address, "", "").await;
        assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS);
        assert!(refused.field("retry-after").parse::<u32>().unwrap() > 0);
    });
}

#[test]
fn during_an_outage_a_request_is_503_or_let_through() {
    block_on(async {
        let setup = Setup::new(1);
        // A port on which nobody listens.
        let away = {
            let port = TcpListener::bind("127.0.0.1:0")
                .await
                .unwrap()
                .local_addr()
                .unwrap()
                .port();
            let url = format!("postgres://postgres@127.0.0.1:{port}/nowhere");
            let manager = diesel_async::pooled_connection::AsyncDieselConnectionManager::new(url);
            PgPool::builder(manager).max_size(1).build().unwrap()
        };
        let calls = Arc::new(AtomicUsize::new(0));
        let router = || {
            let calls = calls.clone();
            let handler = async move || calls.fetch_add(1, Ordering::SeqCst).to_string();
            Router::new().route("/", get(handler.clone()).post(handler))
        };
        let limit = || RateLimitLayer::new((API.clone(), away.clone()), client);
        let once = IdempotencyLayer::new(CHARGE.clone(), away.clone(), client);
        for router in [router().layer(limit()), router().layer(once)] {
            let address = serve(router).await;
            assert_eq!(charge(&address, "k", "1").await.status.as_u16(), 503);
        }
        assert_eq!(calls.load(Ordering::SeqCst), 0);
        let address = serve(router().layer(limit().let_through_if_away())).await;
        let reply = charge(&address, "k", "1").await;
        reply.is(200, "0");
        assert_eq!(reply.field("ratelimit"), "");
        // A missing schema is not an outage, so the request is not let through.
        setup.sql("DROP SCHEMA resource_control CASCADE");
        let layer = RateLimitLayer::new((API.clone(), setup.pool.clone()), client);
        let address = serve(router().layer(layer.let_through_if_away())).await;
        assert_eq!(charge(&address, "k", "1").await.status.as_u16(), 500);
    });
}

/// A client can keep its own key busy.
#[test]
fn a_key_that_others_keep_locked_is_not_let_through() {
    block_on(async {
        let setup = Setup::new(2);
        let layer = RateLimitLayer::new((API.clone(), setup.pool.clone()), client);
        let router = Router::new().route("/", post(async || "done"));
        let address = serve(router.layer(layer.let_through_if_away())).await;
        charge(&address, "", "").await.is(200, "done");
        let mut other = setup.database.connect_async().await;
        let lock = "BEGIN; SELECT FROM resource_control.rate_limit FOR UPDATE";
        other.batch_execute(lock).await.unwrap();
        assert_eq!(charge(&address, "", "").await.status.as_u16(), 503);
        other.batch_execute("ROLLBACK").await.unwrap();
        charge(&address, "", "").await.is(200, "done");
    });
}

/// A service like tower's concurrency limit: only the instance that was found ready may be called,
/// and a clone is not ready.
#[derive(Default)]
struct OnceReady(bool);

impl Clone for OnceReady {
    fn clone(&self) -> Self {
        Self(false)
    }
}

impl tower_service::Service<Request<Body>> for OnceReady {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(
        &mut self,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Result<(), Infallible>> {
        self.0 = true;
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        assert!(
            std::mem::take(&mut self.0),
            "it was not asked whether it is ready"
        );
        std::future::ready(Ok(status(200, "done")))
    }
}

#[test]
fn the_service_that_was_found_ready_is_the_one_that_is_called() {
    async fn call_twice<B>(
        mut service: impl tower_service::Service<
            Request<Body>,
            Response = Response<B>,
            Error = Infallible,
        >,
    ) {
        for _ in 0..2 {
            std::future::poll_fn(|context| service.poll_ready(context))
                .await
                .unwrap();
            let response = service.call(Request::new(Body::empty())).await.unwrap();
            assert_eq!(response.status(), StatusCode::OK);
        }
    }
    block_on(async {
        use tower_layer::Layer;
        let setup = Setup::new(1);
        call_twice(setup.layer().layer(OnceReady::default())).await;
        let limit = RateLimitLayer::new((API.clone(), setup.pool.clone()), client);
        call_twice(limit.layer(OnceReady::default())).await;
    });
}
