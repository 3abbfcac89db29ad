//! Packing against plain restatements: first-fit, the samples in the sequences, their order, and what is refused.

use super::*;
use crate::{
    BlendConfig, BlendPaths, BlendedDataset, IGNORE, IndexedDatasetBuilder, Split, TokenType,
};
use ferrotron_tensor::RandomKey;
use proptest::prelude::*;
use std::cmp::Reverse;
use tempfile::TempDir;

/// First-fit as its definition says.
fn plainly(lengths: &[u32], capacity: u32, algorithm: PackingAlgorithm) -> Vec<Vec<u32>> {
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    if algorithm == PackingAlgorithm::FirstFitDecreasing {
        order.sort_by_key(|&item| Reverse(lengths[item]));
    }
    let (mut bins, mut free): (Vec<Vec<u32>>, Vec<u32>) = (Vec::new(), Vec::new());
    for item in order {
        let bin = free.iter().position(|&free| free >= lengths[item]).unwrap_or_else(|| {
            bins.push(Vec::new());
            free.push(capacity);
            bins.len() - 1
        });
        free[bin] -= lengths[item];
        bins[bin].push(item as u32);
    }
    bins.iter_mut().for_each(|bin| bin.sort_unstable());
    bins
}

const ALGORITHMS: [PackingAlgorithm; 2] =
    [PackingAlgorithm::FirstFit, PackingAlgorithm::FirstFitDecreasing];

proptest! {
    #[test]
    fn each_item_goes_into_the_first_bin_with_room(
        capacity in 1_u32..60, draws in proptest::collection::vec(any::<u32>(), 0..200)
    ) {
        let lengths: Vec<u32> = draws.iter().map(|draw| 1 + draw % capacity).collect();
        for algorithm in ALGORITHMS {
            let bins = Bins::first_fit(&lengths, capacity, algorithm);
            let found: Vec<Vec<u32>> = (0..bins.len()).map(|bin| bins.bin(bin).to_vec()).collect();
            prop_assert_eq!(found, plainly(&lengths, capacity, algorithm));
        }
    }
}

/// 100,000 lengths whose logarithms are uniform: between 20 and 2048 tokens, 440 on average.
#[test]
fn the_stated_efficiency_is_reached() {
    let key = RandomKey::new(1, 0, "lengths");
    let lengths: Vec<u32> =
        (0..100_000).map(|i| (20.0 * 102.4_f64.powf(key.uniform(i))) as u32).collect();
    let sum: u64 = lengths.iter().map(|&length| u64::from(length)).sum();
    for (algorithm, stated) in ALGORITHMS.into_iter().zip([0.995, 0.9995]) {
        let bins = Bins::first_fit(&lengths, 2048, algorithm);
        let efficiency = sum as f64 / (bins.len() as f64 * 2048.0);
        println!("{algorithm:?}: {} sequences, efficiency {efficiency:.5}", bins.len());
        assert!(efficiency > stated, "{algorithm:?}: {efficiency}");
    }
}

type Pairs = Vec<[Vec<u32>; 2]>;

/// `count` pairs of 1 to 6 and 1 to 5 tokens.
fn pairs(count: u64, seed: u64) -> Pairs {
    let key = RandomKey::new(seed, 0, "pairs");
    let part = |sample: u64, part: u64, most: f64| {
        let draw = |place: u64| key.uniform(32 * (2 * sample + part) + place);
        (1..=1 + (draw(0) * most) as u64).map(|place| (draw(place) * 1000.0) as u32).collect()
    };
    (0..count).map(|sample| [part(sample, 0, 6.0), part(sample, 1, 5.0)]).collect()
}

fn write(folder: &TempDir, name: &str, pairs: &Pairs) -> String {
    let prefix = folder.path().join(name);
    let mut builder = IndexedDatasetBuilder::new(&prefix, TokenType::U16).unwrap();
    for pair in pairs {
        pair.iter().for_each(|part| builder.add_sequence(part).unwrap());
        builder.end_document().unwrap();
    }
    builder.finish().unwrap();
    prefix.display().to_string()
}

fn open(words: &[&str], parts: [f64; 3]) -> Result<BlendedDataset> {
    let words: Vec<String> = words.iter().map(|word| word.to_string()).collect();
    let config =
        BlendConfig::Shared(BlendPaths::parse("--data-path", &words)?, Split::proportions(parts)?);
    BlendedDataset::open_pairs(&config, 1000)
}

fn config(seq_length: usize) -> PackingConfig {
    let (algorithm, long_samples) = (PackingAlgorithm::FirstFit, LongSamples::Refuse);
    PackingConfig { seq_length, algorithm, long_samples }
}

/// The pairs in the rows of a batch, which must have nothing else.
fn unpacked(batch: &Batch) -> Pairs {
    let (length, mut found) = (batch.seq_length, Vec::new());
    let inputs = batch.get::<u32>(TokenBatch::INPUTS).unwrap();
    let targets = batch.get::<i64>(TokenBatch::TARGETS).unwrap();
    let positions = batch.get::<u32>(TokenBatch::POSITIONS).unwrap();
    for (row, ends) in batch.documents().unwrap().iter().enumerate() {
        for two in ends.windows(2) {
            let range = row * length + two[0]..row * length + two[1];
            let counted = (0..range.len() as u32).collect::<Vec<u32>>();
            assert_eq!(positions[range.clone()], counted);
            let (inputs, targets) = (&inputs[range.clone()], &targets[range]);
            let Some(prompt) = targets.iter().position(|&target| target != IGNORE) else {
                assert!(inputs.iter().all(|&token| token == 0) && two[1] == length);
                continue;
            };
            let completion: Vec<u32> = targets[prompt..].iter().map(|&t| t as u32).collect();
            assert_eq!(inputs[prompt + 1..], completion[..completion.len() - 1]);
            found.push([inputs[..=prompt].to_vec(), completion]);
        }
    }
    found
}

fn sorted(mut pairs: Pairs) -> Pairs {
    pairs.sort();
    pairs
}

#[test]
fn an_epoch_has_each_pair_once_whole_and_by_itself() {
    let folder = tempfile::tempdir().unwrap();
    let (some, others) = (pairs(70, 1), pairs(30, 2));
    let names = [write(&folder, "a", &some), write(&folder, "b", &others)];
    let dataset = open(&[&names[0], &names[1]], [1.0, 0.0, 0.0]).unwrap();
    let all = sorted([some, others].concat());
    for algorithm in ALGORITHMS {
        let config = PackingConfig { algorithm, ..config(16) };
        let sampler = PackedSampler::new(&dataset.training, &config, 3).unwrap();
        let report = sampler.report();
        assert_eq!((report.samples, report.positions), (100, 16 * report.sequences));
        let epoch = |epoch: u64| {
            sampler.batch(epoch * report.sequences, report.sequences as usize).unwrap()
        };
        let (first, second) = (unpacked(&epoch(0)), unpacked(&epoch(1)));
        assert!(first != second && sorted(first) == all && sorted(second) == all);
        // Any cut, from any place on: a run resumes with the samples that it would have had.
        let whole = sampler.batch(5, 40).unwrap();
        for (first, count) in [(5, 7), (31, 14)] {
            let part = sampler.batch(first, count).unwrap();
            let again = PackedSampler::new(&dataset.training, &config, 3).unwrap();
            assert_eq!(part, again.batch(first, count).unwrap());
            let range = 16 * (first as usize - 5)..16 * (first as usize - 5 + count);
            let tokens = |batch: &Batch| batch.get::<u32>(TokenBatch::INPUTS).unwrap().to_vec();
            assert_eq!(tokens(&part), tokens(&whole)[range]);
        }
        let samples = PackedSamples::new(&dataset.training, &config).unwrap();
        let used: usize = all.iter().map(|pair| pair.concat().len() - 1).sum();
        assert_eq!((samples.report(), samples.report().used), (report, used as u64));
        let batch = samples.clone().first(3).batch(2, 2).unwrap();
        assert_eq!(batch.documents().unwrap()[1], [0, 16]);
        assert!(batch.get::<i64>(TokenBatch::TARGETS).unwrap()[16..].iter().all(|&t| t == IGNORE));
    }
}

#[test]
fn parts_are_whole_pairs_and_sets_have_their_weights() {
    let folder = tempfile::tempdir().unwrap();
    let all = pairs(50, 3);
    let name = write(&folder, "a", &all);
    let dataset = open(&[&name], [7.0, 2.0, 1.0]).unwrap();
    let parts = [Some(dataset.training), dataset.validation, dataset.test];
    for (part, want) in parts.into_iter().zip([&all[..35], &all[35..45], &all[45..]]) {
        let samples = PackedSamples::new(&part.unwrap(), &config(16)).unwrap();
        let found = unpacked(&samples.batch(0, samples.len as usize).unwrap());
        assert_eq!(sorted(found), sorted(want.to_vec()));
    }
    let same = |token: u32| vec![[vec![token; 3], vec![token; 6]]; 40];
    let (two, three) = (write(&folder, "two", &same(2)), write(&folder, "three", &same(3)));
    let dataset = open(&["30", &two, "70", &three], [1.0, 0.0, 0.0]).unwrap();
    let sampler = PackedSampler::new(&dataset.training, &config(16), 3).unwrap();
    let batch = sampler.batch(0, 10).unwrap();
    let tokens = batch.get::<u32>(TokenBatch::INPUTS).unwrap();
    let sets: Vec<u32> = tokens.chunks(16).map(|row| row[0]).collect();
    assert_eq!(sets, [3, 2, 3, 3, 2, 3, 3, 2, 3, 3]);
    let other = open(&["50", &two, "50", &three], [1.0, 0.0, 0.0]).unwrap();
    let other = PackedSampler::new(&other.training, &config(16), 3).unwrap();
    assert_ne!(sampler.crc32(), other.crc32());
}

#[test]
fn long_samples_are_refused_or_cut() {
    let folder = tempfile::tempdir().unwrap();
    let pair = |prompt: usize, completion: usize| [vec![1; prompt], vec![2; completion]];
    let all = vec![pair(2, 3), pair(6, 4), pair(3, 9), pair(8, 1), pair(9, 1), pair(20, 2)];
    let name = write(&folder, "a", &all);
    let dataset = open(&[&name], [1.0, 0.0, 0.0]).unwrap();
    let error = PackedSamples::new(&dataset.training, &config(8)).err().unwrap().to_string();
    for part in [
        "--packing: 4 of 6 samples are longer than --seq-length 8, of which sample 5 of '",
        "a' needs the most, 21: give --seq-length 21, or cut them by --truncate-samples",
    ] {
        assert!(error.contains(part), "{part} is missing: {error}");
    }
    let cut = PackingConfig { long_samples: LongSamples::Truncate, ..config(8) };
    let samples = PackedSamples::new(&dataset.training, &cut).unwrap();
    let report = samples.report();
    assert_eq!((report.samples, report.truncated, report.left_out), (4, 2, 2));
    let found = unpacked(&samples.batch(0, 4).unwrap());
    assert_eq!(found, [pair(2, 3), pair(6, 3), pair(3, 6), pair(8, 1)]);
    assert_eq!(
        report.to_string(),
        "4 samples packed into 4 sequences, efficiency 87.50 %; 2 samples are cut, and 2 left out, whose prompt alone \
         fills a sequence"
    );
    let cut = PackingConfig { seq_length: 1, ..cut };
    let error = PackedSamples::new(&dataset.training, &cut).err().unwrap().to_string();
    assert!(error.contains("the prompts of all 6 samples fill --seq-length 1"), "{error}");
}

#[test]
fn other_data_sets_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let name = folder.path().join("plain");
    let mut builder = IndexedDatasetBuilder::new(&name, TokenType::U16).unwrap();
    for sequences in [2, 1] {
        (0..sequences).for_each(|_| builder.add_sequence(&[1, 2]).unwrap());
        builder.end_document().unwrap();
    }
    builder.finish().unwrap();
    let error = open(&[&name.display().to_string()], [1.0, 0.0, 0.0]).err().unwrap().to_string();
    let words = "has no prompts and completions: document 1 has 1 sequences, not two; make such";
    assert!(error.starts_with("--packing: '") && error.contains(words), "{error}");

    let empty = write(&folder, "empty", &vec![[vec![1], vec![2]], [vec![3], vec![]]]);
    let dataset = open(&[&empty], [1.0, 0.0, 0.0]).unwrap();
    let error = PackedSamples::new(&dataset.training, &config(8)).err().unwrap().to_string();
    assert!(error.contains("sample 1 of '") && error.contains("an empty completion"), "{error}");
    std::fs::write(
        folder.path().join("empty.fingerprint.json"),
        r#"{ "options": { "split_sentences": true } }"#,
    )
    .unwrap();
    let error = open(&[&empty], [1.0, 0.0, 0.0]).err().unwrap().to_string();
    assert!(error.contains("its fingerprint says that it was made without"), "{error}");
}
