//! Writes hashes as text.

use std::fmt::Write;

/// The bytes in hexadecimal, two digits each.
pub fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
