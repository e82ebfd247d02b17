//! Asynchronous connections with TLS.

use std::error::Error;
use std::sync::Arc;

use diesel::result::{ConnectionError, ConnectionResult};
use diesel_async::AsyncPgConnection;
use rustls::crypto::ring;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use tokio_postgres::Config;
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::endpoint::Endpoint;

/// Opens a connection to a server whose certificate was issued by the endpoint's authority, `sslrootcert`.
pub(super) async fn establish(endpoint: Endpoint) -> ConnectionResult<AsyncPgConnection> {
    let failed = |error: Box<dyn Error + Send + Sync>| {
        // The reason is in the source of tokio-postgres's error.
        let source = error.source().map(|source| format!(": {source}"));
        ConnectionError::BadConnection(format!("{error}{}", source.unwrap_or_default()))
    };
    let (config, tls) = settings(endpoint).map_err(failed)?;
    let connected = config.connect(tls).await;
    let (client, connection) = connected.map_err(|error| failed(error.into()))?;
    AsyncPgConnection::try_from_client_and_connection(client, connection).await
}

fn settings(
    endpoint: Endpoint,
) -> Result<(Config, MakeRustlsConnect), Box<dyn Error + Send + Sync>> {
    // tokio-postgres supports neither `sslrootcert` nor the modes `verify-ca` and `verify-full`.
    let (endpoint, authority) = endpoint.with("sslmode", "require").without("sslrootcert");
    let authority = authority.ok_or("the URL does not name the server's authority: sslrootcert")?;
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(authority)? {
        roots.add(certificate?)?;
    }
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok((endpoint.url().parse()?, MakeRustlsConnect::new(config)))
}
