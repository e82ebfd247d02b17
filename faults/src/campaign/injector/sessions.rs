//! Sessions that the server ends.

use std::thread;
use std::time::Duration;

use diesel::prelude::*;
use diesel::sql_types::{Bool, Integer, Text};

use super::Injector;
use crate::check::Death;
use crate::clock;
use crate::fault::{Fault, SESSIONS};

/// The condition for the sessions of the workers that this fault ends.
const fn of(kind: Fault) -> &'static str {
    match kind {
        Fault::EndedHolder => {
            "EXISTS (SELECT FROM pg_locks WHERE pg_locks.pid = a.pid AND locktype = 'advisory' AND granted)"
        }
        Fault::EndedWaiter => {
            "EXISTS (SELECT FROM pg_locks WHERE pg_locks.pid = a.pid AND locktype = 'advisory' AND NOT granted)"
        }
        _ => {
            "state = 'idle' AND NOT EXISTS (SELECT FROM pg_locks WHERE pg_locks.pid = a.pid AND locktype = 'advisory')"
        }
    }
}

#[derive(QueryableByName)]
struct Session {
    #[diesel(sql_type = Integer)]
    pid: i32,
    #[diesel(sql_type = Text)]
    application_name: String,
}

pub(super) fn inject(injector: Injector<'_>) {
    injector.scarcest_first(&SESSIONS, |injector, kind| {
        // There may be no such session, and no server, for a moment.
        for _ in 0..100 {
            if let Ok(Some(worker)) = end_one(injector, of(kind)) {
                injector.log.fault(kind, worker);
                break;
            }
            injector.pause(5, 20);
        }
        injector.pause(50, 400);
    });
}

/// Ends one of the sessions. Returns its worker, if the application name has its number.
fn end_one(injector: &mut Injector<'_>, which: &str) -> QueryResult<Option<Option<usize>>> {
    let Ok(mut conn) = PgConnection::establish(&injector.primary.url()) else {
        return Ok(None);
    };
    let sessions: Vec<Session> = diesel::sql_query(format!(
        "SELECT pid, application_name FROM pg_stat_activity AS a \
         WHERE application_name LIKE 'worker-%' AND backend_type = 'client backend' AND {which}"
    ))
    .load(&mut conn)?;
    let Some(session) = injector.random.choice(&sessions) else {
        return Ok(None);
    };
    let sent = clock::now();
    injector.log.condemned(session.pid, sent);
    diesel::sql_query("SELECT pg_terminate_backend($1)")
        .bind::<Integer, _>(session.pid)
        .execute(&mut conn)?;
    let is_gone = format!(
        "NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = {})",
        session.pid
    );
    for _ in 0..1000 {
        if diesel::select(diesel::dsl::sql::<Bool>(&is_gone)).get_result(&mut conn)? {
            let gone = clock::now();
            injector.log.death(session.pid, Death { sent, gone });
            return Ok(Some(number(&session.application_name)));
        }
        thread::sleep(Duration::from_millis(1));
    }
    Ok(None)
}

fn number(application_name: &str) -> Option<usize> {
    application_name.strip_prefix("worker-")?.parse().ok()
}
