//! Autoregressive sampling: temperature, top-k, top-p, a key-value cache, and a sliding window past the context.

use ferrotron_autograd::no_grad;
use ferrotron_nn::{Context, KvCache};
use ferrotron_tensor::{Error, RandomKey, Result, Tensor};
use std::ops::ControlFlow;

use crate::finite::first_not_finite;
use crate::model::gpt::Gpt;

/// The rule by which the next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the likeliest token.
    pub temperature: f64,
    /// Choose among this many of the likeliest tokens.
    pub top_k: Option<usize>,
    /// Choose among the fewest likeliest tokens that together have at least this probability. This is nucleus sampling
    /// (Holtzman et al., arXiv 1904.09751), applied after top-k, as in transformers.
    pub top_p: Option<f64>,
    /// Seed of the choice, which is a function of it and the token's position.
    pub seed: u64,
    /// The token that ends a text: generation stops where it is chosen, without it.
    pub end_of_text: Option<u32>,
}

impl Sampling {
    /// Always the likeliest token.
    pub const GREEDY: Sampling =
        Sampling { temperature: 0.0, top_k: None, top_p: None, seed: 0, end_of_text: None };

    /// Checks the numbers.
    ///
    /// # Errors
    /// One that is out of range, with the option that sets it.
    pub fn validate(&self) -> Result<()> {
        let refuse = |message: String| Err(Error::config("generate", message));
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return refuse(format!(
                "--temperature must be at least 0 and finite, got {}",
                self.temperature
            ));
        }
        if self.top_k == Some(0) {
            return refuse("--top-k must be at least 1, got 0".into());
        }
        match self.top_p {
            Some(p) if !(p > 0.0 && p <= 1.0) => {
                refuse(format!("--top-p must be above 0 and at most 1, got {p}"))
            }
            _ => Ok(()),
        }
    }

    /// The token chosen from `logits` at `position`. A constant added to all logits changes nothing but by rounding.
    pub fn choose(&self, logits: &[f64], position: u64) -> u32 {
        let likeliest =
            || (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best });
        if self.temperature == 0.0 {
            return likeliest() as u32;
        }
        let likelier = |&a: &usize, &b: &usize| logits[b].total_cmp(&logits[a]).then(a.cmp(&b));
        let mut order: Vec<usize> = (0..logits.len()).collect();
        if let Some(k) = self.top_k.filter(|&k| k < order.len()) {
            order.select_nth_unstable_by(k - 1, likelier);
            order.truncate(k);
        }
        let largest = order.iter().map(|&i| logits[i]).fold(f64::NEG_INFINITY, f64::max);
        let weight = |&i: &usize| ((logits[i] - largest) / self.temperature).exp();
        let total: f64 = order.iter().map(weight).sum();
        let uniform = RandomKey::new(self.seed, 0, "generate").uniform(position);
        // Only the likeliest tokens that together have so much are sorted: as a rule few of a vocabulary.
        let enough = self.top_p.unwrap_or(uniform) * total;
        let (mut weights, mut sum) = (Vec::new(), 0.0);
        while weights.len() < order.len() && sum <= enough {
            let sorted = weights.len();
            let next = (4 * sorted).clamp(64, order.len().max(64)).min(order.len());
            order[sorted..].select_nth_unstable_by(next - 1 - sorted, likelier);
            order[sorted..next].sort_unstable_by(likelier);
            weights.extend(order[sorted..next].iter().map(weight));
            sum = weights.iter().sum();
        }
        let mut left = uniform * total;
        if self.top_p.is_some() {
            let sums =
                weights.iter().scan(0.0, |sum, weight| Some(std::mem::replace(sum, *sum + weight)));
            let kept = sums.take_while(|&before| before < enough).count();
            weights.truncate(kept);
            left = uniform * weights.iter().sum::<f64>();
        }
        for (&token, weight) in order.iter().zip(&weights) {
            left -= weight;
            if left < 0.0 {
                return token as u32;
            }
        }
        order[weights.len() - 1] as u32
    }
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
    sampling.validate()?;
    let (longest, vocab) = (gpt.config().max_position_embeddings, gpt.config().vocab_size);
    if prompt.is_empty() {
        return Err(Error::value("generate", "the prompt is empty: give at least one token"));
    }
    if let Some(token) = prompt.iter().find(|&&token| token as usize >= vocab) {
        return Err(Error::value(
            "generate",
            format!("token {token} of the prompt is outside of the vocabulary of {vocab}"),
        ));
    }
    let ctx = Context::eval(1, longest);
    let device = gpt.scope().device();
    let mut tokens = prompt.to_vec();
    let mut caches: Vec<KvCache> = gpt.caches(1, prompt.len().saturating_add(max_new_tokens))?;
    // The first token of the window, and the first that is not in the caches.
    let (mut first, mut unread) = (0, 0);
    for _ in 0..max_new_tokens {
        let start = tokens.len().saturating_sub(longest);
        if start > first {
            caches.iter_mut().for_each(KvCache::clear);
            (first, unread) = (start, start);
        }
        let new = Tensor::from_slice(device, &tokens[unread..], &[1, tokens.len() - unread])?;
        let logits = device.run(|| no_grad(|| gpt.next_token_logits(&ctx, &new, &mut caches)))?;
        unread = tokens.len();
        let logits = logits.value().to_f64()?;
        if let Some(bad) = logits.iter().find(|logit| !logit.is_finite()) {
            return Err(match first_not_finite(gpt)? {
                Some(weight) => Error::value("generate", weight),
                None => Error::value(
                    "generate",
                    format!(
                        "a logit after token {} is {bad}, though all weights are finite: {} overflows",
                        tokens.len(),
                        gpt.scope().dtype()
                    ),
                ),
            });
        }
        let token = sampling.choose(&logits, tokens.len() as u64);
        if sampling.end_of_text == Some(token) {
            break;
        }
        tokens.push(token);
        if on_token(token).is_break() {
            break;
        }
    }
    Ok(tokens)
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

    #[test]
    fn choices_follow_their_definitions() {
        let logits = [0.0, 2.0, 1.0, -1.0];
        let with =
            |top_k, top_p| Sampling { temperature: 1.0, top_k, top_p, seed: 7, end_of_text: None };
        let chosen = |sampling: Sampling| {
            let mut counts = [0; 4];
            (0..4000).for_each(|position| counts[sampling.choose(&logits, position) as usize] += 1);
            counts
        };
        let sum: f64 = logits.iter().map(|x: &f64| x.exp()).sum();
        for (count, logit) in chosen(with(None, None)).iter().zip(logits) {
            let p = logit.exp() / sum;
            // Five standard deviations of a binomial count.
            assert!((f64::from(*count) - 4000.0 * p).abs() < 5.0 * (4000.0 * p * (1.0 - p)).sqrt());
        }
        assert_eq!(chosen(with(Some(1), None)), [0, 4000, 0, 0]);
        let [zero, one, two, three] = chosen(with(Some(2), None));
        assert!(zero == 0 && three == 0 && one > two && two > 0);
        // Tokens 1 and 2 have 0.64 and 0.24 of the probability: both are needed for 0.7.
        let [zero, one, two, three] = chosen(with(None, Some(0.7)));
        assert!(zero == 0 && three == 0 && one > two && two > 0);
        assert_eq!(chosen(with(None, Some(0.5))), [0, 4000, 0, 0]);
        assert_eq!(chosen(with(None, None)), chosen(with(None, None)));
    }

    /// Choices over a vocabulary of which a part is sorted are those of sorting all of it.
    #[test]
    fn sorting_a_part_chooses_as_sorting_all() {
        let logit = |i: u64| 6.0 * RandomKey::new(5, 0, "logits").uniform(i);
        let logits: Vec<f64> = (0..3000).map(|i| (8.0 * logit(i)).round() / 8.0).collect(); // with ties
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        for temperature in [0.3, 1.0, 3.0] {
            for (top_k, top_p) in [
                (None, None),
                (Some(700), None),
                (None, Some(0.9)),
                (Some(700), Some(0.5)),
                (Some(5000), None),
            ] {
                let sampling = Sampling { temperature, top_k, top_p, seed: 3, end_of_text: None };
                let kept = &order[..top_k.unwrap_or(3000).min(3000)];
                let weight = |&i: &usize| ((logits[i] - logits[order[0]]) / temperature).exp();
                let mut weights: Vec<f64> = kept.iter().map(weight).collect();
                if let Some(p) = top_p {
                    let (enough, mut sum) = (p * weights.iter().sum::<f64>(), 0.0);
                    let first = weights.iter().position(|weight| {
                        sum += weight;
                        sum >= enough
                    });
                    weights.truncate(first.expect("all is enough") + 1);
                }
                for position in 0..200 {
                    let uniform = RandomKey::new(3, 0, "generate").uniform(position);
                    let mut left = uniform * weights.iter().sum::<f64>();
                    let at = weights.iter().position(|weight| {
                        left -= weight;
                        left < 0.0
                    });
                    let want = kept[at.unwrap_or(weights.len() - 1)] as u32;
                    assert_eq!(
                        sampling.choose(&logits, position),
                        want,
                        "{sampling:?}, {position}"
                    );
                }
            }
        }
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
