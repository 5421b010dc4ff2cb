//! From a name to a connection that can take a request. Whatever fails here has sent nothing.

use std::error::Error;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpStream, lookup_host};
use tokio::time::{Instant, timeout_at};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_util::task::TaskTracker;

use super::downstream::Base;
use super::http1::Http1;
use super::http2::Http2;
use super::send::NotSent;
use super::socket::{Meter, Socket, Stream};

/// Where to and how, for every connection to one downstream.
pub struct Dialler {
    pub base: Base,
    /// For https; what is wrong with the settings is told when they are used.
    pub tls: Option<Result<Arc<ClientConfig>, String>>,
    pub http2: bool,
    pub within: Duration,
    pub tasks: TaskTracker,
}

pub enum Connection {
    One(Box<Http1>),
    Shared(Arc<Http2>),
}

impl Dialler {
    pub async fn dial(&self) -> Result<Connection, NotSent> {
        let deadline = Instant::now() + self.within;
        let addresses = self.within(deadline, "dns", self.look_up()).await?;
        let stream = self.reach(&addresses, deadline).await?;
        // A request must not wait for Nagle's algorithm.
        let _ = stream.set_nodelay(true);
        let (socket, meter) = Socket::new(stream);
        let (stream, http2) = match &self.tls {
            Some(config) => self.within(deadline, "tls", self.secure(config, socket)).await?,
            None => (Stream::Plain(socket), self.http2),
        };
        self.speak(stream, meter, http2, deadline).await
    }

    async fn look_up(&self) -> io::Result<Vec<SocketAddr>> {
        let found: Vec<_> = lookup_host((self.base.host(), self.base.port())).await?.collect();
        if found.is_empty() {
            return Err(io::Error::new(io::ErrorKind::NotFound, "the name has no addresses"));
        }
        Ok(found)
    }

    /// The first address that answers; each gets its part of the time that is left.
    async fn reach(&self, addresses: &[SocketAddr], deadline: Instant) -> Result<TcpStream, NotSent> {
        let mut last = NotSent::new("connect", "no address");
        for (at, address) in addresses.iter().enumerate() {
            let left = deadline.saturating_duration_since(Instant::now());
            let others = u32::try_from(addresses.len() - at).unwrap_or(u32::MAX);
            let share = Instant::now() + left / others;
            match self.within(share, "connect", TcpStream::connect(address)).await {
                Ok(stream) => return Ok(stream),
                Err(error) => last = NotSent::new("connect", format!("{address}: {}", error.cause)),
            }
        }
        Err(last)
    }

    async fn secure(&self, config: &Result<Arc<ClientConfig>, String>, socket: Socket) -> io::Result<(Stream, bool)> {
        let config = config.clone().map_err(io::Error::other)?;
        let name = ServerName::try_from(self.base.host().to_owned()).map_err(io::Error::other)?;
        let stream = TlsConnector::from(config).connect(name, socket).await?;
        let http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
        Ok((Stream::Tls(Box::new(stream)), http2))
    }

    async fn speak(
        &self,
        stream: Stream,
        meter: Arc<Meter>,
        http2: bool,
        deadline: Instant,
    ) -> Result<Connection, NotSent> {
        if !http2 {
            return Ok(Connection::One(Box::new(Http1::new(stream, meter))));
        }
        let handshake = Http2::new(stream, meter, &self.tasks);
        let connection = self.within(deadline, "connect", handshake).await?;
        Ok(Connection::Shared(Arc::new(connection)))
    }

    async fn within<T, E: Error + 'static>(
        &self,
        deadline: Instant,
        stage: &'static str,
        step: impl Future<Output = Result<T, E>>,
    ) -> Result<T, NotSent> {
        match timeout_at(deadline, step).await {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(error)) => Err(NotSent::new(stage, chain(&error))),
            Err(_) => Err(NotSent::new(stage, format!("not done within {:?}", self.within))),
        }
    }
}

/// An error with what caused it, in one line.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let said = error.to_string();
        // Wrappers often print what they wrap.
        if !text.ends_with(&said) {
            text = format!("{text}: {said}");
        }
        cause = error.source();
    }
    text
}
