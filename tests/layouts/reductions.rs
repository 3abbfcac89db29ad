//! Reductions that cannot be left out: with a fault in one of them, some layout trains in another way.

use ferrotron::nn::{AdafactorConfig, MuonConfig, OptimizerConfig};
use ferrotron::tensor::DType;
use std::sync::Arc;

use super::layout::all;
use super::mutants::{Site, Sites, Watched, faulty};
use super::reference::reference;
use super::train::{Found, Numbers, difference, train};
use super::{gpt2, random};

/// A test that can fail: a fault in any one reduction, or in a scale that is made of one, makes the comparison
/// fail.
#[test]
fn no_reduction_can_be_left_out() {
    // Ranks that agree do not notice that they are not compared: `tests/launch` has ranks that differ.
    let is_wanted = |site: &Site| !site.is_in("src/agreement.rs");
    let count = notice_all_mutants(&Numbers::with_dtype(DType::F64), is_wanted);
    assert!(count >= 2 * 12, "only {count} mutants");
}

/// No sum of Adafactor's can be left out: those of squares and of updates' squares over the ranks that share a tensor.
/// Nor can those of gradients on the rank that owns a parameter.
#[test]
fn no_reduction_of_adafactor_can_be_left_out() {
    // So small that every update is clipped.
    let config = AdafactorConfig { clip_threshold: 0.5, ..AdafactorConfig::default() };
    let optimizer = OptimizerConfig::Adafactor(config);
    let numbers = Numbers { optimizer, ..Numbers::with_dtype(DType::F64) };
    let count = notice_all_mutants(&numbers, of_optimizer);
    assert!(count >= 2 * 5, "only {count} mutants");
}

/// The gathering of the shards of Muon's matrices cannot be left out.
#[test]
fn no_reduction_of_muon_can_be_left_out() {
    let optimizer = OptimizerConfig::Muon(MuonConfig::default());
    let numbers = Numbers { optimizer, ..Numbers::with_dtype(DType::F64) };
    let count = notice_all_mutants(&numbers, of_optimizer);
    assert!(count >= 2 * 4, "only {count} mutants");
}

/// Returns whether a reduction belongs to the update of weights, or to the norm.
fn of_optimizer(site: &Site) -> bool {
    ["mod.rs", "shard_exchange.rs", "update.rs", "whole_parameters.rs"]
        .iter()
        .any(|file| site.is_in(&format!("data_parallel/{file}")))
}

/// Asserts that every fault at a site that `is_wanted` selects is noticed in some layout; returns the number of faults.
fn notice_all_mutants(numbers: &Numbers, is_wanted: impl Fn(&Site) -> bool) -> usize {
    let model = gpt2();
    let reference = reference(&model, numbers).unwrap().without_key_biases(&model);
    let differs = |found: Found| difference(&found.without_key_biases(&model), &reference);
    let sites = Arc::new(Sites::default());
    for layout in random(&all(&model), 24, 2) {
        let found = train(&model, &layout, numbers, &|inner| {
            let sites = sites.clone();
            let fault = move |group: &str, call: &_| {
                sites.note(group, call, &layout);
                None
            };
            Arc::new(Watched { inner, fault })
        });
        assert_eq!(differs(found.unwrap()), None, "{layout}");
    }
    let mutants = Arc::into_inner(sites).expect("all ranks have ended").into_mutants();
    let mutants: Vec<_> = mutants.into_iter().filter(|(site, ..)| is_wanted(site)).collect();
    for (site, fault, layouts) in &mutants {
        let noticed = layouts.iter().any(|layout| {
            let found = train(&model, layout, numbers, &|inner| {
                Arc::new(Watched { inner, fault: faulty(site.clone(), *fault) })
            });
            match found {
                Ok(found) => differs(found).is_some(),
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
    mutants.len()
}
