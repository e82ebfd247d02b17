//! Throttles whose intervals are stored in the database, as declared resources.

use std::time::Duration;

use diesel::prelude::*;
use diesel_interlock::schema::resource_control::throttled_resource::dsl;
use diesel_interlock::throttle::ResourceLabel;

use super::throttles::{Resource, declared, rewind};
use crate::assert_matches;
use crate::half::{Error, Throttle, execute, on_one, pool, prune, throttled_resources, wait};
use crate::support::{installed, number, run, truth};

const HOUR: Duration = Duration::from_secs(3600);

#[test]
fn a_declared_resource_is_a_value_of_the_enumerated_type() {
    let (database, _) = declared();
    let conn = &mut database.connect();
    let all: Vec<Resource> = dsl::throttled_resource
        .select(dsl::resource_id)
        .order(dsl::resource_id)
        .load(conn)
        .unwrap();
    assert_eq!(all, [Resource::Newsletter, Resource::Import]);
    let label: ResourceLabel = dsl::throttled_resource
        .filter(dsl::resource_id.eq(Resource::Import))
        .select(dsl::resource_id)
        .first(conn)
        .unwrap();
    assert_eq!(label.to_string(), "it's an import");
}

mod odd {
    use std::time::Duration;

    use crate::half::throttled_resources;

    throttled_resources! {
        pub(super) enum Resource {
            Dollars = "a\\b $1 $2 'c' \"d\" ü" every Duration::from_millis(1_500_500),
            Millennium = "a thousand years" every Duration::from_secs(1000 * 360 * 86_400),
            Microsecond = "a microsecond" every Duration::from_micros(1),
        }
    }
}

#[test]
fn every_label_and_interval_is_stored_as_it_was_declared() {
    let database = installed();
    // Under this setting a backslash in a plain string is an escape.
    let name = database.name();
    run(
        &mut database.connect(),
        &format!("ALTER DATABASE {name} SET standard_conforming_strings = off"),
    );
    let pool = pool(&database, 1);
    let synced = wait(Throttle::sync::<odd::Resource>(&pool)).unwrap();
    assert_eq!(synced.added.len(), 3);
    let again = wait(Throttle::sync::<odd::Resource>(&pool)).unwrap();
    assert_eq!(again, Default::default());
    for resource in [odd::Resource::Dollars, odd::Resource::Millennium] {
        let throttle = Throttle::of(resource);
        assert!(wait(throttle.attempt(&pool)).unwrap().is_granted());
        assert!(wait(throttle.attempt(&pool)).unwrap().is_denied());
        assert!(
            wait(throttle.key("$1").attempt(&pool))
                .unwrap()
                .is_granted()
        );
    }
}

mod impossible {
    use std::time::Duration;

    use crate::half::throttled_resources;

    throttled_resources! { pub(super) enum Nameless { A = "" every Duration::from_secs(1) } }
    throttled_resources! { pub(super) enum Nul { A = "a\0b" every Duration::from_secs(1) } }
    throttled_resources! {
        pub(super) enum Long {
            A = "0123456789012345678901234567890123456789012345678901234567890123" every Duration::from_secs(1),
        }
    }
    throttled_resources! { pub(super) enum Never { A = "a" every Duration::ZERO } }
    throttled_resources! { pub(super) enum Always { A = "a" every Duration::MAX } }
}

#[test]
fn an_impossible_declaration_is_refused_before_anything_is_sent() {
    let pool = pool(&workbench::Database::new(), 1);
    for refused in [
        wait(Throttle::sync::<impossible::Nameless>(&pool)),
        wait(Throttle::sync::<impossible::Nul>(&pool)),
        wait(Throttle::sync::<impossible::Long>(&pool)),
        wait(Throttle::sync::<impossible::Never>(&pool)),
        wait(Throttle::sync_intervals::<impossible::Always>(&pool)),
    ] {
        assert_matches!(refused, Err(Error::Input(_)));
    }
}

mod more {
    use std::time::Duration;

    use crate::half::throttled_resources;

    throttled_resources! {
        pub(super) enum Resource {
            Newsletter = "newsletter" every Duration::from_secs(60),
            New = "new" every Duration::from_secs(60),
        }
    }
}

#[test]
fn only_a_new_label_needs_the_owner_of_the_type() {
    let (database, pool) = declared();
    let conn = &mut database.connect();
    let role = format!("{}_app", database.name());
    run(
        conn,
        &format!(
            "CREATE ROLE {role}; GRANT USAGE ON SCHEMA resource_control TO {role};
            GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA resource_control TO {role}"
        ),
    );
    let limited = crate::half::pool(&database, 1);
    on_one(&limited, |conn| {
        wait(execute(conn, &format!("SET ROLE {role}"))).unwrap();
    });
    let synced = wait(Throttle::sync::<Resource>(&limited)).unwrap();
    assert_eq!(synced, Default::default());
    run(
        conn,
        "DELETE FROM resource_control.throttled_resource WHERE resource_id = 'newsletter'",
    );
    let synced = wait(Throttle::sync::<Resource>(&limited)).unwrap();
    assert_eq!(synced.added, ["newsletter"], "its label is there");
    for throttle in [
        Throttle::of(Resource::Newsletter),
        Throttle::of(Resource::Newsletter).key(7),
    ] {
        assert!(wait(throttle.attempt(&limited)).unwrap().is_granted());
    }
    assert_matches!(
        wait(Throttle::sync::<more::Resource>(&limited)),
        Err(Error::Database(_))
    );
    assert_eq!(
        wait(Throttle::sync::<more::Resource>(&pool)).unwrap().added,
        ["new"]
    );
    drop(limited);
    run(conn, &format!("DROP OWNED BY {role}; DROP ROLE {role}"));
}

/// In Berlin the clocks change in this interval, so a calendar day has 23 hours.
#[test]
fn a_day_has_24_hours_and_a_month_30_days_in_every_time_zone() {
    let (database, pool) = declared();
    let conn = &mut database.connect();
    on_one(&pool, |conn| {
        wait(execute(conn, "SET TimeZone = 'Europe/Berlin'")).unwrap();
    });
    let day = Duration::from_secs(24 * 3600);
    for (interval, elapsed) in [
        ("24 hours", day),
        ("1 day", day),
        ("1 month", 30 * day),
        (
            "1 month 1 day 01:02:03.5",
            31 * day + Duration::from_millis(3_723_500),
        ),
        ("1 year", 365 * day + day / 4),
    ] {
        run(
            conn,
            &format!(
                "DELETE FROM resource_control.throttle;
                UPDATE resource_control.throttled_resource SET throttle_interval = '{interval}', last_locked = '-infinity',
                    last_locker_details = ''"
            ),
        );
        let newsletter = Throttle::of(Resource::Newsletter);
        for throttle in [newsletter.clone(), newsletter.key(7)] {
            let granted = wait(throttle.attempt(&pool)).unwrap().granted().unwrap();
            assert_eq!(granted.due_in, elapsed, "{interval}");
        }
    }
    // The last grant was an hour less than a day ago, over a change of the clocks.
    for (last, is_due) in [("23 hours", false), ("24 hours", true)] {
        let due = truth(
            conn,
            &format!(
                "TIMESTAMPTZ '2126-03-30 12:00+01' + interval '{last}'
                    >= TIMESTAMPTZ '2126-03-30 12:00+01' + resource_control.elapsed('1 day')"
            ),
        );
        assert_eq!(due, is_due, "{last}");
    }
}

#[test]
fn a_throttle_that_an_operator_has_closed_is_denied() {
    let (database, pool) = declared();
    let newsletter = Throttle::of(Resource::Newsletter);
    assert!(wait(newsletter.key(7).attempt(&pool)).unwrap().is_granted());
    run(
        &mut database.connect(),
        "UPDATE resource_control.throttled_resource SET last_locked = 'infinity', last_locker_details = 'closed';
        UPDATE resource_control.throttle SET last_granted = 'infinity'",
    );
    for throttle in [newsletter.clone(), newsletter.key(7)] {
        assert!(wait(throttle.attempt(&pool)).unwrap().is_denied());
    }
    assert_eq!(wait(prune::throttles(&pool)).unwrap(), 0);
}

#[test]
fn pruning_uses_the_present_interval_of_a_resource() {
    let (database, pool) = declared();
    let (newsletter, import) = (
        Throttle::of(Resource::Newsletter).key(7),
        Throttle::of(Resource::Import).key(7),
    );
    for throttle in [&newsletter, &import] {
        assert!(wait(throttle.attempt(&pool)).unwrap().is_granted());
    }
    run(
        &mut database.connect(),
        "UPDATE resource_control.throttled_resource SET throttle_interval = '1 year' WHERE resource_id = 'newsletter'",
    );
    rewind(&database, 3 * 3600);
    assert_eq!(wait(prune::throttles(&pool)).unwrap(), 1);
    assert!(wait(newsletter.attempt(&pool)).unwrap().is_denied());
    assert!(wait(import.attempt(&pool)).unwrap().is_granted());
}

#[test]
fn details_are_stored_as_they_are_and_blank_ones_are_replaced_by_the_sessions() {
    let (database, pool) = declared();
    let conn = &mut database.connect();
    for throttle in [
        Throttle::named("named", HOUR),
        Throttle::of(Resource::Newsletter),
        Throttle::of(Resource::Newsletter).key(7),
    ] {
        for details in [" web-3 ", "ü\n", "", "  ", "\t\n", "\u{a0}", "'", "\\"] {
            run(
                conn,
                "DELETE FROM resource_control.throttle;
                UPDATE resource_control.throttled_resource SET last_locked = '-infinity', last_locker_details = ''",
            );
            let throttle = throttle.details(details);
            assert!(wait(throttle.attempt(&pool)).unwrap().is_granted());
            let last = wait(throttle.attempt(&pool))
                .unwrap()
                .denied()
                .unwrap()
                .last;
            let by = last.unwrap().by;
            if details.trim().is_empty() {
                assert!(by.contains("pid "), "{details:?}: {by:?}");
            } else {
                assert_eq!(by, details);
            }
        }
    }
}

#[test]
fn the_table_refuses_an_interval_of_zero_and_a_grant_without_details() {
    let (database, _) = declared();
    let conn = &mut database.connect();
    for (change, is_kept) in [
        ("throttle_interval = '1 us'", true),
        ("throttle_interval = '0'", false),
        ("last_locked = now(), last_locker_details = 'me'", true),
        ("last_locked = now(), last_locker_details = '  '", false),
        ("last_locked = '-infinity', last_locker_details = ''", true),
        (
            "last_locked = '-infinity', last_locker_details = 'me'",
            false,
        ),
    ] {
        let update = format!("UPDATE resource_control.throttled_resource SET {change}");
        let updated = diesel::sql_query(update).execute(conn);
        assert_eq!(updated.is_ok(), is_kept, "{change}");
    }
    let rows = "(SELECT count(*) FROM resource_control.throttled_resource)";
    assert_eq!(number(conn, rows), 2);
}

/// `impostor` has an operator that would be used to compare resources if it were looked up.
#[test]
fn no_search_path_changes_a_decision() {
    let (database, pool) = declared();
    run(
        &mut database.connect(),
        "CREATE SCHEMA impostor;
        CREATE FUNCTION impostor.never(
            resource_control.throttled_resource_enum, resource_control.throttled_resource_enum
        ) RETURNS boolean LANGUAGE sql AS 'SELECT false';
        CREATE OPERATOR impostor.= (FUNCTION = impostor.never,
            LEFTARG = resource_control.throttled_resource_enum, RIGHTARG = resource_control.throttled_resource_enum)",
    );
    let newsletter = Throttle::of(Resource::Newsletter);
    for path in ["impostor, pg_catalog", "''", "pg_temp"] {
        for throttle in [newsletter.clone(), newsletter.key(7)] {
            on_one(&pool, |conn| {
                wait(execute(conn, &format!("SET search_path = {path}"))).unwrap();
                assert!(wait(throttle.attempt_on(conn)).unwrap().is_granted());
                assert!(wait(throttle.attempt_on(conn)).unwrap().is_denied());
                wait(execute(conn, "RESET search_path")).unwrap();
            });
        }
        rewind(&database, 3600);
    }
}

throttled_resources! {
    #[derive(PartialOrd)]
    pub(crate) enum Documented {
        /// A doc comment is allowed on each resource.
        One = "one" every HOUR,
    }
}

#[test]
fn a_reference_and_a_copy_are_the_same_resource() {
    let database = installed();
    let pool = pool(&database, 1);
    let one = Documented::One;
    let synced = wait(Throttle::sync::<Documented>(&pool)).unwrap();
    assert_eq!(synced.added, ["one"]);
    assert!(wait(Throttle::of(one).attempt(&pool)).unwrap().is_granted());
    assert!(wait(Throttle::of(one).attempt(&pool)).unwrap().is_denied());
}
