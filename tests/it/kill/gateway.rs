//! Between a caller and the ledger: keeps the ledger's answer back until the test lets it through.

use std::net::SocketAddr;

use bytes::BytesMut;
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};

/// For one connection. Dropped, it ends it.
pub struct Gateway {
    pub address: SocketAddr,
    answered: watch::Sender<bool>,
    open: watch::Sender<bool>,
    _end: DropGuard,
}

impl Gateway {
    pub async fn before(ledger: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (answered, open) = (watch::Sender::new(false), watch::Sender::new(false));
        let end = CancellationToken::new();
        let carrying = carry(listener, ledger, answered.clone(), open.clone());
        tokio::spawn(end.clone().run_until_cancelled_owned(carrying));
        Self {
            address,
            answered,
            open,
            _end: end.drop_guard(),
        }
    }

    /// Returns when the ledger has begun to answer.
    pub async fn answered(&self) {
        let _ = self.answered.subscribe().wait_for(|answered| *answered).await;
    }

    pub fn open(&self) {
        self.open.send_replace(true);
    }
}

async fn carry(
    listener: TcpListener,
    ledger: SocketAddr,
    answered: watch::Sender<bool>,
    open: watch::Sender<bool>,
) -> std::io::Result<()> {
    let (caller, _) = listener.accept().await?;
    let ledger = TcpStream::connect(ledger).await?;
    let (mut from_caller, mut to_caller) = caller.into_split();
    let (mut from_ledger, mut to_ledger) = ledger.into_split();
    let down = async move {
        let mut answer = BytesMut::new();
        while from_ledger.read_buf(&mut answer).await? > 0 {
            answered.send_replace(true);
            let _ = open.subscribe().wait_for(|open| *open).await;
            to_caller.write_all_buf(&mut answer).await?;
        }
        std::io::Result::Ok(())
    };
    tokio::select! {
        up = copy(&mut from_caller, &mut to_ledger) => up.map(drop),
        down = down => down,
    }
}
