//! Whatever a name or a text is: either an error of ours before anything is sent, or it is taken and read
//! back as it was.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use diesel::prelude::*;
use diesel_interlock::error::{Input, Schema};
use diesel_interlock::schema::resource_control::{fence, service_request, throttled_key};
use diesel_interlock::{
    DeclaredResources, Error, Fence, ResourceLabel, Semaphore, Throttle, ThrottledResource,
    migrations, monitor, sync, testing,
};
use proptest::collection::vec;
use proptest::prelude::*;
use workbench::Database;

use super::{hold, text};
use crate::support::{Expect, assert_matches, attempt};

/// A database with the schema, and one where whatever is sent is an error.
struct Databases {
    installed: RefCell<PgConnection>,
    bare: RefCell<PgConnection>,
    _keep: [Database; 2],
}

impl Databases {
    fn new() -> Self {
        let (installed, bare) = (Database::new(), Database::new());
        migrations::install(&mut installed.connect()).unwrap();
        Self {
            installed: RefCell::new(installed.connect()),
            bare: RefCell::new(bare.connect()),
            _keep: [installed, bare],
        }
    }

    /// What came of a call; an error is one that was told before anything was sent.
    #[track_caller]
    fn call<T>(&self, call: impl Fn(&mut PgConnection) -> Result<T, Error>) -> Option<T> {
        let nowhere = call(&mut self.bare.borrow_mut())
            .err()
            .expect("the database has no schema");
        match call(&mut self.installed.borrow_mut()) {
            Ok(value) => {
                assert_matches!(nowhere, Error::Schema(Schema::NotInstalled));
                Some(value)
            }
            Err(error) => {
                let ours = matches!(
                    error,
                    Error::Input(Input::EmptyName)
                        | Error::Input(Input::EmptyKey)
                        | Error::Input(Input::EmptyDetails)
                        | Error::Input(Input::NulCharacter)
                        | Error::Input(Input::TooLong { .. })
                        | Error::Input(Input::BadLabel { .. })
                );
                assert!(ours, "{error:?}");
                assert_eq!(error.to_string(), nowhere.to_string());
                None
            }
        }
    }
}

fn fits(text: &str, longest: usize) -> bool {
    !text.contains('\0') && text.len() <= longest
}

#[test]
fn services_and_details() {
    let databases = Databases::new();
    hold(100, (text(), text()), |(service, details)| {
        let semaphore =
            Semaphore::new(&*service, 2, Duration::from_secs(60)).details(details.to_owned());
        let claim = databases.call(|conn| semaphore.claim_on(conn));
        let good = !service.is_empty() && fits(&service, 1000) && fits(&details, 8192);
        assert_eq!(claim.is_some(), good);
        let Some(claim) = claim else { return };
        let claim = claim.expect_acquired();
        let conn = &mut *databases.installed.borrow_mut();
        let row = service_request::table.find(claim.id);
        let stored = row
            .select((service_request::service, service_request::details))
            .get_result::<(String, String)>(conn);
        assert_eq!(stored.unwrap(), (service.clone(), details));
        let of_service = service_request::table
            .filter(monitor::of_service(&service))
            .filter(monitor::in_flight());
        assert_eq!(of_service.count().get_result(conn), Ok(1));
        assert!(semaphore.complete_on(conn, claim.id).unwrap());
    });
}

#[test]
fn keys_and_details_of_throttles() {
    let databases = Databases::new();
    LABEL.set("resource");
    let _ = sync::<Declared>(&mut databases.installed.borrow_mut()).unwrap();
    let key = proptest::option::of(text());
    hold(100, (key, text()), |(key, details)| {
        let throttle = Throttle::of(ResourceLabel("resource".into()));
        let throttle = match &key {
            None => throttle,
            Some(key) => throttle.key(key),
        };
        let decision = databases.call(|conn| throttle.details(details.clone()).attempt_on(conn));
        let good = !details.trim_matches(' ').is_empty()
            && fits(&details, 8192)
            && key
                .as_deref()
                .is_none_or(|key| !key.is_empty() && fits(key, 1000));
        assert_eq!(decision.is_some(), good);
        let Some(decision) = decision else { return };
        let conn = &mut *databases.installed.borrow_mut();
        if let (Some(_), Some(key)) = (decision.granted(), &key) {
            let row = throttled_key::table
                .filter(throttled_key::key.eq(key))
                .select(throttled_key::last_locker_details)
                .get_result::<String>(conn);
            assert_eq!(row.as_deref(), Ok(&*details));
        }
        testing::make_due(conn, &throttle).unwrap();
    });
}

#[test]
fn names_of_fences() {
    let databases = Databases::new();
    hold(100, (text(), any::<i64>()), |(name, token)| {
        let guarded = Fence::new(&*name);
        let passed = databases.call(|conn| {
            conn.transaction(|conn| guarded.pass(conn, token))
                .map_err(|error| match error {
                    // What failed there can no longer be asked for its reason.
                    Error::Database(_) => Error::Schema(Schema::NotInstalled),
                    Error::Fenced { .. } => panic!("{error:?}"),
                    other => other,
                })
        });
        assert_eq!(passed.is_some(), !name.is_empty() && fits(&name, 1000));
        if passed.is_some() {
            let conn = &mut *databases.installed.borrow_mut();
            let stored = fence::table.find(&name).select(fence::token);
            assert_eq!(stored.get_result::<i64>(conn), Ok(token));
            diesel::delete(fence::table).execute(conn).unwrap();
        }
    });
}

/// A resource with whatever label.
#[derive(Debug, Clone, Copy)]
struct Declared;

thread_local! {
    static LABEL: Cell<&'static str> = const { Cell::new("") };
}

impl ThrottledResource for Declared {
    fn label(&self) -> &str {
        LABEL.get()
    }
}

impl DeclaredResources for Declared {
    const ALL: &'static [Self] = &[Declared];

    fn interval(&self) -> Duration {
        Duration::from_secs(3600)
    }
}

#[test]
fn labels_of_resources() {
    let databases = Databases::new();
    for length in [63, 64] {
        LABEL.set("x".repeat(length).leak());
        let synced = databases.call(sync::<Declared>);
        assert_eq!(synced.is_some(), length == 63);
    }
    hold(60, text(), |label| {
        LABEL.set(label.clone().leak());
        let synced = databases.call(sync::<Declared>);
        assert_eq!(synced.is_some(), !label.is_empty() && fits(&label, 63));

        let throttle = Throttle::of(ResourceLabel(label.clone()));
        let conn = &mut *databases.installed.borrow_mut();
        let first = throttle.details("somebody").attempt_on(conn);
        if synced.is_some() {
            assert!(sync::<Declared>(conn).unwrap().added.is_empty());
            first.unwrap().granted().unwrap();
            let denial = attempt(conn, &throttle, "another").denied();
            assert_eq!(denial.unwrap().holder.as_deref(), Some("somebody"));
            testing::make_due(conn, &throttle).unwrap();
        } else if fits(&label, 63) {
            let unknown = |error: &Error| matches!(error, Error::Schema(Schema::UnknownResource { label: told }) if *told == label);
            assert!(first.as_ref().is_err_and(unknown), "{first:?}");
            let due = testing::make_due(conn, &throttle);
            assert!(due.as_ref().is_err_and(unknown), "{due:?}");
        }
    });
}

#[test]
fn a_prefix_and_the_names_behind_it() {
    let databases = Databases::new();
    hold(50, vec(text(), 2), |texts| {
        let [prefix, service] = &texts[..] else {
            unreachable!()
        };
        let _prefix = testing::key_prefix(prefix);
        let semaphore = Semaphore::new(service, 1, Duration::from_secs(60));
        let claim = databases.call(|conn| semaphore.claim_on(conn));
        let escaped = prefix.replace('\\', r"\\").replace(' ', r"\ ");
        let name = format!("{escaped} {service}");
        assert_eq!(claim.is_some(), !service.is_empty() && fits(&name, 1000));
        if claim.is_some() {
            let conn = &mut *databases.installed.borrow_mut();
            assert_eq!(testing::prefixed(service), name);
            assert_eq!(testing::expire(conn, &semaphore).unwrap(), 1);
        }
    });
}
