//! Decoding of bytes that may not be UTF-8.

/// U+FFFD in UTF-8.
pub(super) const REPLACEMENT: &[u8] = "\u{FFFD}".as_bytes();

/// Concatenates the bytes of all tokens and then decodes, since characters may span tokens.
pub(super) fn lossy(tokens: &[u32], mut append: impl FnMut(u32, &mut Vec<u8>)) -> String {
    let mut bytes = Vec::with_capacity(tokens.len());
    tokens.iter().for_each(|&token| append(token, &mut bytes));
    match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
    }
}
