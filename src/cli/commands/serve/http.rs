//! The HTTP server: one thread that reads requests, hands prompts to the engine and writes responses, whole or as events.

use ferrotron::models::stop::StopFlag;
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::{Error, Result};
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::{Value, json};
use std::convert::Infallible;
use std::net::TcpListener;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::net::TcpStream;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;

use super::api::{ApiError, Completion, CompletionRequest, Limits, ResponseHead, response};
use super::counted::{CountedStream, Written};
use super::engine::{Client, Job};
use super::stream::StreamingClient;

/// Bytes of the largest request that is read.
const LARGEST_BODY: usize = 8 << 20;

/// Bytes beyond which the rest of a request is not even skipped.
const LARGEST_SKIPPED: usize = 64 << 20;

/// Time in which the next piece of a request must arrive.
const TO_READ: Duration = Duration::from_secs(30);

/// Time between two looks at a connection when the server ends. A response that is made must go on being written.
const TO_WRITE: Duration = Duration::from_secs(1);

/// Time after which a client that takes no byte of a response that is being made is given up when the server ends.
const TO_TAKE: Duration = Duration::from_secs(10);

/// Time between two looks at the request to stop.
const POLL: Duration = Duration::from_millis(50);

/// State that the handlers of all connections share.
pub struct Service {
    pub tokenizer: Arc<Tokenizer>,
    pub vocab_size: usize,
    pub longest: usize,
    /// The name of the model in responses.
    pub model: String,
    pub jobs: Mutex<Sender<Job>>,
    pub count: AtomicU64,
    /// Tokens by which texts were continued.
    pub added_tokens: Arc<AtomicU64>,
}

/// Serves connections until `stop` is set, and then those requests that are already there.
///
/// # Errors
/// A listener that the runtime refuses.
pub fn serve(listener: TcpListener, service: Service, stop: &StopFlag) -> Result<()> {
    let failed = |error: std::io::Error| Error::io("serve", error.to_string());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(failed)?.block_on(async {
        listener.set_nonblocking(true).map_err(failed)?;
        let listener = tokio::net::TcpListener::from_std(listener).map_err(failed)?;
        let service = Arc::new(service);
        let (ended, ends) = watch::channel(());
        let mut connections = JoinSet::new();
        while !stop.is_set() {
            match tokio::time::timeout(POLL, listener.accept()).await {
                Err(_) => {}
                Ok(Ok((stream, _))) => {
                    let (service, ends) = (service.clone(), ends.clone());
                    connections.spawn(connection(stream, service, ends));
                }
                // Too many are open, say: some will end.
                Ok(Err(_)) => tokio::time::sleep(POLL).await,
            }
            while connections.try_join_next().is_some() {}
        }
        drop(listener);
        drop(ended);
        while connections.join_next().await.is_some() {}
        Ok(())
    })
}

/// Answers the requests of a connection. When `ends` changes, one that is being answered is the last; without one the
/// connection is closed.
async fn connection(stream: TcpStream, service: Arc<Service>, mut ends: watch::Receiver<()>) {
    let is_busy = &Arc::new(AtomicBool::new(false));
    let service = &service;
    let answer = service_fn(move |request| async move {
        is_busy.store(true, Relaxed);
        answer(service, request, Busy(is_busy.clone())).await
    });
    let written = Arc::new(Written::default());
    let stream = CountedStream { stream, written: written.clone() };
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .serve_connection(TokioIo::new(stream), answer);
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        _ = connection.as_mut() => return,
        _ = ends.changed() => connection.as_mut().graceful_shutdown(),
    }
    let (mut bytes, mut refused) = (written.bytes(), Duration::ZERO);
    // A client that is gone needs no answer.
    while tokio::time::timeout(TO_WRITE, connection.as_mut()).await.is_err() {
        let now = written.bytes();
        let goes_on = now != bytes;
        bytes = now;
        refused = if goes_on || !written.waits() { Duration::ZERO } else { refused + TO_WRITE };
        if refused >= TO_TAKE || !(goes_on || is_busy.load(Relaxed)) {
            return;
        }
    }
}

/// Marks a connection as busy until the response is made, whole or up to its last event.
struct Busy(Arc<AtomicBool>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.store(false, Relaxed);
    }
}

/// A response that is made.
enum Answer {
    Whole(Value),
    /// Its events, as they come.
    Events(UnboundedReceiver<Bytes>),
}

/// The body of a response.
enum ResponseBody {
    Whole(Full<Bytes>),
    Events(UnboundedReceiver<Bytes>, #[expect(dead_code, reason = "ends with the events")] Busy),
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context,
    ) -> Poll<Option<std::result::Result<Frame<Bytes>, Infallible>>> {
        match &mut *self {
            ResponseBody::Whole(body) => Pin::new(body).poll_frame(context),
            ResponseBody::Events(events, _) => {
                events.poll_recv(context).map(|event| event.map(|event| Ok(Frame::data(event))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, ResponseBody::Whole(body) if body.is_end_stream())
    }

    /// The length of a whole response, for its header.
    fn size_hint(&self) -> SizeHint {
        match self {
            ResponseBody::Whole(body) => body.size_hint(),
            ResponseBody::Events(..) => SizeHint::default(),
        }
    }
}

async fn answer(
    service: &Service,
    request: Request<Incoming>,
    busy: Busy,
) -> std::result::Result<Response<ResponseBody>, Infallible> {
    let whole = |value: Value| ResponseBody::Whole(Full::new(Bytes::from(value.to_string())));
    let (status, kind, body) = match route(service, request).await {
        Ok(Answer::Whole(value)) => (200, "application/json", whole(value)),
        Ok(Answer::Events(events)) => {
            (200, "text/event-stream", ResponseBody::Events(events, busy))
        }
        Err(error) => (error.status, "application/json", whole(error.to_json())),
    };
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or_default();
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    Ok(response)
}

async fn route(
    service: &Service,
    request: Request<Incoming>,
) -> std::result::Result<Answer, ApiError> {
    let (method, path) = (request.method().clone(), request.uri().path().to_string());
    let wanted = match path.as_str() {
        "/v1/completions" => Method::POST,
        "/v1/models" | "/health" => Method::GET,
        _ => {
            let message = format!("there is no {path}: use /v1/completions, /v1/models or /health");
            return Err(ApiError::new(404, message));
        }
    };
    if method != wanted {
        return Err(ApiError::new(405, format!("{path} takes {wanted}, not {method}")));
    }
    match path.as_str() {
        "/v1/completions" => complete(service, &body(request).await?).await,
        "/health" => {
            let added = service.added_tokens.load(Relaxed);
            Ok(Answer::Whole(json!({ "status": "ok", "added_tokens": added })))
        }
        _ => {
            let model = json!({ "id": service.model, "object": "model", "owned_by": "ferrotron" });
            Ok(Answer::Whole(json!({ "object": "list", "data": [model] })))
        }
    }
}

/// Reads the body of a request. One that is too large is read to its end, so that its client gets to the answer.
async fn body(request: Request<Incoming>) -> std::result::Result<Vec<u8>, ApiError> {
    let mut stream = request.into_body();
    let (mut body, mut length) = (Vec::new(), 0);
    let slow = |_| ApiError::new(408, "the body of the request does not arrive");
    while let Some(frame) = tokio::time::timeout(TO_READ, stream.frame()).await.map_err(slow)? {
        let frame = frame.map_err(|error| {
            ApiError::new(400, format!("the body of the request ends early: {error}"))
        })?;
        let Ok(data) = frame.into_data() else { continue };
        length += data.len();
        if length <= LARGEST_BODY {
            body.extend_from_slice(&data);
        } else if length > LARGEST_SKIPPED {
            break;
        } else {
            body = Vec::new();
        }
    }
    if length > LARGEST_BODY {
        let message = format!("the request has more than {LARGEST_BODY} bytes: send fewer prompts");
        return Err(ApiError::new(413, message));
    }
    Ok(body)
}

/// A client that gets its completions at once.
struct WaitingClient(oneshot::Sender<std::result::Result<Vec<Completion>, String>>);

impl Client for WaitingClient {
    fn added(&mut self, _prompt: usize, _tokens: &[u32]) -> bool {
        !self.0.is_closed()
    }

    fn answered(self: Box<Self>, completions: std::result::Result<Vec<Completion>, String>) {
        // A client that is gone needs no answer.
        drop(self.0.send(completions));
    }
}

async fn complete(service: &Service, body: &[u8]) -> std::result::Result<Answer, ApiError> {
    let Service { tokenizer, vocab_size, longest, .. } = service;
    let limits = Limits { tokenizer, vocab_size: *vocab_size, longest: *longest };
    let request = CompletionRequest::parse(body, &limits)?;
    let ended = || ApiError::new(503, "the server is ending");
    let send = |client| {
        let job = Job { prompts: request.prompts.clone(), client };
        service.jobs.lock().map_err(|_| ended())?.send(job).map_err(|_| ended())
    };
    let head = ResponseHead {
        id: service.count.fetch_add(1, Relaxed),
        created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
        model: request.model.clone().unwrap_or_else(|| service.model.clone()),
    };
    if request.stream {
        let (sender, events) = mpsc::unbounded_channel();
        let client = StreamingClient::new(request.clone(), head, tokenizer.clone(), sender);
        send(Box::new(client))?;
        return Ok(Answer::Events(events));
    }
    let (sender, receiver) = oneshot::channel();
    send(Box::new(WaitingClient(sender)))?;
    let completions = receiver.await.map_err(|_| ended())?;
    let completions = completions.map_err(|error| ApiError::new(500, error))?;
    Ok(Answer::Whole(response(&request, &completions, tokenizer, &head)))
}
