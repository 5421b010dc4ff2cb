//! Traces as a collector sees them, over a real socket.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span as Exported;
use opledger::telemetry::trace::{self, Error, Exporter, Handle, Settings, TraceParent};
use prost::Message;
use tokio::net::TcpListener;
use tracing::{Level, info, info_span, span};
use tracing_subscriber::layer::SubscriberExt;

const CALLER: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const LONG: Duration = Duration::from_secs(10);

#[tokio::test]
async fn a_requests_spans_join_the_callers_trace() {
    let collector = Collector::start().await;
    let (tracing, handle) = collector.traced();
    let request = info_span!("request", otel.kind = "server", operation.id = "acme:1");
    trace::continue_from(&request, &parent(CALLER));
    request.in_scope(|| {
        info!(operation.state = "running", "claimed");
        info_span!("settle").in_scope(|| {});
    });
    let ours = trace::current(&request).unwrap();
    drop((request, tracing));
    handle.shutdown(LONG).await;

    let spans = collector.spans();
    let (request, settle) = (&spans["request"], &spans["settle"]);
    assert_eq!(hex(&request.trace_id), parent(CALLER).trace_id().to_string());
    assert_eq!(hex(&request.parent_span_id), "00f067aa0ba902b7");
    assert_eq!(request.kind, 2, "server");
    assert_eq!(request.events[0].name, "claimed");
    assert!(request.end_time_unix_nano >= request.start_time_unix_nano);
    assert_eq!(settle.parent_span_id, request.span_id);
    assert_eq!(settle.trace_id, request.trace_id);
    let place = format!("00-{}-{}-01", hex(&request.trace_id), hex(&request.span_id));
    assert_eq!(ours.to_string(), place);
}

#[tokio::test]
async fn a_replays_span_is_linked_to_the_operations_trace() {
    let collector = Collector::start().await;
    let (tracing, handle) = collector.traced();
    let replay = info_span!("request");
    trace::link_to(&replay, &parent(CALLER));
    let begun = info_span!("later");
    let own = trace::current(&begun).unwrap();
    trace::link_to(&begun, &parent(CALLER));
    drop((replay, begun, tracing));
    handle.shutdown(LONG).await;

    let spans = collector.spans();
    for linked in [&spans["request"], &spans["later"]] {
        assert_eq!(hex(&linked.links[0].trace_id), "4bf92f3577b34da6a3ce929d0e0e4736");
        assert_eq!(hex(&linked.links[0].span_id), "00f067aa0ba902b7");
        assert!(linked.parent_span_id.is_empty());
        assert_ne!(linked.trace_id, linked.links[0].trace_id);
    }
    assert_eq!(own.trace_id().to_string(), hex(&spans["later"].trace_id));
}

#[tokio::test]
async fn a_caller_that_does_not_sample_is_not_exported_but_still_continued() {
    let collector = Collector::start().await;
    let (tracing, handle) = collector.traced();
    let request = info_span!("request");
    trace::continue_from(&request, &parent(&CALLER.replace("-01", "-00")));
    let ours = trace::current(&request).unwrap();
    drop((request, tracing));
    handle.shutdown(LONG).await;
    assert_eq!(ours.trace_id().to_string(), parent(CALLER).trace_id().to_string());
    assert!(ours.to_string().ends_with("-00"));
    assert!(collector.spans().is_empty());
}

#[tokio::test]
async fn the_collector_is_told_who_sends() {
    let collector = Collector::start().await;
    let (tracing, handle) = collector.traced();
    info_span!("request").in_scope(|| {});
    drop(tracing);
    handle.shutdown(LONG).await;

    let received = collector.received.lock().unwrap();
    let (path, headers, batch) = &received[0];
    assert_eq!(path, "/tenant/v1/traces");
    assert_eq!(headers["content-type"], "application/x-protobuf");
    assert_eq!(headers["x-key"], "a secret");
    let resource = batch.resource_spans[0].resource.as_ref().unwrap();
    let text = |key: &str| {
        let found = resource
            .attributes
            .iter()
            .find(|attribute| attribute.key == key)
            .unwrap();
        match found.value.as_ref().unwrap().value.as_ref().unwrap() {
            Value::StringValue(text) => text.clone(),
            other => panic!("{key} is {other:?}"),
        }
    };
    assert_eq!(text("service.name"), "opledger");
    assert_eq!(text("service.instance.id"), "instance-1");
    assert_eq!(text("service.version"), env!("CARGO_PKG_VERSION"));
}

#[tokio::test]
async fn spans_leave_by_themselves_and_a_refused_batch_is_sent_again() {
    let collector = Collector::refusing(1).await;
    let (_tracing, handle) = collector.traced();
    (0..600).for_each(|_| drop(info_span!("request")));
    let began = Instant::now();
    while collector.count() < 600 && began.elapsed() < LONG {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(collector.count(), 600);
    handle.shutdown(LONG).await;
    assert_eq!(collector.count(), 600);
}

#[tokio::test]
async fn a_collector_that_is_down_delays_nobody() {
    let down = {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        listener.local_addr().unwrap()
    };
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    for address in [down, silent.local_addr().unwrap()] {
        let (tracing, handle) = traced(&format!("http://{address}"));
        let mut slowest = Duration::ZERO;
        for _ in 0..50_000 {
            let each = Instant::now();
            drop(info_span!("request"));
            slowest = slowest.max(each.elapsed());
        }
        assert!(slowest < Duration::from_millis(250), "a span took {slowest:?}");
        drop(tracing);
        let stopping = Instant::now();
        handle.shutdown(Duration::from_millis(300)).await;
        assert!(
            stopping.elapsed() < Duration::from_secs(2),
            "stopping took {:?}",
            stopping.elapsed()
        );
    }
}

#[tokio::test]
async fn spans_after_the_end_are_dropped() {
    let collector = Collector::start().await;
    let (_tracing, handle) = collector.traced();
    handle.shutdown(LONG).await;
    drop(info_span!("late"));
    handle.shutdown(LONG).await;
    assert!(collector.spans().is_empty());
}

#[test]
fn without_an_exporter_nothing_is_done_or_allocated() {
    let _tracing = tracing::subscriber::set_default(tracing_subscriber::registry());
    let span = info_span!("request");
    let parent = parent(CALLER);
    let before = ALLOCATIONS.get();
    trace::continue_from(&span, &parent);
    trace::link_to(&span, &parent);
    assert_eq!(trace::current(&span), None);
    assert_eq!(ALLOCATIONS.get(), before);
}

#[test]
fn a_span_that_the_filter_left_out_is_nobodys() {
    let collector = Settings {
        endpoint: "http://127.0.0.1:9".into(),
        headers: None,
        instance: "1".into(),
    };
    let exporter = Exporter::start(&collector).unwrap();
    let quiet = tracing_subscriber::registry()
        .with(tracing_subscriber::EnvFilter::new("error"))
        .with(exporter.layer());
    let _tracing = tracing::subscriber::set_default(quiet);
    let span = span!(Level::DEBUG, "unseen");
    trace::continue_from(&span, &parent(CALLER));
    trace::link_to(&span, &parent(CALLER));
    assert_eq!(trace::current(&span), None);
}

#[test]
fn an_address_that_is_none_is_refused_at_the_start() {
    let settings = Settings {
        endpoint: "localhost:4318".into(),
        headers: None,
        instance: "1".into(),
    };
    assert!(matches!(Exporter::start(&settings), Err(Error::Endpoint { .. })));
    let settings = Settings {
        endpoint: "http://localhost:4318".into(),
        headers: Some("key".into()),
        ..settings
    };
    assert!(matches!(Exporter::start(&settings), Err(Error::Header { position: 1 })));
}

/// What a collector is, as far as we are concerned.
struct Collector {
    url: String,
    received: Received,
}

type Received = Arc<Mutex<Vec<(String, HeaderMap, ExportTraceServiceRequest)>>>;

impl Collector {
    async fn start() -> Self {
        Self::refusing(0).await
    }

    /// Answers the first few batches with 503, each on a connection of its own.
    async fn refusing(mut refusals: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/tenant/", listener.local_addr().unwrap());
        let received = Received::default();
        let store = received.clone();
        #[expect(clippy::disallowed_methods, reason = "ends with the test's runtime")]
        tokio::spawn(async move {
            loop {
                let (socket, _) = listener.accept().await.unwrap();
                let refuse = refusals > 0;
                refusals = refusals.saturating_sub(1);
                let store = store.clone();
                let answer = hyper::service::service_fn(move |request| {
                    let store = store.clone();
                    async move {
                        Ok::<_, Infallible>(if refuse {
                            refusal()
                        } else {
                            receive(request, &store).await
                        })
                    }
                });
                let mut http = hyper::server::conn::http1::Builder::new();
                let connection = http.keep_alive(!refuse).serve_connection(TokioIo::new(socket), answer);
                tokio::spawn(async move { drop(connection.await) });
            }
        });
        Self { url, received }
    }

    fn traced(&self) -> (tracing::subscriber::DefaultGuard, Handle) {
        traced(&self.url)
    }

    fn spans(&self) -> HashMap<String, Exported> {
        let received = self.received.lock().unwrap();
        let batches = received.iter().flat_map(|(_, _, batch)| &batch.resource_spans);
        let spans = batches
            .flat_map(|resource| &resource.scope_spans)
            .flat_map(|scope| &scope.spans);
        spans.map(|span| (span.name.clone(), span.clone())).collect()
    }

    fn count(&self) -> usize {
        let received = self.received.lock().unwrap();
        let batches = received.iter().flat_map(|(_, _, batch)| &batch.resource_spans);
        batches
            .flat_map(|resource| &resource.scope_spans)
            .map(|scope| scope.spans.len())
            .sum()
    }
}

async fn receive(request: Request<Incoming>, store: &Received) -> Response<Full<Bytes>> {
    let (head, body) = request.into_parts();
    let batch = ExportTraceServiceRequest::decode(body.collect().await.unwrap().to_bytes()).unwrap();
    store
        .lock()
        .unwrap()
        .push((head.uri.path().to_owned(), head.headers, batch));
    Response::new(Full::default())
}

fn refusal() -> Response<Full<Bytes>> {
    let mut refusal = Response::new(Full::default());
    *refusal.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    refusal
}

fn traced(url: &str) -> (tracing::subscriber::DefaultGuard, Handle) {
    let settings = Settings {
        endpoint: url.to_owned(),
        headers: Some("x-key=a%20secret".into()),
        instance: "instance-1".into(),
    };
    let exporter = Exporter::start(&settings).unwrap();
    let handle = exporter.handle();
    (
        tracing::subscriber::set_default(tracing_subscriber::registry().with(exporter.layer())),
        handle,
    )
}

fn parent(text: &str) -> TraceParent {
    text.parse().unwrap()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

/// Counts what each thread allocates.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: the system's allocator does the work; the count is a plain thread-local number.
#[expect(unsafe_code, reason = "the only way to count allocations")]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        unsafe { System.dealloc(pointer, layout) }
    }
}
