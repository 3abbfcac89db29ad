//! The promise of the project: loss, gradient norm, gradients and weights do not depend on the layout.
//!
//! A small GPT with dropout, tied embeddings, clipping, ignored labels, and a vocabulary and layers that
//! nothing divides, is trained in f64 in layouts that cover every pair of values of the axes, every rank a
//! thread, and compared with a training loop on one rank that knows no layout.

mod layout;
mod mutants;
mod precision;
mod reference;
mod train;

use ferrotron::models::gpt::GptConfig;
use ferrotron::nn::{AdafactorConfig, OptimizerConfig, RelativeStep, Sharding};
use ferrotron::tensor::{DType, RandomKey};
use layout::{Layout, all, covering};
use mutants::{Sites, Watched, faulty};
use reference::reference;
use std::sync::Arc;
use train::{CLIP, Numbers, difference, train};

/// GPT-2 style: tied, learned positions, biases.
fn gpt2() -> GptConfig {
    GptConfig {
        hidden_dropout: 0.1,
        attention_dropout: 0.1,
        init_method_std: 0.3,
        ..GptConfig::gpt2(13, 9, 16, 4, 16)
    }
}

/// Llama style: its own head, rotary positions, SwiGLU, grouped queries.
fn llama() -> GptConfig {
    GptConfig {
        hidden_dropout: 0.1,
        attention_dropout: 0.1,
        init_method_std: 0.3,
        ffn_hidden_size: 21,
        ..GptConfig::llama(11, 7, 16, 4, 2, 16)
    }
}

fn compare(model: &GptConfig, numbers: &Numbers, layouts: &[Layout]) {
    let reference = reference(model, numbers).unwrap();
    assert!(reference.steps.iter().all(|&(_, norm)| norm > CLIP), "nothing was clipped");
    let mut failures = Vec::new();
    for layout in [&Layout::SERIAL].into_iter().chain(layouts) {
        match train(model, layout, numbers, &|collective| collective) {
            Ok(found) => {
                failures
                    .extend(difference(&found, &reference).map(|what| format!("{layout}: {what}")));
            }
            Err(error) => failures.push(format!("{layout}: {error}")),
        }
    }
    let (failed, count) = (failures.len(), 1 + layouts.len());
    assert!(failures.is_empty(), "{failed} of {count} layouts differ:\n{}", failures.join("\n"));
}

#[test]
fn every_pair_of_axis_values_trains_as_one_rank_does() {
    let model = gpt2();
    let all = all(&model);
    let layouts = [covering(&all), random(&all, 24, 2)].concat();
    assert!(layouts.len() >= 40, "only {} layouts", layouts.len());
    compare(&model, &Numbers::of(DType::F64), &layouts);
}

/// Layouts that nobody chose: others for each seed.
fn random(all: &[Layout], count: u64, seed: u64) -> Vec<Layout> {
    let key = RandomKey::new(seed, 0, "layouts");
    (0..count).map(|i| all[(key.uniform(i) * all.len() as f64) as usize]).collect()
}

#[test]
fn the_llama_style_trains_alike_too() {
    let model = llama();
    let all = all(&model);
    let layouts = [covering(&all), random(&all, 12, 3)].concat();
    compare(&model, &Numbers::of(DType::F64), &layouts);
}

/// Adafactor sees a parameter whole: its sums go over the ranks that have parts of it, and ZeRO's shards are
/// made of parameters.
#[test]
fn adafactor_trains_in_every_layout_as_on_one_rank() {
    // The gradients of the keys' biases are nothing but rounding errors (attention does not see what is added
    // to all keys), which 1e-30 would leave to be divided by their own size.
    let plain = AdafactorConfig { eps1: 1e-16, ..AdafactorConfig::default() };
    let relative = AdafactorConfig { relative_step: RelativeStep::On, ..plain };
    for (model, config, seed) in [
        (gpt2(), AdafactorConfig { weight_decay: 0.1, ..plain }, 4),
        (gpt2(), AdafactorConfig { clip_threshold: 0.5, ..relative }, 5),
        (llama(), AdafactorConfig { beta1: 0.9, weight_decay: 0.1, ..relative }, 6),
    ] {
        let all = all(&model);
        let optimizer = OptimizerConfig::Adafactor(config);
        let numbers = Numbers { optimizer, ..Numbers::of(DType::F64) };
        let zero = [Sharding::None, Sharding::Optimizer, Sharding::Gradients, Sharding::Weights];
        let zero = zero.map(|sharding| Layout { dp: 2, micro: 2, sharding, ..Layout::SERIAL });
        let mut layouts = vec![
            Layout { tp: 2, micro: 2, ..Layout::SERIAL },
            Layout { pp: 2, micro: 2, ..Layout::SERIAL },
            // Two stages with the same matrix, and four ranks whose sums could be added up in other orders.
            Layout { tp: 4, pp: 2, micro: 2, ..Layout::SERIAL },
        ];
        layouts.retain(|layout| layout.allowed(&model));
        layouts.extend(zero);
        layouts.extend(if seed == 4 { covering(&all) } else { random(&all, 12, seed) });
        compare(&model, &numbers, &layouts);
    }
}

/// A test that can fail: a fault in any one reduction, or in a scale that is made of one, makes the comparison
/// fail.
#[test]
fn no_reduction_can_be_left_out() {
    let model = gpt2();
    let f64 = Numbers::of(DType::F64);
    let reference = reference(&model, &f64).unwrap();
    let sites = Arc::new(Sites::default());
    for layout in random(&all(&model), 24, 2) {
        let found = train(&model, &layout, &f64, &|inner| {
            let sites = sites.clone();
            let fault = move |group: &str, call: &_| {
                sites.note(group, call, &layout);
                None
            };
            Arc::new(Watched { inner, fault })
        });
        assert_eq!(difference(&found.unwrap(), &reference), None, "{layout}");
    }
    let mutants = Arc::into_inner(sites).expect("all ranks have ended").into_mutants();
    assert!(mutants.len() >= 2 * 12, "only {} mutants: {mutants:?}", mutants.len());
    for (site, fault, layouts) in mutants {
        let noticed = layouts.iter().any(|layout| {
            let found = train(&model, layout, &f64, &|inner| {
                Arc::new(Watched { inner, fault: faulty(site.clone(), fault) })
            });
            match found {
                Ok(found) => difference(&found, &reference).is_some(),
                // Ranks that disagree, or numbers that are not finite; but nothing may hang.
                Err(error) => {
                    let error = error.to_string();
                    assert!(!error.contains("within"), "{site:?} in {layout}: {error}");
                    true
                }
            }
        });
        assert!(noticed, "with {site:?} {fault:?} everything is the same");
    }
}

/// Neither can the clip coefficient.
#[test]
fn unclipped_gradients_are_noticed() {
    let model = gpt2();
    let f64 = Numbers::of(DType::F64);
    let reference = reference(&model, &f64).unwrap();
    let unclipped = Numbers { clip_grad: 0.0, ..f64 };
    for layout in random(&all(&model), 2, 2).into_iter().chain([Layout::SERIAL]) {
        let found = train(&model, &layout, &unclipped, &|collective| collective).unwrap();
        assert!(difference(&found, &reference).is_some(), "{layout}");
    }
}
