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
        service_request,
        throttled_key,
        throttled_resource,
    );
}
