//! Eight requests in flight of eight slots, and then everybody says four: until fewer than four are
//! in flight nobody gets in.
//!
//! Without the article's steps: they look for a free slot below four, and do not count.

use std::thread;
use std::time::{Duration, Instant, SystemTime};

use diesel::pg::PgConnection;
use diesel_interlock::{Claim, Semaphore};
use workbench::Database;

use crate::account;
use crate::clients::{Clients, Program};
use crate::dice::Dice;
use crate::fragile::{self, Fragile};
use crate::log;
use crate::report::Report;
use crate::semaphore::{FUNCTIONS, HOLDER, judge};

const BEFORE: usize = 8;
const AFTER: usize = 4;
const SERVICES: [&str; 6] = ["north", "south", "east", "west", "up", "down"];

/// What the requests of eight slots say in their log.
const OF_EIGHT: &str = "of eight";

pub(crate) fn hammer(duration: Duration) -> Report {
    let mut report = Report::of("lowering");
    let database = account::database();
    let conn = &mut database.connect();
    let service = Fragile::start();
    let end = Instant::now() + duration;

    // The first of the eight end while the clients start, the last when half of the time is over.
    let longest = (duration / 2).as_millis() as usize;
    let said = thread::scope(|scope| {
        for name in SERVICES {
            for _ in 0..BEFORE {
                let one = OneOfEight::claim(conn, name, longest);
                let (database, service) = (&database, &service);
                scope.spawn(move || one.hold(database, service));
            }
        }
        wait_until_all_are_in_flight(&service);
        service.count_anew();

        let clients = [
            Program::new("by the crate", HOLDER, "read committed"),
            Program::new("by the crate", HOLDER, "serializable"),
            Program::new("by the functions", FUNCTIONS, "read committed"),
            Program::new("by the functions", FUNCTIONS, "repeatable read"),
        ];
        let (url, address) = (database.url(), service.address());
        let mut arguments = vec![url.as_str(), address.as_str(), "4"];
        arguments.extend(SERVICES);
        let clients = Clients::start(clients.map(|program| program.arguments(&arguments)));
        thread::sleep(end.saturating_duration_since(Instant::now()));
        let (said, violations) = clients.end();
        report.violated(violations);
        said
    });
    judge(&mut report, conn, &service, &said);

    let requests = account::requests(conn);
    log::check_answers(&mut report, &requests, &said);
    log::check_successions(&mut report, &requests);
    log::check_number_in_flight(&mut report, &requests, |request| {
        if request.details == OF_EIGHT {
            BEFORE
        } else {
            AFTER
        }
    });
    report.check(!said.claimed.is_empty(), || {
        "nobody came after them".to_owned()
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
    fn claim(conn: &mut PgConnection, service: &'static str, longest: usize) -> Self {
        let mut dice = Dice::new();
        let work = dice.milliseconds(1000..longest);
        let is_forgotten = dice.one_in(4);
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
        fragile::call(
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
