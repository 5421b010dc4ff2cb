//! TLS towards downstreams: whom we trust, and who we are.

use std::error::Error;
use std::io;
use std::sync::{Arc, LazyLock};

use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, AlertDescription, ClientConfig, RootCertStore};

use super::downstream::Tls;

#[derive(Debug, thiserror::Error)]
pub enum InvalidTls {
    #[error("the file of authorities is no PEM with certificates: {0}")]
    Authorities(String),
    #[error("the file of the client's certificate is no PEM with certificates: {0}")]
    Chain(String),
    #[error("the file of the client's key is no PEM with a private key: {0}")]
    Key(pem::Error),
    #[error("certificate and key of the client do not fit each other: {0}")]
    Client(rustls::Error),
    #[error("this machine has no certificates of authorities; name some with ca_file")]
    NoRoots,
    #[error("TLS cannot be set up: {0}")]
    Provider(rustls::Error),
}

/// The system's, read once.
static SYSTEM: LazyLock<Arc<RootCertStore>> = LazyLock::new(|| {
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    Arc::new(roots)
});

/// Whether these settings can be used; the system's authorities are not looked at.
pub fn check(tls: &Tls) -> Result<(), InvalidTls> {
    let roots = match &tls.authorities {
        Some(pem) => authorities(pem)?,
        None => Arc::new(RootCertStore::empty()),
    };
    with_roots(tls, roots).map(drop)
}

pub(super) fn client_config(tls: &Tls) -> Result<Arc<ClientConfig>, InvalidTls> {
    let roots = match &tls.authorities {
        Some(pem) => authorities(pem)?,
        None if SYSTEM.is_empty() => return Err(InvalidTls::NoRoots),
        None => SYSTEM.clone(),
    };
    with_roots(tls, roots).map(Arc::new)
}

fn with_roots(tls: &Tls, roots: Arc<RootCertStore>) -> Result<ClientConfig, InvalidTls> {
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(InvalidTls::Provider)?
        .with_root_certificates(roots);
    let mut config = match &tls.client {
        Some(identity) => {
            let chain = certificates(&identity.chain).map_err(InvalidTls::Chain)?;
            let key = PrivateKeyDer::from_pem_slice(&identity.key).map_err(InvalidTls::Key)?;
            builder.with_client_auth_cert(chain, key).map_err(InvalidTls::Client)?
        }
        None => builder.with_no_client_auth(),
    };
    // Early data could be replayed by whoever records it: one attempt would be two sends.
    config.enable_early_data = false;
    config.alpn_protocols = if tls.http2 {
        vec![b"h2".to_vec(), b"http/1.1".to_vec()]
    } else {
        vec![b"http/1.1".to_vec()]
    };
    Ok(config)
}

fn authorities(pem: &[u8]) -> Result<Arc<RootCertStore>, InvalidTls> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(pem).map_err(InvalidTls::Authorities)? {
        roots
            .add(certificate)
            .map_err(|error| InvalidTls::Authorities(error.to_string()))?;
    }
    Ok(Arc::new(roots))
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let found: Vec<_> = CertificateDer::pem_slice_iter(pem)
        .collect::<Result<_, _>>()
        .map_err(|error| error.to_string())?;
    if found.is_empty() {
        return Err("there is none in it".to_owned());
    }
    Ok(found)
}

/// Whether the peer ended the handshake because of our certificate. In TLS 1.3 it can say so only after we believe the
/// handshake to be over; it reads nothing of a request before it is content with us.
pub(super) fn refused_us(error: &(dyn Error + 'static)) -> Option<AlertDescription> {
    let chain = std::iter::successors(Some(error), |&error| error.source());
    chain.into_iter().find_map(|error| {
        let inner = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        let inner: Option<&(dyn Error + 'static)> = inner.map(|inner| inner as _);
        match inner.unwrap_or(error).downcast_ref::<rustls::Error>() {
            Some(rustls::Error::AlertReceived(alert)) if about_our_certificate(*alert) => Some(*alert),
            Some(_) | None => None,
        }
    })
}

fn about_our_certificate(alert: AlertDescription) -> bool {
    [
        AlertDescription::BadCertificate,
        AlertDescription::UnsupportedCertificate,
        AlertDescription::CertificateRevoked,
        AlertDescription::CertificateExpired,
        AlertDescription::CertificateUnknown,
        AlertDescription::UnknownCA,
        AlertDescription::AccessDenied,
        AlertDescription::DecryptError,
        AlertDescription::CertificateRequired,
    ]
    .contains(&alert)
}
