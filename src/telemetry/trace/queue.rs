//! Finished spans between the request that ended them and the collector: a bounded queue, and a thread that empties it.
//!
//! The thread has a runtime of its own, so a slow collector takes no turn from the requests, and a busy service none from
//! the export. It looks at the queue on a beat rather than at every span: waking it costs the request a system call.

use std::io;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use opentelemetry::Context;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Span, SpanData, SpanExporter, SpanProcessor};
use tokio::sync::Notify;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio_util::sync::CancellationToken;

use super::Handle;
use super::collector::LastFailure;

/// Spans that may wait: some megabytes, and some tenths of a second under full load.
const CAPACITY: usize = 8192;
const BATCH: usize = 512;
const BEAT: Duration = Duration::from_secs(1);
/// Losses are logged no oftener than this.
const BETWEEN_LINES: Duration = Duration::from_secs(60);

/// The requests' end.
#[derive(Debug)]
pub(super) struct Queue {
    spans: Sender<SpanData>,
    signals: Arc<Signals>,
    stop: CancellationToken,
}

#[derive(Debug, Default)]
struct Signals {
    batch_is_full: Notify,
    dropped: AtomicUsize,
}

/// The thread's end.
struct Outlet<E> {
    spans: Receiver<SpanData>,
    signals: Arc<Signals>,
    stop: CancellationToken,
    exporter: E,
    failure: LastFailure,
    losses: Losses,
}

#[derive(Default)]
struct Losses {
    spans: usize,
    reason: Option<String>,
    logged_at: Option<Instant>,
}

pub(super) fn start(exporter: impl SpanExporter + 'static, failure: LastFailure, handle: Handle) -> io::Result<Queue> {
    let (spans, waiting) = channel(CAPACITY);
    let signals = Arc::new(Signals::default());
    let queue = Queue {
        spans,
        signals: signals.clone(),
        stop: handle.stop.clone(),
    };
    let outlet = Outlet {
        spans: waiting,
        signals,
        stop: handle.stop,
        exporter,
        failure,
        losses: Losses::default(),
    };
    let stopped = handle.stopped.drop_guard();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::Builder::new().name("traces".to_owned()).spawn(move || {
        // Dropped after the last batch, or by a panic: nobody waits for a thread that is gone.
        let _stopped = stopped;
        runtime.block_on(outlet.run());
        // A name that is still being looked up must not hold the process.
        runtime.shutdown_background();
    })?;
    Ok(queue)
}

impl SpanProcessor for Queue {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        if !span.span_context.is_sampled() {
            return;
        }
        match self.spans.try_send(span) {
            Ok(()) if CAPACITY - self.spans.capacity() >= BATCH => self.signals.batch_is_full.notify_one(),
            Ok(()) | Err(TrySendError::Closed(_)) => {}
            Err(TrySendError::Full(_)) => {
                self.signals.dropped.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.signals.batch_is_full.notify_one();
        Ok(())
    }

    /// Called when the last tracer is dropped; whoever wants to wait has the handle.
    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        self.stop.cancel();
        Ok(())
    }
}

impl<E: SpanExporter> Outlet<E> {
    async fn run(mut self) {
        while !self.beat().await {
            self.send_waiting().await;
            self.losses.log_now_and_then();
        }
        self.spans.close();
        self.send_waiting().await;
        self.losses.add(self.spans.len(), "the process is stopping");
        self.losses.log();
    }

    /// Waits until there is a reason to look, and says whether it is the last one.
    async fn beat(&self) -> bool {
        tokio::select! {
            () = self.stop.cancelled() => true,
            () = self.signals.batch_is_full.notified() => false,
            () = tokio::time::sleep(BEAT) => false,
        }
    }

    /// Sends the spans that wait now. Those that come meanwhile are for the next beat, else a busy service would have
    /// them leave by twos and threes. A collector that fails is left alone until the next beat too.
    async fn send_waiting(&mut self) {
        let mut left = self.spans.len();
        let mut batch = Vec::new();
        while left > 0 {
            let taken = self.spans.recv_many(&mut batch, left.min(BATCH)).await;
            left -= taken;
            if let Err(error) = self.exporter.export(mem::take(&mut batch)).await {
                let reason = self.failure.take().unwrap_or_else(|| error.to_string());
                self.losses.add(taken, &reason);
                break;
            }
        }
        self.losses
            .add(self.signals.dropped.swap(0, Ordering::Relaxed), "the queue is full");
    }
}

impl Losses {
    fn add(&mut self, spans: usize, reason: &str) {
        self.spans += spans;
        if spans > 0 && self.reason.is_none() {
            self.reason = Some(reason.to_owned());
        }
    }

    fn log_now_and_then(&mut self) {
        if self.logged_at.is_none_or(|at| at.elapsed() >= BETWEEN_LINES) {
            self.log();
        }
    }

    fn log(&mut self) {
        if let Some(reason) = self.reason.take() {
            let spans = mem::take(&mut self.spans);
            tracing::warn!(spans, reason, "spans were lost on their way to the collector");
            self.logged_at = Some(Instant::now());
        }
    }
}
