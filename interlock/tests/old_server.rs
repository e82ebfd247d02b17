//! `interlock` on a server that is too old. `scripts/test with postgresql 13` runs it.

mod support;

use workbench::Database;

use self::support::*;

#[test]
fn nothing_is_installed_and_doctor_says_why() {
    let database = Database::new();
    let (status, text) = printed(&mut interlock(&database.url(), "install"));
    assert_eq!(status, Some(78), "{text}");
    assert!(text.contains("needs PostgreSQL 14 or later"), "{text}");
    let mut session = Session::of(&database);
    let schemas = "SELECT count(*) FROM pg_namespace WHERE nspname = 'resource_control'";
    assert_eq!(session.number(schemas), 0);
    let (status, text) = printed(&mut interlock(&database.url(), "doctor"));
    assert_eq!(status, Some(1), "{text}");
    assert!(text.contains("fail  PostgreSQL 13"), "{text}");
}
