//! The classes of characters that the patterns of words distinguish.

use std::sync::LazyLock;

/// The class of a character. `\r` and `\n` are `Space`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum CharClass {
    /// None of the others.
    Other,
    /// `\p{L}`
    Letter,
    /// `\p{N}`
    Number,
    /// `\s`
    Space,
}

/// The place of a character in a word of o200k's pattern, which begins with capitals and ends with small letters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum LetterCase {
    /// Neither a letter nor a mark.
    None,
    /// `[\p{Lu}\p{Lt}]`
    Upper,
    /// `\p{Ll}`
    Lower,
    /// `[\p{Lm}\p{Lo}\p{M}]`, which stands with both
    Both,
}

/// The class of each code point.
static CLASSES: LazyLock<Box<[CharClass]>> = LazyLock::new(|| {
    let classes =
        [(r"\p{L}", CharClass::Letter), (r"\p{N}", CharClass::Number), (r"\s", CharClass::Space)];
    table(CharClass::Other, classes)
});

/// The case of each code point.
static CASES: LazyLock<Box<[LetterCase]>> = LazyLock::new(|| {
    let cases = [
        (r"[\p{Lu}\p{Lt}]", LetterCase::Upper),
        (r"\p{Ll}", LetterCase::Lower),
        (r"[\p{Lm}\p{Lo}\p{M}]", LetterCase::Both),
    ];
    table(LetterCase::None, cases)
});

/// The value of each code point, from the tables of the regex engine, so that both have the same version of Unicode.
fn table<T: Copy, const N: usize>(default: T, values: [(&str, T); N]) -> Box<[T]> {
    let mut table = vec![default; char::MAX as usize + 1];
    for (pattern, value) in values {
        let parsed = regex_syntax::parse(pattern).expect("the pattern is valid");
        let regex_syntax::hir::HirKind::Class(regex_syntax::hir::Class::Unicode(ranges)) =
            parsed.kind()
        else {
            unreachable!("the pattern is a class of characters");
        };
        for range in ranges.iter() {
            table[range.start() as usize..=range.end() as usize].fill(value);
        }
    }
    table.into_boxed_slice()
}

/// A table, asked for once for a text.
#[derive(Clone, Copy)]
pub struct CharTable<T: 'static>(&'static [T]);

impl CharTable<CharClass> {
    pub fn classes() -> Self {
        CharTable(&CLASSES)
    }
}

impl CharTable<LetterCase> {
    pub fn cases() -> Self {
        CharTable(&CASES)
    }
}

impl<T: Copy> CharTable<T> {
    /// The value of the character at byte `at`, and its bytes; none at the end of the text.
    #[inline]
    pub fn at(self, text: &str, at: usize) -> Option<(T, usize)> {
        let byte = *text.as_bytes().get(at)?;
        if byte < 0x80 {
            return Some((self.0[byte as usize], 1));
        }
        let c = text[at..].chars().next()?;
        Some((self.0[c as usize], c.len_utf8()))
    }
}
