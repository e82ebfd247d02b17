//! `interlock` and a server with TLS, on a network.

mod support;

use std::fs;
use std::net::UdpSocket;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use workbench::{Cluster, Database, Endpoint};

use self::support::doctor::*;
use self::support::*;

#[test]
fn a_server_that_demands_tls_is_reached_and_doctor_says_whether_a_connection_is_encrypted() {
    let cluster = Cluster::builder().tls().start();
    let database = cluster.database();
    let encrypted = &database.tls().url();
    assert_eq!(status(&mut run(encrypted, "x", "exit 5")), Some(5));
    line(encrypted, "", "ok", "the connection is encrypted (TLS");
    line(&database.url(), "", "ok", "the connection is a socket");
    let clear = &database.tls().url_with("sslmode", "disable");
    let (status, why) = refused(clear);
    assert_eq!(status, Some(78), "{why}");
    assert!(why.contains("add sslmode=require"), "{why}");
}

/// Replaces the TCP lines of `pg_hba.conf`.
fn let_in(cluster: &Cluster, database: &Database, who: &str) {
    let path = cluster.directory().join("data/pg_hba.conf");
    let local = "local all all trust\nlocal replication all trust\n";
    fs::write(path, format!("{local}{who}\n")).unwrap();
    Session::of(database).reload();
}

/// Why `doctor` cannot connect, and what to do.
#[track_caller]
fn refused(url: &str) -> (Option<i32>, String) {
    let (status, lines) = found(url, "");
    let last = lines.last().unwrap();
    assert_eq!(last["level"], "fail", "{lines:#?}");
    (status, last["why"].as_str().unwrap().to_owned())
}

/// A proxy from whose connections the server sees an address of this machine on its network, and
/// not the loopback interface.
fn from_the_network(endpoint: &Endpoint, port: &str) -> (Running, String, String) {
    const PROXY: &str = r#"
        my ($source, $port) = @ARGV;
        my $listener = IO::Socket::INET->new(LocalAddr => "127.0.0.1", Listen => 9) or die $!;
        $| = 1;
        print $listener->sockport, "\n";
        $SIG{CHLD} = "IGNORE";
        sub copy {
            my ($from, $to) = @_;
            while (sysread $from, my $bytes, 65536) { print $to $bytes }
            shutdown $to, 1;
            exit;
        }
        while (my $client = $listener->accept) {
            next if fork;
            my $server = IO::Socket::INET->new(LocalAddr => $source, PeerAddr => "127.0.0.1",
                PeerPort => $port) or die $!;
            fork ? copy($client, $server) : copy($server, $client);
        }"#;
    // `connect` of a UDP socket sends nothing: it selects the address of this machine on the
    // network.
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    socket
        .connect("192.0.2.1:9")
        .expect("this test needs a network, and the machine an address in it");
    let address = socket.local_addr().unwrap().ip().to_string();
    let mut perl = Command::new("perl");
    perl.args(["-MIO::Socket::INET", "-e", PROXY, &address, port]);
    let mut proxy = Running::start(&mut perl);
    let url = endpoint.url_with("port", &proxy.line());
    (proxy, address, url)
}

#[test]
fn faults_of_a_network_connection_are_reported_and_repaired() {
    let cluster = Cluster::builder().tls().start();
    let database = cluster.database();
    let mut session = Session::of(&database);
    let port = session.text("SELECT current_setting('port')");
    let (_proxy, address, url) = from_the_network(database.tls(), &port);
    let_in(
        &cluster,
        &database,
        &format!("host all all {address}/32 trust"),
    );
    let mut encrypt = |is_on: &str| {
        session.sql(&format!("ALTER SYSTEM SET ssl = {is_on}"));
        session.reload();
    };
    encrypt("off");
    let (status, why) = refused(&url);
    assert_eq!(status, Some(78), "{why}");
    assert!(
        why.starts_with("the server has no TLS: set ssl = on"),
        "{why}"
    );
    let preferring = &url.replace("sslmode=require", "sslmode=prefer");
    let vanishes = "a host that vanishes keeps its locks for about";
    remedied(preferring, &database.url(), "", "warn", vanishes);
    line(preferring, "", "ok", vanishes);

    let word = format!("the connection from {address} is not encrypted");
    let found_clear = line(preferring, "", "warn", &word);
    let why = found_clear["why"].as_str().unwrap();
    assert!(
        why.contains("set ssl = on there, and add sslmode=verify-full or require"),
        "{why}"
    );
    encrypt("on");
    let (status, lines) = found(&url, "--strict");
    assert_eq!(status, Some(0), "{lines:#?}");
    assert!(
        of(&lines, "ok", "the connection is encrypted").is_some(),
        "{lines:#?}"
    );
}

#[test]
fn a_missing_or_unreadable_client_certificate_differs_from_a_wrong_authority() {
    let cluster = Cluster::builder().tls().start();
    let database = cluster.database();
    let mut session = Session::of(&database);
    let file = |name: &str| cluster.directory().join(name).display().to_string();
    session.sql(&format!(
        "ALTER SYSTEM SET ssl_ca_file = '{}'",
        file("ca.crt")
    ));
    let_in(&cluster, &database, "hostssl all all 127.0.0.1/32 cert");
    let (status, why) = refused(&database.tls().url());
    assert_eq!(status, Some(78), "{why}");
    for named in [
        "sslcert=",
        "sslkey=",
        "ssl_ca_file",
        "the role as its common name",
    ] {
        assert!(why.contains(named), "{why}");
    }

    let with = database.tls().url_with("sslcert", &file("client.crt"));
    let with = &Endpoint::new(&with).url_with("sslkey", &file("client.key"));
    connects(with);
    let key = file("client.key");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o644)).unwrap();
    let (status, why) = refused(with);
    assert_eq!(status, Some(78), "{why}");
    let (_, command) = why.rsplit_once(": ").unwrap();
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("{command} {key}")]);
    assert_eq!(printed(&mut shell), (Some(0), String::new()));
    connects(with);

    // A certificate of another authority than the server's.
    let other = Cluster::builder().tls().start();
    let root = other.directory().join("ca.crt").display().to_string();
    let wrong = Endpoint::new(with).url_with("sslrootcert", &root);
    let wrong = &Endpoint::new(&wrong).url_with("sslmode", "verify-full");
    let (status, why) = refused(wrong);
    assert_eq!(status, Some(78), "{why}");
    assert!(why.contains("sslrootcert=/path/to/ca.pem"), "{why}");
    connects(&Endpoint::new(wrong).url_with("sslrootcert", &file("ca.crt")));
}

#[test]
fn an_unwanted_method_of_authentication_is_not_a_wrong_password() {
    let cluster = Cluster::builder().tls().start();
    let database = cluster.database();
    Session::of(&database).sql("CREATE ROLE app LOGIN PASSWORD 'known'");
    let_in(
        &cluster,
        &database,
        "hostssl all all 127.0.0.1/32 scram-sha-256",
    );
    let app = Endpoint::new(&database.tls().url_with("user", "app"));
    let app = Endpoint::new(&app.url_with("password", "known"));
    let wanted = &app.url_with("require_auth", "none");
    let (status, why) = refused(wanted);
    assert_eq!(status, Some(78), "{why}");
    assert!(why.starts_with("correct require_auth"), "{why}");
    connects(&app.url_with("require_auth", "scram-sha-256"));
    for (password, remedy) in [
        ("unknown", "put the right password"),
        ("", "put the password"),
    ] {
        let (status, why) = refused(&app.url_with("password", password));
        assert_eq!(status, Some(78), "{why}");
        assert!(why.starts_with(remedy), "{why}");
    }
}
