//! The speed of tokenizers on the same documents, with equal ids.
//!
//! `cargo bench -p ferrotron-data --bench tokenizers -- [--tokenizer TOKENIZER.JSON] [--threads N] [--rounds N] FILE...`
//! encodes each file with GPT-2's vocabulary, or with that of a file: with this crate, `tiktoken-rs` (GPT-2 alone) and
//! `tokenizers`, in turns. It prints the median of the rounds, by the clock and by the seconds of processors, and a hash of
//! the ids, which a first round computes. Files are cut into documents of some 4 KB at the ends of lines.
//! `benches/peers/tokenizers_speed.py` does the same with the Python package. Results are in `docs/data.md`.

use ferrotron_data::tokenizer::Tokenizer;
use std::collections::HashSet;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

/// Bytes of a document, at least.
const DOCUMENT: usize = 4096;

type Encode<'a> = Box<dyn Fn(&str) -> Vec<u32> + Sync + 'a>;

fn main() {
    let mut words = std::env::args().skip(1).filter(|word| word != "--bench");
    let (mut files, mut path, mut threads, mut rounds) = (Vec::new(), None, 1, 3);
    while let Some(word) = words.next() {
        let mut number = || words.next().and_then(|word| word.parse().ok()).expect("a number");
        match word.as_str() {
            "--threads" => threads = number(),
            "--rounds" => rounds = number(),
            "--tokenizer" => path = words.next(),
            _ => files.push(word),
        }
    }
    let ours = match &path {
        None => Tokenizer::Gpt2,
        Some(path) => Tokenizer::from_file(Path::new(path)).expect("a tokenizer.json"),
    };
    let special = HashSet::from(["<|endoftext|>"]);
    let mut encoders: Vec<(&str, Encode)> =
        vec![("ferrotron", Box::new(|text: &str| ours.encode(text).expect("it encodes")))];
    match &path {
        None => {
            let crates = tiktoken_rs::r50k_base_singleton();
            encoders.push((
                "tiktoken-rs",
                Box::new(move |text: &str| crates.encode(text, &special).expect("it encodes").0),
            ));
        }
        Some(path) => {
            let crates = tokenizers::Tokenizer::from_file(path).expect("a tokenizer.json");
            encoders.push((
                "tokenizers",
                Box::new(move |text: &str| {
                    crates.encode_fast(text, false).expect("it encodes").get_ids().to_vec()
                }),
            ));
        }
    }
    for file in &files {
        let text = std::fs::read_to_string(file).expect("a file of text");
        let documents = documents(&text);
        let hashes: Vec<u64> =
            encoders.iter().map(|(_, encode)| hash(encode, &documents)).collect();
        let mut times = vec![Vec::new(); encoders.len()];
        for _ in 0..rounds {
            for ((_, encode), times) in encoders.iter().zip(&mut times) {
                times.push(run(encode, &documents, threads));
            }
        }
        for (((name, _), hash), mut times) in encoders.iter().zip(hashes).zip(times) {
            times.sort_by(|a, b| a.0.total_cmp(&b.0));
            let (clock, processors, tokens) = times[rounds / 2];
            let rate = |seconds: f64| text.len() as f64 / 1e6 / seconds;
            println!(
                "{name} threads {threads}: {:.1} MB/s, {:.1} MB per processor second, {tokens} tokens in {} documents, \
                 ids {hash:016x}",
                rate(clock),
                rate(processors),
                documents.len(),
            );
        }
    }
}

/// Cuts a text behind line breaks.
fn documents(text: &str) -> Vec<&str> {
    let mut documents = Vec::new();
    let mut start = 0;
    for (at, _) in text.match_indices('\n') {
        if at + 1 - start >= DOCUMENT {
            documents.push(&text[start..at + 1]);
            start = at + 1;
        }
    }
    documents.push(&text[start..]);
    documents
}

/// A hash of the documents' ids: each document's CRC-32 of little-endian words, times its number from 1, added up.
fn hash(encode: &Encode, documents: &[&str]) -> u64 {
    let document = |(number, text): (u64, &&str)| {
        let bytes: Vec<u8> = encode(text).iter().flat_map(|id| id.to_le_bytes()).collect();
        u64::from(crc32fast::hash(&bytes)).wrapping_mul(number)
    };
    (1..).zip(documents).map(document).fold(0, u64::wrapping_add)
}

/// Seconds by the clock and of processors, and the number of tokens.
fn run(encode: &Encode, documents: &[&str], threads: usize) -> (f64, f64, u64) {
    let next = AtomicUsize::new(0);
    let (start, processors) = (Instant::now(), processor_seconds());
    let work = || {
        let mut tokens = 0;
        while let Some(document) = documents.get(next.fetch_add(1, Relaxed)) {
            tokens += encode(document).len() as u64;
        }
        tokens
    };
    let tokens = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().map(|worker| worker.join().expect("it does not panic")).sum()
    });
    (start.elapsed().as_secs_f64(), processor_seconds() - processors, tokens)
}

/// Seconds that processors spent on this process so far, to 10 ms, from Linux's table of processes.
fn processor_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("Linux has it");
    let fields = stat.rsplit_once(')').expect("a name in brackets").1.split(' ');
    // `utime` and `stime`, in hundredths of a second.
    fields.skip(12).take(2).map(|ticks| ticks.parse::<f64>().expect("a number")).sum::<f64>()
        / 100.0
}
