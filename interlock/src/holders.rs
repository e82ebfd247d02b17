//! The holders of a lock, or of a semaphore's slots, as text for messages.

use diesel::QueryResult;
use diesel::pg::PgConnection;
use serde_json::Value;

use crate::database::{LOCKS, rows_with};
use crate::ps::{age, plain};

/// The sessions that hold the lock with this number, as [`LOCKS`] shows it.
pub(crate) fn of_lock(conn: &mut PgConnection, number: &str) -> QueryResult<Vec<String>> {
    let query = format!("SELECT * FROM ({LOCKS}) AS l WHERE state = 'held' AND lock = $1");
    let rows = rows_with(conn, &query, number)?;
    Ok(rows.iter().map(session).collect())
}

fn session(row: &Value) -> String {
    if row["pid"].is_null() {
        let gid = row["prepared"].as_str().unwrap_or_default();
        return plain(&format!("the prepared transaction {gid} holds it"));
    }
    let text = |member: &str| row[member].as_str().filter(|text| !text.is_empty());
    let pid = &row["pid"];
    let role = text("role").unwrap_or("an unknown role");
    let application = text("application").unwrap_or("an unnamed application");
    let client = text("client").unwrap_or("this server");
    // Null for a role that is no member of pg_read_all_stats, as is the client.
    let Some(since) = text("session_since") else {
        return plain(&format!(
            "{application} holds it, session {pid} of {role}, and this role may not see more of \
                that session"
        ));
    };
    let since: String = since.chars().take(19).collect();
    let age = age(row["age"].as_i64().unwrap_or(0));
    plain(&format!(
        "{application} holds it, session {pid} of {role} from {client}, connected since {since} \
            UTC ({age})"
    ))
}

/// The requests that have slots of a semaphore.
pub(crate) fn of_slots(conn: &mut PgConnection, service: &str) -> QueryResult<Vec<String>> {
    const SLOTS: &str = "
        SELECT slot, id, left(details, 100) AS details, created_at AS since, date_part('epoch', clock_timestamp() - \
        created_at)::bigint AS age
        FROM resource_control.slot_in_flight WHERE service = $1 ORDER BY created_at";
    let rows = rows_with(conn, SLOTS, service)?;
    let of = |row: &Value| {
        let text = |member: &str| row[member].as_str().unwrap_or_default().to_owned();
        let since: String = text("since").chars().take(19).collect();
        let (age, details) = (age(row["age"].as_i64().unwrap_or(0)), text("details"));
        let details = if details.is_empty() {
            "an unnamed holder"
        } else {
            &*details
        };
        let (slot, id) = (&row["slot"], &row["id"]);
        plain(&format!(
            "{details} has slot {slot}, request {id}, since {since} UTC ({age})"
        ))
    };
    Ok(rows.iter().map(of).collect())
}
