//! The messages of rank 0 to the other ranks.

use ferrotron::models::data::tasks::ScoreRequest;
use ferrotron::models::generate::{GenerationRequest, Sampling};
use ferrotron::{Error, Result};
use serde_json::{Value, json};

/// What the other ranks do next.
#[derive(Debug, Clone, PartialEq)]
pub enum Message {
    /// Nothing yet.
    Wait,
    /// End: no request will come.
    End,
    /// Score requests, with so many likeliest tokens each.
    Score { requests: Vec<ScoreRequest>, top: usize },
    /// Continue texts.
    Generate(Vec<GenerationRequest>),
}

impl Message {
    /// The message as bytes.
    pub fn encode(&self) -> Vec<u8> {
        let value = match self {
            Message::Wait => json!("wait"),
            Message::End => json!("end"),
            Message::Score { requests, top } => {
                let request = |request: &ScoreRequest| {
                    json!([request.tokens, request.first_target, request.wants_next])
                };
                json!({ "top": top, "requests": requests.iter().map(request).collect::<Vec<_>>() })
            }
            Message::Generate(texts) => {
                // Numbers go as their bits, so that every rank chooses by the same.
                let text = |GenerationRequest { prompt, max_new_tokens, sampling }: &_| {
                    let Sampling { temperature, top_k, top_p, seed, end_of_text } = *sampling;
                    let (temperature, top_p) = (temperature.to_bits(), top_p.map(f64::to_bits));
                    json!([prompt, max_new_tokens, temperature, top_k, top_p, seed, end_of_text])
                };
                json!({ "texts": texts.iter().map(text).collect::<Vec<_>>() })
            }
        };
        value.to_string().into_bytes()
    }

    /// The message of these bytes.
    ///
    /// # Errors
    /// Bytes that are none.
    pub fn decode(bytes: &[u8]) -> Result<Message> {
        let value: Option<Value> = serde_json::from_slice(bytes).ok();
        value.and_then(|value| parse(&value)).ok_or_else(|| {
            Error::value("serve", "rank 0 sent no request: start all ranks with the same program")
        })
    }
}

fn parse(value: &Value) -> Option<Message> {
    match value.as_str() {
        Some("wait") => return Some(Message::Wait),
        Some("end") => return Some(Message::End),
        _ => {}
    }
    let tokens = |value: &Value| -> Option<Vec<u32>> {
        value.as_array()?.iter().map(|token| token.as_u64()?.try_into().ok()).collect()
    };
    if let Some(texts) = value["texts"].as_array() {
        let text = |value: &Value| {
            let sampling = Sampling {
                temperature: f64::from_bits(value[2].as_u64()?),
                top_k: value[3].as_u64().map(|top_k| top_k as usize),
                top_p: value[4].as_u64().map(f64::from_bits),
                seed: value[5].as_u64()?,
                end_of_text: value[6].as_u64().map(|token| token as u32),
            };
            let (prompt, max_new_tokens) = (tokens(&value[0])?, value[1].as_u64()? as usize);
            Some(GenerationRequest { prompt, max_new_tokens, sampling })
        };
        return Some(Message::Generate(texts.iter().map(text).collect::<Option<_>>()?));
    }
    let request = |value: &Value| {
        Some(ScoreRequest {
            tokens: tokens(&value[0])?,
            first_target: value[1].as_u64()? as usize,
            wants_next: value[2].as_bool()?,
        })
    };
    let requests = value["requests"].as_array()?.iter().map(request).collect::<Option<_>>()?;
    Some(Message::Score { requests, top: value["top"].as_u64()? as usize })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_as_they_are_sent() {
        let sampling = Sampling {
            temperature: 0.1 + 0.2,
            top_k: None,
            top_p: Some(1.0 / 3.0),
            seed: u64::MAX,
            end_of_text: Some(7),
        };
        let text = |sampling| GenerationRequest { prompt: vec![1, 2], max_new_tokens: 3, sampling };
        let score = ScoreRequest { tokens: vec![5, 6], first_target: 1, wants_next: true };
        for message in [
            Message::Wait,
            Message::End,
            Message::Score { requests: vec![score], top: 4 },
            Message::Generate(vec![text(sampling), text(Sampling::GREEDY)]),
        ] {
            assert_eq!(Message::decode(&message.encode()).unwrap(), message);
        }
        assert!(Message::decode(b"[").is_err() && Message::decode(b"{}").is_err());
    }
}
