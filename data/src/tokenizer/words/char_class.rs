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

/// The class of each code point, from the tables of the regex engine, so that both have the same version of Unicode.
static CLASSES: LazyLock<Box<[CharClass]>> = LazyLock::new(|| {
    let mut classes = vec![CharClass::Other; char::MAX as usize + 1];
    let patterns = [r"\p{L}", r"\p{N}", r"\s"];
    for (pattern, class) in
        patterns.into_iter().zip([CharClass::Letter, CharClass::Number, CharClass::Space])
    {
        let parsed = regex_syntax::parse(pattern).expect("the pattern is valid");
        let regex_syntax::hir::HirKind::Class(regex_syntax::hir::Class::Unicode(ranges)) =
            parsed.kind()
        else {
            unreachable!("the pattern is a class of characters");
        };
        for range in ranges.iter() {
            classes[range.start() as usize..=range.end() as usize].fill(class);
        }
    }
    classes.into_boxed_slice()
});

/// The table, asked for once for a text.
#[derive(Clone, Copy)]
pub struct CharClasses(&'static [CharClass]);

impl CharClasses {
    pub fn new() -> CharClasses {
        CharClasses(&CLASSES)
    }

    /// The class of the character at byte `at`, and its bytes; none at the end of the text.
    #[inline]
    pub fn at(self, text: &str, at: usize) -> Option<(CharClass, usize)> {
        let byte = *text.as_bytes().get(at)?;
        if byte < 0x80 {
            return Some((self.0[byte as usize], 1));
        }
        let c = text[at..].chars().next()?;
        Some((self.0[c as usize], c.len_utf8()))
    }
}
