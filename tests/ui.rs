//! What the compiler has to say to those who overlook an answer.

#[test]
fn a_dropped_attempt_warns() {
    let cases = trybuild::TestCases::new();
    cases.compile_fail("tests/ui/dropped_*.rs");
    cases.pass("tests/ui/used_*.rs");
}
