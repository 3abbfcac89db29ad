//! The three indices of Megatron-LM's `GPTDataset`: documents in order, where each sample begins, samples in order.
//!
//! Source: `megatron/core/datasets/gpt_dataset.py` and `helpers.cpp`. What is called a document there is a sequence of
//! the indexed data set. A sample reads `seq_length + 1` tokens: the inputs, and the one behind them.

use super::random_state::RandomState;
use ferrotron_tensor::{Error, Result};
use std::ops::Range;

/// The place of a sample's first token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Start {
    /// Position in the document index.
    pub position: u32,
    /// Tokens of that sequence in front of it.
    pub offset: u32,
}

/// The indices of one data set.
pub struct Indices {
    /// Sequences, in the order in which they are read.
    pub documents: Vec<u32>,
    /// The first token of each sample, and of one more.
    pub starts: Vec<Start>,
    /// Samples, in the order in which they are taken.
    pub shuffle: Vec<u32>,
}

impl Indices {
    /// The indices for `samples` samples of `seq_length` tokens, or of one epoch, of the sequences `range`, whose lengths
    /// are `lengths`.
    ///
    /// # Errors
    /// No token, or too few for one sample of one epoch; more sequences or samples than 32 bits count.
    pub fn new(
        lengths: &[u32],
        range: Range<u64>,
        seq_length: usize,
        samples: Option<u64>,
        seed: u32,
    ) -> Result<Indices> {
        let (length, tokens) =
            (seq_length as u64, lengths.iter().map(|&n| u64::from(n)).sum::<u64>());
        // A part that is shorter than a sample is read again and again within one.
        if tokens == 0 || (tokens <= length && samples.is_none()) {
            return Err(too_short(tokens, lengths.len() as u64, seq_length));
        }
        let Epochs { count, separate_last } = Epochs::new(tokens, length, samples);
        let total = (count * tokens - 1) / length;
        let entries = u128::from(count) * lengths.len() as u128;
        if total >= u32::MAX.into() || entries >= u32::MAX.into() || range.end > u32::MAX.into() {
            return Err(Error::value(
                "data",
                format!(
                    "{total} samples of {entries} sequences are more than Megatron's order counts, 2^32"
                ),
            ));
        }
        let mut random = RandomState::new(seed);
        let mut shuffled = |epochs: u64| {
            let once = range.start as u32..range.end as u32;
            let mut documents: Vec<u32> = (0..epochs).flat_map(|_| once.clone()).collect();
            random.shuffle(&mut documents);
            documents
        };
        let documents = match separate_last {
            None => shuffled(count),
            Some(_) => [shuffled(count - 1), shuffled(1)].concat(),
        };
        let starts = starts(lengths, range.start, &documents, length, total);
        let mut shuffle: Vec<u32> = (0..total as u32).collect();
        let (first, last) = shuffle.split_at_mut(separate_last.unwrap_or(total) as usize);
        random.shuffle(first);
        random.shuffle(last);
        Ok(Indices { documents, starts, shuffle })
    }
}

/// The error of a part whose `tokens` in `sequences` sequences are too few for a sample.
pub fn too_short(tokens: u64, sequences: u64, seq_length: usize) -> Error {
    Error::value(
        "data",
        format!(
            "a part of the data has {tokens} tokens in {sequences} sequences, but one sample needs {} (--seq-length \
             {seq_length} and the token after it): use more data, a larger share of --split or a shorter --seq-length",
            seq_length + 1
        ),
    )
}

/// The numbers of passes over the sequences.
struct Epochs {
    count: u64,
    /// The samples before the last epoch, if that one is shuffled apart.
    separate_last: Option<u64>,
}

impl Epochs {
    fn new(tokens: u64, length: u64, samples: Option<u64>) -> Epochs {
        let Some(samples) = samples else {
            return Epochs { count: 1, separate_last: None };
        };
        let count = (samples * length + 1).div_ceil(tokens).max(1);
        if count == 1 {
            return Epochs { count, separate_last: None };
        }
        let before = ((count - 1) * tokens - 1) / length;
        let last = samples as i64 - before as i64;
        let threshold = (0.8 * ((tokens - 1) / length) as f64) as i64;
        Epochs { count, separate_last: (last < threshold).then_some(before) }
    }
}

/// The places of every `length`-th token of the documents, `total` + 1 of them.
fn starts(lengths: &[u32], first: u64, documents: &[u32], length: u64, total: u64) -> Vec<Start> {
    let mut starts = Vec::with_capacity(total as usize + 1);
    starts.push(Start { position: 0, offset: 0 });
    // Tokens in front of the document at `position`.
    let (mut position, mut before) = (0_usize, 0_u64);
    for sample in 1..=total {
        let token = sample * length;
        let len =
            |position: usize| u64::from(lengths[documents[position] as usize - first as usize]);
        while before + len(position) <= token {
            before += len(position);
            position += 1;
        }
        starts.push(Start { position: position as u32, offset: (token - before) as u32 });
    }
    starts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_are_those_of_megatron() {
        let found = starts(&[5, 3, 7, 2], 0, &[2, 0, 3, 1], 4, 4);
        let pairs: Vec<(u32, u32)> = found.iter().map(|s| (s.position, s.offset)).collect();
        assert_eq!(pairs, [(0, 0), (0, 4), (1, 1), (2, 0), (3, 2)]);
    }

    /// CRC-32 of the indices as Megatron keeps them, little-endian 32-bit numbers; `data/tests/megatron_order.py`
    /// computes them with NumPy.
    #[test]
    fn indices_are_those_of_a_restatement_with_numpy() {
        let crc32 = |words: &[u32]| {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            crc32fast::hash(&bytes)
        };
        for (range, seq_length, samples, seed, want) in [
            (0..969, 16, Some(3000), 1234, [0x52fd_f442, 0x566a_6f07, 0x3fe5_bf2f]),
            (0..969, 16, Some(1300), 1234, [0x86a7_9ff8, 0x3747_d259, 0xedc2_5547]),
            (969..999, 7, Some(400), 99, [0xaa28_9bee, 0x4c35_bfe7, 0xcedd_8d96]),
            (0..1000, 512, None, 0, [0x53ef_5450, 0x455e_4484, 0x385e_257c]),
        ] {
            let lengths: Vec<u32> = range.clone().map(|i| i as u32 * 31 % 41).collect();
            let Indices { documents, starts, shuffle } =
                Indices::new(&lengths, range, seq_length, samples, seed).unwrap();
            let starts: Vec<u32> =
                starts.iter().flat_map(|start| [start.position, start.offset]).collect();
            assert_eq!([&documents, &starts, &shuffle].map(|words| crc32(words)), want);
        }
    }

    #[test]
    fn every_epoch_reads_every_sequence_once() {
        let lengths: Vec<u32> = (0..100).map(|i| i * 37 % 50).collect();
        let tokens: u64 = lengths.iter().map(|&n| u64::from(n)).sum();
        for (samples, epochs) in
            [(None, 1), (Some(1), 1), (Some(tokens / 16 + 1), 2), (Some(5 * tokens / 16 - 3), 5)]
        {
            let Indices { documents, starts, shuffle } =
                Indices::new(&lengths, 40..140, 16, samples, 7).unwrap();
            let mut sorted = documents.clone();
            sorted.sort_unstable();
            let want: Vec<u32> = (40..140).flat_map(|id| vec![id; epochs]).collect();
            assert_eq!(sorted, want);
            assert_eq!(starts.len() as u64, (epochs as u64 * tokens - 1) / 16 + 1);
            let mut sorted = shuffle.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..starts.len() as u32 - 1).collect::<Vec<u32>>());
            assert!(shuffle.len() as u64 >= samples.unwrap_or(0));
        }
    }

    #[test]
    fn a_last_epoch_of_which_little_is_needed_is_shuffled_apart() {
        // An epoch has 100 tokens, 24 samples of 4; 80 % of them, rounded down, are 19.
        let apart = |samples| Epochs::new(100, 4, Some(samples)).separate_last;
        assert_eq!((apart(24), apart(25)), (None, Some(24)));
        assert_eq!((apart(24 + 18), apart(24 + 19)), (Some(24), None));
        let lengths = [10; 10];
        let Indices { documents, shuffle, .. } =
            Indices::new(&lengths, 0..10, 4, Some(30), 1234).unwrap();
        let mut first = documents[..10].to_vec();
        first.sort_unstable();
        assert_eq!(first, (0..10).collect::<Vec<u32>>());
        assert!(shuffle[..24].iter().all(|&sample| sample < 24));
    }

    #[test]
    fn a_part_shorter_than_a_sample_is_read_several_times_within_one() {
        // Samples of 8 and the token behind them, of 3 tokens: three samples read 25 tokens, in 9 epochs.
        let Indices { documents, starts, shuffle } =
            Indices::new(&[2, 1], 0..2, 8, Some(3), 1).unwrap();
        assert_eq!((documents.len(), starts.len(), shuffle.len()), (18, 4, 3));
    }

    #[test]
    fn too_little_data_is_refused() {
        let error = Indices::new(&[4, 4], 0..2, 8, None, 1).err().unwrap().to_string();
        assert!(error.contains("8 tokens in 2 sequences, but one sample needs 9"), "{error}");
    }
}
