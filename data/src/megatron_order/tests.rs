//! Samples against a plain restatement of the rules, and any place as a place to resume.

use super::*;
use crate::FiniteSamples;
use crate::{
    BlendConfig, BlendPaths, BlendedDataset, IndexedDataset, IndexedDatasetBuilder, Split,
    TokenType,
};
use std::collections::HashSet;
use std::path::PathBuf;
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

const CONFIG: MegatronOrderConfig =
    MegatronOrderConfig { seq_length: 16, samples: 3000, seed: 1234 };

/// The training part of sets, with their weights.
fn blend(prefixes: &[&PathBuf], weights: Option<&[f64]>) -> Blend {
    let paths = BlendPaths {
        option: "--data-path",
        prefixes: prefixes.iter().map(|prefix| prefix.to_path_buf()).collect(),
        weights: weights.map(<[f64]>::to_vec),
    };
    let split = Split::proportions([969.0, 30.0, 1.0]).unwrap();
    BlendedDataset::open(&BlendConfig::Shared(paths, split), 1 << 20).unwrap().training
}

#[test]
fn samples_are_windows_of_the_shuffled_sequences() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = write(&folder, "a", 1000, 0);
    let sampler = MegatronSampler::new(&blend(&[&prefix], None), &CONFIG).unwrap();
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
    let config = MegatronOrderConfig { samples: 1000, ..CONFIG };
    let sampler = MegatronSampler::new(&blend(&[&a, &b], Some(&[30.0, 70.0])), &config).unwrap();
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

/// CRC-32 of the inputs of a whole run, 32-bit numbers; `data/tests/megatron_order.py` computes them with NumPy.
#[test]
fn runs_are_those_of_a_restatement_with_numpy() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (write(&folder, "a", 400, 0), write(&folder, "b", 500, 500_000));
    let c = write(&folder, "c", 77, 700_000);
    let crc32 = |prefixes: &[&PathBuf], weights: Option<&[f64]>, samples: u64| {
        let config = MegatronOrderConfig { samples, ..CONFIG };
        let sampler = MegatronSampler::new(&blend(prefixes, weights), &config).unwrap();
        let batch = sampler.tokens(0, samples as usize).unwrap();
        let bytes: Vec<u8> = batch.inputs.iter().flat_map(|token| token.to_le_bytes()).collect();
        crc32fast::hash(&bytes)
    };
    let found = [
        crc32(&[&a], None, 1300),
        crc32(&[&a], Some(&[2.0]), 480),
        crc32(&[&a, &b], Some(&[30.0, 70.0]), 1000),
        crc32(&[&a, &b, &c], Some(&[0.1, 0.2, 0.4]), 3001),
        crc32(&[&a, &b, &c], None, 900),
    ];
    let want = [0x95ac_168e, 0xb342_91c0, 0x1e50_2360, 0xb414_be4a, 0x5c94_ff59];
    assert_eq!(found, want, "{found:08x?}");
}

/// The part for validation of sets of which every other option is that of `CONFIG`.
fn held_out(prefixes: &[&PathBuf], weights: Option<&[f64]>, shares: [f64; 3]) -> Blend {
    let paths = BlendPaths {
        option: "--data-path",
        prefixes: prefixes.iter().map(|prefix| prefix.to_path_buf()).collect(),
        weights: weights.map(<[f64]>::to_vec),
    };
    let config = BlendConfig::Shared(paths, Split::proportions(shares).unwrap());
    BlendedDataset::open(&config, 1 << 20).unwrap().validation.unwrap()
}

/// CRC-32 of the inputs of three evaluations, which follow one another in one order: a run of 10 steps evaluates 3 batches of
/// 4 samples every 4 steps and behind the last one. `data/tests/megatron_order.py` computes them with NumPy.
#[test]
fn evaluations_are_those_of_a_restatement_with_numpy() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (write(&folder, "a", 400, 0), write(&folder, "b", 500, 500_000));
    let short = write(&folder, "short", 20, 0);
    let shares = [700.0, 250.0, 50.0];
    for (blend, seq_length, want) in [
        (held_out(&[&a], None, shares), 16, [0x7b6c_0720, 0xcff4_594d, 0x0bfa_7a90]),
        (
            held_out(&[&a, &b], Some(&[30.0, 70.0]), shares),
            16,
            [0x487b_7ebf, 0x7b6e_5d41, 0x133a_dbdb],
        ),
        (held_out(&[&short], None, [18.0, 2.0, 0.0]), 64, [0xcae9_2c89, 0xe0f1_11b9, 0x48d9_db20]),
    ] {
        let config = MegatronValidationConfig {
            seq_length,
            samples: Some(12),
            evaluations: 10 / 4 + 1,
            seed: 1234,
        };
        let validation = MegatronValidation::new(&blend, &config).unwrap();
        let crc32 = |number| {
            let samples = validation.of_evaluation(number).unwrap();
            assert_eq!(samples.len(), 12);
            // In batches that do not divide them: beyond the last sample nothing counts.
            let batches = [samples.batch(0, 7).unwrap(), samples.batch(7, 7).unwrap()];
            let targets = batches[1].get::<i64>("targets").unwrap();
            assert_eq!(crate::num_valid(targets), 5 * seq_length as u64);
            let inputs = |batch: &Batch| batch.get::<u32>("inputs").unwrap().to_vec();
            let inputs = batches.iter().flat_map(inputs).take(12 * seq_length);
            crc32fast::hash(&inputs.flat_map(u32::to_le_bytes).collect::<Vec<u8>>())
        };
        assert_eq!([0, 1, 2].map(crc32), want);
    }
}

#[test]
fn an_evaluation_of_one_epoch_has_each_sample_once() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = write(&folder, "a", 400, 0);
    let config =
        MegatronValidationConfig { seq_length: 16, samples: None, evaluations: 5, seed: 1234 };
    let part = held_out(&[&prefix], None, [3.0, 1.0, 0.0]);
    let tokens = part.tokens().len();
    let validation = MegatronValidation::new(&part, &config).unwrap();
    assert_eq!(validation.len(), (tokens - 1) / 16);
    assert!(validation.of_evaluation(3).is_none(), "the same samples each time");
    let batch = validation.batch(0, validation.len() as usize).unwrap();
    let seen: HashSet<u32> = batch.get::<u32>("inputs").unwrap().iter().copied().collect();
    assert_eq!(seen.len() as u64, 16 * validation.len());
    let weighted = held_out(&[&prefix, &prefix], Some(&[1.0, 2.0]), [3.0, 1.0, 0.0]);
    let error = MegatronValidation::new(&weighted, &config).err().unwrap().to_string();
    assert!(error.contains("--data-path: a blend with weights has no end"), "{error}");
}

#[test]
fn an_order_is_told_by_its_checksum() {
    let folder = tempfile::tempdir().unwrap();
    let blend = blend(&[&write(&folder, "a", 400, 0)], None);
    let crc32 =
        |config: MegatronOrderConfig| MegatronSampler::new(&blend, &config).unwrap().crc32();
    let of = |samples| crc32(MegatronOrderConfig { samples, ..CONFIG });
    // 400 sequences make 483 samples an epoch.
    assert_eq!(of(100), of(400));
    assert_ne!(of(100), of(1000));
    assert_ne!(crc32(CONFIG), crc32(MegatronOrderConfig { seed: 7, ..CONFIG }));
}

#[test]
fn what_is_wrong_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let prefix = write(&folder, "a", 30, 0);
    let one = blend(&[&prefix], None);
    let refused = |blend: &Blend, config: MegatronOrderConfig| {
        MegatronSampler::new(blend, &config).err().unwrap().to_string()
    };
    let long = refused(&one, MegatronOrderConfig { seq_length: 100_000, ..CONFIG });
    assert!(long.contains("one sample needs 100001"), "{long}");
    let two = refused(&blend(&[&prefix, &prefix], None), CONFIG);
    let part = "--data-path: without weights each data set is read once, which makes 66 samples of --seq-length 16, but \
                the run takes 3000: give weights";
    assert!(two.contains(part), "{two}");
}
