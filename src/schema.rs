// @generated automatically by Diesel CLI.

pub mod resource_control {
    pub mod sql_types {
        #[derive(
            diesel::query_builder::QueryId, Clone, Copy, Debug, diesel::sql_types::SqlType,
        )]
        #[diesel(postgres_type(name = "throttled_resource_enum", schema = "resource_control"))]
        pub struct ThrottledResourceEnum;
    }

    diesel::table! {
        /// The largest fencing token that has passed each fence.
        resource_control.fence (name) {
            name -> Text,
            token -> Int8,
        }
    }

    diesel::table! {
        /// Outcomes of Once: one row for each name and key whose work has succeeded.
        resource_control.once (name, key) {
            name -> Text,
            key -> Text,
            /// The bytes that the work has returned.
            outcome -> Bytea,
            /// When the work ended, by the server's clock.
            done_at -> Timestamptz,
            /// The SHA-256 of the request. Null if none was given.
            fingerprint -> Nullable<Bytea>,
        }
    }

    diesel::table! {
        /// What the keys of rate limits owe. A key without a row is full.
        resource_control.rate_limit (name, key) {
            name -> Text,
            key -> Text,
            /// When the quota of this row came into force.
            since -> Timestamptz,
            /// When units were spent last, by the server's clock.
            spent_at -> Timestamptz,
            /// When the key is full again if no more units are spent.
            full_at -> Timestamptz,
            /// How many microseconds refill a unit, under the quota of this row.
            unit_us -> Float8,
            /// How many units a full key has, under the quota of this row.
            burst -> Int8,
        }
    }

    diesel::table! {
        /// The next tick of each schedule, and the tick that ran last, with its result.
        resource_control.schedule (name) {
            name -> Text,
            /// The next tick follows this time: the last scheduled tick, or the first look.
            counted_from -> Timestamptz,
            /// The next scheduled tick. Infinity if there is none, null if it is not known.
            next_at -> Nullable<Timestamptz>,
            /// The tick that was taken last: a scheduled time, or the time of a trigger.
            tick -> Nullable<Timestamptz>,
            /// How many runs of this tick have begun, without those that gave the tick back.
            attempt -> Int4,
            /// How many of these runs have returned an error.
            failed -> Int4,
            /// How many ticks before this one were missed and are not run.
            missed -> Int4,
            /// The fencing token of the run, which grows from run to run.
            token -> Int8,
            runner -> Text,
            started_at -> Nullable<Timestamptz>,
            /// When the lease of the run ends. After a failure: when the tick is retried.
            expires_at -> Nullable<Timestamptz>,
            /// When the run ended or gave the tick back. Null while it runs, and after a crash.
            ended_at -> Nullable<Timestamptz>,
            /// The error of the run, or why it has crashed, if that is known.
            error -> Nullable<Text>,
            /// A random number by which the run recognizes its row.
            claim -> Nullable<Int8>,
            /// When the schedule was triggered. Null if no triggered run is outstanding.
            triggered_at -> Nullable<Timestamptz>,
            /// Since when the schedule is paused. Null if it is not paused.
            paused_at -> Nullable<Timestamptz>,
        }
    }

    diesel::table! {
        /// Requests to services that take a limited number at a time, in flight or ended.
        resource_control.service_request (id) {
            id -> Int8,
            service -> Text,
            slot -> Int2,
            created_at -> Timestamptz,
            /// From this time on the request is not in flight, whether or not it is marked.
            expires_at -> Timestamptz,
            completed_at -> Nullable<Timestamptz>,
            /// When the next claim of the service, or a late completion, found it expired.
            timed_out_at -> Nullable<Timestamptz>,
            details -> Text,
            /// A random number by which its holder finds the row. Null if the client sent none.
            claim -> Nullable<Int8>,
        }
    }

    diesel::table! {
        /// When each named throttle, and each key of a resource, was granted last.
        resource_control.throttle (name, key, is_resource) {
            name -> Text,
            key -> Text,
            last_granted -> Timestamptz,
            throttle_interval -> Interval,
            details -> Text,
            is_resource -> Bool,
        }
    }

    diesel::table! {
        use diesel::sql_types::*;
        use super::sql_types::ThrottledResourceEnum;

        /// Resources that are granted at most once per interval.
        resource_control.throttled_resource (resource_id) {
            resource_id -> ThrottledResourceEnum,
            /// Elapsed time in any time zone: a day is 24 hours, a month 30 days, a year 365.25.
            throttle_interval -> Interval,
            /// When it was granted last, by the server's clock; -infinity for never.
            last_locked -> Timestamptz,
            last_locker_details -> Text,
        }
    }

    diesel::allow_tables_to_appear_in_same_query!(
        fence,
        once,
        rate_limit,
        schedule,
        service_request,
        throttle,
        throttled_resource,
    );
}
