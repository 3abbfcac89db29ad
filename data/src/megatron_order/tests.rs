//! Samples against a plain restatement of the rules, and any place as a place to resume.

use super::*;
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
