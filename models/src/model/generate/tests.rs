//! Generation against forwards without a cache, alone and together, and what is refused.

use super::*;
use ferrotron_nn::{Module, Scope};
use ferrotron_tensor::DType;
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
        let window = &tokens[tokens.len().saturating_sub(gpt.config().max_position_embeddings)..];
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
    assert!(refused(&[1], Sampling { temperature: f64::NAN, ..Sampling::GREEDY }).contains("NaN"));
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
