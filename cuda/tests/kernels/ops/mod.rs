//! Tests of kernels: a file for each file of kernels, one for the rules with one momentum, and one for far operands.

mod adafactor;
mod adamw;
mod argsort;
mod attention;
mod attention_bias;
mod attention_merge;
mod attention_problems;
mod attention_rows;
mod attention_warpgroup;
mod cast;
mod compare;
mod copy;
mod cross_entropy;
mod dropout;
mod ema;
mod far;
mod glu;
mod index;
mod loss_scale;
mod momentum;
mod norm;
mod outcome;
mod pointwise;
mod random;
mod reduce;
mod rotary;
mod round;
mod softmax;
mod sort;
mod sq_norm;
mod step;
mod zero_bitmap;

use crate::simulator::{Costs, Sanitizer, Simulator};
use ferrotron_cuda::kernels::{FILES, KernelSource};
use ferrotron_cuda_sim::available;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// A file of kernels, and the function that checks all of them.
type Check = (&'static str, fn(&Simulator));

const CHECKS: &[Check] = &[
    ("adafactor", adafactor::check),
    ("adamw", adamw::check),
    ("argsort", argsort::check),
    ("attention", attention::check),
    ("attention_bias", attention_bias::check),
    ("attention_rows", attention_rows::check),
    ("attention_warpgroup", attention_warpgroup::check),
    ("cast", cast::check),
    ("compare", compare::check),
    ("copy", copy::check),
    ("cross_entropy", cross_entropy::check),
    ("dropout", dropout::check),
    ("ema", ema::check),
    ("glu", glu::check),
    ("index", index::check),
    ("lion", momentum::check_lion),
    ("loss_scale", loss_scale::check),
    ("norm", norm::check),
    ("outcome", outcome::check),
    ("pointwise", pointwise::check),
    ("random", random::check),
    ("reduce", reduce::check),
    ("rotary", rotary::check),
    ("round", round::check),
    ("sgd", momentum::check_sgd),
    ("softmax", softmax::check),
    ("sort", sort::check),
    ("sq_norm", sq_norm::check),
    ("step", step::check),
    ("zero_bitmap", zero_bitmap::check),
];

/// Runs the checks of a file; each of its kernels must have been launched.
pub fn check(file: &str) {
    let (_, check) = CHECKS.iter().find(|(name, _)| *name == file).unwrap();
    let simulator = Simulator::new(KernelSource::named(file).unwrap());
    check(&simulator);
    simulator.assert_all_launched();
}

/// Runs the checks of all files with the sanitizer of threads. Returns the costs of kernels, by "file/kernel".
pub fn costs() -> BTreeMap<String, Costs> {
    let next = AtomicUsize::new(0);
    let all: Mutex<BTreeMap<String, Costs>> = Mutex::default();
    let run = || {
        while let Some((file, check)) = CHECKS.get(next.fetch_add(1, Relaxed)) {
            let simulator = Simulator::with(KernelSource::named(file).unwrap(), Sanitizer::Thread);
            check(&simulator);
            let costs = simulator.costs().into_iter();
            all.lock()
                .unwrap()
                .extend(costs.map(|(name, costs)| (format!("{file}/{name}"), costs)));
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2).map(|_| scope.spawn(run)).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
    all.into_inner().unwrap()
}

macro_rules! tests {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            if available(stringify!($name)) {
                check(stringify!($name));
            }
        })*

        #[test]
        fn every_file_has_its_test() {
            let files: Vec<_> = FILES.iter().map(|file| file.name).collect();
            let checks: Vec<_> = CHECKS.iter().map(|(name, _)| *name).collect();
            assert_eq!(checks, files);
            assert_eq!(files, [$(stringify!($name)),*]);
            let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/kernels");
            let mut found: Vec<String> = std::fs::read_dir(folder)
                .unwrap()
                .filter_map(|entry| entry.unwrap().file_name().to_str()?.strip_suffix(".cu").map(str::to_string))
                .collect();
            found.sort();
            assert_eq!(found, files);
        }
    };
}
tests! { adafactor adamw argsort attention attention_bias attention_rows attention_warpgroup cast compare copy cross_entropy dropout ema glu index lion loss_scale norm outcome pointwise random reduce rotary round sgd softmax sort sq_norm step zero_bitmap }
