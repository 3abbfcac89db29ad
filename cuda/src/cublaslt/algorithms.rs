//! The choice among the algorithms that cuBLASLt offers for a kind of product: its heuristic's first, or the fastest
//! one by timing, which a file keeps.
//!
//! Algorithms add in different orders, so timing noise would choose the last bits of results. A timed choice therefore
//! counts only once a file has it: the first writer wins, and all processes that see the file take the same algorithm
//! without timing anything. The file's name is the SHA-256 of what the choice depends on. An algorithm "can be
//! trivially serialized and later restored for use with the same version of cuBLAS library" (cuBLAS documentation,
//! "cublasLtMatmulAlgo_t"); one from a file counts only if cuBLASLt offers it again.

use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::types::cublasLtMatmulAlgo_t;
use crate::Result;
use crate::cache_folder::CacheFolder;

/// A timed algorithm replaces the heuristic's first if it takes less than this share of its time; less of a difference
/// may be noise.
const WORTHWHILE: f64 = 0.98;

/// The rule by which the algorithm of a kind of product is chosen.
#[derive(Debug, Clone, Default)]
pub enum AlgorithmChoice {
    /// The first that cuBLASLt's heuristic names.
    #[default]
    Heuristic,
    /// The fastest of those that the heuristic names, timed at the first product of a kind and kept in a folder.
    Autotuned(AlgorithmFolder),
}

impl AlgorithmChoice {
    /// Autotuning with the user's folder: `ferrotron/algorithms` in `XDG_CACHE_HOME` or `~/.cache`.
    pub fn autotuned() -> AlgorithmChoice {
        AlgorithmChoice::Autotuned(AlgorithmFolder { folder: CacheFolder::for_user("algorithms") })
    }
}

/// A folder of timed choices.
#[derive(Debug, Clone)]
pub struct AlgorithmFolder {
    folder: CacheFolder,
}

/// The content of a kind of product's file.
enum Kept {
    /// The index of the algorithm.
    Algorithm(usize),
    Nothing,
    /// Anything but one of the algorithms at hand.
    Damaged(String),
}

impl AlgorithmFolder {
    /// The choices in `folder`, which is created with the first one.
    pub fn new(folder: impl Into<PathBuf>) -> AlgorithmFolder {
        AlgorithmFolder { folder: CacheFolder::new(folder) }
    }

    /// The index of the algorithm that the folder keeps for the product that `key` describes. If there is none, that
    /// of the fastest by `seconds`, which it then keeps; 0 without `seconds`.
    ///
    /// A damaged file, or a folder that cannot be written, costs a line on standard error: then the index is 0, so
    /// that it is the same in the next run.
    ///
    /// Errors if `seconds` does.
    pub(super) fn index(
        &self,
        key: &str,
        algorithms: &[cublasLtMatmulAlgo_t],
        seconds: Option<impl FnOnce() -> Result<Vec<f64>>>,
    ) -> Result<usize> {
        let entry = self.folder.entry([key.as_bytes()]);
        let kept = match (self.read(&entry, key, algorithms), seconds) {
            (Kept::Nothing, Some(seconds)) => {
                let text = text(key, algorithms, &seconds()?);
                if let Err(error) = self.folder.create(&entry, text.as_bytes()) {
                    let folder = self.folder.path().display();
                    warn_once(&format!(
                        "autotuning: nothing can be kept in '{folder}' ({error}): products take cuBLASLt's first choice"
                    ));
                }
                // Another process may have been first.
                self.read(&entry, key, algorithms)
            }
            (kept, _) => kept,
        };
        Ok(match kept {
            Kept::Algorithm(index) => index,
            Kept::Nothing => 0,
            Kept::Damaged(why) => {
                warn(&format!(
                    "autotuning: '{}' {why}: a product takes cuBLASLt's first choice; delete the file to time again",
                    entry.display()
                ));
                0
            }
        })
    }

    fn read(&self, entry: &Path, key: &str, algorithms: &[cublasLtMatmulAlgo_t]) -> Kept {
        let text = match std::fs::read_to_string(entry) {
            Ok(text) => text,
            Err(error) => {
                return match error.kind() {
                    ErrorKind::NotFound | ErrorKind::NotADirectory => Kept::Nothing,
                    _ => Kept::Damaged(format!("cannot be read ({error})")),
                };
            }
        };
        let line = text.strip_prefix(key).and_then(|rest| rest.split_once('\n'));
        match line.and_then(|(line, _)| line.strip_prefix("algorithm ")) {
            None => Kept::Damaged("is damaged".into()),
            Some(word) => match algorithms.iter().position(|algorithm| hex(algorithm) == word) {
                Some(index) => Kept::Algorithm(index),
                None => Kept::Damaged("names no algorithm that cuBLASLt offers".into()),
            },
        }
    }
}

/// The text of a file: the key, the fastest algorithm, and the times of all, which nothing reads.
fn text(key: &str, algorithms: &[cublasLtMatmulAlgo_t], seconds: &[f64]) -> String {
    let fastest = (0..seconds.len()).min_by(|&a, &b| seconds[a].total_cmp(&seconds[b]));
    let index = fastest.filter(|&index| seconds[index] < WORTHWHILE * seconds[0]).unwrap_or(0);
    let times: Vec<String> =
        seconds.iter().map(|seconds| format!("{:.1}", 1e6 * seconds)).collect();
    format!("{key}algorithm {}\nmicroseconds {}\n", hex(&algorithms[index]), times.join(" "))
}

fn hex(algorithm: &cublasLtMatmulAlgo_t) -> String {
    algorithm.data.iter().map(|word| format!("{word:016x}")).collect()
}

/// Writes a line to standard error, which may have no reader.
fn warn(line: &str) {
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Like [`warn`], at most once in a process.
fn warn_once(line: &str) {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if !WARNED.swap(true, Relaxed) {
        warn(line);
    }
}
