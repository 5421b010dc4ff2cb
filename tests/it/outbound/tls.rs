//! TLS: whom we trust, who we are, and that nothing was sent where that does not fit.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use opledger::outbound::downstream::{Downstream, Identity, Tls};
use opledger::outbound::send::Outbound;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::version::{TLS12, TLS13};
use tokio_rustls::rustls::{RootCertStore, ServerConfig, SupportedProtocolVersion};

use super::server::Server;
use super::{Ended, SHORT, attempt, downstream, post};

/// An authority that both sides may be told to trust.
pub struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate of an authority, with its key.
pub struct Issued {
    chain: String,
    key: KeyPair,
    certificate: rcgen::Certificate,
}

impl Authority {
    pub fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub fn pem(&self) -> Arc<[u8]> {
        self.0.pem().into_bytes().into()
    }

    pub fn issue(&self, name: &str) -> Issued {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new([name.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        Issued {
            chain: certificate.pem(),
            key,
            certificate,
        }
    }

    fn roots(&self) -> RootCertStore {
        let mut roots = RootCertStore::empty();
        roots.add(self.0.der().clone()).unwrap();
        roots
    }
}

impl Issued {
    fn identity(&self) -> Identity {
        Identity {
            chain: self.chain.clone().into_bytes().into(),
            key: self.key.serialize_pem().into_bytes().into(),
        }
    }
}

/// A server's settings: its certificate, and whose clients it takes.
pub fn settings(
    issued: &Issued,
    clients: Option<&Authority>,
    version: &'static SupportedProtocolVersion,
) -> ServerConfig {
    let provider = Arc::new(ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[version])
        .unwrap();
    let builder = match clients {
        Some(authority) => {
            let roots = Arc::new(authority.roots());
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider).build();
            builder.with_client_cert_verifier(verifier.unwrap())
        }
        None => builder.with_no_client_auth(),
    };
    let key = PrivateKeyDer::try_from(issued.key.serialize_der()).unwrap();
    builder
        .with_single_cert(vec![issued.certificate.der().clone()], key)
        .unwrap()
}

/// Answers one request a connection, and counts those it has read. `cut` ends without the alert that closes TLS.
async fn secure_server(settings: ServerConfig, said: &'static str, cut: bool) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let requests = Arc::new(AtomicUsize::new(0));
    let counted = requests.clone();
    let acceptor = TlsAcceptor::from(Arc::new(settings));
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let (acceptor, counted) = (acceptor.clone(), counted.clone());
            tokio::spawn(async move {
                let Ok(mut stream) = acceptor.accept(stream).await else {
                    return;
                };
                let mut bytes = [0; 4_096];
                while stream.read(&mut bytes).await.is_ok_and(|count| count > 0) {
                    counted.fetch_add(1, Ordering::SeqCst);
                    stream.write_all(said.as_bytes()).await.unwrap();
                    stream.flush().await.unwrap();
                    if cut {
                        return;
                    }
                    if !said.contains("Content-Length") {
                        let _ = stream.shutdown().await;
                        return;
                    }
                }
            });
        }
    });
    (address, requests)
}

fn secure(address: SocketAddr, tls: Tls) -> Arc<Downstream> {
    let mut downstream = downstream(&format!("https://localhost:{}", address.port()));
    downstream.tls = tls;
    Arc::new(downstream)
}

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

#[tokio::test]
async fn a_peer_of_an_authority_that_we_name_is_trusted_and_others_get_nothing() {
    let (ours, other) = (Authority::new(), Authority::new());
    let (address, requests) = secure_server(settings(&ours.issue("localhost"), None, &TLS13), OK, false).await;
    let trusting = |authority: &Authority| Tls {
        authorities: Some(authority.pem()),
        ..Tls::default()
    };
    let outbound = Outbound::default();
    let trusted = secure(address, trusting(&ours));
    for _ in 0..3 {
        assert_eq!(attempt(&outbound, &trusted, post()).await.name(), "answered 200");
        assert!(outbound.has_idle(&trusted));
    }
    for tls in [trusting(&other), Tls::default()] {
        let ended = attempt(&outbound, &secure(address, tls), post()).await;
        assert_eq!(ended.name(), "not_sent tls", "{ended:?}");
    }
    let (misnamed, _) = secure_server(settings(&ours.issue("elsewhere"), None, &TLS13), OK, false).await;
    let ended = attempt(&outbound, &secure(misnamed, trusting(&ours)), post()).await;
    assert_eq!(ended.name(), "not_sent tls", "{ended:?}");
    assert_eq!(requests.load(Ordering::SeqCst), 3);
}

#[tokio::test]
async fn a_peer_without_tls_gets_no_request() {
    let server = Server::keeping(OK).await;
    let plain = server.address;
    let ended = tokio::time::timeout(
        super::CONNECT * 2,
        attempt(&Outbound::default(), &secure(plain, Tls::default()), post()),
    )
    .await
    .unwrap();
    assert_eq!(ended.name(), "not_sent tls", "{ended:?}");
    assert_eq!(server.requests().len(), 0);
}

#[tokio::test]
async fn a_peer_that_refuses_our_certificate_has_not_looked_at_the_request() {
    let (authority, other) = (Authority::new(), Authority::new());
    for version in [&TLS13, &TLS12] {
        let settings = settings(&authority.issue("localhost"), Some(&authority), version);
        let (address, requests) = secure_server(settings, OK, false).await;
        let as_client = |client: Option<Identity>| {
            let tls = Tls {
                authorities: Some(authority.pem()),
                client,
                http2: false,
            };
            secure(address, tls)
        };
        let outbound = Outbound::default();
        let known = as_client(Some(authority.issue("us").identity()));
        assert_eq!(attempt(&outbound, &known, post()).await.name(), "answered 200");
        for unknown in [None, Some(other.issue("us").identity())] {
            let ended = attempt(&outbound, &as_client(unknown), post()).await;
            assert_eq!(ended.name(), "not_sent tls", "{version:?} {ended:?}");
        }
        assert_eq!(requests.load(Ordering::SeqCst), 1);
    }
}

#[tokio::test]
async fn an_answer_without_length_is_complete_only_when_tls_ends_in_order() {
    let authority = Authority::new();
    for (cut, expected) in [(false, "answered 200"), (true, "unknown body")] {
        let settings = settings(&authority.issue("localhost"), None, &TLS13);
        let (address, _) = secure_server(settings, "HTTP/1.1 200 OK\r\n\r\n{}", cut).await;
        let tls = Tls {
            authorities: Some(authority.pem()),
            ..Tls::default()
        };
        let ended = attempt(&Outbound::default(), &secure(address, tls), post()).await;
        assert_eq!(ended.name(), expected, "{ended:?}");
    }
}

#[tokio::test]
async fn what_a_peer_says_unasked_within_tls_is_no_answer_either() {
    let authority = Authority::new();
    let acceptor = TlsAcceptor::from(Arc::new(settings(&authority.issue("localhost"), None, &TLS13)));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (speak, told) = tokio::sync::watch::channel(false);
    let (said, mut heard) = tokio::sync::mpsc::channel(1);
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let (acceptor, mut told, said) = (acceptor.clone(), told.clone(), said.clone());
            tokio::spawn(async move {
                let mut stream = acceptor.accept(stream).await.unwrap();
                let _ = stream.read(&mut [0; 4_096]).await.unwrap();
                stream.write_all(OK.as_bytes()).await.unwrap();
                told.wait_for(|speak| *speak).await.unwrap();
                stream.write_all(b"H").await.unwrap();
                said.send(()).await.unwrap();
                let _ = stream.read(&mut [0; 4_096]).await;
            });
        }
    });
    let tls = Tls {
        authorities: Some(authority.pem()),
        ..Tls::default()
    };
    let (outbound, downstream) = (Outbound::default(), secure(address, tls));
    assert_eq!(attempt(&outbound, &downstream, post()).await.name(), "answered 200");
    assert!(outbound.has_idle(&downstream));
    speak.send(true).unwrap();
    heard.recv().await.unwrap();
    // Until the runtime has heard of it, too.
    tokio::time::sleep(SHORT / 10).await;
    // Asked twice: what was said is taken in by the first look, and not forgotten by the second.
    assert!(!outbound.has_idle(&downstream) && !outbound.has_idle(&downstream));
    match attempt(&outbound, &downstream, post()).await {
        Ended::Answered { body, .. } => assert_eq!(body, b"ok"),
        other => panic!("{other:?}"),
    }
}
