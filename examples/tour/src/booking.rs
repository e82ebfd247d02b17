//! The transaction lock: check, then insert.

// Diesel's macro writes a module that carries no documentation.
#![allow(missing_docs)]

use std::error::Error;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use diesel::connection::SimpleConnection;
use diesel::dsl::exists;
use diesel::prelude::*;
use diesel_interlock::AdvisoryLock;
use workbench::Database;

use crate::screen::{bad, good, note, say, title};

diesel::table! {
    reserved_servers (datacenter_id, server_id, user_id) {
        datacenter_id -> Integer,
        server_id -> Integer,
        user_id -> Integer,
        start_date -> Timestamp,
        end_date -> Timestamp,
    }
}

#[derive(Insertable)]
#[diesel(table_name = reserved_servers)]
struct Reservation {
    datacenter_id: i32,
    server_id: i32,
    user_id: i32,
    start_date: SystemTime,
    end_date: SystemTime,
}

impl Reservation {
    /// Everybody wants the same server at the same time: from 2021-01-01 14:45 for three days.
    fn by_user(user_id: i32) -> Self {
        let start_date = UNIX_EPOCH + Duration::from_secs(1_609_512_300);
        Self {
            datacenter_id: 223,
            server_id: 345,
            user_id,
            start_date,
            end_date: start_date + Duration::from_secs(3 * 24 * 60 * 60),
        }
    }

    fn overlaps_another(&self, conn: &mut PgConnection) -> QueryResult<bool> {
        use self::reserved_servers::dsl::*;
        let others = reserved_servers
            .filter(datacenter_id.eq(self.datacenter_id))
            .filter(server_id.eq(self.server_id))
            .filter(start_date.le(self.end_date))
            .filter(end_date.ge(self.start_date));
        diesel::select(exists(others)).get_result(conn)
    }

    fn insert(&self, conn: &mut PgConnection) -> QueryResult<()> {
        diesel::insert_into(reserved_servers::table)
            .values(self)
            .execute(conn)?;
        Ok(())
    }
}

/// Returns whether the server was free and is booked now. A transaction is not enough: nobody sees
/// what the others have not committed yet. The barrier stands for the bad luck that makes it happen.
fn book_without_lock(
    conn: &mut PgConnection,
    wanted: &Reservation,
    bad_luck: &Barrier,
) -> QueryResult<bool> {
    conn.transaction(|conn| {
        let taken = wanted.overlaps_another(conn);
        bad_luck.wait();
        if taken? {
            return Ok(false);
        }
        wanted.insert(conn)?;
        Ok(true)
    })
}

static SERVER: AdvisoryLock = AdvisoryLock::named("server");

/// The same under a lock, so that each check sees every earlier booking.
fn book_under_lock(conn: &mut PgConnection, wanted: &Reservation) -> QueryResult<bool> {
    SERVER.key(wanted.server_id).transaction(conn, |conn| {
        if wanted.overlaps_another(conn)? {
            return Ok(false);
        }
        wanted.insert(conn)?;
        Ok(true)
    })
}

pub(crate) fn ten_requests_for_one_server(database: &Database) -> Result<(), Box<dyn Error>> {
    title("1. Ten requests book server 345 in data centre 223, at the same time");
    let barrier = Barrier::new(10);

    say("In a transaction: conn.transaction(|conn| { check, then insert })");
    let booked = ten_at_once(database, |conn, wanted| {
        book_without_lock(conn, wanted, &barrier)
    })?;
    assert_eq!(booked.len(), 10);
    bad("10 rows: ten users were told that the server is theirs");

    say("Under a lock: SERVER.key(345).transaction(conn, |conn| { … })");
    note(format!(
        "SERVER: AdvisoryLock::named(\"server\"); the key is {}",
        SERVER.key(345).lock_key()
    ));
    let booked = ten_at_once(database, |conn, wanted| {
        barrier.wait();
        book_under_lock(conn, wanted)
    })?;
    let [user] = booked[..] else {
        panic!("the server was booked by {booked:?}")
    };
    good(format!(
        "1 row: user {user} has the server, nine were told that it is taken"
    ));
    Ok(())
}

/// Returns the users that have the server in the end.
fn ten_at_once(
    database: &Database,
    book: impl Fn(&mut PgConnection, &Reservation) -> QueryResult<bool> + Sync,
) -> QueryResult<Vec<i32>> {
    let mut conn = database.connect();
    conn.batch_execute(
        "DROP TABLE IF EXISTS reserved_servers;
         CREATE TABLE reserved_servers (datacenter_id integer, server_id integer, user_id integer,
                                        start_date timestamp, end_date timestamp)",
    )?;

    let book = &book;
    let conns: Vec<_> = (0..10).map(|_| database.connect()).collect();
    let told_yes = thread::scope(|scope| {
        let requests: Vec<_> = (1..=10)
            .zip(conns)
            .map(|(user, mut conn)| {
                scope.spawn(move || book(&mut conn, &Reservation::by_user(user)))
            })
            .collect();
        let mut told_yes = 0;
        for request in requests {
            if request.join().expect("no request panics")? {
                told_yes += 1;
            }
        }
        QueryResult::Ok(told_yes)
    })?;

    let users = reserved_servers::table
        .select(reserved_servers::user_id)
        .load::<i32>(&mut conn)?;
    assert_eq!(
        users.len(),
        told_yes,
        "the table has what the users were told"
    );
    Ok(users)
}
