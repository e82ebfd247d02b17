//! What the web applications among the examples promise, as tests over HTTP that take the path of an
//! application's binary.
//!
//! Each test has a database of its own and starts one instance of the application or two on it, as
//! processes. What they leave behind is looked up in the database, never asked of the application.

mod admin;
mod browser;
mod endings;
mod instance;
mod limits;
mod observer;
mod requests;
mod root;
mod scene;

pub use admin::*;
pub use browser::*;
pub use endings::*;
pub use limits::*;
pub use requests::*;
pub use root::*;

/// Writes a `#[test]` for every promise, about the application with this binary.
#[macro_export]
macro_rules! tests {
    ($binary:expr) => {
        $crate::tests!(@each $binary =>
            ten_overlapping_bookings_make_one_row,
            bad_input_is_told_what_is_wrong,
            a_second_report_is_told_who_writes_the_first,
            a_second_rebuild_is_told_when_to_come_back,
            two_hundred_calls_over_two_instances_never_exceed_four,
            the_page_tells_who_holds_and_who_waits_by_name,
            the_page_is_escaped,
            the_addresses_that_are_printed_lead_to_pages,
            the_root_is_a_page_that_asks_for_everything_and_needs_nothing_else,
            a_burst_is_sent_at_once_and_each_of_its_responses_is_told,
            an_address_that_leads_nowhere_names_the_one_that_does_not,
            the_status_tells_who_holds_who_waits_and_when_what_is_free,
            a_call_that_takes_too_long_is_seen_to_time_out,
            the_status_tells_that_the_database_is_away_and_finds_it_again,
            a_killed_instance_frees_its_lock_at_once_and_its_slots_by_their_time_out,
            a_client_is_limited_after_its_burst_and_another_is_not,
            a_client_without_a_key_is_known_by_its_address,
            the_quota_and_the_choice_for_an_outage_are_settings,
            a_limited_request_passes_or_is_refused_while_the_database_is_away,
            a_full_semaphore_is_told_beside_the_rate_limit,
            what_is_left_for_a_client_is_told_and_nothing_is_spent,
            the_page_shows_who_is_near_to_the_limit_and_sets_quotas,
            a_quota_that_makes_no_sense_is_refused,
            a_panic_leaves_the_pool_whole,
            a_client_that_hangs_up_leaves_nothing_held,
            a_request_that_times_out_leaves_nothing_held,
            an_instance_that_is_told_to_end_leaves_nothing_held,
            a_restarted_server_is_found_again,
        );

        #[test]
        #[ignore = "scripts/test_with browser installs what it needs"]
        fn the_page_works_in_a_browser() {
            $crate::the_page_works_in_a_browser($binary);
        }
    };
    (@each $binary:expr => $($promise:ident,)+) => {
        $(
            #[test]
            fn $promise() {
                $crate::$promise($binary);
            }
        )+
    };
}
