//! A semaphore whose clients lower the number of slots from eight to four while eight requests are in flight. No claim
//! succeeds until fewer than four are in flight.
//!
//! The article's steps are not tried here, because they look for a free slot below four and do not count the requests.

use std::thread;
use std::time::{Duration, Instant, SystemTime};

use diesel::pg::PgConnection;
use diesel_interlock::{Claim, Semaphore};
use workbench::Database;

use super::changes;
use super::clients::{Clients, Language, Program};
use super::fragile_service::{self, Fragile};
use super::holder;
use super::report::Report;
use super::request_log;
use super::semaphore::{FUNCTIONS, examine};
use crate::chance::Chance;
use crate::role::Role;
use fastrand::Rng;

const BEFORE: usize = 8;
const AFTER: usize = 4;
const SERVICES: [&str; 6] = ["north", "south", "east", "west", "up", "down"];

/// The details of the requests of eight slots.
const OF_EIGHT: &str = "of eight";

pub(super) fn run(duration: Duration) -> Report {
    let mut report = Report::of("fewer slots");
    let database = changes::database();
    let conn = &mut database.connect();
    let service = Fragile::start();
    let end = Instant::now() + duration;

    // The first of the eight end while the clients start, and the last when half of the time is over.
    let longest = (duration / 2).as_millis() as u64;
    let messages = thread::scope(|scope| {
        for name in SERVICES {
            for _ in 0..BEFORE {
                let one = OneOfEight::claim(conn, name, longest);
                let (database, service) = (&database, &service);
                scope.spawn(move || one.hold(database, service));
            }
        }
        wait_until_all_are_in_flight(&service);
        service.reset_most_in_flight();

        let role = Role::Holder(holder::Settings {
            url: database.url(),
            address: service.address(),
            slots: AFTER as u32,
            services: SERVICES.map(str::to_owned).to_vec(),
        });
        let programs = [
            ("by the crate", Language::Rust, "read committed"),
            ("by the crate", Language::Rust, "serializable"),
            ("by the functions", FUNCTIONS, "read committed"),
            ("by the functions", FUNCTIONS, "repeatable read"),
        ];
        let clients = Clients::start(programs.map(|(name, language, isolation)| {
            Program::new(name, language, isolation, role.clone())
        }));
        thread::sleep(end.saturating_duration_since(Instant::now()));
        let (messages, violations) = clients.end();
        report.violated(violations);
        messages
    });
    examine(&mut report, conn, &service, &messages);

    let requests = changes::requests(conn);
    request_log::check_messages(&mut report, &requests, &messages);
    request_log::check_successions(&mut report, &requests);
    request_log::check_number_in_flight(&mut report, &requests, |request| {
        if request.details == OF_EIGHT {
            BEFORE
        } else {
            AFTER
        }
    });
    report.check(!messages.claimed.is_empty(), || {
        "no client claimed one of the four slots".to_owned()
    });
    report
}

/// A request of eight slots. Some of them are forgotten.
struct OneOfEight {
    semaphore: Semaphore,
    claim: Claim,
    work: Duration,
    deadline: SystemTime,
    is_forgotten: bool,
}

impl OneOfEight {
    fn claim(conn: &mut PgConnection, service: &'static str, longest: u64) -> Self {
        let mut random = Rng::new();
        let work = random.millis(1000, longest - 1);
        let is_forgotten = random.one_in(4);
        let timeout = if is_forgotten { work } else { work * 2 };
        let semaphore = Semaphore::named(service, BEFORE as u32, timeout).details(OF_EIGHT);
        let deadline = SystemTime::now() + timeout;
        let attempt = semaphore.claim_on(conn).unwrap();
        Self {
            claim: attempt.admitted().expect("eight slots are free"),
            semaphore,
            work,
            deadline,
            is_forgotten,
        }
    }

    fn hold(self, database: &Database, service: &Fragile) {
        let name = self.semaphore.service();
        let call = (self.claim.slot, self.claim.id);
        let slots = BEFORE as u32;
        fragile_service::call(
            &service.address(),
            name,
            slots,
            call,
            self.deadline,
            self.work,
        );
        if !self.is_forgotten {
            let conn = &mut database.connect();
            self.semaphore.complete_on(conn, self.claim.id).unwrap();
        }
    }
}

fn wait_until_all_are_in_flight(service: &Fragile) {
    let end = Instant::now() + Duration::from_secs(30);
    while SERVICES.iter().any(|name| service.in_flight(name) < BEFORE) {
        assert!(Instant::now() < end, "not all of the eight are in flight");
        thread::sleep(Duration::from_millis(1));
    }
}
