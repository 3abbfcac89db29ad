//! Cuts text into words whose tokens do not depend on the text around them.
//!
//! | pattern | used by |
//! |---|---|
//! | GPT-2's | GPT-2, GPT-NeoX; SmolLM, which cuts digits off first |
//! | cl100k's | OpenAI's cl100k and Llama 3, with up to three digits in a word; Qwen 2 and 3, with one |
//! | o200k's | OpenAI's o200k and gpt-oss, Llama 4 |
//! | spaces | T5, Llama 2, Gemma |
//! | spaces and marks | BERT |
//!
//! The regular expressions are facts about the tokenizers; the tests compare the scanner with a regex engine.

use super::char_class::CharClass::{Letter, Number, Other, Space};
use super::char_class::{CharClass, CharTable, LetterCase};
use ferrotron_tensor::Result;

/// The pattern of `ByteLevel` in Hugging Face's tokenizers.
#[cfg(test)]
pub const GPT2: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// The pattern of Llama 3 and Qwen 2, with `DIGITS` in place of `{1,3}` or nothing.
pub const CL100K: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The pattern of gpt-oss and Llama 4.
pub const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// A known way to cut text into words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WordPattern {
    /// GPT-2's pattern.
    Gpt2,
    /// GPT-2's pattern between digits, each of which is a word.
    Gpt2SingleDigits,
    /// cl100k's pattern, with so many digits in a word.
    Cl100k { digits: usize },
    /// o200k's pattern.
    O200k,
    /// Cuts in front of one of these characters behind another one: nowhere if there are none.
    Spaces(&'static [char]),
    /// Cuts spaces out, and makes each mark a word.
    Marks,
}

/// Whether this is one of the marks that BERT takes for punctuation: all of ASCII, the dashes and quotes of General
/// Punctuation, and the stops and brackets of CJK.
fn is_mark(c: char) -> bool {
    c.is_ascii_punctuation()
        || matches!(c, '\u{2010}'..='\u{2027}' | '\u{3001}'..='\u{3003}' | '\u{3008}'..='\u{3011}')
}

impl WordPattern {
    /// Calls `take` with each word of the text, in order.
    ///
    /// # Errors
    /// The first one of `take`.
    pub fn try_for_each_word(
        self,
        text: &str,
        mut take: impl FnMut(&str) -> Result<()>,
    ) -> Result<()> {
        let scanner = Scanner { text, classes: CharTable::classes() };
        match self {
            WordPattern::Gpt2 => scanner.try_for_each(Scanner::gpt2_word, take),
            WordPattern::Cl100k { digits } => {
                scanner.try_for_each(|scanner, at| scanner.cl100k_word(at, digits), take)
            }
            WordPattern::O200k => {
                let cases = CharTable::cases();
                scanner.try_for_each(|scanner, at| scanner.o200k_word(at, cases), take)
            }
            WordPattern::Spaces(spaces) => {
                let mut rest = text;
                while !rest.is_empty() {
                    let behind_spaces = rest.len() - rest.trim_start_matches(spaces).len();
                    let word = rest[behind_spaces..].find(spaces);
                    let (word, behind) =
                        rest.split_at(word.map_or(rest.len(), |at| behind_spaces + at));
                    take(word)?;
                    rest = behind;
                }
                Ok(())
            }
            WordPattern::Marks => {
                let mut rest = text.trim_start_matches(' ');
                while let Some(first) = rest.chars().next() {
                    let behind = rest.find(|c| c == ' ' || is_mark(c));
                    let end = match is_mark(first) {
                        true => first.len_utf8(),
                        false => behind.unwrap_or(rest.len()),
                    };
                    take(&rest[..end])?;
                    rest = rest[end..].trim_start_matches(' ');
                }
                Ok(())
            }
            WordPattern::Gpt2SingleDigits => {
                let mut at = 0;
                for (digit, c) in text.match_indices(char::is_numeric) {
                    let before = Scanner { text: &text[at..digit], ..scanner };
                    before.try_for_each(Scanner::gpt2_word, &mut take)?;
                    take(c)?;
                    at = digit + c.len();
                }
                Scanner { text: &text[at..], ..scanner }.try_for_each(Scanner::gpt2_word, take)
            }
        }
    }
}

impl WordPattern {
    /// The end of the first word of a text that begins with none of the characters in front of which words are cut.
    pub fn first_word(self, text: &str) -> usize {
        match self {
            WordPattern::Spaces(spaces) => text.find(spaces).unwrap_or(text.len()),
            _ => 0,
        }
    }

    /// The last place at or behind byte `from` at which the text may be cut, whatever follows it: the words on both sides
    /// are those of the whole.
    pub fn last_cut(self, text: &str, from: usize) -> Option<usize> {
        let classes = CharTable::classes();
        let is_cut = |before: char, behind: char| match self {
            WordPattern::Spaces(spaces) => spaces.contains(&behind) && !spaces.contains(&before),
            WordPattern::Marks => [before, behind].into_iter().any(|c| c == ' ' || is_mark(c)),
            // No word goes on behind a letter or digit with these, and none is cut by what comes behind them.
            _ => {
                let class = classes.at(before.encode_utf8(&mut [0; 4]), 0);
                matches!(class, Some((Letter | Number, _)))
                    && (behind.is_whitespace() || behind != '\'' && behind.is_ascii_punctuation())
            }
        };
        let mut behind = None;
        for (at, before) in text.char_indices().rev() {
            let end = at + before.len_utf8();
            if end < from {
                return None;
            }
            if behind.is_some_and(|behind| is_cut(before, behind)) {
                return Some(end);
            }
            behind = Some(before);
        }
        None
    }
}

/// A text whose words are looked for. Methods take the byte at which a word begins and return the byte behind it.
#[derive(Clone, Copy)]
struct Scanner<'a> {
    text: &'a str,
    classes: CharTable<CharClass>,
}

impl Scanner<'_> {
    #[inline]
    fn try_for_each(
        self,
        end: impl Fn(Self, usize) -> usize,
        mut take: impl FnMut(&str) -> Result<()>,
    ) -> Result<()> {
        let mut at = 0;
        while at < self.text.len() {
            let behind = end(self, at);
            take(&self.text[at..behind])?;
            at = behind;
        }
        Ok(())
    }

    #[inline]
    fn gpt2_word(self, at: usize) -> usize {
        if self.byte(at) == Some(b'\'')
            && let Some(end) = self.contraction(at, false)
        {
            return end;
        }
        match self.behind_space(at) {
            (Space, _, _) => self.white_space(at).0,
            (class, first, len) => self.run(class, first + len),
        }
    }

    #[inline]
    fn cl100k_word(self, at: usize, digits: usize) -> usize {
        if self.byte(at) == Some(b'\'')
            && let Some(end) = self.contraction(at, true)
        {
            return end;
        }
        let Some((class, len)) = self.class(at) else { return at };
        let is_line_end = matches!(self.byte(at), Some(b'\r' | b'\n'));
        if class == Letter {
            return self.run(Letter, at + len);
        }
        if class == Number {
            return self.number(at + len, digits);
        }
        if !is_line_end && let Some((Letter, letter)) = self.class(at + len) {
            return self.run(Letter, at + len + letter);
        }
        self.between_words(at, b"\r\n")
    }

    #[inline]
    fn o200k_word(self, at: usize, cases: CharTable<LetterCase>) -> usize {
        let Some((class, len)) = self.class(at) else { return at };
        if class == Number {
            return self.number(at + len, 3);
        }
        let letters = |at: usize| {
            let (cased, upper) = self.cased(at, cases);
            (cased > at).then_some(cased).ok_or(upper)
        };
        // One character may stand in front of the letters. A mark is also a letter here.
        let has_front = class != Letter && !matches!(self.byte(at), Some(b'\r' | b'\n'));
        let front = if has_front { letters(at + len) } else { Err(at + len) };
        let end = front.or_else(|upper_behind| {
            letters(at).or_else(|upper| match has_front && upper_behind > at + len {
                true => Ok(upper_behind),
                false => (upper > at).then_some(upper).ok_or(()),
            })
        });
        match end {
            Ok(end) if self.byte(end) == Some(b'\'') => self.contraction(end, true).unwrap_or(end),
            Ok(end) => end,
            Err(()) => self.between_words(at, b"\r\n/"),
        }
    }

    /// Letters from `at` on: the end of capitals with small letters behind them, or `at`; and the end of the capitals.
    ///
    /// Letters without case are both, so the last of them ends a word of capitals that no small letter follows.
    #[inline]
    fn cased(self, at: usize, cases: CharTable<LetterCase>) -> (usize, usize) {
        let (mut end, mut last_of_both) = (at, at);
        let mut case = cases.at(self.text, end);
        while let Some((LetterCase::Upper | LetterCase::Both, len)) = case {
            end += len;
            if matches!(case, Some((LetterCase::Both, _))) {
                last_of_both = end;
            }
            case = cases.at(self.text, end);
        }
        if !matches!(case, Some((LetterCase::Lower, _))) {
            return (last_of_both, end);
        }
        let mut behind = end;
        while let Some((LetterCase::Lower | LetterCase::Both, len)) = cases.at(self.text, behind) {
            behind += len;
        }
        (behind, end)
    }

    /// The end of a number whose first digit ends at `end`.
    #[inline]
    fn number(self, mut end: usize, digits: usize) -> usize {
        for _ in 1..digits {
            match self.class(end) {
                Some((Number, len)) => end += len,
                _ => break,
            }
        }
        end
    }

    /// The end of other characters, with those of `last` that follow them, or of white space.
    #[inline]
    fn between_words(self, at: usize, last: &[u8]) -> usize {
        match self.behind_space(at) {
            (Other, first, len) => {
                let mut end = self.run(Other, first + len);
                while self.byte(end).is_some_and(|byte| last.contains(&byte)) {
                    end += 1;
                }
                end
            }
            _ => match self.white_space(at) {
                (_, Some(behind_lines)) => behind_lines,
                (end, None) => end,
            },
        }
    }

    fn byte(self, at: usize) -> Option<u8> {
        self.text.as_bytes().get(at).copied()
    }

    #[inline]
    fn class(self, at: usize) -> Option<(CharClass, usize)> {
        self.classes.at(self.text, at)
    }

    /// The end of the characters of `class` from `at` on.
    #[inline]
    fn run(self, class: CharClass, mut at: usize) -> usize {
        while let Some((next, len)) = self.class(at)
            && next == class
        {
            at += len;
        }
        at
    }

    /// The character behind a space at `at`, if both exist and it is no white space itself, else the one at `at`: its
    /// class, first byte and bytes.
    #[inline]
    fn behind_space(self, at: usize) -> (CharClass, usize, usize) {
        if self.byte(at) == Some(b' ')
            && let Some((class, len)) = self.class(at + 1)
            && class != Space
        {
            return (class, at + 1, len);
        }
        let (class, len) = self.class(at).unwrap_or((Space, 0));
        (class, at, len)
    }

    /// White space: its end where the lookahead puts it, in front of the last character if something follows and there
    /// is more than one; and the byte behind its last line break.
    fn white_space(self, at: usize) -> (usize, Option<usize>) {
        let (mut end, mut last, mut behind_lines) = (at, at, None);
        while let Some((Space, len)) = self.class(end) {
            last = end;
            end += len;
            if matches!(self.byte(last), Some(b'\r' | b'\n')) {
                behind_lines = Some(end);
            }
        }
        match end < self.text.len() && last > at {
            true => (last, behind_lines),
            false => (end, behind_lines),
        }
    }

    /// The end of `'s`, `'t`, `'re`, `'ve`, `'m`, `'ll` or `'d`.
    fn contraction(self, at: usize, ignores_case: bool) -> Option<usize> {
        let rest = &self.text.as_bytes()[at + 1..];
        let lower = |i: usize| {
            rest.get(i).map(|byte| if ignores_case { byte.to_ascii_lowercase() } else { *byte })
        };
        match (lower(0)?, lower(1)) {
            (b's' | b't' | b'm' | b'd', _) => Some(at + 2),
            (b'r' | b'v', Some(b'e')) | (b'l', Some(b'l')) => Some(at + 3),
            // The long s is another case of s.
            _ if ignores_case && rest.starts_with("\u{17F}".as_bytes()) => Some(at + 3),
            _ => None,
        }
    }
}
