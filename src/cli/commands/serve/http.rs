//! The HTTP server: one thread that reads requests, hands prompts to the engine and writes responses.

use ferrotron::models::stop::StopFlag;
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::{Error, Result};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::{Value, json};
use std::convert::Infallible;
use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::net::TcpStream;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;

use super::api::{ApiError, CompletionRequest, Limits, response};
use super::engine::Job;

/// Bytes of the largest request that is read.
const LARGEST_BODY: usize = 8 << 20;

/// Bytes beyond which the rest of a request is not even skipped.
const LARGEST_SKIPPED: usize = 64 << 20;

/// Time in which the next piece of a request must arrive.
const TO_READ: Duration = Duration::from_secs(30);

/// Time in which a response that is made must be written when the server ends.
const TO_WRITE: Duration = Duration::from_secs(1);

/// Time between two looks at the request to stop.
const POLL: Duration = Duration::from_millis(50);

/// State that the handlers of all connections share.
pub struct Service {
    pub tokenizer: Tokenizer,
    pub vocab_size: usize,
    pub longest: usize,
    /// The name of the model in responses.
    pub model: String,
    pub jobs: Mutex<Sender<Job>>,
    pub count: AtomicU64,
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
    let is_busy = &AtomicBool::new(false);
    let service = &service;
    let answer = service_fn(move |request| async move {
        is_busy.store(true, Relaxed);
        let response = answer(service, request).await;
        is_busy.store(false, Relaxed);
        response
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .serve_connection(TokioIo::new(stream), answer);
    let mut connection = std::pin::pin!(connection);
    tokio::select! {
        _ = connection.as_mut() => return,
        _ = ends.changed() => connection.as_mut().graceful_shutdown(),
    }
    // A client that is gone needs no answer.
    let _ = match is_busy.load(Relaxed) {
        true => connection.await,
        false => tokio::time::timeout(TO_WRITE, connection).await.unwrap_or(Ok(())),
    };
}

async fn answer(
    service: &Service,
    request: Request<Incoming>,
) -> std::result::Result<Response<Full<Bytes>>, Infallible> {
    let (status, body) = match route(service, request).await {
        Ok(body) => (200, body),
        Err(error) => (error.status, error.to_json()),
    };
    let mut response = Response::new(Full::new(Bytes::from(body.to_string())));
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or_default();
    let json = hyper::header::HeaderValue::from_static("application/json");
    response.headers_mut().insert(hyper::header::CONTENT_TYPE, json);
    Ok(response)
}

async fn route(
    service: &Service,
    request: Request<Incoming>,
) -> std::result::Result<Value, ApiError> {
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
        "/health" => Ok(json!({ "status": "ok" })),
        _ => {
            let model = json!({ "id": service.model, "object": "model", "owned_by": "ferrotron" });
            Ok(json!({ "object": "list", "data": [model] }))
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

async fn complete(service: &Service, body: &[u8]) -> std::result::Result<Value, ApiError> {
    let Service { tokenizer, vocab_size, longest, .. } = service;
    let limits = Limits { tokenizer, vocab_size: *vocab_size, longest: *longest };
    let request = CompletionRequest::parse(body, &limits)?;
    let (sender, receiver) = oneshot::channel();
    // A client that is gone needs no answer.
    let reply = Box::new(move |completions| drop(sender.send(completions)));
    let job = Job { prompts: request.prompts.clone(), reply };
    let ended = || ApiError::new(503, "the server is ending");
    service.jobs.lock().map_err(|_| ended())?.send(job).map_err(|_| ended())?;
    let completions = receiver.await.map_err(|_| ended())?;
    let completions = completions.map_err(|error| ApiError::new(500, error))?;
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let id = service.count.fetch_add(1, Relaxed);
    Ok(response(&request, &completions, tokenizer, (id, created, &service.model)))
}
