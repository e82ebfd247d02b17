//! The service as a process: a charge that is repeated, a limit, its numbers, and its end.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, RwLock};
use std::thread;
use std::time::{Duration, Instant};

use diesel::prelude::*;
use diesel::sql_types::BigInt;
use workbench::Database;

struct Service {
    child: Child,
    address: String,
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Service {
    fn start(database: &Database) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_service"))
            .arg("0")
            .env("DATABASE_URL", database.url())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let address = line.trim().trim_start_matches("http://").to_owned();
        Self { child, address }
    }

    /// The status and the body of a reply, or `None` if the service went away meanwhile.
    fn try_send(&self, customer: &str, key: &str, cents: &str) -> Option<(u16, String)> {
        exchange(&self.address, customer, "POST", "/charges", key, cents).ok()
    }

    /// The status and the body of a reply.
    fn send(&self, method: &str, path: &str, key: &str, body: &str) -> (u16, String) {
        self.send_as("7", method, path, key, body)
    }

    fn send_as(
        &self,
        customer: &str,
        method: &str,
        path: &str,
        key: &str,
        body: &str,
    ) -> (u16, String) {
        exchange(&self.address, customer, method, path, key, body).unwrap()
    }

    /// Ends it as a crash does.
    fn kill(&self) {
        let pid = self.child.id().to_string();
        assert!(
            Command::new("kill")
                .args(["-KILL", &pid])
                .status()
                .unwrap()
                .success()
        );
    }

    /// Ends it as an orchestrator does. Returns whether it ended well.
    fn terminate(mut self) -> bool {
        let pid = self.child.id().to_string();
        let sent = Command::new("kill").args(["-TERM", &pid]).status().unwrap();
        sent.success() && self.child.wait().unwrap().success()
    }
}

/// Sends a request, and returns the status and the body of the reply.
fn exchange(
    address: &str,
    customer: &str,
    method: &str,
    path: &str,
    key: &str,
    body: &str,
) -> io::Result<(u16, String)> {
    let mut stream = TcpStream::connect(address)?;
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: service\r\nconnection: close\r\nx-customer: {customer}\r\n\
         idempotency-key: {key}\r\ncontent-length: {length}\r\n\r\n{body}"
    )?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply)?;
    let status = reply.split(' ').nth(1).and_then(|it| it.parse().ok());
    let body = reply
        .split_once("\r\n\r\n")
        .map(|(_, body)| body.to_owned());
    status
        .zip(body)
        .ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// Waits until it is so, for a minute.
fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < end, "{what}");
        thread::sleep(Duration::from_millis(10));
    }
}

fn count(conn: &mut PgConnection, sql: &str) -> i64 {
    diesel::select(diesel::dsl::sql::<BigInt>(sql))
        .get_result(conn)
        .unwrap()
}

#[test]
fn a_service_from_its_start_to_its_end() {
    let database = Database::new();
    let conn = &mut database.connect();
    let services = [Service::start(&database), Service::start(&database)];
    for service in &services {
        assert_eq!(service.send("POST", "/charges", "a", "4200").0, 201);
    }
    assert_eq!(services[0].send("POST", "/charges", "a", "1").0, 422);
    assert_eq!(services[0].send("POST", "/charges", "", "1").0, 400);
    assert_eq!(count(conn, "(SELECT count(*) FROM charge)"), 1);
    // The key of one customer is not that of another one, however they are joined.
    for (customer, key) in [("b c", "d"), ("b", "c d")] {
        assert_eq!(
            services[0]
                .send_as(customer, "POST", "/charges", key, "1")
                .0,
            201
        );
    }
    assert_eq!(count(conn, "(SELECT count(*) FROM charge)"), 3);

    let mut statuses = (0..30).map(|i| services[1].send("POST", "/charges", &i.to_string(), "1").0);
    assert!(statuses.any(|status| status == 429));

    let leaders = "(SELECT count(*) FROM resource_control.leader)";
    let sent = "(SELECT count(*) FROM charge WHERE is_sent)";
    eventually("a leader sends", || {
        count(conn, leaders) == 1 && count(conn, sent) > 0
    });
    let metrics = services
        .each_ref()
        .map(|service| service.send("GET", "/metrics", "", "").1);
    assert!(
        metrics
            .concat()
            .contains(r#"interlock_held{kind="leader",name="sender"} 1"#)
    );

    // Nothing is held after an end, and the other instance leads without waiting for a lease.
    let [first, second] = services;
    assert!(first.terminate());
    eventually("the other one leads", || count(conn, leaders) == 1);
    assert!(second.terminate());
    assert_eq!(count(conn, leaders), 0);
}

/// Instances are killed and started anew while clients repeat each request until they have its reply, and once more.
#[test]
fn charges_equal_keys_and_limits_hold_while_instances_are_killed() {
    const CLIENTS: usize = 4;
    const KEYS: usize = 40;
    const KILLS: usize = 9;
    let database = Database::new();
    let instances = [(); 3].map(|()| RwLock::new(Arc::new(Service::start(&database))));
    let instance = |i: usize| instances[i % 3].read().unwrap().clone();
    let (done, began) = (AtomicUsize::new(0), Instant::now());
    let charge = |client: usize, key: usize| {
        // A limit is per customer, and these are not to reach it.
        let customer = format!("{client} {}", key / 8);
        let cents = format!("{}", 1 + client * KEYS + key);
        let (mut replies, mut tries) = (0, client);
        while replies < 2 {
            tries += 1;
            match instance(tries).try_send(&customer, &key.to_string(), &cents) {
                Some((201, body)) => {
                    assert_eq!(body, format!("{cents} cents"));
                    replies += 1;
                }
                // A twin runs, or the database is away for this instance.
                Some((409 | 503, _)) | None => thread::sleep(Duration::from_millis(5)),
                Some(other) => panic!("{other:?}"),
            }
        }
        done.fetch_add(1, Ordering::SeqCst);
    };
    let is_over = || done.load(Ordering::SeqCst) == CLIENTS * KEYS;
    let admitted = thread::scope(|scope| {
        for client in 0..CLIENTS {
            scope.spawn(move || (0..KEYS).for_each(|key| charge(client, key)));
        }
        // One customer sends as much as he can. An amount that is none is refused behind the limit.
        let greedy = scope.spawn(|| {
            let statuses = (0..).take_while(|key| !is_over() || *key < 200).map(|key| {
                let reply = instance(key).try_send("greedy", &format!("greedy {key}"), "no amount");
                reply.map(|(status, _)| status)
            });
            statuses.filter(|status| *status == Some(400)).count()
        });
        for kill in 0..KILLS {
            let progress = (kill + 1) * CLIENTS * KEYS / (KILLS + 1);
            eventually("charges are made", || {
                done.load(Ordering::SeqCst) >= progress
            });
            let mut killed = instances[kill % 3].write().unwrap();
            let before = std::mem::replace(&mut *killed, Arc::new(Service::start(&database)));
            before.kill();
        }
        greedy.join().unwrap()
    });
    let minutes = began.elapsed().as_secs_f64() / 60.0;
    // The quota of the program, and its burst.
    let most = (100.0 * minutes).ceil() as usize + 20;
    assert!((20..=most).contains(&admitted), "{admitted} of {most}");
    let conn = &mut database.connect();
    let keys = (CLIENTS * KEYS) as i64;
    let distinct = count(conn, "(SELECT count(DISTINCT cents) FROM charge)");
    assert_eq!(
        (count(conn, "(SELECT count(*) FROM charge)"), distinct),
        (keys, keys)
    );
}

#[test]
fn the_pages_quote_this_program() {
    let program = include_str!("../src/main.rs");
    for page in [
        include_str!("../../../docs/service.md"),
        include_str!("../../../docs/errors.md"),
    ] {
        let quotes = page.split("```rust,ignore\n").skip(1);
        for quote in quotes.map(|rest| rest.split("```").next().unwrap()) {
            assert!(program.contains(quote), "{quote}");
        }
    }
}
