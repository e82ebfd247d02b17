//! Three processes run the scheduler, and one of them is killed.

use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use diesel::connection::SimpleConnection;
use diesel::prelude::*;
use diesel::sql_types::{BigInt, Text};
use workbench::Database;

/// An instance of the scheduler. Killed when it is dropped.
struct Instance {
    name: String,
    process: Child,
}

#[derive(QueryableByName)]
struct Count {
    #[diesel(sql_type = BigInt)]
    count: i64,
}

#[derive(QueryableByName)]
struct Run {
    #[diesel(sql_type = BigInt)]
    id: i64,
    #[diesel(sql_type = Text)]
    job: String,
    #[diesel(sql_type = Text)]
    instance: String,
}

impl Instance {
    fn start(database: &Database, number: usize) -> Self {
        let name = format!("instance {number}");
        let process = Command::new(env!("CARGO_BIN_EXE_scheduler"))
            .env("DATABASE_URL", database.url())
            .env("INSTANCE", &name)
            .env("JOB_TAKES_SECS", "0.6")
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the binary can be started");
        Self { name, process }
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn count(conn: &mut PgConnection, from_where: &str) -> i64 {
    let query = format!("SELECT count(*) AS count FROM {from_where}");
    let row: Count = diesel::sql_query(query).get_result(conn).expect(from_where);
    row.count
}

/// Looks until it is so, for a minute.
#[track_caller]
fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(seen) = look() {
            return seen;
        }
        assert!(Instant::now() < end, "not within a minute: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn each_job_runs_once_per_interval_and_never_twice_at_once_though_the_worker_is_killed() {
    let database = Database::new();
    let mut conn = database.connect();
    let conn = &mut conn;
    let mut instances = vec![Instance::start(&database, 0)];
    eventually("there is the table", || {
        (count(conn, "pg_tables WHERE tablename = 'job_runs'") == 1).then_some(())
    });
    eventually("a run has begun", || {
        (count(conn, "job_runs") > 0).then_some(())
    });
    // One job takes longer than its interval, the other does not.
    conn.batch_execute(
        "UPDATE resource_control.throttled_resource SET throttle_interval = \
         CASE resource_id::text WHEN 'clean up' THEN interval '0.3 s' ELSE '1.5 s' END",
    )
    .expect("there are the jobs");
    instances.extend((1..3).map(|number| Instance::start(&database, number)));
    let many = "(SELECT FROM job_runs WHERE finished_at IS NOT NULL GROUP BY job HAVING count(*) >= 4) AS jobs";
    eventually("four runs of both jobs", || {
        (count(conn, many) == 2).then_some(())
    });

    let killed = eventually("somebody works", || {
        let working = "SELECT id, job, instance FROM job_runs WHERE finished_at IS NULL ORDER BY id DESC LIMIT 1";
        let run: Run = diesel::sql_query(working).get_result(conn).ok()?;
        let worker = instances
            .iter()
            .position(|instance| instance.name == run.instance)?;
        drop(instances.swap_remove(worker)); // kill -9
        let died_at_work = count(
            conn,
            &format!("job_runs WHERE id = {} AND finished_at IS NULL", run.id),
        );
        (died_at_work == 1).then_some(run)
    });
    let next = format!(
        "job_runs WHERE job = '{}' AND id > {} AND instance <> '{}' AND finished_at IS NOT NULL",
        killed.job, killed.id, killed.instance,
    );
    eventually("another instance does the next run", || {
        (count(conn, &next) > 0).then_some(())
    });

    let pairs = "(SELECT started_at, lag(started_at) OVER runs AS last_start, \
                  lag(finished_at) OVER runs AS last_end, throttle_interval FROM job_runs \
                  JOIN resource_control.throttled_resource ON resource_id::text = job \
                  WINDOW runs AS (PARTITION BY job ORDER BY started_at)) AS pairs";
    let too_close = format!("{pairs} WHERE started_at < last_start + throttle_interval");
    assert_eq!(count(conn, &too_close), 0, "runs closer than the interval");
    let overlapping = format!("{pairs} WHERE started_at < last_end");
    assert_eq!(count(conn, &overlapping), 0, "runs that overlap");
    assert!(count(conn, pairs) >= 9, "the runs were looked at");
    let unfinished = format!(
        "job_runs WHERE finished_at IS NULL AND instance = '{}'",
        killed.instance
    );
    assert!(count(conn, &unfinished) >= 1);

    // The others are told to end, and leave nothing held.
    for instance in &mut instances {
        let pid = instance.process.id().to_string();
        assert!(
            Command::new("kill")
                .args(["-TERM", &pid])
                .status()
                .is_ok_and(|kill| kill.success())
        );
        let status = eventually("it ends", || {
            instance.process.try_wait().expect("it was started")
        });
        assert!(status.success(), "{status}");
    }
    let held = "pg_locks WHERE locktype = 'advisory' AND database = \
                (SELECT oid FROM pg_database WHERE datname = current_database())";
    assert_eq!(count(conn, held), 0);
}
