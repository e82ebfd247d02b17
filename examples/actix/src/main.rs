//! A handler of actix-web with a rate limit for each customer, and charges that are made once. Both
//! use operations that take a connection, so a connection from any pool of any crate will do.
//!
//! `CARGO_TARGET_DIR=target DATABASE_URL=postgres://… cargo run --manifest-path
//! examples/actix/Cargo.toml` listens on port 3000; the first argument is another port.

use std::error::Error as AnyError;

use actix_web::http::StatusCode;
use actix_web::{App, HttpRequest, HttpResponse, HttpServer, ResponseError, web};
use diesel::sql_types::{Integer, Text};
use diesel_async::RunQueryDsl;
use diesel_async::pooled_connection::AsyncDieselConnectionManager;
use diesel_interlock::deadpool::{Once, PgPool, RateLimit};
use diesel_interlock::{Attempt, Done, Error, Quota, migrations};

static API: RateLimit = RateLimit::named("api", Quota::per_hour(100).burst(20));
static CHARGE: Once = Once::named("charge");

#[actix_web::main]
async fn main() -> Result<(), Box<dyn AnyError>> {
    let url = std::env::var("DATABASE_URL")?;
    let pool = PgPool::builder(AsyncDieselConnectionManager::new(url)).build()?;
    migrations::install(&pool).await?;
    let create = "CREATE TABLE IF NOT EXISTS actix_charge (customer text, cents int)";
    diesel::sql_query(create)
        .execute(&mut pool.get().await?)
        .await?;
    let port = std::env::args()
        .nth(1)
        .map_or(Ok(3000), |port| port.parse())?;
    let pool = web::Data::new(pool);
    let server = HttpServer::new(move || {
        let app = App::new().app_data(pool.clone());
        app.route("/charges", web::post().to(charge))
    });
    let server = server.bind(("127.0.0.1", port))?;
    for address in server.addrs() {
        println!("http://{address}");
    }
    Ok(server.run().await?)
}

/// A header field, or nothing.
fn field<'r>(request: &'r HttpRequest, name: &str) -> &'r str {
    let value = request.headers().get(name);
    value
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default()
}

/// Charges once, however often a client repeats the request. In an application the customer comes
/// from the authentication, not from a header field that anybody can write.
async fn charge(
    pool: web::Data<PgPool>,
    request: HttpRequest,
    body: String,
) -> Result<HttpResponse, Failed> {
    let (customer, key) = (
        field(&request, "x-customer"),
        field(&request, "idempotency-key"),
    );
    let (false, Ok(cents)) = (key.is_empty(), body.parse::<i32>()) else {
        return Ok(HttpResponse::BadRequest().body("a key, and an amount in cents"));
    };
    let conn = &mut pool
        .get()
        .await
        .map_err(|error| Error::Pool(error.into()))?;
    let check = API.key(customer).check_on(conn).await?;
    if check.is_limited() {
        let mut response = HttpResponse::TooManyRequests();
        for field in check.headers() {
            response.insert_header(field);
        }
        return Ok(response.finish());
    }
    // The length of the first part says where it ends, so that no two pairs are written alike.
    let key = format!("{} {customer} {key}", customer.len());
    let once = CHARGE.key(key).fingerprint(body);
    let done = once.try_run(conn, async |conn| {
        let insert = diesel::sql_query("INSERT INTO actix_charge VALUES ($1, $2)");
        let insert = insert.bind::<Text, _>(customer).bind::<Integer, _>(cents);
        insert.execute(conn).await?;
        Ok::<_, Error>(format!("{cents} cents"))
    });
    let done: Attempt<Done> = done.await?;
    Ok(match done {
        Attempt::Acquired(done) => HttpResponse::Created().body(done.into_bytes()),
        Attempt::Busy => HttpResponse::Conflict().body("the same request is at work"),
    })
}

/// An error as a reply.
#[derive(Debug)]
struct Failed(Error);

impl<E: Into<Error>> From<E> for Failed {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.status_code().canonical_reason().unwrap_or_default())
    }
}

impl ResponseError for Failed {
    fn status_code(&self) -> StatusCode {
        match &self.0 {
            error if error.is_input() => StatusCode::BAD_REQUEST,
            Error::OtherRequest(_) => StatusCode::UNPROCESSABLE_ENTITY,
            error if error.is_unavailable() => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}
