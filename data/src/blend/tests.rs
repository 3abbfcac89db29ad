//! Blends against plain restatements: shares, splits, orders, and what is refused.

use super::*;
use crate::thread_use;
use crate::{IndexedDatasetBuilder, TokenType, num_valid};
use std::time::Instant;
use tempfile::TempDir;

/// Writes a set of `sequences` sequences of 5 tokens that count up from `first`.
fn write(folder: &TempDir, name: &str, sequences: u32, first: u32) -> String {
    let prefix = folder.path().join(name);
    let mut builder = IndexedDatasetBuilder::new(&prefix, TokenType::I32).unwrap();
    for sequence in 0..sequences {
        let next = first + 5 * sequence;
        builder.add_sequence(&(next..next + 5).collect::<Vec<u32>>()).unwrap();
        builder.end_document().unwrap();
    }
    builder.finish().unwrap();
    prefix.display().to_string()
}

fn paths(words: &[&str]) -> BlendPaths {
    let words: Vec<String> = words.iter().map(|word| word.to_string()).collect();
    BlendPaths::parse("--data-path", &words).unwrap()
}

fn shared(words: &[&str], parts: [f64; 3]) -> Result<BlendedDataset> {
    let split = Split::proportions(parts)?;
    BlendedDataset::open(&BlendConfig::Shared(paths(words), split), 1 << 20)
}

fn inputs(samples: &dyn Samples, first: u64, rows: usize) -> Vec<u32> {
    samples.batch(first, rows).unwrap().get::<u32>("inputs").unwrap().to_vec()
}

#[test]
fn each_set_is_split_by_its_sequences() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (write(&folder, "a", 10, 0), write(&folder, "b", 1, 1000));
    let dataset = shared(&[&a, &b], [7.0, 2.0, 1.0]).unwrap();
    let streams = dataset.streams();
    let want: Vec<u32> = (0..35).chain(1000..1005).collect();
    assert_eq!(streams.train.to_vec().unwrap(), want);
    // The one sequence of b is for training.
    assert_eq!(dataset.validation.unwrap().num_sets(), 1);
    assert_eq!(streams.validation.unwrap().to_vec().unwrap(), (35..45).collect::<Vec<u32>>());
    assert_eq!(dataset.test.unwrap().tokens().to_vec().unwrap(), [45, 46, 47, 48, 49]);
    let all = shared(&[&a], [1.0, 0.0, 0.0]).unwrap();
    assert!(all.validation.is_none() && all.test.is_none());
}

#[test]
fn sets_without_weights_are_one_stream() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (write(&folder, "a", 30, 0), write(&folder, "b", 50, 1000));
    let dataset = shared(&[&a, &b], [1.0, 0.0, 0.0]).unwrap();
    let plain = Sampler::new(dataset.training.tokens(), 8, 7).unwrap();
    let sampler = dataset.training.sampler(8, 7).unwrap();
    assert_eq!(inputs(&*sampler, 3, 20), plain.tokens(3, 20).unwrap().inputs);
}

#[test]
fn sets_with_weights_take_their_shares_of_any_number() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (write(&folder, "a", 60, 0), write(&folder, "b", 60, 1000));
    let dataset = shared(&["1", &a, "3", &b], [1.0, 0.0, 0.0]).unwrap();
    let sampler = dataset.training.sampler(8, 7).unwrap();
    let whole = inputs(&*sampler, 0, 400);
    let of_b: Vec<&[u32]> = whole.chunks(8).filter(|row| row[0] >= 1000).collect();
    assert_eq!(of_b.len(), 300);
    // 300 tokens make 36 samples an epoch: each of b's is read once before any is read again.
    let first: std::collections::HashSet<_> = of_b[..36].iter().collect();
    assert_eq!(first.len(), 36);
    // A resumed run computes the order anew.
    let resumed = dataset.training.sampler(8, 7).unwrap();
    assert_eq!(inputs(&*resumed, 237, 9), whole[237 * 8..246 * 8]);
    // Sets of equal length do not walk in step.
    let of_a: Vec<&[u32]> = whole.chunks(8).filter(|row| row[0] < 1000).collect();
    let same = of_a.iter().zip(&of_b).filter(|(a, b)| a[0] + 1000 == b[0]).count();
    assert!(same < 30, "{same}");
}

#[test]
fn validation_reads_each_window_once_and_by_share() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (write(&folder, "a", 8, 0), write(&folder, "b", 24, 1000));
    let training = paths(&[&a]);
    for (words, of_a) in [(vec![&a[..], &b], 2), (vec!["1", &a, "1", &b], 4)] {
        let validation = Some(paths(&words));
        let config = BlendConfig::PerSplit { training: training.clone(), validation, test: None };
        let validation = BlendedDataset::open(&config, 1 << 20).unwrap().validation.unwrap();
        let samples = validation.validation(4, u64::MAX).unwrap();
        // 39 and 119 targets in windows of 4.
        assert_eq!(samples.len(), 10 + 30);
        let batch = samples.batch(0, 50).unwrap();
        assert_eq!(num_valid(batch.get::<i64>("targets").unwrap()), 39 + 119);
        let rows = inputs(&*samples, 0, 8);
        let found = rows.chunks(4).filter(|row| row[0] < 1000).count();
        assert_eq!(found, of_a, "{rows:?}");
        assert_eq!(validation.validation(4, 7).unwrap().len(), 7);
    }
}

#[test]
fn what_is_wrong_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let a = write(&folder, "a", 10, 0);
    let text = folder.path().join("words.txt").display().to_string();
    std::fs::write(&text, "words").unwrap();
    let refused = |words: &[&str], parts| shared(words, parts).err().unwrap().to_string();
    let all = [1.0, 0.0, 0.0];
    for (words, parts, part) in [
        (vec![&text[..]], all, "is no indexed data set (PREFIX.idx and PREFIX.bin): give text"),
        (
            vec!["nowhere"],
            all,
            "--data-path: there is no data set 'nowhere': no file 'nowhere.idx'",
        ),
        (
            vec![&a],
            [1.0, 99.0, 0.0],
            "a' has no token for this part: leave it out, or give a larger share by --split",
        ),
    ] {
        let error = refused(&words, parts);
        assert!(error.contains(part), "{error}");
    }
    let config = BlendConfig::Shared(paths(&[&a]), Split::proportions(all).unwrap());
    let error = BlendedDataset::open(&config, 10).err().unwrap().to_string();
    assert!(error.contains("a.bin' has token 10 at position 10"), "{error}");
}

/// Ten terabytes: 10 000 sets of 5 x 10^8 tokens, as sparse files, named by a file.
#[test]
fn ten_thousand_sets_open_at_once() {
    const SETS: usize = 10_000;
    const TOKENS: u64 = 500_000_000;
    let folder = tempfile::tempdir().unwrap();
    let first = write(&folder, "set-0", 4, 0);
    let index = std::fs::read(format!("{first}.idx")).unwrap();
    let quarter = (TOKENS / 4) as i32;
    let index = [
        &index[..34],
        &[quarter.to_le_bytes(); 4].concat(),
        &[0, 1, 2, 3_i64].map(|i| (4 * i * i64::from(quarter)).to_le_bytes()).concat(),
        &index[34 + 4 * 12..],
    ]
    .concat();
    let mut list = String::new();
    for set in 0..SETS {
        let prefix = folder.path().join(format!("set-{set}"));
        std::fs::write(prefix.with_extension("idx"), &index).unwrap();
        let bin = std::fs::File::create(prefix.with_extension("bin")).unwrap();
        bin.set_len(4 * TOKENS).unwrap();
        list += &format!("{}\n", prefix.display());
    }
    let file = folder.path().join("list");
    std::fs::write(&file, list).unwrap();
    let open_files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let (before, start) = (open_files(), Instant::now());
    let processor = thread_use::processor_seconds();
    let paths = BlendPaths::from_file("--data-args-path", &file).unwrap();
    let split = Split::proportions([3.0, 1.0, 0.0]).unwrap();
    let dataset = BlendedDataset::open(&BlendConfig::Shared(paths, split), 50_304).unwrap();
    let sampler = dataset.training.sampler(1024, 1).unwrap();
    let validation = dataset.validation.unwrap().validation(1024, 256).unwrap();
    let seconds = start.elapsed().as_secs_f64();
    let processor = thread_use::processor_seconds() - processor;
    let tokens = dataset.training.tokens().len();
    println!(
        "{SETS} data sets of {tokens} tokens in {seconds:.2} s, {processor:.2} of a processor"
    );
    assert_eq!(dataset.training.tokens().len(), SETS as u64 * TOKENS / 4 * 3);
    assert!(open_files() < before + 64, "{} descriptors", open_files());
    // By the clock it is as long, unless others use the machine.
    assert!(processor < 1.0, "{processor} s");
    assert_eq!(inputs(&*sampler, 12_345, 2), [0; 2048]);
    assert_eq!(inputs(&*validation, 254, 2), [0; 2048]);
}
