//! The views of the schema `resource_control`.
#![allow(missing_docs)]

diesel::table! {
    /// Who holds the advisory locks of this database, and who waits for them on the server, and for
    /// whom.
    resource_control.advisory_lock (pid, is_held, number, first, second) {
        number -> Nullable<Int8>,
        first -> Nullable<Int4>,
        second -> Nullable<Int4>,
        is_shared -> Bool,
        is_held -> Bool,
        pid -> Nullable<Int4>,
        application_name -> Text,
        role -> Nullable<Text>,
        client -> Nullable<Text>,
        state -> Nullable<Text>,
        transaction_since -> Nullable<Timestamptz>,
        waiting_since -> Nullable<Timestamptz>,
        blocked_by -> Array<Int4>,
    }
}

diesel::table! {
    /// The slots of semaphores that are in use.
    resource_control.slot_in_flight (id) {
        id -> Int8,
        service -> Text,
        slot -> Int2,
        created_at -> Timestamptz,
        expires_at -> Timestamptz,
        remaining -> Interval,
        details -> Text,
    }
}

diesel::table! {
    /// When throttles of both kinds are due.
    resource_control.throttle_state (name, key, is_resource) {
        name -> Text,
        key -> Text,
        is_resource -> Bool,
        throttle_interval -> Interval,
        last_granted -> Nullable<Timestamptz>,
        details -> Text,
        due_at -> Nullable<Timestamptz>,
        is_due -> Bool,
    }
}

diesel::table! {
    /// How many units the keys of rate limits have left.
    resource_control.rate_limit_state (name, key) {
        name -> Text,
        key -> Text,
        burst -> Int8,
        remaining -> Int8,
        used -> Float8,
        full_at -> Timestamptz,
        spent_at -> Timestamptz,
    }
}

diesel::table! {
    /// Who leads what, since when, and until when unless the term is renewed.
    resource_control.leader (name) {
        name -> Text,
        holder -> Text,
        since -> Timestamptz,
        until -> Timestamptz,
        fencing_token -> Int8,
    }
}

diesel::table! {
    /// What comes next in each schedule, and the tick that ran last, with what came of it.
    resource_control.schedule_state (name) {
        name -> Text,
        state -> Text,
        next_at -> Nullable<Timestamptz>,
        tick -> Nullable<Timestamptz>,
        attempt -> Int4,
        token -> Int8,
        runner -> Text,
        started_at -> Nullable<Timestamptz>,
        expires_at -> Nullable<Timestamptz>,
        ended_at -> Nullable<Timestamptz>,
        error -> Nullable<Text>,
        retry_at -> Nullable<Timestamptz>,
        triggered_at -> Nullable<Timestamptz>,
        paused_at -> Nullable<Timestamptz>,
    }
}

diesel::allow_tables_to_appear_in_same_query!(
    advisory_lock,
    leader,
    rate_limit_state,
    schedule_state,
    slot_in_flight,
    throttle_state,
);
