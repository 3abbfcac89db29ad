//! Sealed records: how bytes cross a network that nobody else may read or change.
//!
//! ```text
//!  u16 n, little-endian | n bytes: the payload, encrypted, and its tag of 16 bytes
//! ```
//!
//! Record i of a direction is the message with nonce i of a Noise session (Noise Protocol Framework, revision 34, section
//! 5; crate `snow`). A record that was changed, left out, repeated or moved does not open, and ends the connection.

use snow::params::{CipherChoice, DHChoice, HashChoice, NoiseParams};
use snow::resolvers::{BoxedCryptoResolver, CryptoResolver, DefaultResolver};
use snow::types::{Cipher, Dh, Hash, Random};
use snow::{Builder, StatelessTransportState};
use std::io::{Error, ErrorKind, Result};
use std::sync::Arc;

/// The pattern of the handshake, and its primitives.
const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_SHA256";

/// Bytes in front of a record's message: its length.
const LENGTH: usize = 2;

/// Bytes that encryption adds.
pub const TAG: usize = 16;

/// Bytes of the longest payload of a record: a message of Noise has at most 65535 bytes.
pub const PAYLOAD: usize = u16::MAX as usize - TAG;

/// Bytes that an [`Opener`] holds: two whole records.
const HELD: usize = 2 * (LENGTH + u16::MAX as usize);

/// Begins a handshake in which both ends must know `key`, and have the same `prologue`, with the cryptography of a resolver.
///
/// Errors if the system has no random numbers.
pub fn session<'a>(
    resolver: BoxedCryptoResolver,
    key: &'a [u8; 32],
    prologue: &'a [u8],
) -> Result<Builder<'a>> {
    let pattern: NoiseParams = PATTERN.parse().map_err(wrong)?;
    let builder = Builder::with_resolver(pattern, resolver);
    builder.psk(0, key).and_then(|builder| builder.prologue(prologue)).map_err(wrong)
}

/// Takes random bytes from the system, and everything else from `snow`.
#[derive(Default)]
pub struct Resolver(DefaultResolver);

struct System;

impl Random for System {
    fn try_fill_bytes(&mut self, bytes: &mut [u8]) -> std::result::Result<(), snow::Error> {
        getrandom::fill(bytes).map_err(|_| snow::Error::Rng)
    }
}

impl CryptoResolver for Resolver {
    fn resolve_rng(&self) -> Option<Box<dyn Random>> {
        Some(Box::new(System))
    }

    fn resolve_dh(&self, choice: &DHChoice) -> Option<Box<dyn Dh>> {
        self.0.resolve_dh(choice)
    }

    fn resolve_hash(&self, choice: &HashChoice) -> Option<Box<dyn Hash>> {
        self.0.resolve_hash(choice)
    }

    fn resolve_cipher(&self, choice: &CipherChoice) -> Option<Box<dyn Cipher>> {
        self.0.resolve_cipher(choice)
    }
}

/// Both directions of a session.
pub struct Seal {
    /// Seals what is sent.
    pub sealer: Sealer,
    /// Opens what is received.
    pub opener: Opener,
}

impl Seal {
    /// Seals with the keys of a handshake, with which this end has sent and received messages already.
    pub fn new(keys: StatelessTransportState, sent: u64, received: u64) -> Seal {
        let keys = Arc::new(keys);
        Seal {
            sealer: Sealer { keys: keys.clone(), records: sent },
            opener: Opener {
                keys,
                records: received,
                held: vec![0; HELD],
                taken: 0,
                filled: 0,
                payload: Vec::new(),
                given: 0,
            },
        }
    }
}

/// Makes the records of one direction.
pub struct Sealer {
    keys: Arc<StatelessTransportState>,
    /// The number of the next record.
    records: u64,
}

impl Sealer {
    /// Appends the records of `bytes` to `sealed`.
    ///
    /// Errors after 2^64 - 1 records.
    pub fn seal(&mut self, bytes: &[u8], sealed: &mut Vec<u8>) -> Result<()> {
        for payload in bytes.chunks(PAYLOAD) {
            let start = sealed.len();
            sealed.resize(start + LENGTH + payload.len() + TAG, 0);
            let (length, message) = sealed[start..].split_at_mut(LENGTH);
            let written = self.keys.write_message(self.records, payload, message).map_err(wrong)?;
            length.copy_from_slice(&(written as u16).to_le_bytes());
            self.records += 1;
        }
        Ok(())
    }
}

/// Opens the records of one direction.
pub struct Opener {
    keys: Arc<StatelessTransportState>,
    /// The number of the next record.
    records: u64,
    /// Received bytes; those from `taken` to `filled` are not opened yet.
    held: Vec<u8>,
    taken: usize,
    filled: usize,
    /// The payload of an opened record; the bytes before `given` are with the reader.
    payload: Vec<u8>,
    given: usize,
}

impl Opener {
    /// Memory for bytes that come next.
    pub fn room(&mut self) -> &mut [u8] {
        self.held.copy_within(self.taken..self.filled, 0);
        (self.taken, self.filled) = (0, self.filled - self.taken);
        &mut self.held[self.filled..]
    }

    /// Memory for the bytes that the current record lacks, and for none behind it.
    pub fn room_of_record(&mut self) -> &mut [u8] {
        let lacking = match self.record() {
            Some(record) => record.end.saturating_sub(self.filled),
            None => LENGTH - (self.filled - self.taken),
        };
        &mut self.room()[..lacking]
    }

    /// Notes that `count` bytes have been written to the memory that [`Opener::room`] returned.
    pub fn received(&mut self, count: usize) {
        self.filled += count;
    }

    /// Writes payload to the front of `into`, at most that of one record. Returns the number of bytes: 0 if more must be
    /// received first.
    ///
    /// Errors if a record does not open.
    pub fn open(&mut self, into: &mut [u8]) -> Result<usize> {
        while self.given == self.payload.len() {
            let Some(record) = self.record().filter(|record| record.end <= self.filled) else {
                return Ok(0);
            };
            let (message, number) = (&self.held[record.clone()], self.records);
            let len = message.len().checked_sub(TAG).ok_or_else(changed)?;
            (self.taken, self.records) = (record.end, number + 1);
            if len > 0 && len <= into.len() {
                let opened = self.keys.read_message(number, message, &mut into[..len]);
                return opened.map_err(|_| changed());
            }
            (self.payload, self.given) = (std::mem::take(&mut self.payload), 0);
            self.payload.resize(len, 0);
            self.keys.read_message(number, message, &mut self.payload).map_err(|_| changed())?;
        }
        let count = into.len().min(self.payload.len() - self.given);
        into[..count].copy_from_slice(&self.payload[self.given..][..count]);
        self.given += count;
        Ok(count)
    }

    /// The place of the current record's message, if its length has come.
    fn record(&self) -> Option<std::ops::Range<usize>> {
        let length = self.held[self.taken..self.filled].first_chunk::<LENGTH>()?;
        let start = self.taken + LENGTH;
        Some(start..start + usize::from(u16::from_le_bytes(*length)))
    }
}

/// The error of a record that does not open.
fn changed() -> Error {
    Error::new(ErrorKind::InvalidData, "a record was changed on its way, or is not of this job")
}

/// An error of the Noise session.
pub fn wrong(error: snow::Error) -> Error {
    Error::other(format!("encryption: {error}"))
}

#[cfg(test)]
pub(in crate::collective::host) mod tests {
    use super::*;

    /// The two ends of a session.
    pub fn both_ends() -> [Seal; 2] {
        let begin = || session(Box::new(Resolver::default()), &[7; 32], b"").unwrap();
        let mut first = begin().build_initiator().unwrap();
        let mut second = begin().build_responder().unwrap();
        let (mut message, mut payload) = ([0; 128], [0; 128]);
        let len = first.write_message(&[], &mut message).unwrap();
        second.read_message(&message[..len], &mut payload).unwrap();
        let len = second.write_message(&[], &mut message).unwrap();
        first.read_message(&message[..len], &mut payload).unwrap();
        [first, second].map(|end| Seal::new(end.into_stateless_transport_mode().unwrap(), 0, 0))
    }

    /// Opens everything in `sealed`, which comes in parts of `part` bytes, into buffers of `wanted` bytes.
    fn open_all(opener: &mut Opener, sealed: &[u8], part: usize, wanted: usize) -> Result<Vec<u8>> {
        let (mut opened, mut into) = (Vec::new(), vec![0; wanted]);
        for part in sealed.chunks(part) {
            let mut part = part;
            while !part.is_empty() {
                let room = opener.room();
                let count = room.len().min(part.len());
                room[..count].copy_from_slice(&part[..count]);
                opener.received(count);
                part = &part[count..];
                loop {
                    match opener.open(&mut into)? {
                        0 => break,
                        count => opened.extend_from_slice(&into[..count]),
                    }
                }
            }
        }
        Ok(opened)
    }

    fn numbers(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * i % 251) as u8).collect()
    }

    #[test]
    fn bytes_of_any_length_come_back() {
        for len in [0, 1, PAYLOAD - 1, PAYLOAD, PAYLOAD + 1, 3 * PAYLOAD + 5] {
            for (part, wanted) in [(1 << 20, 1 << 20), (1000, 7000), (70_001, PAYLOAD)] {
                let [mut one, mut other] = both_ends();
                let (bytes, mut sealed) = (numbers(len), Vec::new());
                one.sealer.seal(&bytes, &mut sealed).unwrap();
                let records = len.div_ceil(PAYLOAD);
                assert_eq!(sealed.len(), len + records * (LENGTH + TAG), "{len} bytes");
                let opened = open_all(&mut other.opener, &sealed, part, wanted).unwrap();
                assert!(opened == bytes, "{len} bytes in parts of {part}, read by {wanted}");
                // The other direction has records of its own.
                let mut back = Vec::new();
                other.sealer.seal(&bytes, &mut back).unwrap();
                assert!(len == 0 || back != sealed, "two directions have two keys");
                assert!(open_all(&mut one.opener, &back, part, wanted).unwrap() == bytes);
            }
        }
    }

    #[test]
    fn the_room_of_a_record_ends_with_it() {
        let [mut one, mut other] = both_ends();
        let mut sealed = Vec::new();
        one.sealer.seal(b"abc", &mut sealed).unwrap();
        let end = sealed.len();
        sealed.extend(b"bells");
        let mut read = 0;
        let mut into = [0; 16];
        while other.opener.open(&mut into).unwrap() == 0 {
            let room = other.opener.room_of_record();
            let count = room.len();
            assert!(count > 0 && read + count <= end, "{count} bytes behind {read} of {end}");
            room.copy_from_slice(&sealed[read..read + count]);
            other.opener.received(count);
            read += count;
        }
        assert_eq!((read, &into[..3]), (end, &b"abc"[..]));
    }

    #[test]
    fn changed_repeated_left_out_and_foreign_records_do_not_open() {
        type Damage = fn(&mut Vec<u8>, usize);
        let record = LENGTH + 100 + TAG;
        let damages: [(&str, Damage); 7] = [
            ("a bit of the payload", |sealed, _| sealed[50] ^= 1),
            ("a bit of the tag", |sealed, record| sealed[record - 1] ^= 0x80),
            ("a shorter length", |sealed, _| sealed[0] -= 1),
            ("a length without a tag", |sealed, _| sealed[0] = 3),
            ("a length of 0", |sealed, _| sealed[0] = 0),
            ("left out", |sealed, record| drop(sealed.drain(..record))),
            ("repeated", |sealed, record| sealed.copy_within(..record, record)),
        ];
        for (what, damage) in damages {
            let [mut one, mut other] = both_ends();
            let mut sealed = Vec::new();
            for part in numbers(300).chunks(100) {
                one.sealer.seal(part, &mut sealed).unwrap();
            }
            assert_eq!(sealed.len(), 3 * record);
            damage(&mut sealed, record);
            let error = open_all(&mut other.opener, &sealed, 1 << 20, 1000).expect_err(what);
            assert_eq!(error.kind(), ErrorKind::InvalidData, "{what}");
        }
        let ([mut one, _], [_, mut stranger]) = (both_ends(), both_ends());
        let mut sealed = Vec::new();
        one.sealer.seal(b"abc", &mut sealed).unwrap();
        assert!(open_all(&mut stranger.opener, &sealed, 100, 100).is_err(), "of another session");
    }
}
