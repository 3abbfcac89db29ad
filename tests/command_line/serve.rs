//! `ferrotron serve` as lm-evaluation-harness 0.4 and other clients use it, against numbers of transformers.

use super::{ferrotron, succeeded};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// Time in which a server must have ended.
const SOON: Duration = Duration::from_secs(60);

fn fixture() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/hf/tasks")
}

/// A server of the fixture, at a port of its own.
pub(super) struct Server {
    child: Child,
    address: String,
    _out: BufReader<ChildStdout>,
}

impl Server {
    pub(super) fn start(more: &str) -> Server {
        Server::load(&fixture(), more)
    }

    /// One of a model in `folder`.
    pub(super) fn load(folder: &Path, more: &str) -> Server {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrotron"));
        command.arg("serve").arg("--load").arg(folder);
        command.args(["--port", "0", "--threads", "1"]).args(more.split_whitespace());
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        let address = line.strip_prefix("listening at http://").unwrap();
        let address = address.trim().strip_suffix("/v1/completions").unwrap().to_string();
        Server { child, address, _out: out }
    }

    /// Sends a request.
    pub(super) fn open(&self, method: &str, path: &str, body: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: here\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body).unwrap();
        stream
    }

    /// The status and the body of a response.
    fn send(&self, method: &str, path: &str, body: &[u8]) -> (u16, Value) {
        let mut text = String::new();
        self.open(method, path, body).read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, serde_json::from_str(body).unwrap())
    }

    pub(super) fn complete(&self, request: &Value) -> Value {
        let (status, body) = self.send("POST", "/v1/completions", request.to_string().as_bytes());
        assert_eq!(status, 200, "{request}: {body}");
        body
    }

    /// The tokens that were added to prompts since it started.
    pub(super) fn added_tokens(&self) -> u64 {
        let (status, body) = self.send("GET", "/health", b"");
        assert_eq!((status, &body["status"]), (200, &json!("ok")));
        body["added_tokens"].as_u64().unwrap()
    }

    /// The events of a streamed response, without the mark behind the last one.
    fn events(&self, request: &Value) -> Vec<Value> {
        let mut request = request.clone();
        request["stream"] = true.into();
        let mut text = String::new();
        let body = request.to_string();
        let mut stream = self.open("POST", "/v1/completions", body.as_bytes());
        stream.read_to_string(&mut text).unwrap();
        assert!(
            text.starts_with("HTTP/1.1 200 ") && text.contains("content-type: text/event-stream"),
            "{text}"
        );
        let mut data: Vec<&str> =
            text.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        assert_eq!(data.pop(), Some("[DONE]"), "{text}");
        data.into_iter().map(|event| serde_json::from_str(event).unwrap()).collect()
    }

    pub(super) fn refused(&self, request: &str) -> (u16, String) {
        let (status, body) = self.send("POST", "/v1/completions", request.as_bytes());
        (status, body["error"]["message"].as_str().unwrap().to_string())
    }

    /// Ends it by SIGTERM; returns its exit code.
    pub(super) fn stop(mut self) -> Option<i32> {
        let process = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &process]).status().unwrap().success());
        let asked = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            assert!(asked.elapsed() < SOON, "it has not ended {SOON:?} after the signal");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The prompts of the fixture with what transformers finds.
fn expected() -> Vec<Value> {
    let text = std::fs::read_to_string(fixture().join("expected.json")).unwrap();
    let expected: Value = serde_json::from_str(&text).unwrap();
    expected["completions"].as_array().unwrap().clone()
}

/// The request of the harness for log-likelihoods, of `LocalCompletionsAPI._create_payload`.
fn log_likelihoods(prompts: &[&Value]) -> Value {
    json!({
        "model": "tiny", "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1,
        "seed": 1234, "echo": true,
    })
}

fn floats(values: &Value) -> Vec<f64> {
    values.as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect()
}

fn assert_close(found: &[f64], wanted: &[f64], what: &str) {
    assert_eq!(found.len(), wanted.len(), "{what}");
    for (found, wanted) in found.iter().zip(wanted) {
        // Logits of about 10 in f32.
        assert!((found - wanted).abs() < 1e-4, "{what}: {found}, not {wanted}");
    }
}

fn check_completions(server: &Server) {
    let expected = expected();
    let prompts: Vec<&Value> = expected.iter().map(|one| &one["prompt"]).collect();
    let body = server.complete(&log_likelihoods(&prompts));
    assert_eq!((&body["object"], &body["model"]), (&json!("text_completion"), &json!("tiny")));
    for (index, one) in expected.iter().enumerate() {
        let choice = &body["choices"][index];
        assert_eq!(choice["index"], index);
        let logprobs = &choice["logprobs"];
        let count = prompts[index].as_array().unwrap().len();
        // An entry for each token of the prompt, and one for the token that was added.
        for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            assert_eq!(logprobs[name].as_array().unwrap().len(), count + 1, "{name}");
        }
        assert!(logprobs["token_logprobs"][0].is_null() && logprobs["top_logprobs"][0].is_null());
        let own: Vec<Value> = logprobs["token_logprobs"].as_array().unwrap()[1..count].to_vec();
        assert_close(&floats(&json!(own)), &floats(&one["token_logprobs"]), "log-probabilities");
        // The harness compares each with the largest, exactly; the added one is the likeliest.
        let top = logprobs["top_logprobs"][count].as_object().unwrap();
        let largest = top.values().map(|value| value.as_f64().unwrap()).fold(f64::MIN, f64::max);
        assert_eq!(logprobs["token_logprobs"][count].as_f64().unwrap(), largest);
        assert!(choice["text"].as_str().unwrap().starts_with(one["text"].as_str().unwrap()));
        let alone = server.complete(&log_likelihoods(&prompts[index..=index]));
        let alone = &alone["choices"][0]["logprobs"]["token_logprobs"];
        let rest = |values: &Value| floats(&json!(values.as_array().unwrap()[1..]));
        assert_close(&rest(alone), &rest(&logprobs["token_logprobs"]), "alone");
    }
    for one in &expected {
        let wanted = one["continuation"].as_array().unwrap();
        let request = json!({
            "prompt": one["prompt"], "max_tokens": wanted.len(), "temperature": 0, "logprobs": 0,
        });
        let body = server.complete(&request);
        let choice = &body["choices"][0];
        assert_eq!(body["usage"]["completion_tokens"], wanted.len());
        assert_eq!(choice["finish_reason"], "length");
        let tokens = choice["logprobs"]["tokens"].as_array().unwrap();
        assert_eq!(tokens.len(), wanted.len());
        let text: String = tokens.iter().map(|token| token.as_str().unwrap()).collect();
        assert_eq!(text, choice["text"].as_str().unwrap());
        let echo = json!({ "prompt": wanted, "max_tokens": 0, "echo": true });
        assert_eq!(server.complete(&echo)["choices"][0]["text"], text);
        // The same as a text, continued up to a stop that it contains.
        let middle: String = text.chars().skip(3).take(2).collect();
        let request = json!({
            "prompt": [one["text"]], "max_tokens": wanted.len(), "temperature": 0, "stop": [middle],
        });
        let stopped = &server.complete(&request)["choices"][0];
        assert_eq!(stopped["finish_reason"], "stop");
        assert_eq!(stopped["text"].as_str().unwrap(), text.split(&middle).next().unwrap());
    }
    let sampled = |seed: u64| {
        let prompt = &expected[1]["prompt"];
        let request =
            json!({ "prompt": prompt, "max_tokens": 8, "temperature": 2.0, "seed": seed });
        server.complete(&request)["choices"][0]["text"].as_str().unwrap().to_string()
    };
    assert_eq!(sampled(7), sampled(7));
    assert!((8..16).any(|seed| sampled(seed) != sampled(7)));
}

#[test]
fn completions_are_those_of_transformers_on_one_rank_and_on_several() {
    for layout in [
        "",
        "--nproc 2 --tensor-model-parallel-size 2",
        "--nproc 2 --pipeline-model-parallel-size 2",
        "--nproc 2 --context-parallel-size 2",
    ] {
        let server = Server::start(layout);
        check_completions(&server);
        check_several(&server);
        check_pieces(&server);
        assert_eq!(server.stop(), Some(0), "{layout}");
    }
}

/// Several completions of each prompt, as so many requests with the seeds that follow one another.
fn check_several(server: &Server) {
    let expected = expected();
    let prompts = json!([expected[0]["prompt"], expected[1]["prompt"]]);
    let request = json!({ "prompt": prompts, "max_tokens": 4, "temperature": 2.0, "seed": 5, "n": 3, "best_of": 3 });
    let body = server.complete(&request);
    let choices = body["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 6);
    for (index, choice) in choices.iter().enumerate() {
        assert_eq!(choice["index"], index);
        let one = json!({
            "prompt": prompts[index / 3], "max_tokens": 4, "temperature": 2.0, "seed": 5 + index % 3,
        });
        assert_eq!(server.complete(&one)["choices"][0]["text"], choice["text"], "{index}");
    }
    let tokens: usize = (0..2).map(|prompt| prompts[prompt].as_array().unwrap().len()).sum();
    assert_eq!(body["usage"]["prompt_tokens"], tokens);
    let unseeded = json!({ "prompt": prompts[0], "max_tokens": 4, "temperature": 3.0, "n": 8 });
    let body = server.complete(&unseeded);
    let texts = body["choices"].as_array().unwrap().iter().map(|choice| choice["text"].to_string());
    assert!(texts.collect::<std::collections::BTreeSet<_>>().len() > 1, "{body}");
}

/// The pieces of a streamed completion make the text of one that comes at once.
fn check_pieces(server: &Server) {
    let expected = expected();
    let stop = {
        let all = json!({ "prompt": expected[1]["prompt"], "max_tokens": 10, "temperature": 0 });
        let text = server.complete(&all)["choices"][0]["text"].as_str().unwrap().to_string();
        text.chars().skip(4).take(3).collect::<String>()
    };
    for more in [
        json!({ "temperature": 0 }),
        json!({ "temperature": 0, "echo": true }),
        json!({ "temperature": 0, "stop": stop }),
        json!({ "temperature": 0, "max_tokens": 1 }),
        json!({ "temperature": 2.0, "seed": 3, "n": 2, "stream_options": { "include_usage": true } }),
    ] {
        let mut request = json!({ "prompt": expected[1]["prompt"], "max_tokens": 10 });
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let events = server.events(&request);
        request.as_object_mut().unwrap().remove("stream_options");
        let whole = server.complete(&request);
        let usage = more.get("stream_options").is_some();
        let (last, pieces) = match usage {
            true => events.split_last().map(|(last, pieces)| (Some(last), pieces)).unwrap(),
            false => (None, &events[..]),
        };
        if let Some(last) = last {
            assert_eq!((&last["choices"], &last["usage"]), (&json!([]), &whole["usage"]));
        }
        for (index, choice) in whole["choices"].as_array().unwrap().iter().enumerate() {
            let own: Vec<&Value> = pieces
                .iter()
                .map(|event| &event["choices"][0])
                .filter(|piece| piece["index"] == index)
                .collect();
            let text: String = own.iter().map(|piece| piece["text"].as_str().unwrap()).collect();
            assert_eq!(text, choice["text"].as_str().unwrap(), "{more}");
            let (last, before) = own.split_last().unwrap();
            assert_eq!(last["finish_reason"], choice["finish_reason"], "{more}");
            assert!(before.iter().all(|piece| piece["finish_reason"].is_null()), "{more}");
            let single = request["max_tokens"] == 1;
            assert!(own.len() > 2 || single || more.get("stop").is_some(), "{more}: {own:?}");
        }
        let heads = events.iter().map(|event| (&event["id"], &event["object"]));
        assert!(heads.clone().all(|head| head == (&events[0]["id"], &json!("text_completion"))));
    }
}

/// A client that leaves does not hold the others up, and a signal waits for the last piece.
#[test]
fn a_stream_that_nobody_reads_is_given_up_and_others_end() {
    let server = Server::start("");
    let prompt = expected()[1]["prompt"].clone();
    let request = json!({ "prompt": prompt, "max_tokens": 10, "stream": true, "n": 128 });
    drop(server.open("POST", "/v1/completions", request.to_string().as_bytes()));
    server.complete(&json!({ "prompt": prompt, "max_tokens": 3 }));
    let mut stream = server.open("POST", "/v1/completions", request.to_string().as_bytes());
    let mut first = [0; 1];
    stream.read_exact(&mut first).unwrap();
    assert_eq!(server.stop(), Some(0));
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("data: [DONE]"), "{rest}");
}

#[test]
fn requests_that_come_at_once_are_all_answered() {
    let server = Server::start("--micro-batch-size 3");
    let expected = expected();
    std::thread::scope(|threads| {
        for client in 0..8 {
            let (server, one) = (&server, &expected[client % expected.len()]);
            threads.spawn(move || {
                let body = server.complete(&log_likelihoods(&[&one["prompt"]]));
                let own = &body["choices"][0]["logprobs"]["token_logprobs"];
                let own = own.as_array().unwrap();
                let own = floats(&json!(own[1..own.len() - 1]));
                assert_close(&own, &floats(&one["token_logprobs"]), "one of several");
            });
        }
    });
    let (status, models) = server.send("GET", "/v1/models", b"");
    assert_eq!((status, &models["data"][0]["id"]), (200, &json!("tasks")));
    assert_eq!(server.stop(), Some(0));
}

#[test]
fn bad_requests_get_an_error_object_and_the_server_goes_on() {
    let server = Server::start("");
    for (request, status, words) in [
        ("{\"prompt\": ", 400, "no JSON object"),
        ("[1]", 400, "no JSON object"),
        ("{}", 400, "prompt is missing"),
        ("{\"prompt\": []}", 400, "prompt is empty"),
        ("{\"prompt\": [1, 400]}", 400, "400 is no token id: they are from 0 to 311"),
        ("{\"prompt\": [[1], {}]}", 400, "prompt must be"),
        ("{\"prompt\": [1], \"maxtokens\": 3}", 400, "unknown field 'maxtokens'"),
        ("{\"prompt\": [1], \"max_tokens\": 24}", 400, "maximum context length is 24"),
        ("{\"prompt\": [1], \"temperature\": -1}", 400, "temperature"),
        ("{\"prompt\": [1], \"temperature\": \"hot\"}", 400, "temperature must be a number"),
        ("{\"prompt\": [1], \"n\": 0}", 400, "n must be from 1 to 128"),
        ("{\"prompt\": [1], \"n\": 129}", 400, "n must be from 1 to 128"),
        ("{\"prompt\": [1], \"best_of\": 2}", 400, "best_of must be n, which is 1"),
        ("{\"prompt\": [1], \"n\": 2, \"best_of\": 3}", 400, "best_of must be n, which is 2"),
        (
            "{\"prompt\": [1], \"stream\": true, \"logprobs\": 1}",
            400,
            "logprobs do not come in pieces",
        ),
        ("{\"prompt\": [1], \"stream_options\": {}}", 400, "stream_options need stream"),
        (
            "{\"prompt\": [1], \"stream\": true, \"stream_options\": {\"a\": 1}}",
            400,
            "include_usage alone",
        ),
        ("{\"prompt\": [1], \"suffix\": \"x\"}", 400, "suffix is not supported"),
        ("{\"prompt\": [1], \"logit_bias\": {\"1\": 1}}", 400, "logit_bias is not supported"),
        ("{\"prompt\": [1], \"presence_penalty\": 1}", 400, "presence_penalty must be 0"),
        ("{\"prompt\": [1], \"logprobs\": 21}", 400, "logprobs must be at most 20"),
    ] {
        let (found, message) = server.refused(request);
        assert!(found == status && message.contains(words), "{request}: {found} {message}");
    }
    let (status, message) =
        server.refused(&format!("{{\"prompt\": \"{}\"}}", "a".repeat(10 << 20)));
    assert!(status == 413 && message.contains("more than 8388608 bytes"), "{status} {message}");
    assert_eq!(server.send("GET", "/v1/chat", b"").0, 404);
    assert_eq!(server.send("GET", "/v1/completions", b"").0, 405);
    server.complete(&json!({ "prompt": [1], "max_tokens": 1, "user": "me", "suffix": null }));

    let port = server.address.rsplit_once(':').unwrap().1;
    let folder = tempfile::tempdir().unwrap();
    let load = fixture();
    let arguments = ["serve", "--load", load.to_str().unwrap(), "--port", port];
    for ranks in [&[][..], &["--nproc", "2"]] {
        let output = ferrotron(folder.path(), &[&arguments[..], ranks].concat());
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains("--port") && error.contains("in use"), "{error}");
        assert!(ranks.len() > 1 || error.lines().count() == 1, "{error}");
    }
    assert_eq!(server.stop(), Some(0));
    succeeded(ferrotron(folder.path(), &["serve", "--help"]));
}
