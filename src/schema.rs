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
        /// What is left of rate limits: a row for each limit and key that was used, until it is pruned, and the first generation of those keys that have a later generation. A missing row means a full key.
        resource_control.rate_limit (name, key, generation) {
            name -> Text,
            key -> Text,
            /// The row of the largest generation counts. After 200 updates the next generation replaces it, because old versions of a row slow down a search for it as long as a snapshot needs them.
            generation -> Int8,
            /// The number of updates in this generation.
            updates -> Int4,
            /// When the key was used first, or first after it was reset, pruned, or given another quota. If the clock was set back since then, a microsecond after the last change by the old clock.
            created_at -> Timestamptz,
            /// When the row was changed last, by the server's clock: units were spent or given back, or the debt was rewritten for another quota or clock.
            changed_at -> Timestamptz,
            /// When the key is full again if no more units are spent; -infinity in a first generation that a later one replaced.
            full_at -> Timestamptz,
            /// N of the quota under which the row was written.
            n -> Int8,
            /// The period of the quota under which the row was written, in microseconds.
            period_us -> Int8,
            /// Each reservation may be used from some moment on. This is the latest of these moments, or null if there was no reservation in this row.
            reserved_until -> Nullable<Timestamptz>,
        }
    }

    diesel::table! {
        /// Quotas that operators set. The row of the key counts, else the row of the name, else the quota of the program.
        resource_control.rate_limit_override (name, scope) {
            name -> Text,
            /// The key, or null for all keys of the name.
            key -> Nullable<Text>,
            n -> Int8,
            /// Elapsed time: a day is 24 hours and a month 30 days, in every time zone.
            period -> Interval,
            burst -> Int8,
            /// An equals sign and the key, or an asterisk for all keys of the name.
            scope -> Text,
        }
    }

    diesel::table! {
        /// Requests to services that take a limited number at a time: the requests in flight, and the log of ended requests.
        resource_control.service_request (id) {
            id -> Int8,
            service -> Text,
            slot -> Int2,
            created_at -> Timestamptz,
            /// From this time on the request no longer counts as in flight, even if it is not marked.
            expires_at -> Timestamptz,
            completed_at -> Nullable<Timestamptz>,
            /// When the request was found to have expired: by a claim that found no other slot free, by its own late completion, or by pruning.
            timed_out_at -> Nullable<Timestamptz>,
            details -> Text,
        }
    }

    diesel::table! {
        use diesel::sql_types::*;
        use super::sql_types::ThrottledResourceEnum;

        /// Resources that are granted at most once per interval and key. The first attempt inserts the row.
        resource_control.throttled_key (resource_id, key) {
            resource_id -> ThrottledResourceEnum,
            key -> Text,
            last_locked -> Timestamptz,
            last_locker_details -> Text,
        }
    }

    diesel::table! {
        use diesel::sql_types::*;
        use super::sql_types::ThrottledResourceEnum;

        /// Resources that are granted at most once per interval.
        resource_control.throttled_resource (resource_id) {
            resource_id -> ThrottledResourceEnum,
            /// Elapsed time: a day is 24 hours and a month 30 days, in every time zone. More than 1000 years, and infinity, count as 1000 years.
            throttle_interval -> Interval,
            /// When it was granted last, by the server's clock; -infinity for never.
            last_locked -> Timestamptz,
            last_locker_details -> Text,
        }
    }

    diesel::allow_tables_to_appear_in_same_query!(
        fence,
        rate_limit,
        rate_limit_override,
        service_request,
        throttled_key,
        throttled_resource,
    );
}
