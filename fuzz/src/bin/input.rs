//! What takes a text to the server: either an error of ours before anything is sent, or it is taken and read
//! back as it was.

#![no_main]

use std::cell::RefCell;
use std::time::Duration;

use diesel::prelude::*;
use diesel_interlock::error::{Input, Schema};
use diesel_interlock::schema::resource_control::{fence, service_request, throttled_key};
use diesel_interlock::{
    AdvisoryLock, Attempt, Error, Fence, LockKey, ResourceLabel, Semaphore, Throttle, migrations, sync,
    testing, throttled_resources,
};
use libfuzzer_sys::fuzz_target;
use workbench::Database;

throttled_resources! {
    enum Resource {
        Import = "import" every Duration::from_secs(3600),
    }
}

struct Server {
    conn: PgConnection,
    _database: Database,
}

thread_local! {
    static SERVER: RefCell<Server> = RefCell::new({
        let database = Database::new();
        let mut conn = database.connect();
        migrations::install(&mut conn).unwrap();
        let _ = sync::<Resource>(&mut conn).unwrap();
        Server { conn, _database: database }
    });
}

fuzz_target!(|data: &[u8]| {
    let Some((kind, rest)) = data.split_first() else {
        return;
    };
    let text = String::from_utf8_lossy(rest);
    let (name, details) = text.split_once('|').unwrap_or((&text, "somebody"));
    SERVER.with_borrow_mut(|server| {
        let conn = &mut server.conn;
        match kind % 5 {
            0 => service(conn, name, details),
            1 => key(conn, name, details),
            2 => label(conn, name, details),
            3 => fenced(conn, name),
            _ => lock(conn, name),
        }
    });
});

fn fits(text: &str, longest: usize) -> bool {
    !text.contains('\0') && text.len() <= longest
}

/// An error of ours, told before anything is sent.
fn refused<T: std::fmt::Debug>(result: Result<T, Error>) {
    match result {
        Err(
            Error::Input(Input::EmptyName)
            | Error::Input(Input::EmptyKey)
            | Error::Input(Input::EmptyDetails)
            | Error::Input(Input::NulCharacter)
            | Error::Input(Input::TooLong { .. }),
        ) => {}
        other => panic!("{other:?}"),
    }
}

fn service(conn: &mut PgConnection, name: &str, details: &str) {
    let semaphore = Semaphore::new(name, 3, Duration::from_secs(60)).details(details.to_owned());
    let claimed = semaphore.claim_on(conn);
    if name.is_empty() || !fits(name, 1000) || !fits(details, 8192) {
        return refused(claimed);
    }
    let claim = claimed.unwrap().admitted().unwrap();
    let stored = service_request::table
        .find(claim.id)
        .select((service_request::service, service_request::details))
        .get_result::<(String, String)>(conn);
    assert_eq!(stored, Ok((name.into(), details.into())));
    assert!(semaphore.complete_on(conn, claim.id).unwrap());
    diesel::delete(service_request::table).execute(conn).unwrap();
}

fn key(conn: &mut PgConnection, name: &str, details: &str) {
    let throttle = Throttle::of(Resource::Import).key(name);
    let decision = throttle.details(details.to_owned()).attempt_on(conn);
    if name.is_empty() || !fits(name, 1000) || details.trim_matches(' ').is_empty() || !fits(details, 8192) {
        return refused(decision);
    }
    decision.unwrap().granted().unwrap();
    let stored = throttled_key::table
        .select((throttled_key::key, throttled_key::last_locker_details))
        .get_result::<(String, String)>(conn);
    assert_eq!(stored, Ok((name.into(), details.into())));
    diesel::delete(throttled_key::table).execute(conn).unwrap();
}

fn label(conn: &mut PgConnection, name: &str, details: &str) {
    let throttle = Throttle::of(ResourceLabel(name.into()));
    let decision = throttle.details(details.to_owned()).attempt_on(conn);
    if !fits(name, 63) || details.trim_matches(' ').is_empty() || !fits(details, 8192) {
        return refused(decision);
    }
    match decision {
        Ok(_) => {
            assert_eq!(name, "import");
            testing::make_due(conn, &throttle).unwrap();
        }
        Err(Error::Schema(Schema::UnknownResource { label })) => assert_eq!(label, name),
        Err(error) => panic!("{error:?}"),
    }
}

fn fenced(conn: &mut PgConnection, name: &str) {
    let guarded = Fence::new(name);
    let passed = conn.transaction(|conn| guarded.pass(conn, 7));
    if name.is_empty() || !fits(name, 1000) {
        return refused(passed);
    }
    passed.unwrap();
    let stored = fence::table.select(fence::name).get_result::<String>(conn);
    assert_eq!(stored.as_deref(), Ok(name));
    diesel::delete(fence::table).execute(conn).unwrap();
}

fn lock(conn: &mut PgConnection, name: &str) {
    let lock = AdvisoryLock::new(LockKey::from(name));
    match lock.try_acquire_on(conn) {
        Ok(Attempt::Acquired(guard)) => guard.release().unwrap(),
        Ok(Attempt::Busy) => panic!("nobody else is here"),
        Err(error) => {
            assert!(name.is_empty());
            refused::<()>(Err(error));
        }
    }
}
