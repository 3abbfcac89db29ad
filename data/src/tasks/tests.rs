use super::*;
use crate::tokenizer::Tokenizer;

/// One replacement each, as Python's `re` and `str.replace` make them.
#[test]
fn every_rule_of_the_detokenizer_applies() {
    for (from, to) in [
        ("dogs ' bones", "dogs' bones"),
        ("a @-@ b 1 @,@ 5 2 @.@ 5", "a-b 1,5 2.5"),
        ("so : yes ; no . now ! why ? well , ok", "so: yes; no. now! why? well, ok"),
        ("( a ( b ) c ) d", "(a ( b) c ) d"),
        ("[ a\n] { b} ( ", "[a] {b} ( "),
        ("\" a \" b \" c \"", "\"a\" b \"c\""),
        ("say ' hi ' now", "say 'hi' now"),
        ("= = = = T = = =", "==== T ==="),
        ("5 \u{b0} C \n N N", "5\u{b0}C\nN N"),
        ("a N b it 's", "a 1 b it's"),
    ] {
        assert_eq!(detokenize_wikitext(from), to, "{from:?}");
    }
}

/// Windows as Megatron-LM's `_LMDataset` cuts them, whose masks count each target once.
#[test]
fn every_token_but_the_first_is_scored_once_with_megatrons_context() {
    for (length, seq_length, overlapping_eval) in
        [(3, 8, 3), (9, 8, 3), (10, 8, 3), (40, 8, 3), (41, 8, 8), (5, 8, 8), (30, 8, 1)]
    {
        let text: String = (0..length).map(|i| if i % 3 == 1 { ' ' } else { 'x' }).collect();
        let config = WikiTextConfig { seq_length, overlapping_eval };
        let task = WikiText::new(&text, &Tokenizer::Byte, config).unwrap();
        let tokens = text.len();
        let mut scored = vec![0; tokens];
        for (window, request) in task.requests().iter().enumerate() {
            let start = window * overlapping_eval;
            assert_eq!(
                request.tokens,
                text.as_bytes()[start..(start + seq_length + 1).min(tokens)]
                    .iter()
                    .map(|&byte| u32::from(byte))
                    .collect::<Vec<_>>()
            );
            for target in request.first_target..request.tokens.len() {
                scored[start + target] += 1;
            }
        }
        assert_eq!((scored[0], &scored[1..]), (0, &vec![1; tokens - 1][..]), "{length}");
    }
}

#[test]
fn the_perplexity_is_adjusted_by_tokens_over_words() {
    let config = WikiTextConfig { seq_length: 8, overlapping_eval: 8 };
    let task = WikiText::new("ab cd ef\n", &Tokenizer::Byte, config).unwrap();
    let result = task.result(-16.0);
    assert_eq!((result.tokens, result.words, result.loss), (9, 3, 2.0));
    assert_eq!((result.token_ratio, result.adjusted_ppl), (4.0, 8.0_f64.exp()));
    for (config, text, message) in [
        ((8, 9), "a b", "--overlapping-eval: 9 must be from 1 to the sequence length, 8"),
        ((8, 0), "a b", "--overlapping-eval: 0 must be from 1"),
        ((8, 4), "ab", "has 2 tokens and 1 words"),
    ] {
        let config = WikiTextConfig { seq_length: config.0, overlapping_eval: config.1 };
        let error = WikiText::new(text, &Tokenizer::Byte, config).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn forms_of_lambada_cut_passages_as_their_sources_do() {
    let bytes = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
    let parts = |passage: &str, form| {
        let task = Lambada::new(&[passage.to_string()], &Tokenizer::Byte, form, 64).unwrap();
        let ScoreRequest { tokens, first_target, .. } = task.requests()[0].clone();
        (tokens[..first_target].to_vec(), tokens[first_target..].to_vec())
    };
    for (passage, context, word) in
        [("he saw the dog", "he saw the", " dog"), (" a  dog \n", "a", " dog")]
    {
        assert_eq!(parts(passage, LambadaForm::Strict), (bytes(context), bytes(word)));
    }
    for (passage, context, word) in
        [("he saw the dog", "he saw the", " dog"), ("a  dog", "a", "  dog")]
    {
        assert_eq!(parts(passage, LambadaForm::OpenAi), (bytes(context), bytes(word)));
    }
    for form in [LambadaForm::Strict, LambadaForm::OpenAi] {
        let refused = |passages: &[&str], longest| {
            let passages: Vec<String> = passages.iter().map(|text| text.to_string()).collect();
            Lambada::new(&passages, &Tokenizer::Byte, form, longest).unwrap_err().to_string()
        };
        assert!(
            refused(&["a b", "alone"], 8).contains("passage 2 has no word behind another: 'alone'")
        );
        assert!(refused(&["a longer"], 4).contains("more than 4 tokens"));
        assert!(refused(&[], 4).contains("there is no passage"));
    }
}

#[test]
fn a_context_that_is_too_long_loses_its_beginning() {
    let request = ScoreRequest::continuation(&[1, 2, 3, 4], &[5, 6], 4).unwrap();
    assert_eq!((request.tokens.clone(), request.first_target), (vec![2, 3, 4, 5, 6], 3));
    assert_eq!((request.input_length(), request.num_scores()), (4, 2));
    assert_eq!(ScoreRequest::continuation(&[], &[5], 4), None);
}

#[test]
fn a_word_is_right_if_each_token_is_the_likeliest() {
    let score = |token, log_prob, best| TokenScore { token, log_prob, top: vec![(best, -0.5)] };
    let scores =
        [vec![score(1, -0.5, 1), score(2, -0.5, 2)], vec![score(1, -0.5, 1), score(2, -2.5, 3)]];
    let result = Lambada::result(&scores);
    assert_eq!((result.accuracy, result.perplexity, result.examples), (0.5, 2.0_f64.exp(), 2));
}

/// Each part of a request counts, and so does the border between two.
#[test]
fn other_requests_have_other_checksums() {
    let request = |tokens: &[u32], first_target, wants_next| ScoreRequest {
        tokens: tokens.to_vec(),
        first_target,
        wants_next,
    };
    let all = [
        vec![],
        vec![request(&[1, 2, 3], 1, false)],
        vec![request(&[1, 2, 4], 1, false)],
        vec![request(&[1, 2, 3], 2, false)],
        vec![request(&[1, 2, 3], 1, true)],
        vec![request(&[1, 2], 1, false), request(&[3], 1, false)],
        vec![request(&[1], 1, false), request(&[2, 3], 1, false)],
    ];
    for (index, requests) in all.iter().enumerate() {
        assert_eq!(requests_crc32(requests), requests_crc32(&requests.clone()));
        for other in &all[..index] {
            assert_ne!(requests_crc32(requests), requests_crc32(other), "{requests:?}");
        }
    }
}
