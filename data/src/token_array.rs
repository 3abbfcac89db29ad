//! Tokens that lie in a file one after another, read by position.
//!
//! They are read with `pread`, not mapped: a file that another program cuts short is an error with its name, where reading
//! a map would end the process by SIGBUS.

use super::token_file::TokenFile;
use super::token_type::TokenType;
use ferrotron_tensor::{Error, Result};

/// The tokens of a file from byte `offset` on.
pub(super) struct TokenArray {
    pub file: TokenFile,
    pub offset: u64,
    pub token_type: TokenType,
    /// Number of tokens.
    pub len: u64,
}

impl TokenArray {
    /// Copies tokens `at .. at + out.len()`, which the caller has checked against the length. `name` is for messages.
    ///
    /// # Errors
    /// A file that cannot be read, or has become shorter.
    pub fn read(&self, name: &str, at: u64, out: &mut [u32]) -> Result<()> {
        let bytes = self.bytes(name, at, out.len())?;
        self.token_type.decode(&bytes, out);
        Ok(())
    }

    /// The number at position `at` as it is in the file, which may be no token.
    pub fn number(&self, name: &str, at: u64) -> Result<i64> {
        self.bytes(name, at, 1).map(|bytes| self.token_type.number(&bytes))
    }

    fn bytes(&self, name: &str, at: u64, count: usize) -> Result<Vec<u8>> {
        let width = self.token_type.bytes();
        let mut bytes = vec![0; count * width];
        let read = self.file.read_exact_at(&mut bytes, self.offset + at * width as u64);
        read.map_err(|error| self.unreadable(name, &error))?;
        Ok(bytes)
    }

    fn unreadable(&self, name: &str, error: &std::io::Error) -> Error {
        let why = match error.kind() {
            std::io::ErrorKind::UnexpectedEof => {
                format!(
                    "it ends before its {} tokens, which it had when it was opened: do not change a file \
                     while a run reads it",
                    self.len
                )
            }
            _ => error.to_string(),
        };
        Error::io("data", format!("cannot read '{name}': {why}"))
    }
}
