//! The fingerprint of a run's data: a checkpoint carries it, and a resumed run compares it.
//!
//! The place of a sample in the data is a function of the number of training tokens, so other data would continue a
//! run without a sign. The fingerprint is made of tokens and not of files: the same text as `.txt` and as `.bin` has the
//! same one.

use ferrotron_tensor::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{Dataset, TokenSource};
use crate::tokenizer::Tokenizer;

/// Name of the fingerprint in a checkpoint's progress.
const KEY: &str = "data_fingerprint";

/// Number of training tokens: all that older checkpoints say of their data.
const OLD_KEY: &str = "training_tokens";

/// Sources of up to so many tokens are hashed whole: 64 MiB as 32-bit numbers.
const WHOLE: u64 = 1 << 24;

/// Longer ones are hashed in so many windows of so many tokens, evenly spread from the first token to the last.
const WINDOWS: u64 = 1024;
const WINDOW: usize = 4096;

/// Whether a resumed run may use other data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataChange {
    /// Other data is an error.
    Refused,
    /// The run resumes with the data that it has now.
    Allowed,
}

/// The origin of a run's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataOrigin {
    /// Files that the user names.
    Files,
    /// A text that the program carries, which may differ between its versions.
    BuiltIn,
}

/// Identifies the data of a run.
///
/// ```
/// use ferrotron_data::{DataChange::Refused, DataFingerprint, DataOrigin::Files, Dataset, Split};
/// use ferrotron_data::tokenizer::Tokenizer;
/// let fingerprint = |text: &str| {
///     let dataset = Dataset::from_text(text, &Tokenizer::Byte, Split::default())?;
///     DataFingerprint::new(&dataset, &Tokenizer::Byte)
/// };
/// let mut progress = serde_json::Map::new();
/// fingerprint("to be or not to be")?.record(&mut progress);
/// fingerprint("to be or not to be")?.check(&progress, Refused, Files)?;
/// let error = fingerprint("to me or not to be")?.check(&progress, Refused, Files).unwrap_err();
/// assert!(error.to_string().contains("other tokens of the same number"));
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataFingerprint {
    /// Number of training tokens.
    training_tokens: u64,
    /// Number of tokens of the training files, with those that are held out of them.
    stream_tokens: Option<u64>,
    /// CRC-32 of the training tokens as little-endian 32-bit numbers: of all, or of a sample of a long source.
    tokens_crc32: Option<u32>,
    /// CRC-32 of the tokenizer's `tokenizer.json`.
    tokenizer_crc32: Option<u32>,
    /// CRC-32 of what decides the order of samples beside the tokens and their number: weights, Megatron's indices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    order_crc32: Option<u32>,
}

impl DataFingerprint {
    /// Reads up to 2^24 training tokens, all or a sample of them.
    ///
    /// # Errors
    /// A token beyond the vocabulary.
    pub fn new(dataset: &Dataset, tokenizer: &Tokenizer) -> Result<DataFingerprint> {
        Ok(DataFingerprint {
            training_tokens: dataset.train.len(),
            stream_tokens: Some(dataset.train.stream_len()),
            tokens_crc32: Some(tokens_crc32(&dataset.train)?),
            tokenizer_crc32: Some(crc32fast::hash(tokenizer.to_json().as_bytes())),
            order_crc32: None,
        })
    }

    /// The same data in an order that depends on more than its tokens, with the checksum of that.
    #[must_use]
    pub fn with_order(self, order_crc32: Option<u32>) -> DataFingerprint {
        DataFingerprint { order_crc32, ..self }
    }

    /// Describes the tokenizer by its checksum, for comparing those of several ranks.
    pub fn tokenizer(&self) -> String {
        format!("checksum {:08x}", self.tokenizer_crc32.unwrap_or_default())
    }

    /// Describes the training tokens in words, for comparing what several ranks read.
    pub fn training(&self) -> String {
        described(self.training_tokens, self.tokens_crc32.unwrap_or_default())
    }

    /// Puts the fingerprint into the extra entries of a checkpoint's `TrainState`.
    pub fn record(&self, progress: &mut Map<String, Value>) {
        progress.remove(OLD_KEY);
        progress.insert(KEY.to_string(), json!(self));
    }

    /// Compares the fingerprint with the one in the extra entries of a checkpoint's progress, as far as there is one.
    ///
    /// # Errors
    /// Other data than that, unless it is allowed; the message says what differs.
    pub fn check(
        &self,
        progress: &Map<String, Value>,
        change: DataChange,
        origin: DataOrigin,
    ) -> Result<()> {
        let Some(Difference { words, text_differs }) = self.difference(progress) else {
            return Ok(());
        };
        if change == DataChange::Allowed {
            return Ok(());
        }
        let (was, remedy) = match (origin, text_differs) {
            (DataOrigin::BuiltIn, true) => (
                "the built-in corpus of another version of the program",
                "resume it with that version",
            ),
            (DataOrigin::BuiltIn, false) => {
                ("other data", "give the same --valid-fraction or --split")
            }
            (DataOrigin::Files, _) => (
                "other data",
                "give the same --data or --data-path, --valid-data and --valid-fraction or --split",
            ),
        };
        let message = format!(
            "the run was started with {was}: {words}; {remedy}, or go on with this data by --allow-data-change"
        );
        Err(Error::config("data", message))
    }

    /// The first difference, or `None`.
    fn difference(&self, progress: &Map<String, Value>) -> Option<Difference> {
        let before = match (progress.get(KEY), progress.get(OLD_KEY).and_then(Value::as_u64)) {
            (Some(saved), _) => match serde_json::from_value::<DataFingerprint>(saved.clone()) {
                Ok(before) => before,
                Err(error) => {
                    let words = format!("its fingerprint is unreadable ({error})");
                    return Some(Difference { words, text_differs: false });
                }
            },
            (None, Some(training_tokens)) => DataFingerprint {
                training_tokens,
                stream_tokens: None,
                tokens_crc32: None,
                tokenizer_crc32: None,
                order_crc32: self.order_crc32,
            },
            (None, None) => return None,
        };
        let differs = |now: Option<u64>, before: Option<u64>| before.is_some() && now != before;
        let mut found = Vec::new();
        let crc = |crc: Option<u32>| crc.map(u64::from);
        if differs(crc(self.tokenizer_crc32), crc(before.tokenizer_crc32)) {
            found.push("another tokenizer".to_string());
        }
        let (now, then) = (self.training_tokens, before.training_tokens);
        let mut text_differs = false;
        if now != then && self.stream_tokens == before.stream_tokens {
            let all = self.stream_tokens.unwrap_or_default();
            found.push(format!("another split, {now} of {all} training tokens, not {then}"));
        } else if now != then {
            text_differs = true;
            found.push(format!("{now} training tokens, not {then}"));
        } else if differs(crc(self.tokens_crc32), crc(before.tokens_crc32)) {
            text_differs = true;
            found.push(format!("other tokens of the same number, {now}"));
        }
        if found.is_empty() && self.order_crc32 != before.order_crc32 {
            found.push(
                "another order of the same tokens, which --data-order, the weights of the data sets, with --packing its value, \
                 --seq-length, --truncate-samples and where prompts end, and with --data-order megatron --seed, --seq-length \
                 and the number of samples (--train-iters x --global-batch-size, or --train-samples) decide"
                    .to_string(),
            );
        }
        (!found.is_empty()).then(|| Difference { words: found.join(", and "), text_differs })
    }
}

/// Differences between the data of a run and that of a checkpoint.
struct Difference {
    words: String,
    /// Whether the tokens differ, not only the split or the tokenizer.
    text_differs: bool,
}

/// Describes the tokens of any source, as [`DataFingerprint::training`] does those of the training data.
///
/// # Errors
/// A token beyond the vocabulary.
pub fn tokens_in_words(source: &TokenSource) -> Result<String> {
    Ok(described(source.len(), tokens_crc32(source)?))
}

fn described(tokens: u64, crc32: u32) -> String {
    format!("{tokens} tokens with checksum {crc32:08x}")
}

/// The checksum of a source's tokens.
fn tokens_crc32(source: &TokenSource) -> Result<u32> {
    let mut hasher = crc32fast::Hasher::new();
    let mut tokens = vec![0_u32; WINDOW.min(source.len() as usize)];
    let mut hash = |start: u64| {
        let length = (source.len() - start).min(WINDOW as u64) as usize;
        source.read(start, &mut tokens[..length])?;
        tokens[..length].iter_mut().for_each(|token| *token = token.to_le());
        hasher.update(bytemuck::cast_slice(&tokens[..length]));
        Ok::<_, Error>(())
    };
    if source.len() <= WHOLE {
        (0..source.len()).step_by(WINDOW).try_for_each(&mut hash)?;
    } else {
        // The product does not fit into 64 bits where there are more than 2^54 tokens.
        let last = u128::from(source.len() - WINDOW as u64);
        let start = |window: u64| (last * u128::from(window) / u128::from(WINDOWS - 1)) as u64;
        (0..WINDOWS).map(start).try_for_each(&mut hash)?;
    }
    Ok(hasher.finalize())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Split;

    fn dataset(train: Vec<u32>, split: f64) -> Dataset {
        let all = TokenSource::from_tokens(train, 1 << 20).unwrap();
        let (train, rest) = all.split(Split::valid_fraction(split).unwrap()).unwrap();
        Dataset { train, validation: Some(rest) }
    }

    fn fingerprint(dataset: &Dataset) -> DataFingerprint {
        DataFingerprint::new(dataset, &Tokenizer::Byte).unwrap()
    }

    fn saved(fingerprint: &DataFingerprint) -> Map<String, Value> {
        let mut progress = Map::new();
        fingerprint.record(&mut progress);
        progress
    }

    #[test]
    fn each_difference_is_named_and_can_be_allowed() {
        let tokens: Vec<u32> = (0..10_000).map(|i| i * 7919 % 251).collect();
        let before = saved(&fingerprint(&dataset(tokens.clone(), 0.1)));
        let mut other = tokens.clone();
        other[8_000] += 1;
        let mut held_out = tokens.clone();
        held_out[9_500] += 1;
        let longer = [&tokens[..], &tokens].concat();
        let byte = |tokens: &[u32], split| fingerprint(&dataset(tokens.to_vec(), split));
        let gpt2 = DataFingerprint::new(&dataset(tokens.clone(), 0.1), &Tokenizer::Gpt2).unwrap();
        for (now, want) in [
            (byte(&tokens, 0.1), None),
            (byte(&held_out, 0.1), None),
            (byte(&other, 0.1), Some("other tokens of the same number, 9000;")),
            (byte(&longer, 0.1), Some("18000 training tokens, not 9000;")),
            (byte(&tokens, 0.2), Some("another split, 8000 of 10000 training tokens, not 9000;")),
            (gpt2, Some("another tokenizer;")),
        ] {
            let found = now
                .check(&before, DataChange::Refused, DataOrigin::Files)
                .err()
                .map(|e| e.to_string());
            match want {
                None => assert_eq!(found, None),
                Some(want) => {
                    let found = found.unwrap();
                    assert!(
                        found.contains(want) && found.contains("--allow-data-change"),
                        "{found}"
                    );
                    now.check(&before, DataChange::Allowed, DataOrigin::Files).unwrap();
                }
            }
        }
    }

    #[test]
    fn another_built_in_corpus_is_named() {
        let tokens: Vec<u32> = (0..10_000).map(|i| i * 7919 % 251).collect();
        let now = fingerprint(&dataset(tokens.clone(), 0.1));
        let refused = |before: &[u32], split| {
            let before = saved(&fingerprint(&dataset(before.to_vec(), split)));
            now.check(&before, DataChange::Refused, DataOrigin::BuiltIn).unwrap_err().to_string()
        };
        let other = refused(&tokens[1..], 0.1);
        for part in [
            "built-in corpus of another version",
            "9000 training tokens, not 8999",
            "resume it with",
        ] {
            assert!(other.contains(part), "{other}");
        }
        let split = refused(&tokens, 0.2);
        assert!(
            split.contains("other data: another split") && !split.contains("version"),
            "{split}"
        );
    }

    #[test]
    fn an_older_checkpoint_is_compared_in_what_it_has() {
        let now = fingerprint(&dataset((0..100).collect(), 0.1));
        now.check(&Map::new(), DataChange::Refused, DataOrigin::Files).unwrap();
        let mut old = Map::from_iter([(OLD_KEY.to_string(), json!(90))]);
        now.check(&old, DataChange::Refused, DataOrigin::Files).unwrap();
        now.record(&mut old);
        assert_eq!(old.keys().collect::<Vec<_>>(), [KEY]);
        let old = Map::from_iter([(OLD_KEY.to_string(), json!(91))]);
        let error =
            now.check(&old, DataChange::Refused, DataOrigin::Files).unwrap_err().to_string();
        assert!(error.contains("90 training tokens, not 91"), "{error}");
    }

    #[test]
    fn a_long_source_is_sampled_from_the_first_token_to_the_last() {
        let tokens: Vec<u32> = (0..WHOLE as u32 + 12_345).map(|i| i % 1000).collect();
        let (length, second) = (tokens.len(), (tokens.len() - WINDOW) / 1023);
        let crc32 = |tokens: &[u32]| {
            tokens_crc32(&TokenSource::from_tokens(tokens.to_vec(), 2000).unwrap()).unwrap()
        };
        let before = crc32(&tokens);
        let changed = |at: usize| {
            let mut other = tokens.clone();
            other[at] += 1000;
            crc32(&other) != before
        };
        // What lies between two windows is not looked at.
        let ats = [0, WINDOW - 1, WINDOW, second - 1, second, length - 1];
        assert_eq!(ats.map(changed), [true, true, false, false, true, true]);
    }
}
