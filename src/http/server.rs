//! Connections: accepting, bounding, and closing them in order.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::wire::Wire;
use crate::config::Limits;

/// Serves until told to stop; then stops accepting, and waits up to `drain` for requests under way. Returns how many
/// connections were cut off.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    limits: Limits,
    connections: TaskTracker,
    stop: CancellationToken,
) -> usize {
    let graceful = GracefulShutdown::new();
    let places = Arc::new(Semaphore::new(limits.max_connections));
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(limits.header_timeout)
        // Somewhat above the documented limits, so that what is a little too large gets an answer in our own shape.
        .max_buf_size(limits.max_header_bytes * 2 + limits.max_uri_bytes * 8)
        .max_headers(limits.max_headers * 2)
        .half_close(false);
    loop {
        let stream = tokio::select! {
            accepted = accept(&listener, &places) => accepted,
            () = stop.cancelled() => break,
        };
        let Some((stream, place)) = stream else { continue };
        let wire = Wire::new(stream, place, connections.clone());
        let connection = http.serve_connection(TokioIo::new(wire), TowerToHyperService::new(router.clone()));
        // On the heap: the task would hold it twice, before and after its first step.
        let watched = Box::pin(graceful.watch(connection));
        connections.spawn(async move {
            if let Err(error) = watched.await {
                tracing::debug!(error = %error, "connection ended");
            }
        });
    }
    drop(listener);
    let open = graceful.count();
    match tokio::time::timeout(limits.drain, graceful.shutdown()).await {
        Ok(()) => 0,
        Err(_) => open,
    }
}

async fn accept(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
) -> Option<(tokio::net::TcpStream, tokio::sync::OwnedSemaphorePermit)> {
    // Never closed.
    let place = places.clone().acquire_owned().await.ok()?;
    match listener.accept().await {
        Ok((stream, _)) => {
            // Small answers must not wait for Nagle's algorithm.
            let _ = stream.set_nodelay(true);
            Some((stream, place))
        }
        Err(error) => {
            // Out of descriptors, mostly: waiting is what helps.
            tracing::warn!(error = %error, "cannot accept a connection");
            tokio::time::sleep(Duration::from_millis(50)).await;
            None
        }
    }
}
