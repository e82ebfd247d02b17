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
        use diesel::sql_types::*;
        use super::sql_types::ThrottledResourceEnum;

        /// Resources that are handed out at most once per interval and key. A row is made by the first attempt.
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

        /// Resources that are handed out at most once per interval.
        resource_control.throttled_resource (resource_id) {
            resource_id -> ThrottledResourceEnum,
            /// Elapsed time: a day is 24 hours and a month 30 days, whatever the time zone.
            throttle_interval -> Interval,
            /// When it was handed out last, by the server's clock; -infinity for never.
            last_locked -> Timestamptz,
            last_locker_details -> Text,
        }
    }

    diesel::allow_tables_to_appear_in_same_query!(throttled_key, throttled_resource,);
}
