//! The program as a process, over HTTP.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use diesel::dsl::sql;
use diesel::prelude::*;
use diesel::sql_types::BigInt;
use workbench::Database;

struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The status and the body of a reply.
fn send(address: &str, customer: &str, key: &str, body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    let length = body.len();
    write!(
        stream,
        "POST /charges HTTP/1.1\r\nhost: actix\r\nconnection: close\r\nx-customer: {customer}\r\n\
         idempotency-key: {key}\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    let status = reply.split(' ').nth(1).unwrap().parse().unwrap();
    (status, reply.split_once("\r\n\r\n").unwrap().1.to_owned())
}

#[test]
fn a_charge_is_made_once_and_a_customer_is_limited() {
    let database = Database::new();
    let mut child = Command::new(env!("CARGO_BIN_EXE_actix"))
        .arg("0")
        .env("DATABASE_URL", database.url())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let _server = Server(child);
    stdout.read_line(&mut line).unwrap();
    let address = line.trim().trim_start_matches("http://");

    let created = (201, "4200 cents".to_owned());
    for _ in 0..2 {
        assert_eq!(send(address, "a b", "c", "4200"), created);
        assert_eq!(send(address, "a", "b c", "4200"), created);
    }
    assert_eq!(send(address, "a", "b c", "1").0, 422);
    assert_eq!(send(address, "a", "", "1").0, 400);
    assert_eq!(send(address, "a", &"x".repeat(1001), "1").0, 400);
    let conn = &mut database.connect();
    let charges = sql::<BigInt>("(SELECT count(*) FROM actix_charge)");
    assert_eq!(diesel::select(charges).get_result(conn), Ok(2));
    let mut statuses = (0..30).map(|number| send(address, "b", &number.to_string(), "1").0);
    assert!(statuses.any(|status| status == 429));
}
