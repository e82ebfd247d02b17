//! Two instances between which everything is taken: the scene of the tests of the two pages.

use std::thread;
use std::time::Duration;

use diesel_interlock::{AdvisoryLock, LockKey};
use fragile_geocoder::FragileGeocoder;
use workbench::Database;

use crate::instance::{Instance, Start};
use crate::observer::{Observer, eventually};
use crate::requests::{reservation, service};

pub(crate) struct Scene {
    /// Writes reports and books servers.
    writer: Instance,
    /// Calls the geocoder and rebuilds the cache.
    pub(crate) caller: Instance,
    service: FragileGeocoder,
    database: Database,
}

impl Scene {
    pub(crate) fn start(binary: &str) -> Self {
        let database = Database::new();
        let service = service(Duration::from_secs(600));
        let writer = Start::of(binary, &database.async_url())
            .named("the writer")
            .with_long_report()
            .start();
        let caller = Start::of(binary, &database.async_url())
            .named("the caller")
            .calling(&service)
            .start();
        Self {
            writer,
            caller,
            service,
            database,
        }
    }

    /// Runs `look` while the writer holds the lock of the report and waits for that of a server, the caller has so many
    /// calls in flight, and the cache has just been rebuilt.
    pub(crate) fn while_everything_is_taken<T>(
        &self,
        calls: i64,
        look: impl FnOnce(&Instance) -> T,
    ) -> T {
        let mut observer = Observer::of(&self.database);
        let _report = self.writer.send_and_leave("POST", "/reports/nightly");
        let _calls: Vec<_> = (0..calls)
            .map(|_| self.caller.send_and_leave("GET", "/geocode?q=x"))
            .collect();
        assert_eq!(self.caller.post("/cache/rebuild").status, 202);
        let pool = self.database.pool(1);
        let server = AdvisoryLock::new(LockKey::parts(["server", "223", "345"]));
        let elsewhere = server.acquire(&pool).expect("nobody has it");
        let seen = thread::scope(|scope| {
            let booking = scope.spawn(|| self.writer.post_json("/reservations", reservation(1)));
            eventually("the report has begun", || {
                observer.count("report_runs") == 1
            });
            eventually("the reservation waits", || observer.waiting() == 1);
            eventually("the calls are in flight", || observer.in_flight() == calls);
            let seen = look(&self.caller);
            elsewhere.release().expect("it was held");
            let booked = booking.join().expect("the request does not panic");
            assert_eq!(booked.status, 201);
            seen
        });
        self.service.takes(Duration::ZERO);
        seen
    }
}
