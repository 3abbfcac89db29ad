//! Autoregressive generation of one text or several: a key-value cache, and a sliding window past the context.

use ferrotron_autograd::no_grad;
use ferrotron_nn::{Context, KvCache};
use ferrotron_tensor::{Device, Error, Result, Tensor};
use std::ops::ControlFlow;

use crate::finite::first_not_finite;
use crate::model::config::GptConfig;
use crate::model::gpt::Gpt;
pub use crate::model::sampling::Sampling;

/// A text to be continued.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationRequest {
    /// Its tokens; at least one.
    pub prompt: Vec<u32>,
    /// The most tokens that are added.
    pub max_new_tokens: usize,
    /// The rule by which they are chosen.
    pub sampling: Sampling,
}

/// Appends up to `max_new_tokens` tokens to `prompt`, calling `on_token` with each as it comes, until that breaks off;
/// returns all.
///
/// Each token follows from the last `max_position_embeddings` tokens before it, at positions counted from 0, as in
/// nanoGPT. While they fit, keys and values are cached and a token costs a forward over one position. Once the
/// window slides, every position and every hidden state behind the first block changes (with rotary positions, too:
/// a state has seen tokens that leave the window), so a token costs a forward over the whole window.
///
/// # Errors
/// An empty prompt, or a token of it outside the vocabulary; a [`Sampling`] out of range; logits that are not finite.
pub fn generate(
    gpt: &Gpt,
    prompt: &[u32],
    max_new_tokens: usize,
    sampling: &Sampling,
    mut on_token: impl FnMut(u32) -> ControlFlow<()>,
) -> Result<Vec<u32>> {
    let (prompt, sampling) = (prompt.to_vec(), *sampling);
    let request = GenerationRequest { prompt, max_new_tokens, sampling };
    let texts = generate_batch(gpt, &[request], |_, token| on_token(token))?;
    Ok(texts.into_iter().flatten().collect())
}

/// Continues several texts together, each as [`generate`] continues it alone, on a CPU to the last bit: their next tokens come
/// from one forward, which reads the weights once. `on_token` gets the number of a text and its token as it comes, and ends this
/// text by breaking off. Returns all tokens of each.
///
/// Prompts, and windows that slide, take a forward of their own. All texts have their caches at the same time.
///
/// # Errors
/// Errors of [`generate`].
pub fn generate_batch(
    gpt: &Gpt,
    requests: &[GenerationRequest],
    mut on_token: impl FnMut(usize, u32) -> ControlFlow<()>,
) -> Result<Vec<Vec<u32>>> {
    let next = |texts: Vec<Text>| {
        let texts = next_logits(gpt, texts)?.into_iter();
        Ok(texts.map(|(text, logits)| (text.choose(requests, &logits), text)).collect())
    };
    let goes_on = |added: &[(usize, u32)]| {
        Ok(added.iter().map(|&(index, token)| on_token(index, token).is_continue()).collect())
    };
    let caches = |rooms: &[usize]| rooms.iter().map(|&room| gpt.caches(1, room)).collect();
    continue_texts(gpt.config(), requests, caches, next, goes_on)
}

/// Continues texts until each is full, has ended or is broken off; returns all tokens of each. `caches` makes those of all
/// texts by the positions that each needs, `next` chooses the next token of each text, in order, and `goes_on` is told all
/// tokens of a round, with the numbers of their texts, and says which of these go on.
///
/// # Errors
/// Errors of [`generate`].
pub(crate) fn continue_texts(
    config: &GptConfig,
    requests: &[GenerationRequest],
    caches: impl FnOnce(&[usize]) -> Result<Vec<Vec<KvCache>>>,
    mut next: impl FnMut(Vec<Text>) -> Result<Vec<(u32, Text)>>,
    mut goes_on: impl FnMut(&[(usize, u32)]) -> Result<Vec<bool>>,
) -> Result<Vec<Vec<u32>>> {
    requests.iter().try_for_each(|request| check(config, request))?;
    let room =
        |request: &GenerationRequest| request.prompt.len().saturating_add(request.max_new_tokens);
    let rooms: Vec<usize> = requests.iter().map(room).collect();
    let texts = requests.iter().zip(caches(&rooms)?).enumerate();
    let text = |(index, (request, caches)): (usize, (&GenerationRequest, _))| Text {
        index,
        tokens: request.prompt.clone(),
        caches,
        first: 0,
        unread: 0,
    };
    let mut active: Vec<Text> = texts.map(text).collect();
    let mut ended: Vec<Vec<u32>> = vec![Vec::new(); requests.len()];
    loop {
        let is_full = |text: &Text| {
            let request = &requests[text.index];
            text.tokens.len() - request.prompt.len() == request.max_new_tokens
        };
        for text in active.extract_if(.., |text| is_full(text)) {
            ended[text.index] = text.tokens;
        }
        if active.is_empty() {
            return Ok(ended);
        }
        let (mut longer, mut added) = (Vec::new(), Vec::new());
        for (token, mut text) in next(active)? {
            if requests[text.index].sampling.end_of_text == Some(token) {
                ended[text.index] = text.tokens;
            } else {
                text.tokens.push(token);
                added.push((text.index, token));
                longer.push(text);
            }
        }
        active = Vec::new();
        for (text, goes_on) in longer.into_iter().zip(goes_on(&added)?) {
            match goes_on {
                true => active.push(text),
                false => ended[text.index] = text.tokens,
            }
        }
    }
}

/// A text that is being continued.
pub(crate) struct Text {
    /// Its number among the requests.
    pub index: usize,
    tokens: Vec<u32>,
    /// One for each block.
    caches: Vec<KvCache>,
    /// The first token of the window.
    first: usize,
    /// The first token that is not in the caches.
    unread: usize,
}

impl Text {
    /// Moves the window of at most `longest` tokens behind the last token. If it slides, the caches are empty from then on.
    pub fn slide(&mut self, longest: usize) {
        let start = self.tokens.len().saturating_sub(longest);
        if start > self.first {
            self.caches.iter_mut().for_each(KvCache::clear);
            (self.first, self.unread) = (start, start);
        }
    }

    /// Number of tokens that are not in the caches.
    pub fn num_unread(&self) -> usize {
        self.tokens.len() - self.unread
    }

    /// The token that its request chooses by `logits`.
    pub fn choose(&self, requests: &[GenerationRequest], logits: &[f64]) -> u32 {
        requests[self.index].sampling.choose(logits, self.tokens.len() as u64)
    }
}

/// The tokens (B, T) of `texts` with equally many new ones, and their caches for a forward over these.
pub(crate) fn join(device: &Device, texts: &mut [Text]) -> Result<(Tensor, Vec<KvCache>)> {
    let new = texts.iter().flat_map(|text| &text.tokens[text.unread..]);
    let new: Vec<u32> = new.copied().collect();
    let new = Tensor::from_slice(device, &new, &[texts.len(), new.len() / texts.len()])?;
    let blocks = texts[0].caches.len();
    let mut of_texts: Vec<_> =
        texts.iter_mut().map(|text| std::mem::take(&mut text.caches).into_iter()).collect();
    let join = |_| KvCache::join(of_texts.iter_mut().filter_map(Iterator::next));
    Ok((new, (0..blocks).map(join).collect()))
}

/// Gives `texts` their caches back, which have all tokens from then on.
pub(crate) fn split(caches: Vec<KvCache>, texts: &mut [Text]) {
    for cache in caches {
        texts.iter_mut().zip(cache.split()).for_each(|(text, cache)| text.caches.push(cache));
    }
    texts.iter_mut().for_each(|text| text.unread = text.tokens.len());
}

fn check(config: &GptConfig, request: &GenerationRequest) -> Result<()> {
    let GenerationRequest { prompt, sampling, .. } = request;
    sampling.validate()?;
    let vocab = config.vocab_size;
    if prompt.is_empty() {
        return Err(Error::value("generate", "the prompt is empty: give at least one token"));
    }
    match prompt.iter().find(|&&token| token as usize >= vocab) {
        Some(token) => Err(Error::value(
            "generate",
            format!("token {token} of the prompt is outside of the vocabulary of {vocab}"),
        )),
        None => Ok(()),
    }
}

/// The logits for the next token of each text, in the same order.
fn next_logits(gpt: &Gpt, mut texts: Vec<Text>) -> Result<Vec<(Text, Vec<f64>)>> {
    let longest = gpt.config().max_position_embeddings;
    texts.iter_mut().for_each(|text| text.slide(longest));
    // Texts of which one token is new share a forward.
    let (mut next, alone): (Vec<Text>, Vec<Text>) =
        texts.into_iter().partition(|text| text.num_unread() == 1);
    let mut found = Vec::new();
    for text in alone {
        let mut texts = vec![text];
        let logits = forward(gpt, &mut texts)?;
        found.extend(texts.into_iter().zip(logits));
    }
    if !next.is_empty() {
        let logits = forward(gpt, &mut next)?;
        found.extend(next.into_iter().zip(logits));
    }
    found.sort_by_key(|(text, _)| text.index);
    Ok(found)
}

/// The logits of texts with equally many new tokens, which are in the caches from then on.
fn forward(gpt: &Gpt, texts: &mut [Text]) -> Result<Vec<Vec<f64>>> {
    let ctx = Context::eval(texts.len(), gpt.config().max_position_embeddings);
    let device = gpt.scope().device();
    let (new, mut caches) = join(device, texts)?;
    let logits = no_grad(|| gpt.next_token_logits(&ctx, &new, &mut caches))?;
    split(caches, texts);
    let logits = logits.value().to_f64()?;
    let rows = logits.chunks(gpt.config().vocab_size).map(<[f64]>::to_vec);
    for (text, logits) in texts.iter().zip(logits.chunks(gpt.config().vocab_size)) {
        if let Some(bad) = logits.iter().find(|logit| !logit.is_finite()) {
            return Err(not_finite(gpt, text, *bad)?);
        }
    }
    Ok(rows.collect())
}

/// The error for a logit that is not finite.
fn not_finite(gpt: &Gpt, text: &Text, bad: f64) -> Result<Error> {
    Ok(match first_not_finite(gpt)? {
        Some(weight) => Error::value("generate", weight),
        None => Error::value(
            "generate",
            format!(
                "a logit after token {} is {bad}, though all weights are finite: {} overflows",
                text.tokens.len(),
                gpt.scope().dtype()
            ),
        ),
    })
}

#[cfg(test)]
mod tests;
