//! Instances of an application, as processes, and requests to them.

use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use fragile_geocoder::FragileGeocoder;
use serde_json::Value;
use ureq::Agent;
use ureq::http::{self, Request};

const JSON: &str = "application/json";

/// How long an instance may take to start, or to end.
const PATIENCE: Duration = Duration::from_secs(60);

/// A process that serves HTTP. Killed when it is dropped.
pub(crate) struct Instance {
    process: Child,
    address: String,
    /// The paths of the addresses that it printed.
    pages: Vec<String>,
    agent: Agent,
}

/// A response that was read.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) retry_after: Option<String>,
    /// The list in `RateLimit-Policy`.
    pub(crate) policy: Option<String>,
    /// The list in `RateLimit`.
    pub(crate) limit: Option<String>,
    pub(crate) content_type: String,
    pub(crate) text: String,
}

/// What an instance is to be started with.
#[derive(Debug)]
pub(crate) struct Start {
    command: Command,
}

impl Start {
    /// The application of this binary, on the database of a URL that tokio-postgres accepts, too, with the settings of a fast test, in which
    /// nothing times out on a slow machine.
    pub(crate) fn of(binary: &str, database_url: &str) -> Self {
        let mut command = Command::new(binary);
        command
            .env("DATABASE_URL", database_url)
            .env("LISTEN", "127.0.0.1:0")
            .env("LOG", "warn")
            .env("RUST_BACKTRACE", "0")
            .env("REPORT_PAUSE_SECS", "0")
            .env("RESERVATION_PAUSE_SECS", "0")
            .env("GEOCODE_TIMEOUT_SECS", "600")
            .env("REQUEST_TIMEOUT_SECS", "600")
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        Self { command }
    }

    pub(crate) fn named(self, name: &str) -> Self {
        self.with("INSTANCE", name)
    }

    pub(crate) fn calling(self, service: &FragileGeocoder) -> Self {
        self.with("BACKEND", &service.url())
    }

    /// With a report that takes half a minute, if it is left alone.
    pub(crate) fn with_long_report(self) -> Self {
        self.with("REPORT_PAUSE_SECS", "1")
    }

    pub(crate) fn with(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self
    }

    /// Starts it, and returns the error that it ends with.
    #[track_caller]
    pub(crate) fn error(mut self) -> String {
        let output = self.command.output().expect("the binary can be started");
        assert!(!output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    /// Starts it, and waits until it says where it listens.
    #[track_caller]
    pub(crate) fn start(mut self) -> Instance {
        let mut process = self.command.spawn().expect("the binary can be started");
        let output = lines(process.stdout.take().expect("it is a pipe"));
        // Nothing is printed later than this.
        let printed: Vec<_> = (0..2)
            .map_while(|_| output.recv_timeout(PATIENCE).ok())
            .collect();
        let (address, pages) = addresses(&printed).unwrap_or_default();
        let instance = Instance {
            process,
            address,
            pages,
            agent: Agent::config_builder()
                .http_status_as_error(false)
                .timeout_global(Some(PATIENCE))
                .build()
                .into(),
        };
        assert!(
            !instance.address.is_empty(),
            "it does not listen: {printed:?}"
        );
        instance
    }
}

/// Reads the address of `try it:  http://127.0.0.1:3000/` and its like, and the path in each line.
fn addresses(printed: &[String]) -> Option<(String, Vec<String>)> {
    let urls: Option<Vec<_>> = printed
        .iter()
        .map(|line| line.split_once("  http://")?.1.split_once('/'))
        .collect();
    let urls = urls?;
    let address = urls.first()?.0.to_owned();
    let pages = urls.iter().map(|(_, path)| format!("/{path}"));
    Some((address, pages.collect()))
}

/// Reads what the process prints, to its end, so that printing never fails.
fn lines(output: ChildStdout) -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
    });
    receiver
}

impl Instance {
    /// The host and port at which it listens.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// The paths of the addresses that it printed.
    pub(crate) fn printed_addresses(&self) -> &[String] {
        &self.pages
    }

    #[track_caller]
    pub(crate) fn get(&self, target: &str) -> Response {
        self.send("GET", target, None, JSON, String::new())
    }

    #[track_caller]
    pub(crate) fn post(&self, target: &str) -> Response {
        self.send("POST", target, None, JSON, String::new())
    }

    #[track_caller]
    pub(crate) fn post_json(&self, target: &str, body: impl fmt::Display) -> Response {
        self.send("POST", target, None, JSON, body.to_string())
    }

    /// With an API key.
    #[track_caller]
    pub(crate) fn get_as(&self, api_key: &str, target: &str) -> Response {
        self.send("GET", target, Some(api_key), JSON, String::new())
    }

    /// With an API key.
    #[track_caller]
    pub(crate) fn post_json_as(
        &self,
        api_key: &str,
        target: &str,
        body: impl fmt::Display,
    ) -> Response {
        self.send("POST", target, Some(api_key), JSON, body.to_string())
    }

    /// As a browser sends a form, and follows to the page that is shown then.
    #[track_caller]
    pub(crate) fn post_form(&self, target: &str, form: &str) -> Response {
        let kind = "application/x-www-form-urlencoded";
        self.send("POST", target, None, kind, form.to_owned())
    }

    #[track_caller]
    fn send(
        &self,
        method: &str,
        target: &str,
        api_key: Option<&str>,
        content_type: &str,
        body: String,
    ) -> Response {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("http://{}{target}", self.address))
            .header("content-type", content_type);
        if let Some(api_key) = api_key {
            request = request.header("x-api-key", api_key);
        }
        let request = request.body(body).expect("it is a request");
        let response = self.agent.run(request).and_then(Response::read);
        response.unwrap_or_else(|error| panic!("{method} {target}: {error}"))
    }

    /// Sends a request whose response is not read, over a connection that ends when it is dropped.
    pub(crate) fn send_and_leave(&self, method: &str, target: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).expect("it listens");
        let request =
            format!("{method} {target} HTTP/1.1\r\nhost: test\r\ncontent-length: 0\r\n\r\n");
        stream.write_all(request.as_bytes()).expect("it is read");
        stream
    }

    /// `kill -9`.
    pub(crate) fn kill(mut self) {
        self.process.kill().expect("it runs");
        self.process.wait().expect("it ends");
    }

    /// `kill -TERM`.
    pub(crate) fn terminate(&self) {
        let pid = self.process.id().to_string();
        let status = Command::new("kill").args(["-TERM", &pid]).status();
        assert!(
            status.is_ok_and(|status| status.success()),
            "kill -TERM {pid}"
        );
    }

    /// Waits until the process has ended by itself.
    #[track_caller]
    pub(crate) fn ended(mut self) -> ExitStatus {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.process.try_wait().expect("it was started") {
                return status;
            }
            assert!(Instant::now() < end, "it does not end");
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Response {
    fn read(mut response: http::Response<ureq::Body>) -> Result<Self, ureq::Error> {
        let header = |name| {
            let values = response.headers().get_all(name).iter();
            let values: Vec<_> = values
                .map(|value| value.to_str().expect("it is ASCII"))
                .collect();
            // Several fields of a name are one list.
            (!values.is_empty()).then(|| values.join(", "))
        };
        Ok(Self {
            status: response.status().as_u16(),
            retry_after: header("retry-after"),
            policy: header("ratelimit-policy"),
            limit: header("ratelimit"),
            content_type: header("content-type").unwrap_or_default(),
            text: response.body_mut().read_to_string()?,
        })
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The whole seconds of `Retry-After`.
    #[track_caller]
    pub(crate) fn retry_after_secs(&self) -> u64 {
        let seconds = self
            .retry_after
            .as_deref()
            .and_then(|value| value.parse().ok());
        seconds.unwrap_or_else(|| panic!("no Retry-After: {self:?}"))
    }
}
