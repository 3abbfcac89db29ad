//! The tokenizer that token files were made with, as the fingerprint beside them names it.

use super::indexed_dataset::with_suffix;
use crate::tokenizer::Tokenizer;
use ferrotron_tensor::{Error, Result};
use serde::Deserialize;
use serde_json::Value;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

/// Errors if `ferrotron tokenize` has made the token file `path` with another tokenizer. A file without a fingerprint may
/// be of any; so may all with a null tokenizer, which names none.
pub(crate) fn check(path: &Path, tokenizer: &Tokenizer) -> Result<()> {
    if matches!(tokenizer, Tokenizer::Null(_)) {
        return Ok(());
    }
    let Some(Fields { tokenizer: made_with, .. }) = fields(path) else { return Ok(()) };
    let (name, size) = (made_with["name"].as_str(), made_with["vocab_size"].as_u64());
    let (Some(name), Some(size)) = (name, size) else { return Ok(()) };
    if (name, size) == (tokenizer.name(), tokenizer.vocab_size() as u64) {
        return Ok(());
    }
    let message = format!(
        "'{}' was made with the {name} tokenizer of {size}, not with {} of {}: give the one it was made with",
        path.display(),
        tokenizer.name(),
        tokenizer.vocab_size()
    );
    Err(Error::config("--tokenizer", message))
}

/// Whether `ferrotron tokenize --prompt-completion` has made the token file `path`; `None` without a fingerprint.
pub fn holds_pairs(path: &Path) -> Option<bool> {
    fields(path).map(|fields| fields.options["prompt_completion"] == true)
}

/// The fields of a fingerprint that are looked at: its sources may be many.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Fields {
    tokenizer: Value,
    options: Value,
}

/// The fingerprint of a file, if there is one.
fn fields(path: &Path) -> Option<Fields> {
    let file = prefixes(path)
        .find_map(|prefix| File::open(with_suffix(&prefix, ".fingerprint.json")).ok())?;
    serde_json::from_reader(BufReader::new(file)).ok()
}

/// The prefixes that `PREFIX`, `PREFIX.bin`, `PREFIX.idx` and the shard `PREFIX_000000.bin` of llm.c may have.
fn prefixes(path: &Path) -> impl Iterator<Item = PathBuf> {
    let bare = match path.extension().is_some_and(|end| end == "bin" || end == "idx") {
        true => path.with_extension(""),
        false => path.to_path_buf(),
    };
    let name = bare.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let numbered = |(_, number): &(&str, &str)| number.bytes().all(|byte| byte.is_ascii_digit());
    let shard = name.rsplit_once('_').filter(numbered).map(|(front, _)| bare.with_file_name(front));
    [Some(bare), shard].into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_tokenizer_than_that_of_the_fingerprint_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let fingerprint = r#"{ "tokenizer": { "name": "byte", "vocab_size": 256 } }"#;
        std::fs::write(folder.path().join("a_text.fingerprint.json"), fingerprint).unwrap();
        for name in ["a_text", "a_text.bin", "a_text.idx", "a_text_000003.bin"] {
            let path = folder.path().join(name);
            let error = check(&path, &Tokenizer::Gpt2).unwrap_err().to_string();
            for part in ["--tokenizer: ", name, "byte tokenizer of 256", "gpt2 of 50257"] {
                assert!(error.contains(part), "{part} is missing: {error}");
            }
            check(&path, &Tokenizer::Byte).unwrap();
            check(&path, &Tokenizer::Null(256)).unwrap();
        }
        check(&folder.path().join("b_text.bin"), &Tokenizer::Gpt2).unwrap();
    }
}
