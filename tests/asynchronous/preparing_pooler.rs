//! A pooler that prepares statements by itself, as PgBouncer does from version 1.21 on.
//!
//! It sends a `Parse` of its own in front of the client's `Bind`. PostgreSQL then begins the transaction with the `Parse`, so
//! the transaction is older than the portal of the statement, as it is in a transaction that somebody left open.

use std::collections::VecDeque;
use std::io::{Read, Result, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use diesel_async::pooled_connection::AsyncDieselConnectionManager;
use diesel_async::pooled_connection::deadpool;
use diesel_async::{AsyncPgConnection, SimpleAsyncConnection};
use diesel_interlock::asynchronous::Semaphore;
use diesel_interlock::{Error, migrations};
use workbench::{Database, RoundTrips};

use crate::run;

static ONE: Semaphore = Semaphore::named("geocoding", 1, Duration::from_secs(60));

const PARSE_COMPLETE: u8 = b'1';

/// What one connection has sent to be prepared and has no reply to: whether it was the pooler.
type Pending = Arc<Mutex<VecDeque<bool>>>;

/// Starts the pooler in front of a server. Returns its port, and the number of the statements that it has prepared.
fn pooler(server: u16) -> (u16, Arc<AtomicUsize>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let prepared = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&prepared);
    thread::spawn(move || {
        for client in listener.incoming() {
            let (client, counted) = (client.unwrap(), Arc::clone(&counted));
            let server = TcpStream::connect((Ipv4Addr::LOCALHOST, server)).unwrap();
            let (to_client, from_server) =
                (client.try_clone().unwrap(), server.try_clone().unwrap());
            let pending = Pending::default();
            let replied = Arc::clone(&pending);
            // Each ends with its connection.
            thread::spawn(move || requests(client, server, &pending, &counted));
            thread::spawn(move || replies(from_server, to_client, &replied));
        }
    });
    (port, prepared)
}

fn requests(
    mut client: TcpStream,
    mut server: TcpStream,
    pending: &Pending,
    prepared: &AtomicUsize,
) -> Result<()> {
    server.set_nodelay(true)?;
    // The first message has no type.
    server.write_all(&body(&mut client)?)?;
    loop {
        let (kind, message) = message(&mut client)?;
        let mut sent = Vec::new();
        match kind {
            b'P' => pending.lock().unwrap().push_back(false),
            b'B' => {
                pending.lock().unwrap().push_back(true);
                let number = prepared.fetch_add(1, Ordering::SeqCst);
                let parse = format!("pooler{number}\0SELECT 1\0\0\0");
                sent.push(b'P');
                sent.extend((parse.len() as u32 + 4).to_be_bytes());
                sent.extend(parse.into_bytes());
            }
            _ => {}
        }
        sent.push(kind);
        sent.extend(message);
        server.write_all(&sent)?;
    }
}

fn replies(mut server: TcpStream, mut client: TcpStream, pending: &Pending) -> Result<()> {
    client.set_nodelay(true)?;
    loop {
        let (kind, message) = message(&mut server)?;
        let is_own = kind == PARSE_COMPLETE && pending.lock().unwrap().pop_front() == Some(true);
        if !is_own {
            client.write_all(&[&[kind], &message[..]].concat())?;
        }
    }
}

/// The type of a message, and the rest of it.
fn message(from: &mut TcpStream) -> Result<(u8, Vec<u8>)> {
    let mut kind = [0];
    from.read_exact(&mut kind)?;
    Ok((kind[0], body(from)?))
}

/// The length and the body of a message.
fn body(from: &mut TcpStream) -> Result<Vec<u8>> {
    let mut message = vec![0; 4];
    from.read_exact(&mut message)?;
    let length = u32::from_be_bytes(message[..].try_into().unwrap());
    message.resize(length as usize, 0);
    from.read_exact(&mut message[4..])?;
    Ok(message)
}

#[test]
fn a_statement_that_a_pooler_prepares_is_outside_a_transaction() {
    let database = Database::new();
    migrations::install(&mut database.connect()).unwrap();
    let server = RoundTrips::in_front_of(&database);
    let url = server.async_url();
    let port = url
        .split_once("127.0.0.1:")
        .unwrap()
        .1
        .split_once('/')
        .unwrap()
        .0;
    let (pooler, prepared) = pooler(port.parse().unwrap());
    let url = url.replacen(port, &pooler.to_string(), 1);
    run(async move {
        let manager = AsyncDieselConnectionManager::<AsyncPgConnection>::new(url);
        let pool = deadpool::Pool::builder(manager)
            .max_size(1)
            .build()
            .unwrap();
        for _ in 0..3 {
            let permit = ONE.try_acquire(&pool).await.unwrap().admitted().unwrap();
            permit.release().await.unwrap();
        }
        assert!(prepared.load(Ordering::SeqCst) >= 6);

        let mut conn = pool.get().await.unwrap();
        conn.batch_execute("BEGIN").await.unwrap();
        drop(conn);
        let claim = ONE.try_acquire(&pool).await;
        assert!(matches!(claim, Err(Error::TransactionInPool)), "{claim:?}");
    });
}
