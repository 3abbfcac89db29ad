//! The request for the scores of some tokens, and a score.

/// Tokens of which a model scores the last ones, each given all before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScoreRequest {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// The first token that is scored; at least 1.
    pub first_target: usize,
    /// Whether the token behind the last one is asked for, too.
    pub wants_next: bool,
}

impl ScoreRequest {
    /// Scores `continuation` given `context`, of which the last tokens are kept if the model takes `longest` only.
    ///
    /// Returns `None` if the context is empty, or the continuation is empty or longer than `longest`.
    pub fn continuation(
        context: &[u32],
        continuation: &[u32],
        longest: usize,
    ) -> Option<ScoreRequest> {
        if context.is_empty() || continuation.is_empty() || continuation.len() > longest {
            return None;
        }
        // The last token is predicted and not read.
        let kept = context.len().min(longest + 1 - continuation.len());
        let tokens = [&context[context.len() - kept..], continuation].concat();
        Some(ScoreRequest { tokens, first_target: kept, wants_next: false })
    }

    /// Tokens that the model reads.
    pub fn input_length(&self) -> usize {
        self.tokens.len() - usize::from(!self.wants_next)
    }

    /// Tokens that get a score.
    pub fn num_scores(&self) -> usize {
        self.tokens.len() - self.first_target + usize::from(self.wants_next)
    }
}

/// A CRC-32 of everything that requests ask for: equal requests have equal ones.
pub fn requests_crc32(requests: &[ScoreRequest]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    for ScoreRequest { tokens, first_target, wants_next } in requests {
        hasher.update(&(tokens.len() as u64).to_le_bytes());
        hasher.update(&(*first_target as u64).to_le_bytes());
        hasher.update(&[u8::from(*wants_next)]);
        tokens.iter().for_each(|token| hasher.update(&token.to_le_bytes()));
    }
    hasher.finalize()
}

/// The score of a token.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenScore {
    /// The token; behind the last one of a request the likeliest.
    pub token: u32,
    /// The natural logarithm of its probability.
    pub log_prob: f64,
    /// The likeliest tokens with theirs, in descending order; of equal ones the smallest id comes first.
    pub top: Vec<(u32, f64)>,
}

impl TokenScore {
    /// Whether the token is the likeliest.
    pub fn is_greedy(&self) -> bool {
        self.top.first().is_some_and(|(token, _)| *token == self.token)
    }
}
