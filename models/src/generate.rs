//! Continuing a sequence of tokens: temperature, top-k, top-p, and a cache of keys and values.

use ferrotron_autograd::no_grad;
use ferrotron_nn::{Context, KvCache, Mode};
use ferrotron_tensor::{Error, RandomKey, Result, Tensor};
use std::ops::ControlFlow;

use crate::gpt::Gpt;

/// How the next token is chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the likeliest token.
    pub temperature: f64,
    /// Choose among this many of the likeliest tokens.
    pub top_k: Option<usize>,
    /// Choose among the fewest likeliest tokens that together have at least this probability
    /// (nucleus sampling: Holtzman et al., arXiv 1904.09751); applied after top-k, as in transformers.
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

    fn validate(&self) -> Result<()> {
        let refuse = |message: String| Err(Error::config("generate", message));
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return refuse(format!("the temperature must be at least 0, got {}", self.temperature));
        }
        if self.top_k == Some(0) {
            return refuse("top-k must be positive, got 0".into());
        }
        match self.top_p {
            Some(p) if !(p > 0.0 && p <= 1.0) => {
                refuse(format!("top-p must be in (0, 1], got {p}"))
            }
            _ => Ok(()),
        }
    }

    /// The token chosen from `logits` at `position`.
    fn choose(&self, logits: &[f64], position: u64) -> u32 {
        let likeliest =
            || (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best });
        if self.temperature == 0.0 {
            return likeliest() as u32;
        }
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        order.truncate(self.top_k.unwrap_or(logits.len()));
        let largest = logits[order[0]];
        let mut weights: Vec<f64> =
            order.iter().map(|&i| ((logits[i] - largest) / self.temperature).exp()).collect();
        if let Some(p) = self.top_p {
            let enough = p * weights.iter().sum::<f64>();
            let sums =
                weights.iter().scan(0.0, |sum, weight| Some(std::mem::replace(sum, *sum + weight)));
            let kept = sums.take_while(|&before| before < enough).count();
            weights.truncate(kept);
        }
        let uniform = RandomKey::new(self.seed, 0, "generate").uniform(position);
        let mut left = uniform * weights.iter().sum::<f64>();
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
/// When the model's longest sequence is full, the second half of it is read again and becomes the
/// context of what follows. Errors if the prompt is empty or holds a token outside the vocabulary.
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
    let ctx = Context::new(sampling.seed, 0, Mode::Eval, 1, longest);
    let mut tokens = prompt.to_vec();
    let mut caches: Vec<KvCache> = Vec::new();
    let mut read = tokens.len(); // so that the first round starts a cache
    for _ in 0..max_new_tokens {
        if caches.first().is_none_or(|cache| cache.len() + tokens.len() - read > longest) {
            caches = gpt.caches(1)?;
            let context = if tokens.len() < longest { tokens.len() } else { (longest / 2).max(1) };
            read = tokens.len() - context;
        }
        let device = gpt.scope().device();
        let new = Tensor::from_slice(device, &tokens[read..], &[1, tokens.len() - read])?;
        let logits = device.run(|| no_grad(|| gpt.next_token_logits(&ctx, &new, &mut caches)))?;
        read = tokens.len();
        let logits = logits.value().to_f64()?;
        if let Some(bad) = logits.iter().find(|logit| !logit.is_finite()) {
            return Err(Error::value(
                "generate",
                format!("a logit is {bad}: the weights are damaged"),
            ));
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
    use crate::gpt::GptConfig;
    use ferrotron_nn::Scope;
    use ferrotron_tensor::{DType, Device};
    use std::ops::ControlFlow::{Break, Continue};

    fn gpt(positions: usize) -> Result<Gpt> {
        let scope = Scope::new(&Device::cpu(1)?, DType::F64, 3);
        let config = GptConfig { init_method_std: 0.5, ..GptConfig::gpt2(11, 2, 8, 2, positions) };
        Gpt::new(&scope, &config)
    }

    /// Greedy without a cache: the whole context goes through the model for every token.
    fn without_cache(gpt: &Gpt, prompt: &[u32], count: usize) -> Result<Vec<u32>> {
        let mut tokens = prompt.to_vec();
        for _ in 0..count {
            let input = Tensor::from_slice(gpt.scope().device(), &tokens, &[1, tokens.len()])?;
            let ctx = Context::new(0, 0, Mode::Eval, 1, tokens.len());
            let logits = gpt.forward(&ctx, &input)?.value().to_f64()?;
            tokens.push(Sampling::GREEDY.choose(&logits[logits.len() - 11..], 0));
        }
        Ok(tokens)
    }

    #[test]
    fn greedy_with_a_cache_is_greedy_without() -> Result<()> {
        let gpt = gpt(32)?;
        let prompt = [3, 1, 4, 1, 5];
        let got = generate(&gpt, &prompt, 20, &Sampling::GREEDY, |_| Continue(()))?;
        assert_eq!(got, without_cache(&gpt, &prompt, 20)?);
        Ok(())
    }

    #[test]
    fn a_full_context_goes_on_from_its_second_half() -> Result<()> {
        let gpt = gpt(8)?;
        let mut seen = Vec::new();
        let all = generate(&gpt, &[1, 2, 3], 30, &Sampling::GREEDY, |token| {
            seen.push(token);
            Continue(())
        })?;
        assert_eq!((all.len(), &all[3..]), (33, &seen[..]));
        let until = |end| move |token| if token == end { Break(()) } else { Continue(()) };
        let cut = generate(&gpt, &[1, 2, 3], 30, &Sampling::GREEDY, until(all[4]))?;
        let end = all[3..].iter().position(|&token| token == all[4]).expect("it was chosen");
        assert_eq!(cut, all[..=3 + end]);
        // The ninth token is the first that does not fit: it follows from the last four.
        assert_eq!(all[8], without_cache(&gpt, &all[4..8], 1)?[4]);
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
        Ok(())
    }
}
