//! Why a database refuses a connection. Only the texts of libpq and of the server distinguish a
//! wrong set-up, where waiting does not help, from a database that is unavailable: a failed
//! connection has no SQLSTATE.
//!
//! **An error shows whether libpq has TLS**: a libpq without TLS refuses `sslmode=require` before
//! it connects to a server. Asking libpq itself would need `unsafe`.

use crate::{Failure, unreachable};

/// A part of the error's text, whether it means a wrong set-up, and the remedy, in which `{role}`,
/// `{database}` and `{host}` stand for the names in the error's text. The first match counts.
const REFUSALS: &[(&str, bool, &str)] = &[
    (
        "GSSAPI",
        true,
        "take gssencmode out of DATABASE_URL and PGGSSENCMODE: this program, or the server, has no \
            Kerberos; use sslmode=verify-full instead",
    ),
    (
        "not compiled in",
        true,
        "this program was built with a libpq without TLS: `cargo install --path interlock` builds one \
            with it",
    ),
    (
        "does not support SSL",
        true,
        "the server has no TLS: set ssl = on there, with ssl_cert_file and ssl_key_file, or take \
            sslmode out of DATABASE_URL",
    ),
    (
        "private key file",
        true,
        "the file of sslkey must belong to this user, and nobody else may read it: chmod 600",
    ),
    (
        "requires a valid client certificate",
        true,
        "give libpq the client's own certificate and key: sslcert=/path/to/client.crt and \
            sslkey=/path/to/client.key, signed by the authority that the server trusts \
            (ssl_ca_file), with the role as its common name",
    ),
    (
        "certificate",
        true,
        "give libpq the certificate of the authority that has signed the server's: \
            sslrootcert=/path/to/ca.pem, or sslrootcert=system; \
         and with sslmode=verify-full the host name must be that of the certificate",
    ),
    (
        "authentication method requirement",
        true,
        "correct require_auth in DATABASE_URL or PGREQUIREAUTH: the server asks for another method",
    ),
    (
        "no password supplied",
        true,
        "put the password into DATABASE_URL, PGPASSWORD or ~/.pgpass \
            (host:port:database:role:password)",
    ),
    (
        "authentication failed",
        true,
        "put the right password into DATABASE_URL, PGPASSWORD or ~/.pgpass; or set a new one: \
            \\password {role}",
    ),
    (
        "SASL",
        true,
        "put the right password into DATABASE_URL, PGPASSWORD or ~/.pgpass",
    ),
    // After the above, because with sslmode=prefer libpq says both why it was refused with TLS and
    // why without.
    (
        "host \"[local]\"",
        true,
        "add a line to pg_hba.conf on the server, before any that rejects: `local {database} \
            {role} scram-sha-256`; then SELECT pg_reload_conf();",
    ),
    (
        "no encryption",
        true,
        "if the server has TLS, add sslmode=require to DATABASE_URL; otherwise, or if that is \
            refused, too, add a line to pg_hba.conf on the server, before any that rejects: `host \
            {database} {role} {host} scram-sha-256`; then SELECT pg_reload_conf();",
    ),
    (
        "pg_hba.conf",
        true,
        "add a line to pg_hba.conf on the server, before any that rejects: `hostssl {database} \
            {role} {host} scram-sha-256`; then SELECT pg_reload_conf();",
    ),
    ("not permitted to log in", true, "ALTER ROLE {role} LOGIN;"),
    (
        "permission denied for database",
        true,
        "GRANT CONNECT ON DATABASE {database} TO {role};",
    ),
    (
        "not currently accepting connections",
        true,
        "ALTER DATABASE {database} ALLOW_CONNECTIONS true;",
    ),
    (
        "too many connections for role",
        false,
        "end sessions of the role, or: ALTER ROLE {role} CONNECTION LIMIT -1;",
    ),
    (
        "too many connections for database",
        false,
        "end sessions of the database, or: ALTER DATABASE {database} CONNECTION LIMIT -1;",
    ),
    ("too many clients", false, FULL),
    ("remaining connection slots", false, FULL),
    ("no more connections allowed", false, FULL),
    (
        "out of shared memory",
        false,
        "the table of locks is full: end the session that holds most of them, or make room, which \
            needs a restart: ALTER SYSTEM SET max_locks_per_transaction = 256;",
    ),
    (
        "invalid URI query parameter",
        true,
        "correct DATABASE_URL: libpq knows no parameter of this name, so take it out",
    ),
    (
        "no such database",
        true,
        "name a database of [databases] in pgbouncer.ini",
    ),
    (
        "no such user",
        true,
        "add the role to the auth_file of PgBouncer",
    ),
    (
        "unsupported startup parameter",
        true,
        "a pooler is in between: take the parameter out of DATABASE_URL and PGOPTIONS, or add it \
            to ignore_startup_parameters",
    ),
    (
        "unrecognized configuration parameter",
        true,
        "correct the options of DATABASE_URL or PGOPTIONS: the server has no such setting",
    ),
    (
        "invalid value for parameter",
        true,
        "correct the options of DATABASE_URL or PGOPTIONS, or PGTZ, PGCLIENTENCODING and \
            PGDATESTYLE",
    ),
    (
        "requires a value",
        true,
        "correct the options of DATABASE_URL or PGOPTIONS",
    ),
    (
        "invalid command-line argument",
        true,
        "correct the options of DATABASE_URL or PGOPTIONS",
    ),
    (
        "for connection option",
        true,
        "correct that option in DATABASE_URL, or its variable, such as PGCONNECT_TIMEOUT",
    ),
    (
        "role \"",
        true,
        "CREATE ROLE {role} LOGIN; -- or name another one in DATABASE_URL",
    ),
    (
        "database \"",
        true,
        "CREATE DATABASE {database} ENCODING 'UTF8' TEMPLATE template0; -- or name another one \
            in DATABASE_URL",
    ),
    (
        "could not translate host name",
        false,
        "correct the host of DATABASE_URL",
    ),
    (
        "Connection refused",
        false,
        "start the server, or correct host and port of DATABASE_URL: it must listen there \
            (listen_addresses)",
    ),
    (
        "No such file or directory",
        false,
        "start the server, or correct the directory of its socket in DATABASE_URL \
            (unix_socket_directories)",
    ),
    ("starting up", false, "wait until the server has started"),
    (
        "timeout expired",
        false,
        "is a firewall in between, or the host of DATABASE_URL wrong?",
    ),
    ("session is read-only", false, "connect to the primary"),
    ("is in hot standby mode", false, "connect to the primary"),
];

const FULL: &str = "use smaller pools or a pooler, end idle sessions, or: ALTER SYSTEM SET \
    max_connections = 200; and restart the server";

/// An error with one of these texts comes from the server or the network. Any other error means
/// that libpq could not parse the URL.
const SERVER: [&str; 3] = [
    "connection to server",
    "could not connect",
    "could not translate host name",
];

fn of(text: &str) -> Option<&'static (&'static str, bool, &'static str)> {
    let has = |it: &str| text.contains(it);
    let is_absent = |it: &&(&str, bool, &str)| !it.0.ends_with(" \"") || has("does not exist");
    let mut all = REFUSALS.iter().filter(|it| has(it.0)).filter(is_absent);
    all.next()
}

pub(crate) fn failure(text: &str, url: &str) -> Failure {
    let is_of_server = SERVER.iter().any(|it| text.contains(it));
    let is_set_up = match of(text) {
        Some((_, is_set_up, _)) => *is_set_up,
        None => !is_of_server,
    };
    let status = if is_set_up {
        Failure::SET_UP
    } else {
        Failure::UNAVAILABLE
    };
    let text = if is_of_server {
        text.to_owned()
    } else {
        without_user_info(text, url)
    };
    Failure {
        remedy: is_set_up.then_some("interlock doctor"),
        ..Failure::new(status, unreachable(&text))
    }
}

/// Hides the quotations in libpq's error that may be the password of a URL that libpq could not
/// parse. The other quotations stay, because they show the mistake.
fn without_user_info(text: &str, url: &str) -> String {
    let rest = url.split_once("://").map_or("", |(_, rest)| rest);
    let user_info = rest.rsplit_once('@').map_or("", |(info, _)| info);
    // A keyword without a value may be the second half of a password that contains a space.
    let is_of_words = text.contains("missing \"=\"");
    let hidden = |piece: &str| match piece.rsplit_once('@') {
        Some((_, host)) => format!("...@{host}"),
        None if piece.len() > 1 && (is_of_words || user_info.contains(piece)) => "...".to_owned(),
        None => piece.to_owned(),
    };
    let pieces = text.split('"').enumerate();
    let pieces = pieces.map(|(i, piece)| match i % 2 {
        0 => piece.to_owned(),
        _ => hidden(piece),
    });
    pieces.collect::<Vec<_>>().join("\"")
}

/// What to do if a connection fails for this reason, if that is known.
pub(crate) fn remedy(text: &str, url: &str) -> Option<String> {
    let (_, _, remedy) = of(text)?;
    let named = |before: &[&str]| {
        let mut found = before.iter().filter_map(|before| {
            let (_, rest) = text.split_once(&format!("{before} \""))?;
            Some(rest.split_once('"')?.0)
        });
        found.next()
    };
    let identifier = |name: Option<&str>, otherwise: &str| {
        let quoted = |name: &str| format!("\"{}\"", name.replace('"', "\"\""));
        name.map_or_else(|| otherwise.to_owned(), quoted)
    };
    let info = url
        .split_once("://")
        .and_then(|(_, rest)| rest.rsplit_once('@'));
    let of_url = info.and_then(|(info, _)| info.split(':').next());
    let role = named(&["role", "user"]).or(of_url);
    let database = named(&["database"]);
    let host = named(&["for host", "from host"]).unwrap_or("ADDRESS");
    let bits = if host.contains(':') { 128 } else { 32 };
    let remedy = remedy
        .replace("{role}", &identifier(role, "CURRENT_USER"))
        .replace("{database}", &identifier(database, "all"))
        .replace("{host}", &format!("{host}/{bits}"));
    Some(remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn remedy(text: &str, url: &str) -> String {
        super::remedy(text, url).unwrap()
    }

    #[test]
    fn errors_hide_the_password_and_a_wrong_set_up_differs_from_an_outage() {
        let url = "postgres://app:s3cret%zz@db/app?schema=public";
        let server = "connection to server at \"db\" (10.0.0.1), port 5432 failed: ";
        for (text, status) in [
            (
                "missing \"=\" after \"app:s3cret@db\" in connection info string",
                78,
            ),
            (
                "missing \"=\" after \"s3cret\" in connection info string",
                78,
            ),
            ("invalid percent-encoded token: \"s3cret%zz\"", 78),
            ("invalid sslmode value: \"no\"", 78),
            (&(server.to_owned() + "Connection refused"), 69),
            (
                &(server.to_owned() + "FATAL:  the database system is starting up"),
                69,
            ),
            (
                &(server.to_owned() + "fe_sendauth: no password supplied"),
                78,
            ),
            (
                &(server.to_owned()
                    + "FATAL:  pg_hba.conf rejects connection for host \"10.0.0.2\""),
                78,
            ),
            (
                &(server.to_owned() + "FATAL:  password authentication failed for user \"app\""),
                78,
            ),
            (
                &(server.to_owned() + "FATAL:  too many connections for role \"app\""),
                69,
            ),
            ("could not translate host name \"db\" to address", 69),
            (&(server.to_owned() + "FATAL:  -c foo requires a value"), 78),
            (
                &(server.to_owned()
                    + "invalid integer value \"abc\" for connection option \"connect_timeout\""),
                78,
            ),
        ] {
            let failure = failure(text, url);
            assert_eq!(failure.status, status, "{text}");
            assert!(!failure.message.contains("s3cret"), "{failure}");
        }
        let wrong = failure("invalid URI query parameter: \"schema\"", url);
        assert!(wrong.message.contains("\"schema\""), "{wrong}");
    }

    #[test]
    fn a_remedy_has_the_names_of_the_servers_error() {
        let text = "FATAL:  too many connections for role \"the app\"";
        assert!(
            remedy(text, "postgres://app:s3cret@db/app")
                .ends_with("ALTER ROLE \"the app\" CONNECTION LIMIT -1;")
        );
        let text = "FATAL:  database \"app\" does not exist";
        assert!(
            remedy(text, "postgres://app:s3cret@db/app").starts_with("CREATE DATABASE \"app\" ")
        );
        let entry = |host: &str, more: &str| {
            let text = format!(
                "FATAL:  no pg_hba.conf entry for host \"{host}\", user \"app\", database \"app\", \
                    no encryption{more}"
            );
            remedy(&text, "postgres://app@db/app")
        };
        for (host, line) in [
            (
                "10.0.0.2",
                "`host \"app\" \"app\" 10.0.0.2/32 scram-sha-256`",
            ),
            (
                "fd00::2",
                "`host \"app\" \"app\" fd00::2/128 scram-sha-256`",
            ),
            ("[local]", "`local \"app\" \"app\" scram-sha-256`"),
        ] {
            let remedy = entry(host, "");
            assert!(remedy.contains(line), "{remedy}");
        }
        // With sslmode=prefer, the error has both failures: with TLS and without.
        let both = "; FATAL:  password authentication failed for user \"app\"";
        assert!(entry("10.0.0.2", both).starts_with("put the right password"));
        let full = remedy("FATAL:  out of shared memory", "postgres://app@db/app");
        assert!(full.contains("max_locks_per_transaction"), "{full}");
        let text = "FATAL:  permission denied for database \"app\"";
        assert!(
            remedy(text, "postgres://app:s3cret@db/app")
                .contains("ON DATABASE \"app\" TO \"app\";")
        );
    }
}
