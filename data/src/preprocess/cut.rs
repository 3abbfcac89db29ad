//! Cuts long documents where a tokenizer cuts too, so that the pieces have the tokens of the whole.

use crate::tokenizer::Tokenizer;
use ferrotron_tensor::Result;
use std::ops::Range;

/// Bytes of a piece, from which the next cut is looked for.
pub const PIECE: usize = 64 << 10;

/// The places at which a text may be cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CutRule {
    /// Cuts in front of a space between two letters, behind a line break between a character that is no white space and a
    /// letter or digit, and in front of the last ideographic space between a line break and a letter or digit.
    WordsAndLines,
    /// Cuts in front of a space between two letters.
    Words,
    /// Cuts at a space between two letters and leaves it out: for tokenizers that put one in front of each text.
    LeftOutSpaces,
    /// Cuts behind a line break.
    Lines,
    /// Cuts nowhere.
    Nowhere,
}

/// Texts whose pieces show what a tokenizer does at a cut.
const AT_SPACES: [(&str, &str); 3] =
    [("The fox", " jumps over"), ("caf\u{e9}s", " na\u{ef}ve"), ("it", " won't")];
const AT_LINES: [(&str, &str); 5] = [
    ("It ended.\n", "Next line"),
    ("of words\n", "in lines"),
    ("3\n", "4 \u{4e2d}"),
    ("\u{4e2d}\u{3002}\n\u{3000}", "\u{3000}\u{6587}"),
    ("\u{4e2d}\n", "\u{3000}\u{6587}"),
];

/// The space that indents lines of Chinese and Japanese texts.
const IDEOGRAPHIC_SPACE: char = '\u{3000}';

impl CutRule {
    /// The first rule that does not change what `tokenizer` makes of texts that show it.
    ///
    /// # Errors
    /// The errors of [`Tokenizer::encode`].
    pub fn for_tokenizer(tokenizer: &Tokenizer) -> Result<CutRule> {
        if let Tokenizer::Char(_) = tokenizer {
            return Ok(CutRule::WordsAndLines);
        }
        let holds = |texts: &[(&str, &str)], left_out: usize| -> Result<bool> {
            for (first, second) in texts {
                let whole = tokenizer.encode(&format!("{first}{second}"))?;
                let second = tokenizer.encode(&second[left_out..])?;
                if whole != [tokenizer.encode(first)?, second].concat() {
                    return Ok(false);
                }
            }
            Ok(true)
        };
        Ok(match (holds(&AT_SPACES, 0)?, holds(&AT_LINES, 0)?) {
            (true, true) => CutRule::WordsAndLines,
            (true, false) => CutRule::Words,
            _ if holds(&AT_SPACES, 1)? => CutRule::LeftOutSpaces,
            _ => CutRule::Nowhere,
        })
    }

    /// The bytes to leave out at the first place to cut at or behind byte `from`: none, or a space. The place depends on
    /// the text up to the character behind it alone.
    pub fn find(self, text: &str, from: usize) -> Option<Range<usize>> {
        if self == CutRule::Nowhere || from >= text.len() {
            return None;
        }
        let from = (from..).find(|&at| text.is_char_boundary(at))?;
        let mut before = text[..from].chars().rev();
        let (mut last, mut second) = (before.next()?, before.next().unwrap_or('\n'));
        let mut rest = text[from..].char_indices().peekable();
        while let Some((at, c)) = rest.next() {
            let next = rest.peek().map(|&(_, next)| next);
            let is_line = last == '\n';
            let is_cut = match self {
                CutRule::Lines => is_line,
                _ if c == ' ' => last.is_alphabetic() && next.is_some_and(char::is_alphabetic),
                CutRule::WordsAndLines if c == IDEOGRAPHIC_SPACE => {
                    let is_indent =
                        || text[..from + at].trim_end_matches(IDEOGRAPHIC_SPACE).ends_with('\n');
                    next.is_some_and(char::is_alphanumeric) && is_indent()
                }
                CutRule::WordsAndLines => is_line && !second.is_whitespace() && c.is_alphanumeric(),
                _ => false,
            };
            if is_cut {
                let left_out = usize::from(self == CutRule::LeftOutSpaces);
                return Some(from + at..from + at + left_out);
            }
            (second, last) = (last, c);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_cut_where_the_rule_says() {
        for (rule, text, from, want) in [
            (CutRule::WordsAndLines, "ab cd", 1, Some(2)),
            (CutRule::WordsAndLines, "ab  cd", 1, None),
            (CutRule::WordsAndLines, "ab. cd", 1, None),
            (CutRule::WordsAndLines, "ab.\ncd", 1, Some(4)),
            (CutRule::WordsAndLines, "ab.\r\ncd", 1, None),
            (CutRule::WordsAndLines, "ab.\n\ncd", 1, None),
            (CutRule::WordsAndLines, "\u{4e2d}\u{3002}\n\u{6587}", 1, Some(7)),
            (CutRule::WordsAndLines, "\u{4e2d}\n\u{3000}\u{3000}\u{6587}", 1, Some(7)),
            (CutRule::WordsAndLines, "\u{4e2d}\n\u{3000}\u{3000}\u{6587}", 6, Some(7)),
            (CutRule::WordsAndLines, "ab\n\n\u{3000}cd", 1, Some(4)),
            (CutRule::WordsAndLines, "ab\u{3000}\u{3000}cd", 1, None),
            (CutRule::WordsAndLines, "ab\n\u{3000}\u{300c}cd", 1, None),
            (CutRule::Words, "ab\n\u{3000}cd", 1, None),
            (CutRule::Words, "ab.\ncd ef", 1, Some(6)),
            (CutRule::Words, "ab ", 1, None),
            (CutRule::LeftOutSpaces, "ab.\ncd ef", 1, Some(6)),
            (CutRule::Lines, "ab\n\ncd", 1, Some(3)),
            (CutRule::Lines, "ab\n", 1, None),
            (CutRule::Nowhere, "ab cd", 1, None),
        ] {
            let left_out = usize::from(rule == CutRule::LeftOutSpaces);
            let want = want.map(|at| at..at + left_out);
            assert_eq!(rule.find(text, from), want, "{rule:?} {text:?}");
        }
    }

    #[test]
    fn pieces_have_the_tokens_of_the_whole() {
        let text = "It's 'quoted', caf\u{e9} na\u{ef}ve.\r\n\r\n  indented\tword  \u{4e2d}\u{6587}\u{3002}\n\u{4e2d} \
                    \u{939}\u{93f}\u{928}\u{94d}\u{926}\u{940} x=1;\n\u{1f600} 12 345\n6 7 and so on\
                    \n\u{3000}\u{3000}\u{4e2d}\u{6587}\u{3002}\r\n\u{3000}\u{4e2d}\u{3002}\n \u{3000}\u{3000}A\n\n\u{3000}\u{3000}7 \
                    \n\u{3000}\u{3000}\u{3000}x\n\u{3000}\u{301}y\n\t\u{3000}z";
        let with_space_in_front = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "pre_tokenizer": null,
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "\u{2581}"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"}
            ]},
            "post_processor": null, "decoder": null,
            "model": {"type": "BPE", "unk_token": "?", "fuse_unk": true,
                "vocab": {"?": 0, "\u{2581}": 1, "n": 2, "d": 3, "\u{2581}n": 4, "a": 5, "nd": 6},
                "merges": ["\u{2581} n", "n d"]}
        });
        let with_space_in_front = Tokenizer::from_json(&with_space_in_front.to_string()).unwrap();
        for (tokenizer, want, at_least) in [
            (Tokenizer::Gpt2, CutRule::WordsAndLines, 40),
            (Tokenizer::Byte, CutRule::WordsAndLines, 40),
            (with_space_in_front, CutRule::LeftOutSpaces, 20),
        ] {
            let rule = CutRule::for_tokenizer(&tokenizer).unwrap();
            assert_eq!(rule, want);
            let whole = tokenizer.encode(text).unwrap();
            let mut cuts = 0;
            for from in 1..text.len() {
                let Some(cut) = rule.find(text, from) else { continue };
                let parts = [&text[..cut.start], &text[cut.end..]];
                let parts = parts.map(|part| tokenizer.encode(part).unwrap());
                assert_eq!(parts.concat(), whole, "{cut:?}");
                cuts += 1;
            }
            assert!(cuts > at_least, "{cuts}");
        }
    }
}
