//! Texts and words that are encoded in parts have the ids of the whole.

use super::super::super::{char_boundary, sizes::Sizes};
use super::*;

/// Sizes at which texts of some hundred bytes are long.
const SMALL: [Sizes; 3] = [
    Sizes { chunk: 10, window: 64 },
    Sizes { chunk: 40, window: 48 },
    Sizes { chunk: 100, window: 1000 },
];

fn encode_in(tokenizer: &Tokenizer, text: &str, sizes: Sizes) -> Vec<u32> {
    let mut tokens = Vec::new();
    let mut give = |part: &[u32]| {
        tokens.extend_from_slice(part);
        Ok(())
    };
    tokenizer.encode_in(text, sizes, &mut give).unwrap();
    tokens
}

/// Runs of characters that stay within a word for one pattern or another, and of what cuts them.
fn runs() -> impl Strategy<Value = String> {
    let fragments = [
        "a",
        "wo",
        "word",
        "rd",
        "A",
        "ABab",
        "\u{4e2d}\u{6587}",
        "\u{e9}",
        "e\u{301}",
        "\u{301}",
        "\u{1f600}",
        "\u{12000}\u{12345}",
        " ",
        "\n",
        " \n",
        "\u{a0}",
        "1",
        "12",
        "'s",
        "'",
        "!",
        ".\n",
        "/",
        "\u{2581}",
        "\u{2581}\u{2581}word",
        "<a>",
        " <b> ",
        "<|endoftext|>",
        " word",
        "word word",
        "    ",
    ];
    let run = (prop::sample::select(fragments.to_vec()), 1..60_usize);
    let run = run.prop_map(|(fragment, times)| fragment.repeat(times));
    let letters = prop::collection::vec(
        prop::sample::select("wordaABC'1\u{e9}\u{4e2d}".chars().collect::<Vec<_>>()),
        0..400,
    );
    let letters = letters.prop_map(|letters| letters.into_iter().collect::<String>());
    let part = prop_oneof![2 => run, 1 => letters, 1 => text()];
    prop::collection::vec(part, 0..8).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn parts_have_the_ids_of_gpt2(text in runs()) {
        let special = std::collections::HashSet::from(["<|endoftext|>"]);
        let (want, _) = tiktoken_rs::r50k_base_singleton().encode(&text, &special).unwrap();
        for sizes in SMALL {
            // GPT-2's longest tokens have 128 bytes.
            let sizes = Sizes { window: sizes.window.max(256), ..sizes };
            prop_assert_eq!(&encode_in(&Tokenizer::Gpt2, &text, sizes), &want, "{:?}", sizes);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn parts_have_the_ids_of_the_crate(text in runs()) {
        for (tokenizer, reference) in FILES.iter() {
            let want = reference.encode_fast(text.as_str(), false).unwrap();
            for sizes in SMALL {
                prop_assert_eq!(&encode_in(tokenizer, &text, sizes), want.get_ids(), "{:?}", sizes);
            }
        }
    }
}

#[test]
fn words_of_many_windows_have_the_ids_of_the_crate() {
    let special = std::collections::HashSet::from([]);
    let crates = tiktoken_rs::r50k_base_singleton();
    let letters = |i: u64| char::from(b'a' + (i * i % 8191 * 7919 % 26) as u8);
    for word in [
        "a".repeat(1 << 17),
        (0..1 << 17).map(letters).collect(),
        "\u{4e2d}\u{6587}\u{5b57}".repeat(1 << 14),
        "abcdefg".repeat(1 << 14),
        " ".repeat(1 << 17),
        "!?".repeat(1 << 16) + "\n\n",
    ] {
        let sizes = Sizes { chunk: 1 << 12, window: 1 << 12 };
        let got = encode_in(&Tokenizer::Gpt2, &word, sizes);
        assert!(got == crates.encode(&word, &special).unwrap().0, "{:?}", &word[..6]);
        for (tokenizer, reference) in FILES.iter() {
            let got = encode_in(tokenizer, &word, sizes);
            let want = reference.encode_fast(word.as_str(), false).unwrap();
            assert!(got == want.get_ids(), "{:?}: {}", &word[..6], &tokenizer.to_json()[..600]);
        }
    }
}

#[test]
fn windows_stay_small() {
    let bpe = tiktoken_rs::r50k_base_singleton();
    for fragment in
        ["a", "abc", " ", "!?", "\u{e9}", "\u{4e2d}\u{6587}", "\u{12000}", "\u{1f600}\u{301}"]
    {
        let word = fragment.repeat((1 << 16) / fragment.len());
        let largest = std::cell::Cell::new(0);
        let encode = |window: std::ops::Range<usize>| {
            largest.set(largest.get().max(window.len()));
            let mut end = window.start;
            let piece = |id| {
                let start = end;
                end += bpe.decode_bytes(&[id]).unwrap().len();
                let (start, end) =
                    (char_boundary::floor(&word, start), char_boundary::ceil(&word, end));
                Piece { id, start, end }
            };
            Ok(bpe.encode_ordinary(&word[window]).into_iter().map(piece).collect())
        };
        long_word::encode_by_windows(&word, 1 << 12, encode, &mut |_| Ok(())).unwrap();
        assert!(largest.get() <= 1 << 12, "{fragment:?}: {}", largest.get());
    }
}

#[test]
fn each_window_reaches_beyond_the_one_in_front() {
    let word = "a".repeat(1 << 16);
    let ends = std::cell::RefCell::new(Vec::new());
    // One token for any number of letters: no two windows join.
    let encode = |window: std::ops::Range<usize>| {
        ends.borrow_mut().push(window.end);
        Ok(vec![Piece { id: 7, start: window.start, end: window.end }])
    };
    let mut ids = Vec::new();
    let mut give = |part: &[u32]| {
        ids.extend_from_slice(part);
        Ok(())
    };
    long_word::encode_by_windows(&word, 1 << 12, encode, &mut give).unwrap();
    assert_eq!((ids, ends.into_inner()), (vec![7], vec![1 << 12, 1 << 14, 1 << 16]));
}
