//! What a layer logs. In a binary of its own, because the subscriber of one thread may miss an event
//! whose call site another thread has reached before:
//! <https://github.com/tokio-rs/tracing/issues/3611>.
#![cfg(feature = "tracing")]

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::Router;
use axum::body::Body;
use axum::http::request::Parts;
use axum::http::{Request, StatusCode};
use axum::routing::post;
use diesel_interlock::Quota;
use diesel_interlock::deadpool::{Once, RateLimit};
use diesel_interlock_tower::{IdempotencyLayer, RateLimitLayer};
use tower_service::Service;
use tracing::field::Field;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use workbench::{Database, block_on};

/// The number of warnings with an error.
#[derive(Clone, Default)]
struct Warnings(Arc<AtomicUsize>);

impl<S: Subscriber> Layer<S> for Warnings {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut has_error = false;
        event.record(&mut |field: &Field, _: &dyn fmt::Debug| has_error |= field.name() == "error");
        if *event.metadata().level() <= Level::WARN && has_error {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
}

/// The schema is missing.
#[test]
fn an_error_that_nobody_else_gets_is_logged() {
    let warnings = Warnings::default();
    let subscriber = tracing_subscriber::registry().with(warnings.clone());
    tracing::subscriber::set_global_default(subscriber).unwrap();
    let database = Database::new();
    block_on(async {
        let pool = database.deadpool(1);
        let everyone: fn(&Parts) -> String = |_| "everyone".to_owned();
        let router = || Router::new().route("/", post(async || "done"));
        let once = IdempotencyLayer::new(Once::named("charge"), pool.clone(), everyone);
        let limit = RateLimit::named("api", Quota::per_day(24));
        let limit = RateLimitLayer::new((limit, pool.clone()), everyone);
        for (number, mut router) in (1..).zip([router().layer(once), router().layer(limit)]) {
            let request = Request::post("/").header("idempotency-key", "k");
            let request = request.body(Body::empty()).unwrap();
            let response = router.call(request).await.unwrap();
            assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
            assert_eq!(warnings.0.load(Ordering::SeqCst), number);
        }
    });
}
