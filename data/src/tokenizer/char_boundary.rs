//! The boundaries of characters beside a byte of a text.

/// The last boundary of a character up to `index`, at most the text's end.
pub(super) fn floor(text: &str, index: usize) -> usize {
    let index = index.min(text.len());
    (0..=index).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0)
}

/// The first boundary of a character from `index` on, at most the text's end.
pub(super) fn ceil(text: &str, index: usize) -> usize {
    (index..text.len()).find(|&at| text.is_char_boundary(at)).unwrap_or(text.len())
}

#[cfg(test)]
mod tests {
    #[test]
    fn boundaries_enclose_a_byte() {
        let text = "a€b"; // 1, 3 and 1 bytes
        let floors: Vec<usize> = (0..7).map(|index| super::floor(text, index)).collect();
        let ceils: Vec<usize> = (0..7).map(|index| super::ceil(text, index)).collect();
        assert_eq!(floors, [0, 1, 1, 1, 4, 5, 5]);
        assert_eq!(ceils, [0, 1, 4, 4, 4, 5, 5]);
    }
}
