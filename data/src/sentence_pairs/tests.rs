mod sets;

use super::*;
use crate::IGNORE;
use crate::tokenizer::Tokenizer;

/// Documents of 1 to 9 sentences of 1 to 12 letters.
fn documents(count: u64) -> Documents {
    let mut text = String::new();
    for document in 0..count {
        let key = RandomKey::new(7, document, "documents");
        for sentence in 0..1 + below(&key, 0, 9) as u64 {
            let letter =
                |i: usize| (b'a' + below(&key, 100 * sentence + i as u64, 26) as u8) as char;
            let length = 1 + below(&key, 1 + sentence, 12);
            text.extend((0..length).map(|i| letter(i + 20)));
            text.push('\n');
        }
        text.push('\n');
    }
    Documents::from_text(&text, &Tokenizer::Byte).unwrap()
}

fn pairs(seq_length: usize) -> SentencePairs {
    let special = Tokenizer::Byte.special_tokens().unwrap();
    SentencePairs::new(documents(200), special, seq_length, 1234).unwrap()
}

#[test]
fn groups_cover_the_documents() {
    let documents = documents(200);
    for fit in [2, 3, 10, 29, 1000] {
        for (index, document) in documents.documents().iter().enumerate() {
            let mut groups = Vec::new();
            let key = RandomKey::new(1, index as u64, "groups");
            cut_into_groups(&documents, document, fit, &key, &mut groups);
            let covered: Vec<usize> =
                groups.iter().flat_map(|group| group.sentences.clone()).collect();
            let want = if document.len() < 2 { Vec::new() } else { document.clone().collect() };
            assert_eq!(covered, want);
            for Group { sentences, most } in &groups {
                assert!(sentences.len() >= 2 && (2..=fit).contains(most));
                let without_last = sentences.start..sentences.end - 1;
                let ends = sentences.len() == 2
                    || documents.num_tokens_of(without_last) < *most
                    || sentences.end == document.end;
                assert!(ends, "{sentences:?} has more than {most} tokens");
            }
        }
    }
}

/// The tokens before masking, and the two segments.
fn unmask(batch: &Batch, row: usize) -> (Vec<u32>, Vec<u32>, Vec<u32>) {
    let length = batch.seq_length;
    let at = row * length..(row + 1) * length;
    let tokens = &batch.get::<u32>(PairBatch::TOKENS).unwrap()[at.clone()];
    let targets = &batch.get::<i64>(PairBatch::TARGETS).unwrap()[at.clone()];
    let segments = &batch.get::<u32>(PairBatch::SEGMENTS).unwrap()[at];
    let whole: Vec<u32> = tokens
        .iter()
        .zip(targets)
        .map(|(&token, &target)| u32::try_from(target).unwrap_or(token))
        .collect();
    let seps: Vec<usize> = (0..length).filter(|&i| whole[i] == 258).collect();
    assert_eq!((whole[0], seps.len()), (257, 2), "{whole:?}");
    assert!(whole[seps[1] + 1..].iter().all(|&token| token == 256));
    assert_eq!(batch.key_lengths().unwrap()[row], seps[1] + 1);
    for (i, &segment) in segments.iter().enumerate() {
        assert_eq!(segment, u32::from(seps[0] < i && i <= seps[1]), "{i} of {segments:?}");
    }
    (whole[1..seps[0]].to_vec(), whole[seps[0] + 1..seps[1]].to_vec(), whole)
}

#[test]
fn samples_are_pairs_of_the_text_in_the_order_of_their_label() {
    let pairs = pairs(24);
    let text = pairs.sets[0].documents.token_source().to_vec().unwrap();
    let batch = pairs.batch(0, 1000).unwrap();
    let order = batch.get::<i64>(PairBatch::ORDER).unwrap();
    for (row, &swapped) in order.iter().enumerate() {
        let (a, b, _) = unmask(&batch, row);
        assert!(!a.is_empty() && !b.is_empty() && a.len() + b.len() <= 21);
        let (first, second) = if swapped == 1 { (&b, &a) } else { (&a, &b) };
        // The text has the first before the second, with nothing but dropped tokens between.
        let found = text.windows(first.len()).enumerate().any(|(at, window)| {
            let behind = &text[at + first.len()..text.len().min(at + 130)];
            window == &first[..] && behind.windows(second.len()).any(|window| window == &second[..])
        });
        assert!(found, "row {row}: {first:?} {second:?}");
    }
    let swapped = order.iter().sum::<i64>();
    assert!((440..560).contains(&swapped), "{swapped} of 1000");
}

#[test]
fn masks_are_15_percent_in_80_10_10() {
    let pairs = pairs(64);
    let batch = pairs.batch(0, 2000).unwrap();
    let tokens = batch.get::<u32>(PairBatch::TOKENS).unwrap();
    let targets = batch.get::<i64>(PairBatch::TARGETS).unwrap();
    let (mut masked, mut kept, mut predicted, mut all) = (0.0, 0.0, 0.0, 0.0);
    for row in 0..2000 {
        let (a, b, _) = unmask(&batch, row);
        let count = a.len() + b.len();
        let at = row * 64..(row + 1) * 64;
        let wanted = (0.15 * count as f64).round().max(1.0);
        let own = targets[at.clone()].iter().filter(|&&target| target >= 0).count() as f64;
        assert_eq!(own, wanted);
        all += count as f64;
        predicted += own;
        for (&token, &target) in tokens[at.clone()].iter().zip(&targets[at]) {
            assert!(target < 256, "a special token is predicted");
            masked += f64::from(u8::from(target >= 0 && token == 259));
            kept += f64::from(u8::from(target >= 0 && i64::from(token) == target));
        }
    }
    assert!((predicted / all - 0.15).abs() < 0.01, "{predicted} of {all}");
    assert!((masked / predicted - 0.8).abs() < 0.015, "{masked} of {predicted} masked");
    assert!((kept / predicted - 0.1).abs() < 0.015, "{kept} of {predicted} kept");
}

#[test]
fn batches_are_the_same_samples_however_they_are_cut() {
    let pairs = pairs(16);
    let groups = pairs.samples_per_epoch().unwrap();
    for first in [0, 3, groups - 2, 5 * groups + 1] {
        let whole = pairs.batch(first, 4).unwrap();
        for sample in 0..4 {
            let one = pairs.batch(first + sample as u64, 1).unwrap();
            let part = |name| &whole.get::<u32>(name).unwrap()[sample * 16..(sample + 1) * 16];
            for name in [PairBatch::TOKENS, PairBatch::SEGMENTS] {
                assert_eq!(one.get::<u32>(name).unwrap(), part(name));
            }
        }
    }
    // Another epoch has other masks of the same groups.
    let rows = |epoch: u64| {
        let batch = pairs.batch(epoch * groups, groups as usize).unwrap();
        let mut rows: Vec<Vec<u32>> =
            batch.get::<u32>(PairBatch::TOKENS).unwrap().chunks(16).map(<[u32]>::to_vec).collect();
        rows.sort();
        rows
    };
    assert_ne!(rows(0), rows(1));
}

#[test]
fn held_out_pairs_are_always_the_same_and_end() {
    let special = Tokenizer::Byte.special_tokens().unwrap();
    let held_out = HeldOutPairs::new(documents(20), special, 16).unwrap();
    let count = held_out.len();
    let batch = held_out.batch(count - 1, 3).unwrap();
    let order = batch.get::<i64>(PairBatch::ORDER).unwrap();
    assert!(order[0] >= 0 && order[1..] == [IGNORE, IGNORE]);
    assert!(batch.get::<i64>(PairBatch::TARGETS).unwrap()[16..].iter().all(|&target| target < 0));
    assert_eq!(held_out.clone().first(3).len(), 3);
    assert_eq!(held_out.first(u64::MAX).len(), count);
}

#[test]
fn too_little_is_refused() {
    let special = Tokenizer::Byte.special_tokens().unwrap();
    let of = |text: &str, length| {
        let documents = Documents::from_text(text, &Tokenizer::Byte).unwrap();
        SentencePairs::new(documents, special, length, 1).map(drop)
    };
    let error = of("a\n\nb", 16).unwrap_err().to_string();
    assert_eq!(
        error,
        "data: no document for training has two sentences: there are 2 sentences in 2 documents, which blank lines separate \
         in text: give documents of several sentences"
    );
    let documents = Documents::from_text("a\n\nb", &Tokenizer::Byte).unwrap();
    let error = HeldOutPairs::new(documents, special, 16).err().unwrap().to_string();
    let remedy = "hold out more with --valid-fraction or --split, or name files by --valid-data";
    assert!(
        error.starts_with("data: no document for validation") && error.ends_with(remedy),
        "{error}"
    );
    let error = of("a\nb", 4).unwrap_err().to_string();
    assert_eq!(error, "--seq-length: must be at least 5, [CLS] a [SEP] b [SEP], got 4");
    assert!(of("a\nb", 5).is_ok());
}
