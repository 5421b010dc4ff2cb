//! Traces: the context that a caller sends along, and our own spans on their way to a collector.
//!
//! [`TraceParent`] is pure. An [`Exporter`] exists only if a collector was configured; without one, everything here that
//! takes a span does nothing. Which spans there are is left to whoever opens them, and `tracestate` to the caller: we
//! neither read it nor pass it on.

mod collector;
mod queue;

use std::collections::HashMap;
use std::fmt::{self, Write};
use std::io;
use std::str::FromStr;
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::trace::{SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState, TracerProvider};
use opentelemetry::{Context, KeyValue};
use opentelemetry_otlp::{ExporterBuildError, Protocol, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider, SpanExporter};
use tokio_util::sync::CancellationToken;
use tracing::{Span, Subscriber};
use tracing_opentelemetry::OpenTelemetrySpanExt;
use tracing_subscriber::Layer;
use tracing_subscriber::registry::LookupSpan;

/// How long the collector may take over one batch, retries included, before the batch is given up.
const PATIENCE: Duration = Duration::from_secs(5);

/// Which span of which trace something belongs to: a `traceparent` header, W3C Trace Context level 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TraceParent {
    trace_id: [u8; 16],
    parent_id: [u8; 8],
    flags: u8,
}

/// A `traceparent` that is not one. The standard has us carry on as if none had been sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a W3C traceparent")]
pub struct Malformed;

/// Where the spans go, and as whose.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The collector's base URL, as in `OTEL_EXPORTER_OTLP_ENDPOINT`: spans go to `/v1/traces` below it.
    pub endpoint: String,
    /// Headers that the collector wants, as in `OTEL_EXPORTER_OTLP_HEADERS`: `name=value,name=value`, percent-encoded.
    pub headers: Option<String>,
    /// Tells this process from the others of its kind: `service.instance.id`.
    pub instance: String,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("\"{endpoint}\" is not a collector's address; try http://localhost:4318")]
    Endpoint { endpoint: String },
    // The header may be a credential: its place is named, not its text.
    #[error("the collector's header number {position} is not of the form name=value")]
    Header { position: usize },
    #[error("failed to load the certificates that the collector is checked against")]
    Certificates { source: io::Error },
    #[error("failed to set up the export of traces")]
    Setup {
        #[from]
        source: ExporterBuildError,
    },
    #[error("failed to start the thread that exports traces")]
    Thread { source: io::Error },
}

/// Hands finished spans to a thread of its own, which sends them. Whoever ends a span never waits: what the collector
/// does not take in time is counted, dropped and logged now and then.
#[derive(Debug)]
pub struct Exporter {
    tracer: SdkTracer,
    handle: Handle,
}

/// Ends the export when the process stops.
#[derive(Debug, Clone)]
pub struct Handle {
    stop: CancellationToken,
    stopped: CancellationToken,
}

/// Marks a subscriber that exports, so that the others can be told apart without allocating anything.
struct Exporting;

impl Exporter {
    pub fn start(settings: &Settings) -> Result<Self, Error> {
        let endpoint = collector::traces_url(&settings.endpoint).ok_or_else(|| Error::Endpoint {
            endpoint: settings.endpoint.clone(),
        })?;
        let (client, failure) =
            collector::client(&endpoint, PATIENCE).map_err(|source| Error::Certificates { source })?;
        let resource = resource(settings);
        let mut sender = opentelemetry_otlp::SpanExporter::builder()
            .with_http()
            .with_shared_http_client(client)
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(endpoint.to_string())
            .with_headers(headers(settings.headers.as_deref().unwrap_or_default())?)
            .with_timeout(PATIENCE)
            .build()?;
        sender.set_resource(&resource);
        let handle = Handle {
            stop: CancellationToken::new(),
            stopped: CancellationToken::new(),
        };
        let queue = queue::start(sender, failure, handle.clone()).map_err(|source| Error::Thread { source })?;
        let provider = SdkTracerProvider::builder()
            .with_resource(resource)
            .with_span_processor(queue)
            .build();
        Ok(Self {
            tracer: provider.tracer("opledger"),
            handle,
        })
    }

    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// What a subscriber needs to see the spans.
    pub fn layer<S>(self) -> impl Layer<S>
    where
        S: Subscriber + for<'a> LookupSpan<'a>,
    {
        // A span's parent is the tracing span it was opened in: nothing here looks at OpenTelemetry's own current context,
        // and keeping that up to date would cost every poll of a request. Threads and source lines say nothing at night.
        let spans = tracing_opentelemetry::layer()
            .with_tracer(self.tracer)
            .with_context_activation(false)
            .with_tracked_inactivity(false)
            .with_threads(false)
            .with_location(false);
        Exporting.and_then(spans)
    }
}

impl Handle {
    /// Sends what is queued, for at most so long. Spans that end later are dropped.
    pub async fn shutdown(&self, within: Duration) {
        self.stop.cancel();
        if tokio::time::timeout(within, self.stopped.cancelled()).await.is_err() {
            tracing::warn!("the collector did not take the last spans in time");
        }
    }
}

impl<S: Subscriber> Layer<S> for Exporting {}

/// Makes a request's span a child of its caller's. To be called before the span is entered or has children.
pub fn continue_from(span: &Span, parent: &TraceParent) {
    if is_exported(span) {
        // It fails if the span has begun, which is a mistake of ours that costs a link in a trace and no more.
        let begun = span.set_parent(Context::new().with_remote_span_context(parent.into()));
        debug_assert!(begun.is_ok(), "a span's parent is named before the span begins");
    }
}

/// Points from a replay's span to the trace in which the operation had its effect.
pub fn link_to(span: &Span, original: &TraceParent) {
    if is_exported(span) {
        span.add_link(original.into());
    }
}

/// The span's own place, for an operation whose caller sent none. From here on the span has begun.
pub fn current(span: &Span) -> Option<TraceParent> {
    if !is_exported(span) {
        return None;
    }
    let context = span.context();
    let span = context.span();
    let place = span.span_context();
    place.is_valid().then(|| TraceParent {
        trace_id: place.trace_id().to_bytes(),
        parent_id: place.span_id().to_bytes(),
        flags: place.trace_flags().to_u8(),
    })
}

fn is_exported(span: &Span) -> bool {
    span.with_subscriber(|(_, subscriber)| subscriber.downcast_ref::<Exporting>().is_some()) == Some(true)
}

fn resource(settings: &Settings) -> Resource {
    Resource::builder()
        .with_service_name("opledger")
        .with_attribute(KeyValue::new("service.instance.id", settings.instance.clone()))
        .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
        .build()
}

/// The values stay encoded: the client decodes them, and would drop a malformed header without a word.
fn headers(text: &str) -> Result<HashMap<String, String>, Error> {
    let entries = text.split(',').map(str::trim).filter(|entry| !entry.is_empty());
    entries
        .enumerate()
        .map(|(index, entry)| header(entry).ok_or(Error::Header { position: index + 1 }))
        .collect()
}

fn header(entry: &str) -> Option<(String, String)> {
    let (name, value) = entry.split_once('=')?;
    let name = HeaderName::from_str(name.trim()).ok()?;
    let value = HeaderValue::from_str(value.trim()).ok()?;
    Some((name.as_str().to_owned(), value.to_str().ok()?.to_owned()))
}

impl TraceParent {
    /// What a request says of its trace. Two answers are none.
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        let mut values = headers.get_all("traceparent").iter();
        match (values.next(), values.next()) {
            (Some(only), None) => only.to_str().ok()?.parse().ok(),
            (Some(_), Some(_)) | (None, _) => None,
        }
    }

    /// 32 hex digits, as logs and collectors show it.
    pub fn trace_id(&self) -> impl fmt::Display + use<> {
        Hex(self.trace_id)
    }
}

impl FromStr for TraceParent {
    type Err = Malformed;

    fn from_str(text: &str) -> Result<Self, Malformed> {
        let mut fields = text.splitn(5, '-');
        let [version] = hex(fields.next())?;
        let trace_id = hex(fields.next())?;
        let parent_id = hex(fields.next())?;
        let [flags] = hex(fields.next())?;
        // A later version may add fields behind a dash; this one ends here. Of a later version's flags only `sampled` is
        // known to mean the same.
        let flags = match (version, fields.next()) {
            (0, None) => flags,
            (1..=0xfe, _) => flags & 1,
            (0, Some(_)) | (0xff, _) => return Err(Malformed),
        };
        if trace_id == [0; 16] || parent_id == [0; 8] {
            return Err(Malformed);
        }
        Ok(Self {
            trace_id,
            parent_id,
            flags,
        })
    }
}

impl fmt::Display for TraceParent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "00-{}-{}-{}",
            Hex(self.trace_id),
            Hex(self.parent_id),
            Hex([self.flags])
        )
    }
}

impl From<&TraceParent> for SpanContext {
    fn from(parent: &TraceParent) -> Self {
        Self::new(
            TraceId::from_bytes(parent.trace_id),
            SpanId::from_bytes(parent.parent_id),
            TraceFlags::new(parent.flags),
            true,
            TraceState::NONE,
        )
    }
}

struct Hex<const N: usize>([u8; N]);

impl<const N: usize> fmt::Display for Hex<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| {
            f.write_char(char::from(DIGITS[usize::from(byte >> 4)]))?;
            f.write_char(char::from(DIGITS[usize::from(byte & 0xf)]))
        })
    }
}

const DIGITS: &[u8; 16] = b"0123456789abcdef";

/// The field's bytes, if it has exactly so many. Capital letters are refused, as the standard says.
fn hex<const N: usize>(field: Option<&str>) -> Result<[u8; N], Malformed> {
    let (pairs, rest) = field.ok_or(Malformed)?.as_bytes().as_chunks::<2>();
    let pairs: &[[u8; 2]; N] = pairs.try_into().map_err(|_| Malformed)?;
    if !rest.is_empty() {
        return Err(Malformed);
    }
    let mut bytes = [0; N];
    for (byte, [high, low]) in bytes.iter_mut().zip(pairs) {
        *byte = digit(*high)? << 4 | digit(*low)?;
    }
    Ok(bytes)
}

fn digit(character: u8) -> Result<u8, Malformed> {
    match character {
        b'0'..=b'9' => Ok(character - b'0'),
        b'a'..=b'f' => Ok(character - b'a' + 10),
        _ => Err(Malformed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_traceparent_reads_back_as_it_was_written() {
        let parent: TraceParent = EXAMPLE.parse().unwrap();
        assert_eq!(parent.to_string(), EXAMPLE);
        assert_eq!(parent.trace_id().to_string(), "4bf92f3577b34da6a3ce929d0e0e4736");
        let random = EXAMPLE.replace("-01", "-03");
        assert_eq!(random.parse::<TraceParent>().unwrap().to_string(), random);
    }

    #[test]
    fn a_later_version_is_read_as_far_as_this_one_goes() {
        for later in [
            "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-ff-what-the-future-says",
            "fe-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-",
        ] {
            assert_eq!(later.parse(), EXAMPLE.parse::<TraceParent>(), "{later}");
        }
    }

    #[test]
    fn what_is_not_a_traceparent_is_refused() {
        for text in [
            "",
            "00",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-1",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-011",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-",
            "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01more",
            "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "0-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e473g-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e473-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e47-3600f067aa0ba902b7-01",
            " 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
            "00_4bf92f3577b34da6a3ce929d0e0e4736_00f067aa0ba902b7_01",
            "00-4bf92f3577b34da6a3ce929d0e0e473é-00f067aa0ba902b7-01",
        ] {
            assert_eq!(text.parse::<TraceParent>(), Err(Malformed), "{text}");
        }
    }

    #[test]
    fn two_traceparents_are_none() {
        let mut headers = HeaderMap::new();
        assert_eq!(TraceParent::of(&headers), None);
        headers.append("traceparent", HeaderValue::from_static(EXAMPLE));
        assert_eq!(TraceParent::of(&headers), EXAMPLE.parse().ok());
        headers.append("traceparent", HeaderValue::from_static(EXAMPLE));
        assert_eq!(TraceParent::of(&headers), None);
    }

    #[test]
    fn the_collectors_headers_are_read_as_the_standard_variable_has_them() {
        let read = headers(" api-key=se%20cret== , X-Tenant=a,").unwrap();
        assert_eq!(read["api-key"], "se%20cret==");
        assert_eq!(read["x-tenant"], "a");
        assert!(headers("").unwrap().is_empty());
        let refused = headers("a=b,sesame").unwrap_err().to_string();
        assert_eq!(refused, "the collector's header number 2 is not of the form name=value");
    }
}
