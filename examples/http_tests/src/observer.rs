//! What the database knows.

use std::thread;
use std::time::{Duration, Instant};

use diesel::data_types::PgInterval;
use diesel::dsl::{count_star, not};
use diesel::prelude::*;
use diesel::sql_types::BigInt;
use diesel_interlock::functions::clock_timestamp;
use diesel_interlock::schema::resource_control::{rate_limit_override, service_request};
use diesel_interlock::{AdvisoryLock, monitor};
use workbench::Database;

/// The lock of the report.
pub(crate) static NIGHTLY: AdvisoryLock = AdvisoryLock::named("nightly report");

/// A session that only looks.
pub(crate) struct Observer(PgConnection);

#[derive(QueryableByName)]
struct Count {
    #[diesel(sql_type = BigInt)]
    count: i64,
}

impl Observer {
    pub(crate) fn of(database: &Database) -> Self {
        Self::of_url(&database.url())
    }

    pub(crate) fn of_url(url: &str) -> Self {
        Self(PgConnection::establish(url).expect("the server runs"))
    }

    pub(crate) fn count(&mut self, from_where: &str) -> i64 {
        let query = format!("SELECT count(*) AS count FROM {from_where}");
        let count: Count = diesel::sql_query(query)
            .get_result(&mut self.0)
            .expect(from_where);
        count.count
    }

    /// How many sessions hold a lock, be it this one or any.
    pub(crate) fn held(&mut self, lock: Option<&AdvisoryLock>) -> usize {
        let holders = match lock {
            Some(lock) => monitor::holders_of(&mut self.0, lock.key()),
            None => monitor::holders().load(&mut self.0).map_err(Into::into),
        };
        holders.expect("pg_locks can be read").len()
    }

    /// How many sessions wait for a lock.
    pub(crate) fn waiting(&mut self) -> usize {
        monitor::waiters()
            .load(&mut self.0)
            .expect("pg_locks can be read")
            .len()
    }

    /// How many sessions wait for anything.
    pub(crate) fn blocked(&mut self) -> i64 {
        self.count(
            "pg_locks WHERE NOT granted AND database = \
             (SELECT oid FROM pg_database WHERE datname = current_database())",
        )
    }

    /// How many calls have a slot.
    pub(crate) fn in_flight(&mut self) -> i64 {
        service_request::table
            .filter(monitor::in_flight())
            .select(count_star())
            .get_result(&mut self.0)
            .expect("there is the table")
    }

    /// Makes the calls that are in flight time out now.
    pub(crate) fn let_time_pass(&mut self) {
        diesel::update(service_request::table.filter(monitor::in_flight()))
            .set(service_request::expires_at.eq(clock_timestamp()))
            .execute(&mut self.0)
            .expect("there is the table");
    }

    /// How many calls have been claimed so far, but are not over yet or were never completed.
    pub(crate) fn not_completed(&mut self) -> i64 {
        service_request::table
            .filter(not(service_request::completed_at.is_not_null()))
            .select(count_star())
            .get_result(&mut self.0)
            .expect("there is the table")
    }

    /// Gives every client this many requests per day, all of them at once.
    pub(crate) fn limit_each_client(&mut self, n: i64) {
        use rate_limit_override::{burst, name, period, table};
        let day = PgInterval::from_microseconds(86_400_000_000);
        diesel::insert_into(table)
            .values((
                name.eq("api"),
                rate_limit_override::n.eq(n),
                period.eq(day),
                burst.eq(n),
            ))
            .execute(&mut self.0)
            .expect("there is the table");
    }

    /// How many other sessions are in a transaction that waits for its application.
    pub(crate) fn idle_in_transaction(&mut self) -> i64 {
        self.count(
            "pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() \
             AND state LIKE 'idle in transaction%'",
        )
    }

    /// How many other sessions there are.
    pub(crate) fn sessions(&mut self) -> i64 {
        self.count(
            "pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() \
             AND backend_type = 'client backend'",
        )
    }

    /// Waits until no lock is held, no slot taken, no transaction left open.
    #[track_caller]
    pub(crate) fn nothing_is_held(&mut self) {
        eventually("no lock is held", || self.held(None) == 0);
        eventually("no call is in flight", || self.in_flight() == 0);
        eventually("no transaction is left open", || {
            self.idle_in_transaction() == 0
        });
    }
}

/// Looks until it is so, for half a minute.
#[track_caller]
pub(crate) fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < end, "not within a minute: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}
