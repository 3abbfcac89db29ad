//! The framing of TensorFlow's record files: length, checksum of the length, data, checksum of the data.
//!
//! Checksums are CRC-32C, masked so that a checksum of data with checksums in it is no special case:
//! `tensorflow/core/lib/hash/crc32c.h`. Numbers are little-endian.

use crc32c::crc32c;

const MASK_DELTA: u32 = 0xa282_ead8;

/// The masked checksum of `data`.
fn masked_crc32c(data: &[u8]) -> u32 {
    crc32c(data).rotate_right(15).wrapping_add(MASK_DELTA)
}

/// Appends a record with `data`.
pub fn push(records: &mut Vec<u8>, data: &[u8]) {
    let length = (data.len() as u64).to_le_bytes();
    records.extend(length);
    records.extend(masked_crc32c(&length).to_le_bytes());
    records.extend(data);
    records.extend(masked_crc32c(data).to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_those_of_tensorflow() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(masked_crc32c(b"123456789"), 0xc78a_b0e5);
    }
}
