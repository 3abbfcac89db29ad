//! Autoregressive generation of one text or several: a key-value cache, and a sliding window past the context.

use ferrotron_autograd::no_grad;
use ferrotron_nn::{Context, KvCache};
use ferrotron_tensor::{Error, Result, Tensor};
use std::ops::ControlFlow;

use crate::finite::first_not_finite;
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
/// As [`generate`].
pub fn generate_batch(
    gpt: &Gpt,
    requests: &[GenerationRequest],
    mut on_token: impl FnMut(usize, u32) -> ControlFlow<()>,
) -> Result<Vec<Vec<u32>>> {
    requests.iter().try_for_each(|request| check(gpt, request))?;
    let texts = requests.iter().enumerate().map(|(index, request)| {
        let room = request.prompt.len().saturating_add(request.max_new_tokens);
        let (caches, tokens) = (gpt.caches(1, room)?, request.prompt.clone());
        Ok(Text { index, tokens, caches, first: 0, unread: 0 })
    });
    let mut active = texts.collect::<Result<Vec<Text>>>()?;
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
        let mut going_on = Vec::new();
        for (mut text, logits) in next_logits(gpt, active)? {
            let request = &requests[text.index];
            let token = request.sampling.choose(&logits, text.tokens.len() as u64);
            let ends = request.sampling.end_of_text == Some(token);
            if !ends {
                text.tokens.push(token);
            }
            if ends || on_token(text.index, token).is_break() {
                ended[text.index] = text.tokens;
            } else {
                going_on.push(text);
            }
        }
        active = going_on;
    }
}

/// A text that is being continued.
struct Text {
    /// Its number among the requests.
    index: usize,
    tokens: Vec<u32>,
    /// One for each block.
    caches: Vec<KvCache>,
    /// The first token of the window.
    first: usize,
    /// The first token that is not in the caches.
    unread: usize,
}

fn check(gpt: &Gpt, request: &GenerationRequest) -> Result<()> {
    let GenerationRequest { prompt, sampling, .. } = request;
    sampling.validate()?;
    let vocab = gpt.config().vocab_size;
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
    for text in &mut texts {
        let start = text.tokens.len().saturating_sub(longest);
        if start > text.first {
            text.caches.iter_mut().for_each(KvCache::clear);
            (text.first, text.unread) = (start, start);
        }
    }
    // Texts of which one token is new share a forward.
    let is_next = |text: &Text| text.tokens.len() - text.unread == 1;
    let (mut next, alone): (Vec<Text>, Vec<Text>) = texts.into_iter().partition(is_next);
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
    let new: Vec<u32> =
        texts.iter().flat_map(|text| &text.tokens[text.unread..]).copied().collect();
    let new = Tensor::from_slice(device, &new, &[texts.len(), new.len() / texts.len()])?;
    let blocks = texts[0].caches.len();
    let mut of_texts: Vec<_> =
        texts.iter_mut().map(|text| std::mem::take(&mut text.caches).into_iter()).collect();
    let join = |_| KvCache::join(of_texts.iter_mut().filter_map(Iterator::next));
    let mut caches: Vec<KvCache> = (0..blocks).map(join).collect();
    let logits = device.run(|| no_grad(|| gpt.next_token_logits(&ctx, &new, &mut caches)))?;
    for cache in caches {
        texts.iter_mut().zip(cache.split()).for_each(|(text, cache)| text.caches.push(cache));
    }
    let logits = logits.value().to_f64()?;
    let rows = logits.chunks(gpt.config().vocab_size).map(<[f64]>::to_vec);
    for (text, logits) in texts.iter_mut().zip(logits.chunks(gpt.config().vocab_size)) {
        text.unread = text.tokens.len();
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
mod tests {
    use super::*;
    use crate::model::gpt::GptConfig;
    use ferrotron_nn::{Module, Scope};
    use ferrotron_tensor::{DType, Device};
    use std::ops::ControlFlow::{Break, Continue};

    fn gpt(positions: usize) -> Result<Gpt> {
        of_style(GptConfig::gpt2(11, 2, 8, 2, positions))
    }

    fn of_style(style: GptConfig) -> Result<Gpt> {
        let scope = Scope::new(&Device::cpu(1)?, DType::F64, 3);
        Gpt::new(&scope, &GptConfig { init_method_std: 0.5, ..style })
    }

    /// Greedy without a cache: the last tokens that fit go through the model for every new one.
    fn without_cache(gpt: &Gpt, prompt: &[u32], count: usize) -> Result<Vec<u32>> {
        let mut tokens = prompt.to_vec();
        for _ in 0..count {
            let window =
                &tokens[tokens.len().saturating_sub(gpt.config().max_position_embeddings)..];
            let input = Tensor::from_slice(gpt.scope().device(), window, &[1, window.len()])?;
            let ctx = Context::eval(1, window.len());
            let logits = gpt.forward(&ctx, &input)?.value().to_f64()?;
            tokens.push(Sampling::GREEDY.choose(&logits[logits.len() - 11..], 0));
        }
        Ok(tokens)
    }

    /// Generates before, at and past the context's length, with learned and with rotary positions. Prompts are shorter
    /// than the context, fill it exactly and exceed it.
    #[test]
    fn every_token_follows_from_the_last_ones_that_fit() -> Result<()> {
        for style in [GptConfig::gpt2(11, 2, 8, 2, 8), GptConfig::llama(11, 2, 8, 2, 1, 8)] {
            let gpt = of_style(style)?;
            for length in [1, 5, 7, 8, 9, 16, 21] {
                let prompt: Vec<u32> = (0..length).map(|i| i * i * 7 % 11).collect();
                let mut seen = Vec::new();
                let got = generate(&gpt, &prompt, 20, &Sampling::GREEDY, |token| {
                    seen.push(token);
                    Continue(())
                })?;
                assert_eq!(got, without_cache(&gpt, &prompt, 20)?, "a prompt of {length}");
                assert_eq!((&got[..prompt.len()], &got[prompt.len()..]), (&prompt[..], &seen[..]));
                let none = generate(&gpt, &prompt, 0, &Sampling::GREEDY, |_| Continue(()))?;
                assert_eq!(none, prompt);
                let until = |end| move |token| if token == end { Break(()) } else { Continue(()) };
                let cut = generate(&gpt, &prompt, 20, &Sampling::GREEDY, until(seen[4]))?;
                let end = seen.iter().position(|token| *token == seen[4]).expect("it was chosen");
                assert_eq!(cut, got[..=prompt.len() + end]);
            }
        }
        Ok(())
    }

    /// Prompts of all lengths, which end, are broken off and slide at different times.
    #[test]
    fn texts_of_a_batch_are_continued_as_alone() -> Result<()> {
        for style in [GptConfig::gpt2(11, 2, 8, 2, 8), GptConfig::llama(11, 2, 8, 2, 1, 8)] {
            let gpt = of_style(style)?;
            let requests: Vec<GenerationRequest> = [1_u32, 5, 3, 8, 5, 12]
                .into_iter()
                .enumerate()
                .map(|(index, length)| GenerationRequest {
                    prompt: (0..length).map(|i| (i * i * 7 + index as u32) % 11).collect(),
                    max_new_tokens: [14, 2, 0, 9, 14, 5][index],
                    sampling: Sampling {
                        temperature: [0.0, 1.0][index % 2],
                        seed: index as u64,
                        end_of_text: Some(4),
                        ..Sampling::GREEDY
                    },
                })
                .collect();
            let until = |index: usize, token: u32| match (index, token) {
                (4, 7) => Break(()),
                _ => Continue(()),
            };
            let together = generate_batch(&gpt, &requests, until)?;
            for (index, (request, got)) in requests.iter().zip(together).enumerate() {
                let GenerationRequest { prompt, max_new_tokens, sampling } = request;
                let alone =
                    generate(&gpt, prompt, *max_new_tokens, sampling, |token| until(index, token))?;
                assert_eq!(got, alone, "text {index}");
            }
        }
        Ok(())
    }

    /// The next token's logits of sequences with different lengths are those of each alone, to the bit, in all dtypes.
    #[test]
    fn sequences_of_a_batch_do_not_change_each_other() -> Result<()> {
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            let scope = Scope::new(&Device::cpu(2)?, dtype, 3);
            let gpt = Gpt::new(&scope, &GptConfig::gpt2(300, 2, 64, 4, 48))?;
            let texts = || -> Result<Vec<Text>> {
                let text = |(index, length): (usize, u32)| {
                    let tokens = (0..length).map(|i| (i * 37 + index as u32) % 300).collect();
                    Ok(Text { index, tokens, caches: gpt.caches(1, 48)?, first: 0, unread: 0 })
                };
                [3, 30, 17, 30, 1].into_iter().enumerate().map(text).collect()
            };
            let take = |texts: Vec<Text>| -> Result<_> {
                let mut texts = next_logits(&gpt, texts)?;
                texts.iter_mut().for_each(|(text, _)| text.tokens.push(9));
                Ok(texts.into_iter().map(|(text, _)| text).collect::<Vec<_>>())
            };
            let together = next_logits(&gpt, take(texts()?)?)?;
            for (text, (_, got)) in texts()?.into_iter().zip(together) {
                let alone = next_logits(&gpt, take(vec![text])?)?;
                assert_eq!(got, alone[0].1, "{dtype}");
            }
        }
        Ok(())
    }

    #[test]
    fn the_end_of_a_text_ends_it() -> Result<()> {
        let gpt = gpt(32)?;
        let all = generate(&gpt, &[3, 1], 20, &Sampling::GREEDY, |_| Continue(()))?;
        let sampling = Sampling { end_of_text: Some(all[6]), ..Sampling::GREEDY };
        let first = all[2..].iter().position(|&token| token == all[6]).expect("it was chosen");
        assert_eq!(generate(&gpt, &[3, 1], 20, &sampling, |_| Continue(()))?, all[..2 + first]);
        Ok(())
    }

    #[test]
    fn bad_requests_are_refused() -> Result<()> {
        let gpt = gpt(8)?;
        let refused = |prompt: &[u32], sampling: Sampling| {
            generate(&gpt, prompt, 1, &sampling, |_| Continue(())).unwrap_err().to_string()
        };
        assert!(refused(&[], Sampling::GREEDY).contains("empty"));
        assert!(refused(&[11], Sampling::GREEDY).contains("token 11"));
        assert!(refused(&[1], Sampling { temperature: -1.0, ..Sampling::GREEDY }).contains("-1"));
        assert!(refused(&[1], Sampling { top_k: Some(0), ..Sampling::GREEDY }).contains("top-k"));
        assert!(refused(&[1], Sampling { top_p: Some(1.5), ..Sampling::GREEDY }).contains("1.5"));
        assert!(
            refused(&[1], Sampling { temperature: f64::NAN, ..Sampling::GREEDY }).contains("NaN")
        );
        Ok(())
    }

    #[test]
    fn damaged_weights_are_named() -> Result<()> {
        let gpt = gpt(8)?;
        let params = gpt.params();
        let bias = params.iter().find(|param| param.name() == "blocks.1.mlp.fc.bias").unwrap();
        bias.leaf().set_value(&Tensor::full(gpt.scope().device(), DType::F64, &[32], f64::NAN)?)?;
        let error =
            generate(&gpt, &[1], 1, &Sampling::GREEDY, |_| Continue(())).unwrap_err().to_string();
        assert!(error.contains("blocks.1.mlp.fc.bias[0] is NaN"), "{error}");
        Ok(())
    }
}
