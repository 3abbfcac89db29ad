//! The integer type in which a file holds its tokens.

/// An integer type of tokens on disk, little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenType {
    /// Bytes.
    U8,
    /// 16 bits, as nanoGPT and small vocabularies in Megatron.
    U16,
    /// 32 bits, as llm.c for Llama 3.
    U32,
    /// Signed bytes.
    I8,
    /// 16 bits, signed.
    I16,
    /// 32 bits, signed, as large vocabularies in Megatron.
    I32,
    /// 64 bits, signed.
    I64,
}

impl TokenType {
    /// The type that Megatron-LM chooses for a vocabulary: 16 bits below 65500 tokens, else signed 32 bits.
    ///
    /// ```
    /// use ferrotron_data::TokenType;
    /// assert_eq!(TokenType::for_vocab_size(50_257), TokenType::U16);
    /// assert_eq!(TokenType::for_vocab_size(128_256), TokenType::I32);
    /// ```
    pub fn for_vocab_size(vocab_size: usize) -> TokenType {
        if vocab_size < 65_500 { TokenType::U16 } else { TokenType::I32 }
    }

    /// Bytes of one token.
    pub fn bytes(self) -> usize {
        match self {
            TokenType::U8 | TokenType::I8 => 1,
            TokenType::U16 | TokenType::I16 => 2,
            TokenType::U32 | TokenType::I32 => 4,
            TokenType::I64 => 8,
        }
    }

    /// The largest token that the type holds.
    pub fn max(self) -> u32 {
        match self {
            TokenType::U8 => u8::MAX.into(),
            TokenType::U16 => u16::MAX.into(),
            TokenType::U32 | TokenType::I64 => u32::MAX,
            TokenType::I8 => i8::MAX as u32,
            TokenType::I16 => i16::MAX as u32,
            TokenType::I32 => i32::MAX as u32,
        }
    }

    /// Decodes `bytes` into `out`. A number that is no `u32` becomes `u32::MAX`, which is beyond every vocabulary.
    pub(crate) fn decode(self, bytes: &[u8], out: &mut [u32]) {
        fn each<const N: usize>(bytes: &[u8], out: &mut [u32], value: impl Fn([u8; N]) -> u32) {
            out.iter_mut()
                .zip(bytes.as_chunks::<N>().0)
                .for_each(|(out, &token)| *out = value(token));
        }
        fn saturating<T: TryInto<u32>>(value: T) -> u32 {
            value.try_into().unwrap_or(u32::MAX)
        }
        match self {
            TokenType::U8 => each(bytes, out, |[byte]| byte.into()),
            TokenType::U16 => each(bytes, out, |token| u16::from_le_bytes(token).into()),
            TokenType::U32 => each(bytes, out, u32::from_le_bytes),
            TokenType::I8 => each(bytes, out, |token| saturating(i8::from_le_bytes(token))),
            TokenType::I16 => each(bytes, out, |token| saturating(i16::from_le_bytes(token))),
            TokenType::I32 => each(bytes, out, |token| saturating(i32::from_le_bytes(token))),
            TokenType::I64 => each(bytes, out, |token| saturating(i64::from_le_bytes(token))),
        }
    }

    /// The number in the first bytes of `bytes`, as it is.
    pub(crate) fn number(self, bytes: &[u8]) -> i64 {
        let width = self.bytes();
        let signed =
            matches!(self, TokenType::I8 | TokenType::I16 | TokenType::I32 | TokenType::I64);
        let fill = if signed && bytes[width - 1] >= 0x80 { 0xFF } else { 0 };
        let mut wide = [fill; 8];
        wide[..width].copy_from_slice(&bytes[..width]);
        i64::from_le_bytes(wide)
    }

    /// Appends tokens that are at most [`TokenType::max`] to `out`.
    pub(crate) fn encode(self, tokens: &[u32], out: &mut Vec<u8>) {
        let width = self.bytes();
        for &token in tokens {
            out.extend_from_slice(&u64::from(token).to_le_bytes()[..width]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back_and_those_that_are_no_token_are_beyond_every_vocabulary() {
        use TokenType::{I8, I16, I32, I64, U8, U16, U32};
        for token_type in [U8, U16, U32, I8, I16, I32, I64] {
            let tokens = [0, 1, 100, token_type.max() - 1, token_type.max()];
            let (mut bytes, mut read) = (Vec::new(), [9; 5]);
            token_type.encode(&tokens, &mut bytes);
            assert_eq!(bytes.len(), 5 * token_type.bytes());
            token_type.decode(&bytes, &mut read);
            assert_eq!(read, tokens, "{token_type:?}");
            assert_eq!(
                token_type.number(&bytes[4 * token_type.bytes()..]),
                i64::from(token_type.max())
            );
        }
        for (token_type, bytes, number) in [
            (I8, &[0xFE_u8][..], -2),
            (I16, &[0xFE, 0xFF], -2),
            (I32, &[0xFE, 0xFF, 0xFF, 0xFF], -2),
            (I64, &[0, 0, 0, 0, 1, 0, 0, 0], 1 << 32),
        ] {
            let mut read = [0];
            token_type.decode(bytes, &mut read);
            assert_eq!((read, token_type.number(bytes)), ([u32::MAX], number));
        }
    }
}
