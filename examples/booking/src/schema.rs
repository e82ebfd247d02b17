//! The tables of this application.

// Diesel's macro writes modules that carry no documentation.
#![allow(missing_docs)]

diesel::table! {
    servers (datacenter_id, server_id) {
        datacenter_id -> Int4,
        server_id -> Int4,
    }
}

diesel::table! {
    reservations (id) {
        id -> Int8,
        datacenter_id -> Int4,
        server_id -> Int4,
        user_id -> Int4,
        start_date -> Timestamptz,
        end_date -> Timestamptz,
    }
}

diesel::table! {
    report_runs (id) {
        id -> Int8,
        host -> Text,
        backend_pid -> Int4,
        started_at -> Timestamptz,
        finished_at -> Nullable<Timestamptz>,
    }
}

diesel::table! {
    report_nights (run_id, night) {
        run_id -> Int8,
        night -> Date,
        reserved -> Int8,
    }
}

// Queries over the locks that are held may join with this table.
diesel_interlock::allow_joins_with!(report_runs);
