//! A completion that is sent in pieces: server-sent events with the text as it comes, in OpenAI's form.

use ferrotron::models::tokenizer::Tokenizer;
use hyper::body::Bytes;
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::sync::mpsc::UnboundedSender;

use super::api::{ApiError, Completion, CompletionRequest, ResponseHead, first_stop, usage};
use super::engine::Client;

/// The end of all events.
const DONE: &str = "[DONE]";

/// A client that gets the text of its completions in pieces.
pub struct StreamingClient {
    request: CompletionRequest,
    head: ResponseHead,
    tokenizer: Arc<Tokenizer>,
    events: UnboundedSender<Bytes>,
    /// Bytes of each completion that are sent.
    sent: Vec<usize>,
}

impl StreamingClient {
    /// Sends the prompts, where they are part of the answer.
    pub fn new(
        request: CompletionRequest,
        head: ResponseHead,
        tokenizer: Arc<Tokenizer>,
        events: UnboundedSender<Bytes>,
    ) -> StreamingClient {
        let sent = vec![0; request.prompts.len()];
        let client = StreamingClient { request, head, tokenizer, events, sent };
        for (index, prompt) in client.request.prompts.iter().enumerate() {
            if prompt.echo {
                client.send_text(index, &client.tokenizer.decode(&prompt.tokens), None);
            }
        }
        client
    }

    /// A client that is gone needs no answer.
    fn send(&self, data: &str) {
        let _ = self.events.send(Bytes::from(format!("data: {data}\n\n")));
    }

    fn send_text(&self, index: usize, text: &str, finish_reason: Option<&str>) {
        let choice = json!({
            "index": index,
            "text": text,
            "logprobs": null,
            "finish_reason": finish_reason,
        });
        self.send(&self.head.response(vec![choice], None).to_string());
    }
}

impl Client for StreamingClient {
    fn added(&mut self, prompt: usize, tokens: &[u32]) -> bool {
        let text = self.tokenizer.decode(tokens);
        let settled = settled(&text, &self.request.prompts[prompt].stop);
        if let Some(piece) = text.get(self.sent[prompt]..settled).filter(|piece| !piece.is_empty())
        {
            self.send_text(prompt, piece, None);
            self.sent[prompt] = settled;
        }
        !self.events.is_closed()
    }

    fn answered(self: Box<Self>, completions: Result<Vec<Completion>, String>) {
        match completions {
            Err(error) => self.send(&ApiError::new(500, error).to_json().to_string()),
            Ok(completions) => {
                for (index, completion) in completions.iter().enumerate() {
                    let rest = completion.text.get(self.sent[index]..).unwrap_or_default();
                    self.send_text(index, rest, Some(completion.finish_reason()));
                }
                if self.request.stream_usage {
                    let count: Value = usage(&self.request, &completions);
                    self.send(&self.head.response(Vec::new(), Some(count)).to_string());
                }
            }
        }
        self.send(DONE);
    }
}

/// The bytes of `text` that no later token changes: not the end of an incomplete character, nor one with which a stop may
/// begin.
fn settled(text: &str, stop: &[String]) -> usize {
    let whole = text.trim_end_matches(char::REPLACEMENT_CHARACTER);
    let begun = |stop: &String| {
        let begins = |&(length, _): &(usize, char)| whole.ends_with(&stop[..length]);
        let longest = stop.char_indices().skip(1).filter(begins).last();
        longest.map(|(length, _)| whole.len() - length)
    };
    let cut = stop.iter().filter_map(begun).chain(first_stop(whole, stop)).min();
    cut.unwrap_or(whole.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_ends_before_what_may_be_a_stop() {
        let stop = ["END".to_string(), "\u{e9}\u{e8}".to_string()];
        for (text, wanted) in [
            ("", 0),
            ("abc", 3),
            ("abcE", 3),
            ("abcEN", 3),
            ("abcEND and more", 3),
            ("abcEx", 5),
            ("EEN", 1),
            ("ab\u{e9}", 2),
            ("ab\u{fffd}", 2),
            ("aE\u{fffd}\u{fffd}", 1),
        ] {
            assert_eq!(settled(text, &stop), wanted, "{text}");
        }
        assert_eq!(settled("abcE", &[]), 4);
    }
}
