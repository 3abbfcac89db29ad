//! Samples against a plain restatement of the rules, and any place as a place to resume.

use super::*;
use crate::{IndexedDatasetBuilder, TokenType};
use std::collections::HashSet;
use tempfile::TempDir;

/// Writes a set of `sequences` sequences of 0 to 40 tokens that count up from `first`.
fn write(folder: &TempDir, name: &str, sequences: u32, first: u32) -> PathBuf {
    let prefix = folder.path().join(name);
    let mut builder = IndexedDatasetBuilder::new(&prefix, TokenType::I32).unwrap();
    let mut next = first;
    for sequence in 0..sequences {
        let length = sequence * 31 % 41;
        builder.add_sequence(&(next..next + length).collect::<Vec<u32>>()).unwrap();
        builder.end_document().unwrap();
        next += length;
    }
    builder.finish().unwrap();
    prefix
}

fn config(data: Vec<(PathBuf, f64)>, samples: u64) -> MegatronOrderConfig {
    let split = Split::proportions([969.0, 30.0, 1.0]).unwrap();
    MegatronOrderConfig { data, split, seq_length: 16, samples, seed: 1234, vocab_size: 1 << 20 }
}

#[test]
fn samples_are_windows_of_the_shuffled_sequences() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = write(&folder, "a", 1000, 0);
    let sampler = MegatronSampler::new(&config(vec![(prefix.clone(), 1.0)], 3000)).unwrap();
    // The stream laid out in memory, of the first 969 sequences.
    let dataset = IndexedDataset::open(&prefix).unwrap();
    let indices = &sampler.sets[0].indices;
    assert_eq!(indices.documents.iter().max(), Some(&968));
    let stream: Vec<u32> =
        indices.documents.iter().flat_map(|&id| dataset.sequence(id.into()).unwrap()).collect();
    let whole = sampler.tokens(0, 3000).unwrap();
    for (sample, row) in whole.inputs.chunks(16).enumerate() {
        let at = indices.shuffle[sample] as usize * 16;
        assert_eq!(row, &stream[at..at + 16]);
        assert_eq!(whole.targets[sample * 16 + 15], i64::from(stream[at + 16]));
    }
    for (first, rows) in [(0, 1), (1234, 7), (2999, 1)] {
        let part = sampler.tokens(first, rows).unwrap();
        let at = first as usize * 16;
        assert_eq!(part.inputs, whole.inputs[at..at + rows * 16], "a place to resume");
    }
    let beyond = sampler.tokens(indices.shuffle.len() as u64, 1).unwrap_err().to_string();
    assert!(beyond.contains("it depends on their number"), "{beyond}");
}

#[test]
fn a_blend_takes_its_shares() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (write(&folder, "a", 400, 0), write(&folder, "b", 500, 500_000));
    let sampler = MegatronSampler::new(&config(vec![(a, 30.0), (b, 70.0)], 1000)).unwrap();
    let batch = sampler.tokens(0, 1000).unwrap();
    let sets: Vec<bool> = batch.inputs.chunks(16).map(|row| row[0] >= 500_000).collect();
    assert_eq!(
        sets[..10].iter().map(|&b| u8::from(b)).collect::<Vec<_>>(),
        [1, 0, 1, 1, 0, 1, 1, 0, 1, 1]
    );
    assert_eq!(sets.iter().filter(|&&b| b).count(), 700);
    // 400 sequences have 7800 tokens and more than 300 samples: none is seen twice.
    let first: HashSet<&[u32]> = batch.inputs.chunks(16).filter(|row| row[0] < 500_000).collect();
    assert_eq!(first.len(), 300);
}

#[test]
fn what_is_wrong_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = write(&folder, "a", 30, 0);
    let refused =
        |config: MegatronOrderConfig| MegatronSampler::new(&config).err().unwrap().to_string();
    let good = config(vec![(prefix.clone(), 1.0)], 10);
    let long = MegatronOrderConfig { seq_length: 100_000, ..good.clone() };
    assert!(refused(long).contains("one sample needs 100001"));
    let weights = config(vec![(prefix.clone(), 0.0), (prefix.clone(), 1.0)], 10);
    assert!(refused(weights).contains("0 is no weight of a data set"));
    let missing = refused(config(vec![(folder.path().join("none"), 1.0)], 10));
    assert!(missing.contains("none.idx'"), "{missing}");
    let narrow = MegatronOrderConfig { vocab_size: 10, ..good };
    let error = MegatronSampler::new(&narrow).unwrap().tokens(0, 4).unwrap_err().to_string();
    assert!(
        error.contains("a.bin' has token") && error.contains("the vocabulary has 10"),
        "{error}"
    );
}
