//! `interlock` and a server that demands TLS.

mod support;

use workbench::Cluster;

use self::support::*;

#[test]
fn a_server_that_demands_tls_is_reached_and_doctor_says_whether_a_connection_is_encrypted() {
    let cluster = Cluster::builder().tls().start();
    let database = cluster.database();
    let encrypted = &database.tls().url();
    assert_eq!(status(&mut run(encrypted, "x", "exit 5")), Some(5));
    let (_, text) = printed(&mut interlock(encrypted, "doctor"));
    assert!(
        text.contains("ok    the connection is encrypted (TLS"),
        "{text}"
    );
    let (_, text) = printed(&mut interlock(&database.url(), "doctor"));
    assert!(text.contains("ok    the connection is a socket"), "{text}");
    let clear = &database.tls().url_with("sslmode", "disable");
    let (status, text) = printed(&mut interlock(clear, "doctor"));
    assert_eq!(status, Some(78), "{text}");
    assert!(text.contains("add sslmode=require"), "{text}");
}
