//! `interlock` behind `PgBouncer` in transaction mode, of any version.

mod support;

use workbench::{PgBouncer, PoolMode};

use self::support::*;

#[test]
fn a_permit_works_and_doctor_names_the_pooler() {
    let database = installed();
    let pooler = PgBouncer::in_front_of(&database, PoolMode::Transaction, 3);
    let url = &pooler.url();
    let mut session = Session::of(&database);
    // Longer than the lease.
    let mut running = Running::start(&mut run(url, "x --lease 3s", "echo held; sleep 5; exit 5"));
    assert_eq!(running.line(), "held");
    assert_eq!(status(&mut run(url, "x --lease 3s", "true")), Some(73));
    assert_eq!(running.status(), Some(5));
    let in_flight = "SELECT count(*) FROM resource_control.slot_in_flight";
    assert_eq!(session.number(in_flight), 0);

    assert_eq!(status(&mut interlock(url, "ps")), Some(0));
    assert_eq!(status(&mut interlock(url, "install")), Some(0));
    let (status, text) = printed(&mut interlock(url, "doctor"));
    assert_eq!(status, Some(1), "{text}");
    let found = "fail  session locks exclude nobody on this pool";
    assert!(text.contains(found), "{text}");

    // Without a lease nothing runs, and no lock is left.
    let (status, text) = printed(&mut run(url, "x", "echo ran"));
    assert_eq!(status, Some(78), "{text}");
    assert!(!text.contains("ran\n") && text.contains("pooler"), "{text}");
    assert_eq!(session.locks(true), 0);
}
