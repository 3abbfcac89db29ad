//! The JSON of `/v1/completions`: requests, responses and errors in OpenAI's form.

use ferrotron::models::data::tasks::TokenScore;
use ferrotron::models::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

/// An error as a client sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError {
    /// The HTTP status.
    pub status: u16,
    pub message: String,
    /// The field that it is about.
    pub param: Option<String>,
}

impl ApiError {
    pub fn new(status: u16, message: impl Into<String>) -> ApiError {
        ApiError { status, message: message.into(), param: None }
    }

    fn field(name: &str, message: impl Into<String>) -> ApiError {
        ApiError { param: Some(name.to_string()), ..ApiError::new(400, message) }
    }

    pub fn to_json(&self) -> Value {
        let kind = if self.status < 500 { "invalid_request_error" } else { "server_error" };
        let (message, param) = (&self.message, &self.param);
        json!({ "error": { "message": message, "type": kind, "param": param, "code": null } })
    }
}

type Result<T> = std::result::Result<T, ApiError>;

/// A prompt and how it is continued.
#[derive(Debug, Clone, PartialEq)]
pub struct Prompt {
    pub tokens: Vec<u32>,
    pub max_tokens: usize,
    pub temperature: f64,
    pub top_p: Option<f64>,
    /// The seed of the choice; any if it is absent.
    pub seed: Option<u64>,
    /// Texts in front of which a continuation ends.
    pub stop: Vec<String>,
    /// The likeliest tokens that are reported with each.
    pub logprobs: Option<usize>,
    pub echo: bool,
}

/// The result of a prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct Completion {
    /// The tokens that were added.
    pub tokens: Vec<u32>,
    /// Their text, up to a stop.
    pub text: String,
    /// Whether a stop or the end of the text was reached, in place of the last token that was asked for.
    pub stopped: bool,
    /// The scores of all tokens that are reported, but for the first of a prompt, which has none.
    pub scores: Vec<TokenScore>,
}

/// A request for completions.
#[derive(Debug, Clone, PartialEq)]
pub struct CompletionRequest {
    pub model: Option<String>,
    /// Each prompt as often as it is continued.
    pub prompts: Vec<Prompt>,
    /// Completions of each prompt.
    pub n: usize,
    /// Whether the text is sent in pieces as it comes.
    pub stream: bool,
    /// Whether the last piece is followed by the count of tokens.
    pub stream_usage: bool,
}

/// The fields of a response that do not depend on the completions.
#[derive(Debug, Clone)]
pub struct ResponseHead {
    pub id: u64,
    /// Seconds since 1970.
    pub created: u64,
    pub model: String,
}

/// The bounds of what the model can do.
pub struct Limits<'a> {
    pub tokenizer: &'a Tokenizer,
    pub vocab_size: usize,
    /// Tokens of a prompt with its continuation.
    pub longest: usize,
}

/// The most tokens that are reported for each position.
const MOST_LOGPROBS: usize = 20;

/// The most completions of a prompt, as OpenAI's, and of all prompts of a request that asks for several of each, and the
/// most tokens of its prompts, each as often as it is continued.
const MOST_COMPLETIONS: usize = 128;
const MOST_COMPLETIONS_TOGETHER: usize = 1 << 16;
const MOST_TOKENS_TOGETHER: usize = 1 << 24;

impl CompletionRequest {
    /// Reads the body of a request.
    ///
    /// # Errors
    /// No JSON object; unknown fields; values that this server does not support, by name.
    pub fn parse(body: &[u8], limits: &Limits) -> Result<CompletionRequest> {
        let object = serde_json::from_slice::<Map<String, Value>>(body)
            .map_err(|error| ApiError::new(400, format!("the body is no JSON object: {error}")))?;
        let mut fields = Fields(object);
        let model = fields.text("model")?;
        let prompts = fields.0.remove("prompt");
        let max_tokens = fields.count("max_tokens")?.unwrap_or(16);
        let temperature = fields.number("temperature")?.unwrap_or(1.0);
        if !(0.0..=100.0).contains(&temperature) {
            return Err(ApiError::field("temperature", "temperature must be from 0 to 100"));
        }
        let top_p = fields.number("top_p")?.filter(|&p| p != 1.0);
        if top_p.is_some_and(|p| !(p > 0.0 && p <= 1.0)) {
            return Err(ApiError::field("top_p", "top_p must be above 0 and at most 1"));
        }
        let logprobs = fields.count("logprobs")?;
        if logprobs.is_some_and(|count| count > MOST_LOGPROBS) {
            let message = format!("logprobs must be at most {MOST_LOGPROBS}");
            return Err(ApiError::field("logprobs", message));
        }
        let seed = fields.integer("seed")?;
        let echo = fields.flag("echo")?;
        let stop = fields.stop()?;
        let n = fields.count("n")?.unwrap_or(1);
        if !(1..=MOST_COMPLETIONS).contains(&n) {
            return Err(ApiError::field("n", format!("n must be from 1 to {MOST_COMPLETIONS}")));
        }
        if fields.count("best_of")?.is_some_and(|count| count != n) {
            let message = format!("best_of must be n, which is {n}: all completions are returned");
            return Err(ApiError::field("best_of", message));
        }
        for name in ["presence_penalty", "frequency_penalty"] {
            if fields.number(name)?.is_some_and(|penalty| penalty != 0.0) {
                return Err(ApiError::field(name, format!("{name} must be 0")));
            }
        }
        let stream = fields.flag("stream")?;
        if stream && logprobs.is_some() {
            let message = "logprobs do not come in pieces: leave logprobs or stream out";
            return Err(ApiError::field("logprobs", message));
        }
        let stream_usage = fields.stream_usage(stream)?;
        fields.text("user")?;
        for name in ["suffix", "logit_bias"] {
            let empty =
                |value: &Value| value.is_null() || *value == json!({}) || *value == json!("");
            if fields.0.remove(name).is_some_and(|value| !empty(&value)) {
                return Err(ApiError::field(name, format!("{name} is not supported")));
            }
        }
        if let Some(name) = fields.0.keys().next() {
            return Err(ApiError::field(name, format!("unknown field '{name}'")));
        }
        let prompt = |tokens: Vec<u32>| {
            let length = tokens.len().saturating_add(max_tokens);
            if length > limits.longest {
                let message = format!(
                    "this model's maximum context length is {} tokens, but {} of the prompt and {max_tokens} of the \
                     completion were asked for",
                    limits.longest,
                    tokens.len()
                );
                return Err(ApiError::field("prompt", message));
            }
            let stop = stop.clone();
            Ok(Prompt { tokens, max_tokens, temperature, top_p, seed, stop, logprobs, echo })
        };
        let prompts = tokens_of_prompts(prompts, limits)?.into_iter().map(prompt);
        let mut prompts = prompts.collect::<Result<Vec<_>>>()?;
        if n > 1 {
            if prompts.len() * n > MOST_COMPLETIONS_TOGETHER {
                let message = format!(
                    "{} prompts with n {n} are more than {MOST_COMPLETIONS_TOGETHER} completions: send fewer at once",
                    prompts.len()
                );
                return Err(ApiError::field("n", message));
            }
            let tokens: usize = prompts.iter().map(|prompt| prompt.tokens.len()).sum();
            if tokens.saturating_mul(n) > MOST_TOKENS_TOGETHER {
                let most = MOST_TOKENS_TOGETHER;
                let message = format!("{tokens} tokens with n {n} are more than {most}: lower n");
                return Err(ApiError::field("n", message));
            }
            // With a seed, completions have that one and those that follow it.
            let copy = |prompt: &Prompt, number: u64| {
                let seed = prompt.seed.map(|seed| seed.wrapping_add(number));
                Prompt { seed, ..prompt.clone() }
            };
            let copies = |prompt| (0..n as u64).map(move |number| copy(prompt, number));
            prompts = prompts.iter().flat_map(copies).collect();
        }
        Ok(CompletionRequest { model, prompts, n, stream, stream_usage })
    }
}

/// The prompts as tokens: a text, a list of texts, a list of tokens, or a list of such lists.
fn tokens_of_prompts(value: Option<Value>, limits: &Limits) -> Result<Vec<Vec<u32>>> {
    let refused = |message: &str| ApiError::field("prompt", message);
    let one = |value: &Value| match value {
        Value::String(text) => limits
            .tokenizer
            .encode(text)
            .map_err(|error| ApiError::field("prompt", format!("prompt: {error}"))),
        Value::Array(ids) => ids.iter().map(|id| token(id, limits.vocab_size)).collect(),
        _ => Err(refused("prompt must be a text, a list of token ids, or a list of those")),
    };
    let prompts: Vec<Vec<u32>> = match value {
        None | Some(Value::Null) => return Err(refused("prompt is missing")),
        Some(Value::Array(parts)) if !parts.is_empty() && !parts[0].is_number() => {
            parts.iter().map(one).collect::<Result<_>>()?
        }
        Some(value) => vec![one(&value)?],
    };
    match prompts.iter().any(Vec::is_empty) {
        true => Err(refused("prompt is empty: give at least one token")),
        false => Ok(prompts),
    }
}

fn token(value: &Value, vocab_size: usize) -> Result<u32> {
    let id = value.as_u64().filter(|&id| id < vocab_size as u64);
    id.map(|id| id as u32).ok_or_else(|| {
        ApiError::field(
            "prompt",
            format!("{value} is no token id: they are from 0 to {}", vocab_size - 1),
        )
    })
}

/// The fields of a request that are not read yet. A field that is null counts as absent.
struct Fields(Map<String, Value>);

impl Fields {
    fn take<T>(
        &mut self,
        name: &str,
        kind: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>> {
        match self.0.remove(name).filter(|value| !value.is_null()) {
            None => Ok(None),
            Some(value) => match read(&value) {
                Some(found) => Ok(Some(found)),
                None => Err(ApiError::field(name, format!("{name} must be {kind}, got {value}"))),
            },
        }
    }

    fn text(&mut self, name: &str) -> Result<Option<String>> {
        self.take(name, "a string", |value| value.as_str().map(String::from))
    }

    fn number(&mut self, name: &str) -> Result<Option<f64>> {
        self.take(name, "a number", Value::as_f64)
    }

    fn count(&mut self, name: &str) -> Result<Option<usize>> {
        self.take(name, "a number from 0 on", |value| value.as_u64().map(|count| count as usize))
    }

    fn integer(&mut self, name: &str) -> Result<Option<u64>> {
        let bits = |value: &Value| value.as_u64().or(value.as_i64().map(|seed| seed as u64));
        self.take(name, "an integer", bits)
    }

    fn flag(&mut self, name: &str) -> Result<bool> {
        Ok(self.take(name, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    /// Whether `stream_options` ask for the count of tokens.
    fn stream_usage(&mut self, stream: bool) -> Result<bool> {
        let refuse = |message| Err(ApiError::field("stream_options", message));
        match self.0.remove("stream_options") {
            None | Some(Value::Null) => Ok(false),
            Some(_) if !stream => refuse("stream_options need stream"),
            Some(Value::Object(mut options)) => {
                let usage = options.remove("include_usage").unwrap_or(Value::Bool(false));
                match (usage.as_bool(), options.keys().next()) {
                    (Some(usage), None) => Ok(usage),
                    _ => refuse("stream_options may have include_usage alone, true or false"),
                }
            }
            Some(_) => refuse("stream_options must be an object"),
        }
    }

    fn stop(&mut self) -> Result<Vec<String>> {
        let read = |value: &Value| match value {
            Value::String(text) => Some(vec![text.clone()]),
            Value::Array(texts) => {
                texts.iter().map(|text| text.as_str().map(String::from)).collect()
            }
            _ => None,
        };
        let stop = self.take("stop", "a text or a list of texts", read)?.unwrap_or_default();
        Ok(stop.into_iter().filter(|text| !text.is_empty()).collect())
    }
}

/// The body of a response, for prompts and what became of each.
pub fn response(
    request: &CompletionRequest,
    completions: &[Completion],
    tokenizer: &Tokenizer,
    head: &ResponseHead,
) -> Value {
    let choices = request.prompts.iter().zip(completions).enumerate();
    let choices: Vec<Value> = choices
        .map(|(index, (prompt, completion))| {
            let before = if prompt.echo { tokenizer.decode(&prompt.tokens) } else { String::new() };
            json!({
                "index": index,
                "text": before + &completion.text,
                "logprobs": prompt.logprobs.map(|_| logprobs(prompt, completion, tokenizer)),
                "finish_reason": completion.finish_reason(),
            })
        })
        .collect();
    head.response(choices, Some(usage(request, completions)))
}

/// The count of tokens: of each prompt once, and of all completions.
pub fn usage(request: &CompletionRequest, completions: &[Completion]) -> Value {
    let once = request.prompts.iter().step_by(request.n);
    let prompt: usize = once.map(|prompt| prompt.tokens.len()).sum();
    let added: usize = completions.iter().map(|completion| completion.tokens.len()).sum();
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": added,
        "total_tokens": prompt + added,
    })
}

impl ResponseHead {
    /// A response, or an event of one, with these choices.
    pub fn response(&self, choices: Vec<Value>, usage: Option<Value>) -> Value {
        let mut response = json!({
            "id": format!("cmpl-{}", self.id),
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        });
        if let Some(usage) = usage {
            response["usage"] = usage;
        }
        response
    }
}

impl Completion {
    /// The reason why it ended, in OpenAI's words.
    pub fn finish_reason(&self) -> &'static str {
        if self.stopped { "stop" } else { "length" }
    }
}

/// The first byte of the first stop in `text`.
pub fn first_stop(text: &str, stop: &[String]) -> Option<usize> {
    stop.iter().filter_map(|stop| text.find(stop.as_str())).min()
}

/// The tokens that are reported, each with its log-probability and the likeliest tokens. The first token of a prompt has
/// neither.
fn logprobs(prompt: &Prompt, completion: &Completion, tokenizer: &Tokenizer) -> Value {
    let text_of = |token: u32| tokenizer.decode(&[token]);
    let (mut tokens, mut own, mut top, mut offsets) = (vec![], vec![], vec![], vec![]);
    let mut offset = 0;
    if prompt.echo {
        let first = text_of(prompt.tokens[0]);
        offset = first.chars().count();
        tokens.push(first);
        own.push(Value::Null);
        top.push(Value::Null);
        offsets.push(0);
    }
    for score in &completion.scores {
        let text = text_of(score.token);
        offsets.push(offset);
        offset += text.chars().count();
        let mut likeliest = Map::new();
        let asked = score.top.iter().take(prompt.logprobs.unwrap_or(0));
        // Two tokens may have one text: the likelier stays. The token itself is always there.
        for (token, log_prob) in asked.copied().chain([(score.token, score.log_prob)]) {
            likeliest.entry(text_of(token)).or_insert_with(|| log_prob.into());
        }
        tokens.push(text);
        own.push(score.log_prob.into());
        top.push(Value::Object(likeliest));
    }
    json!({ "tokens": tokens, "token_logprobs": own, "top_logprobs": top, "text_offset": offsets })
}
