//! Advisory locks and the sessions that hold or want them.

use super::view::view;

/// The advisory locks of the current database, each with its session.
///
/// A lock that a prepared transaction holds has no session, hence the outer join.
pub(super) const LOCKS: &str = "\
    SELECT CASE WHEN l.objsubid OPERATOR(pg_catalog.=) 1 \
    THEN (l.classid::bigint OPERATOR(pg_catalog.<<) 32) OPERATOR(pg_catalog.|) l.objid::bigint END AS key, \
    CASE WHEN l.objsubid OPERATOR(pg_catalog.=) 2 THEN l.classid::integer END AS key1, \
    CASE WHEN l.objsubid OPERATOR(pg_catalog.=) 2 THEN l.objid::integer END AS key2, \
    l.mode OPERATOR(pg_catalog.=) 'ShareLock' AS shared, l.granted, w.waiting_since, \
    pg_catalog.clock_timestamp() OPERATOR(pg_catalog.-) w.waiting_since AS waited, l.pid, \
    a.application_name, pg_catalog.host(a.client_addr) AS client_addr, a.client_hostname, \
    a.usename::pg_catalog.text AS usename, a.state, \
    CASE WHEN a.query OPERATOR(pg_catalog.<>) '<insufficient privilege>' THEN a.query END AS query, \
    a.backend_start, a.xact_start \
    FROM pg_catalog.pg_locks AS l \
    CROSS JOIN LATERAL (SELECT (pg_catalog.to_jsonb(l.*) OPERATOR(pg_catalog.->>) 'waitstart')\
    ::pg_catalog.timestamptz AS waiting_since) AS w \
    LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid OPERATOR(pg_catalog.=) l.pid \
    WHERE l.locktype OPERATOR(pg_catalog.=) 'advisory' AND l.database OPERATOR(pg_catalog.=) \
    (SELECT d.oid FROM pg_catalog.pg_database AS d \
    WHERE d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database())";

diesel::table! {
    /// The advisory locks of the current database, held or wanted, each with its session.
    advisory_lock (pid) {
        /// The `bigint` that is locked; `NULL` for a pair.
        key -> Nullable<BigInt>,
        /// The first number of a pair; `NULL` for a `bigint`.
        key1 -> Nullable<Integer>,
        /// The second number of a pair; `NULL` for a `bigint`.
        key2 -> Nullable<Integer>,
        /// Whether it is held, or wanted, by sharers.
        shared -> Bool,
        /// Whether it is held; else somebody waits for it.
        granted -> Bool,
        /// Since when the session waits; `NULL` before PostgreSQL 14, and for what is held.
        waiting_since -> Nullable<Timestamptz>,
        /// How long the session has waited, by the server's clock; `NULL` where `waiting_since` is.
        waited -> Nullable<Interval>,
        /// The process id of the server session; `NULL` where a prepared transaction holds the lock.
        pid -> Nullable<Integer>,
        /// What the session calls its application.
        application_name -> Nullable<Text>,
        /// The client's address; `NULL` over a Unix socket, and where it is hidden.
        client_addr -> Nullable<Text>,
        /// The client's host name; `NULL` unless the server looks names up (`log_hostname`).
        client_hostname -> Nullable<Text>,
        /// The role that the session logged in as.
        usename -> Nullable<Text>,
        /// `active`, `idle`, `idle in transaction` and the like; `NULL` where it is hidden.
        state -> Nullable<Text>,
        /// The statement that runs, or ran last; `NULL` where it is hidden.
        query -> Nullable<Text>,
        /// When the session began; `NULL` where it is hidden.
        backend_start -> Nullable<Timestamptz>,
        /// When the session's open transaction began; `NULL` where there is none or it is hidden.
        xact_start -> Nullable<Timestamptz>,
    }
}

view! {
    /// The source of [`holders`](super::holders()) and [`waiters`](super::waiters()).
    AdvisoryLocks of advisory_lock [
        key, key1, key2, shared, granted, waiting_since, waited, pid, application_name, client_addr,
        client_hostname, usename, state, query, backend_start, xact_start,
    ] = LOCKS;
}

#[cfg(test)]
mod tests {
    use diesel::pg::Pg;
    use diesel::prelude::*;

    use super::*;

    #[test]
    fn locks_are_those_of_this_database_with_names_fully_qualified() {
        let query = AdvisoryLocks.select(advisory_lock::key);
        assert_eq!(
            diesel::debug_query::<Pg, _>(&query).to_string(),
            "SELECT \"advisory_lock\".\"key\" FROM (\
             SELECT CASE WHEN l.objsubid OPERATOR(pg_catalog.=) 1 \
             THEN (l.classid::bigint OPERATOR(pg_catalog.<<) 32) OPERATOR(pg_catalog.|) l.objid::bigint END AS key, \
             CASE WHEN l.objsubid OPERATOR(pg_catalog.=) 2 THEN l.classid::integer END AS key1, \
             CASE WHEN l.objsubid OPERATOR(pg_catalog.=) 2 THEN l.objid::integer END AS key2, \
             l.mode OPERATOR(pg_catalog.=) 'ShareLock' AS shared, l.granted, w.waiting_since, \
             pg_catalog.clock_timestamp() OPERATOR(pg_catalog.-) w.waiting_since AS waited, l.pid, \
             a.application_name, pg_catalog.host(a.client_addr) AS client_addr, a.client_hostname, \
             a.usename::pg_catalog.text AS usename, a.state, \
             CASE WHEN a.query OPERATOR(pg_catalog.<>) '<insufficient privilege>' THEN a.query END AS query, \
             a.backend_start, a.xact_start \
             FROM pg_catalog.pg_locks AS l \
             CROSS JOIN LATERAL (SELECT (pg_catalog.to_jsonb(l.*) OPERATOR(pg_catalog.->>) 'waitstart')\
             ::pg_catalog.timestamptz AS waiting_since) AS w \
             LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid OPERATOR(pg_catalog.=) l.pid \
             WHERE l.locktype OPERATOR(pg_catalog.=) 'advisory' AND l.database OPERATOR(pg_catalog.=) \
             (SELECT d.oid FROM pg_catalog.pg_database AS d \
             WHERE d.datname OPERATOR(pg_catalog.=) pg_catalog.current_database())\
             ) AS \"advisory_lock\" -- binds: []"
        );
    }
}
