//! A server that demands TLS.

use std::error::Error;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};

use super::builder::line;
use super::{Cluster, ClusterBuilder};
use crate::database::Database;
use crate::endpoint::{Endpoint, cannot};

/// Sessions over TCP use TLS, others do without.
const ACCESS: &str = "local all all trust\n\
                      local replication all trust\n\
                      hostssl all all 127.0.0.1/32 trust\n";

impl ClusterBuilder {
    /// The server listens on a free TCP port of the loopback interface, too, and demands TLS there. Its certificate, for
    /// `localhost` and `127.0.0.1`, is from a certificate authority of its own. See [`Cluster::tls_endpoint`]. The directory
    /// of the server has a certificate of a client, too, for the role `postgres`: `client.crt` and `client.key`.
    pub fn tls(mut self) -> Self {
        self.tls = true;
        self.setting("listen_addresses", "127.0.0.1")
            .setting("ssl", "on")
    }
}

impl Cluster {
    /// Where clients connect to a database of this server with TLS, by `sslmode=require`. The certificate of its authority
    /// is named by `sslrootcert`, for `verify-full`.
    ///
    /// Asynchronous connections and pools of this endpoint verify the certificate in any case. They are made by this crate,
    /// as tokio-postgres does not know `sslrootcert`. Those of Diesel need a libpq with OpenSSL.
    pub fn tls_endpoint(&self, database: &str) -> Endpoint {
        assert!(
            self.builder.tls,
            "the server has no TLS: make it with Cluster::builder().tls().start()"
        );
        Endpoint::new("postgresql://postgres@localhost")
            .with_address("127.0.0.1", self.builder.port)
            .with("sslmode", "require")
            .with("sslrootcert", &format!("{}/ca.crt", self.directory))
            .with("dbname", database)
    }

    /// Tells a database of this server where clients connect to it with TLS.
    pub(crate) fn with_tls(&self, mut database: Database) -> Database {
        if self.builder.tls {
            database.tls = Some(self.tls_endpoint(database.name()));
        }
        database
    }

    /// Makes the certificates, and has the server use them, if it demands TLS.
    pub(super) fn set_up_tls(&self) {
        if !self.builder.tls {
            return;
        }
        write_certificates(self.directory()).unwrap_or_else(cannot("make a certificate"));
        let path = self.directory().join("data/pg_hba.conf");
        fs::write(path, ACCESS).unwrap_or_else(cannot("write pg_hba.conf"));
        for (name, file) in [
            ("ssl_cert_file", "server.crt"),
            ("ssl_key_file", "server.key"),
        ] {
            self.append(&line(name, &format!("{}/{file}", self.directory)));
        }
    }
}

impl Database {
    /// Where clients connect to this database with TLS, on a server that [demands it](ClusterBuilder::tls). The database's
    /// own endpoint is the Unix socket of that server.
    pub fn tls(&self) -> &Endpoint {
        let tls = self.tls.as_ref();
        tls.expect("the database is not of a server that Cluster::builder().tls().start() made")
    }
}

fn write_certificates(directory: &Path) -> Result<(), Box<dyn Error>> {
    let mut authority = CertificateParams::default();
    let name = "an authority of one test";
    authority.distinguished_name.push(DnType::CommonName, name);
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.key_usages.push(KeyUsagePurpose::KeyCertSign);
    let authority_key = KeyPair::generate()?;
    let root = authority.self_signed(&authority_key)?;
    let issuer = Issuer::new(authority, authority_key);

    let mut server = CertificateParams::new(["localhost", "127.0.0.1"].map(String::from))?;
    server
        .distinguished_name
        .push(DnType::CommonName, "localhost");
    server.use_authority_key_identifier_extension = true;
    let key = KeyPair::generate()?;
    let certificate = server.signed_by(&key, &issuer)?;

    let mut client = CertificateParams::default();
    client
        .distinguished_name
        .push(DnType::CommonName, "postgres");
    client.use_authority_key_identifier_extension = true;
    let client_key = KeyPair::generate()?;
    let client = client.signed_by(&client_key, &issuer)?;

    // The server may run as another user.
    let owner = fs::metadata(directory)?;
    for (file, text) in [
        ("ca.crt", root.pem()),
        ("server.crt", certificate.pem()),
        ("server.key", key.serialize_pem()),
        ("client.crt", client.pem()),
        ("client.key", client_key.serialize_pem()),
    ] {
        let path = directory.join(file);
        fs::write(&path, text)?;
        // A server refuses a key that others may read, and so does libpq.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
        if !file.starts_with("client") {
            chown(&path, Some(owner.uid()), Some(owner.gid()))?;
        }
    }
    Ok(())
}
