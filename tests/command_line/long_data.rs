//! A token file of 5 GB: windows behind 4 GiB are trained on, also by a run that goes on, and evaluated.

use super::{ferrotron, losses, succeeded};
use ferrotron::models::data::{Sampler, Split, TokenSource};
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::tensor::RandomKey;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Tokens of two bytes.
const TOKENS: u64 = 2_500_000_000;
const VOCABULARY: usize = 32;
/// The tokens that `--valid-fraction` holds out.
const HELD_OUT: f64 = 4e-7;
const LENGTH: usize = 8;
const BATCH: u64 = 4;
const STEPS: u64 = 12;
const SEED: u64 = 1234;
/// The first token that is behind 4 GiB.
const FAR: u64 = 1 << 31;

const MODEL: &str = "--vocab-size 32 --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 \
    --micro-batch-size 4 --seed 1234 --eval-interval 0 --eval-iters 0 --sample-length 0 --threads 1 \
    --valid-fraction 4e-7 --save-interval 4";

/// Makes a file of zeros, of which the disk holds none.
fn zeros(path: &Path) -> File {
    let file = File::options().create(true).truncate(true).read(true).write(true).open(path);
    let file = file.unwrap();
    file.set_len(2 * TOKENS).unwrap();
    file
}

/// Random tokens but 0, which is that of every other place.
fn random_tokens(number: u64, count: usize) -> Vec<u16> {
    let key = RandomKey::new(number, 0, "long_data");
    let token = |i: usize| 1 + (key.uniform(i as u64) * (VOCABULARY - 1) as f64) as u16;
    (0..count).map(token).collect()
}

fn bytes(tokens: &[u16]) -> Vec<u8> {
    tokens.iter().flat_map(|token| token.to_le_bytes()).collect()
}

#[test]
fn tokens_behind_4_gib_are_trained_on_and_evaluated() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let [training, held_out, _] = Split::valid_fraction(HELD_OUT).unwrap().tokens(TOKENS);
    let tail = random_tokens(u64::MAX, held_out as usize);
    let [near_only, all] = ["near.bin", "all.bin"].map(|name| {
        let file = zeros(&path.join(name));
        file.write_all_at(&bytes(&tail), 2 * training).unwrap();
        file
    });
    std::fs::write(path.join("tail.bin"), bytes(&tail)).unwrap();

    // Each sample of the run gets tokens of its own; in one of the files only those of the first 4 GiB.
    let open = |name: &str| {
        let source = TokenSource::open(&[path.join(name)], &Tokenizer::Null(VOCABULARY)).unwrap();
        Sampler::new(source.slice(0..training).unwrap(), LENGTH, SEED).unwrap()
    };
    let starts: Vec<u64> = (0..STEPS * BATCH).map(|sample| open("all.bin").start(sample)).collect();
    for (sample, &start) in starts.iter().enumerate() {
        let tokens = bytes(&random_tokens(sample as u64, LENGTH + 1));
        all.write_all_at(&tokens, 2 * start).unwrap();
        if start < FAR {
            near_only.write_all_at(&tokens, 2 * start).unwrap();
        }
    }
    let samples = open("all.bin");
    for (sample, &start) in starts.iter().enumerate() {
        let want = random_tokens(sample as u64, LENGTH + 1);
        let batch = samples.tokens(sample as u64, 1).unwrap();
        let want_inputs: Vec<u32> = want[..LENGTH].iter().map(|&token| token.into()).collect();
        assert_eq!(batch.inputs, want_inputs, "sample {sample} at token {start}");
        assert_eq!(batch.targets[LENGTH - 1], i64::from(want[LENGTH]));
    }
    // The first step with a sample behind 4 GiB, which is not the first of all.
    let first_far = 1 + starts.iter().position(|&start| start >= FAR).unwrap() as u64 / BATCH;
    assert!((2..=STEPS / 2).contains(&first_far), "{first_far} of {starts:?}");

    let train = |data: &str, run: &str, exit_interval: u64| {
        let line = format!(
            "train --data {data} --save {run} --load {run} --train-iters {STEPS} --exit-interval {exit_interval} {MODEL}"
        );
        succeeded(ferrotron(path, &line.split_whitespace().collect::<Vec<_>>()));
        losses(path.join(run).join("metrics.jsonl"))
    };
    let whole = train("all.bin", "whole", STEPS);
    assert_eq!(train("all.bin", "parts", STEPS / 2), whole[..STEPS as usize / 2]);
    assert_eq!(train("all.bin", "parts", STEPS), whole);
    let near = train("near.bin", "near", STEPS);
    let differ = whole.iter().zip(&near).position(|(a, b)| a != b).map(|at| at as u64 + 1);
    assert_eq!(differ, Some(first_far));

    let evaluated = |data: &str, fraction: &str| {
        let line = format!(
            "eval --load whole --data {data} --valid-fraction {fraction} --json --threads 1"
        );
        succeeded(ferrotron(path, &line.split_whitespace().collect::<Vec<_>>()))
    };
    assert_eq!(evaluated("all.bin", "4e-7"), evaluated("tail.bin", "1"));
}
