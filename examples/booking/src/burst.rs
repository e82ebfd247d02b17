//! Many requests at the same time, for the page at `/`: a browser sends six to one server at most.
//!
//! Leave it out of a copy that strangers reach, because one request makes twenty.

use std::net::SocketAddr;
use std::sync::{Barrier, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use ureq::Agent;
use ureq::http::Request;

use crate::app::App;
use crate::error::AppError;
use crate::limits::API_KEY;

/// How many requests a burst may have.
const MOST: usize = 20;

/// One request, and how often it is sent.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Burst {
    times: usize,
    request: Ask,
    /// For which client, if not for the address of this instance.
    api_key: Option<String>,
}

/// What a burst may ask this application for.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Ask {
    Reservation(Value),
    Report,
    Rebuild,
    /// With a question.
    Geocode(String),
}

/// A response to one of the requests.
#[derive(Debug, Serialize)]
pub struct Response {
    /// 0 if there was none.
    status: u16,
    retry_after: Option<String>,
    body: Value,
    seconds: f64,
}

/// Sends the requests over HTTP to this instance, all at the same time, and returns the responses in the
/// order of their arrival. Blocks.
pub fn send<P>(app: &App<P>, burst: &Burst) -> Result<Vec<Response>, AppError> {
    if !(1..=MOST).contains(&burst.times) {
        return Err(AppError::Invalid(format!("times must be 1 to {MOST}")));
    }
    let agent: Agent = Agent::config_builder()
        .http_status_as_error(false)
        .timeout_global(Some(app.config.request_timeout + Duration::from_secs(5)))
        .build()
        .into();
    let address = app.address;
    let all_are_ready = Barrier::new(burst.times);
    let responses = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..burst.times {
            scope.spawn(|| {
                let request = burst.to(address);
                all_are_ready.wait();
                let response = Response::to(&agent, request);
                let mut responses = responses.lock().unwrap_or_else(PoisonError::into_inner);
                responses.push(response);
            });
        }
    });
    Ok(responses
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner))
}

impl Burst {
    fn to(&self, address: SocketAddr) -> Result<Request<String>, ureq::Error> {
        let (method, path, body) = match &self.request {
            Ask::Reservation(wanted) => ("POST", "/reservations".to_owned(), wanted.to_string()),
            Ask::Report => ("POST", "/reports/nightly".to_owned(), String::new()),
            Ask::Rebuild => ("POST", "/cache/rebuild".to_owned(), String::new()),
            Ask::Geocode(question) => (
                "GET",
                format!("/geocode?q={}", escaped(question)),
                String::new(),
            ),
        };
        let mut request = Request::builder()
            .method(method)
            .uri(format!("http://{address}{path}"))
            .header("content-type", "application/json");
        if let Some(api_key) = &self.api_key {
            request = request.header(API_KEY, api_key);
        }
        Ok(request.body(body)?)
    }
}

impl Response {
    fn to(agent: &Agent, request: Result<Request<String>, ureq::Error>) -> Self {
        let sent = Instant::now();
        Self::read(agent, request, sent).unwrap_or_else(|error| Self {
            status: 0,
            retry_after: None,
            body: serde_json::json!({ "error": format!("no response: {error}") }),
            seconds: sent.elapsed().as_secs_f64(),
        })
    }

    fn read(
        agent: &Agent,
        request: Result<Request<String>, ureq::Error>,
        sent: Instant,
    ) -> Result<Self, ureq::Error> {
        let mut response = agent.run(request?)?;
        let retry_after = response.headers().get("retry-after");
        let retry_after = retry_after.and_then(|value| value.to_str().ok());
        Ok(Self {
            status: response.status().as_u16(),
            retry_after: retry_after.map(str::to_owned),
            body: response.body_mut().read_json().unwrap_or_default(),
            seconds: sent.elapsed().as_secs_f64(),
        })
    }
}

/// As a query string has it.
fn escaped(text: &str) -> String {
    text.bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => char::from(byte).to_string(),
            _ => format!("%{byte:02X}"),
        })
        .collect()
}
