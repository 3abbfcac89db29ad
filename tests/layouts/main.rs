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
use ferrotron::tensor::{DType, RandomKey};
use layout::{Layout, all, covering};
use mutants::{Sites, Watched, faulty};
use reference::reference;
use std::sync::Arc;
use train::{CLIP, Numbers, WEIGHTS, difference, train};

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

fn compare(model: &GptConfig, layouts: &[Layout]) {
    let reference = reference(model, WEIGHTS).unwrap();
    assert!(reference.steps.iter().all(|&(_, norm)| norm > CLIP), "nothing was clipped");
    let mut failures = Vec::new();
    for layout in [&Layout::SERIAL].into_iter().chain(layouts) {
        match train(model, layout, &Numbers::of(DType::F64), &|collective| collective) {
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
    compare(&model, &layouts);
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
    compare(&model, &[covering(&all), random(&all, 12, 3)].concat());
}

/// A test that can fail: a fault in any one reduction, or in a scale that is made of one, makes the comparison
/// fail.
#[test]
fn no_reduction_can_be_left_out() {
    let model = gpt2();
    let (reference, f64) = (reference(&model, WEIGHTS).unwrap(), Numbers::of(DType::F64));
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
    let reference = reference(&model, WEIGHTS).unwrap();
    let unclipped = Numbers { clip_grad: 0.0, ..Numbers::of(DType::F64) };
    for layout in random(&all(&model), 2, 2).into_iter().chain([Layout::SERIAL]) {
        let found = train(&model, &layout, &unclipped, &|collective| collective).unwrap();
        assert!(difference(&found, &reference).is_some(), "{layout}");
    }
}
