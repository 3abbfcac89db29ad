//! The speed of tokenizers on the same text, with equal ids.
//!
//! `cargo bench -p ferrotron-data --bench tokenizers -- [--tokenizer TOKENIZER.JSON] FILE...` encodes each file with GPT-2's
//! vocabulary, or with that of a file, on 1 and on 2 threads: with this crate, `tiktoken-rs` (GPT-2 alone) and
//! `tokenizers`. Files are cut into documents of some 4 KB at the ends of lines. `benches/peers/tokenizers_speed.py` does
//! the same with the Python package. Results are in `docs/data.md`.

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
    let (mut files, mut path) = (Vec::new(), None);
    while let Some(word) = words.next() {
        match word == "--tokenizer" {
            true => path = words.next(),
            false => files.push(word),
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
        let mut first = None;
        for (name, encode) in &encoders {
            for threads in [1, 2] {
                let (seconds, tokens, hash) = run(encode, &documents, threads);
                let same = *first.get_or_insert(hash) == hash;
                println!(
                    "{file} {name} threads {threads}: {:.2} MB/s, {tokens} tokens in {} documents, {seconds:.2} s, {}",
                    text.len() as f64 / 1e6 / seconds,
                    documents.len(),
                    if same { "equal ids" } else { "OTHER IDS" },
                );
            }
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

/// Seconds, tokens, and a sum over documents of hashes of their ids.
fn run(encode: &Encode, documents: &[&str], threads: usize) -> (f64, u64, u64) {
    let next = AtomicUsize::new(0);
    let start = Instant::now();
    let work = || {
        let (mut tokens, mut hash) = (0, 0u64);
        while let Some(document) = documents.get(next.fetch_add(1, Relaxed)) {
            let ids = encode(document);
            tokens += ids.len() as u64;
            let fnv = |hash: u64, id: &u32| (hash ^ u64::from(*id)).wrapping_mul(0x100_0000_01b3);
            hash = hash.wrapping_add(ids.iter().fold(0xcbf2_9ce4_8422_2325, fnv));
        }
        (tokens, hash)
    };
    let sums = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let sums = workers.into_iter().map(|worker| worker.join().expect("it does not panic"));
        sums.fold((0, 0u64), |a, b| (a.0 + b.0, a.1.wrapping_add(b.1)))
    });
    (start.elapsed().as_secs_f64(), sums.0, sums.1)
}
