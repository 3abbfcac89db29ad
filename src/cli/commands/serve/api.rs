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
    pub prompts: Vec<Prompt>,
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
        for name in ["n", "best_of"] {
            if fields.count(name)?.is_some_and(|count| count != 1) {
                return Err(ApiError::field(name, format!("{name} must be 1")));
            }
        }
        for name in ["presence_penalty", "frequency_penalty"] {
            if fields.number(name)?.is_some_and(|penalty| penalty != 0.0) {
                return Err(ApiError::field(name, format!("{name} must be 0")));
            }
        }
        if fields.flag("stream")? {
            return Err(ApiError::field("stream", "stream must be false"));
        }
        fields.text("user")?;
        for name in ["suffix", "logit_bias", "stream_options"] {
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
        Ok(CompletionRequest { model, prompts: prompts.collect::<Result<_>>()? })
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
    (id, created, model): (u64, u64, &str),
) -> Value {
    let choices = request.prompts.iter().zip(completions).enumerate();
    let choices: Vec<Value> = choices
        .map(|(index, (prompt, completion))| {
            let before = if prompt.echo { tokenizer.decode(&prompt.tokens) } else { String::new() };
            json!({
                "index": index,
                "text": before + &completion.text,
                "logprobs": prompt.logprobs.map(|_| logprobs(prompt, completion, tokenizer)),
                "finish_reason": if completion.stopped { "stop" } else { "length" },
            })
        })
        .collect();
    let prompt: usize = request.prompts.iter().map(|prompt| prompt.tokens.len()).sum();
    let added: usize = completions.iter().map(|completion| completion.tokens.len()).sum();
    json!({
        "id": format!("cmpl-{id}"),
        "object": "text_completion",
        "created": created,
        "model": request.model.as_deref().unwrap_or(model),
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": added,
            "total_tokens": prompt + added,
        },
    })
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
