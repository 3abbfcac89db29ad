//! Writes token files of documents in JSON lines, Parquet and plain text, as Megatron-LM's `preprocess_data.py` does.
//!
//! ```text
//! files --> Reader --> batches --> workers (parse, tokenize) --> in the order of the files --> TokenOutput
//!           one thread, bounded    as many as asked for          the caller's thread           and the journal
//! ```
//!
//! Memory does not grow with the input: batches in flight are bounded in number and bytes. The files do not depend on
//! the number of workers. A journal beside them says how far they are, so that an interrupted call resumes with the same
//! bytes; a fingerprint says in the end what they were made of, which [`verify`] compares.

mod compressed;
mod config;
mod cut;
mod cutter;
mod documents;
mod encode;
mod fingerprint;
mod flat_file;
mod hexadecimal;
mod input;
mod journal;
mod json_line;
mod output;
mod parquet_codec;
mod parquet_header;
mod parquet_pages;
mod parquet_rows;
mod pipeline;
mod quiet_panics;
mod reader;
mod run;
mod verify;

pub use config::{PreprocessConfig, SequenceLevel, TokenFormat};
pub use documents::read_documents;
pub use fingerprint::{HashedFile, PreprocessFingerprint};
pub use input::Source;
pub use run::{PreprocessProgress, PreprocessReport, preprocess};
pub use verify::{Verified, verify};

#[cfg(test)]
mod tests;
