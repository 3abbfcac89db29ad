//! The training and the validation stream of the command line's `--data`.

use super::{Split, shard, source::TokenSource};
use crate::tokenizer::Tokenizer;
use ferrotron_tensor::{Error, Result};
use std::path::{Path, PathBuf};

/// The files to train and validate on.
///
/// A path is a file of any format on the [module's page](super), or a folder: then its `.bin` files
/// are taken, or its `.txt` files where there is no `.bin`, sorted by name, without hidden files and
/// not looking into folders below. Among a folder's files, those with `val`, `valid` or `validation`
/// as a word of their name (`val.bin`, `fineweb_val_000000.bin`) are for validation and those with
/// `test` are left alone. Files of 0 bytes are left out ([`DataConfig::empty_files`]).
#[derive(Debug, Clone, PartialEq)]
pub struct DataConfig {
    /// Files and folders to train on, in this order.
    pub data: Vec<PathBuf>,
    /// Files and folders to validate on; they take the place of a folder's own.
    pub validation_data: Vec<PathBuf>,
    /// The split that holds out the end of the tokens, if there are no validation files.
    pub split: Split,
}

impl DataConfig {
    /// Trains on `data` with the last tenth held out.
    pub fn new(data: impl Into<PathBuf>) -> Self {
        DataConfig { data: vec![data.into()], validation_data: Vec::new(), split: Split::default() }
    }

    /// The files to train and to validate on, folders resolved, without empty ones.
    ///
    /// # Errors
    /// No path; a folder without data; only empty files to train on, or to validate on.
    pub fn files(&self) -> Result<(Vec<PathBuf>, Vec<PathBuf>)> {
        let (train, validation) = self.resolved()?;
        Ok((without_empty(train)?, without_empty(validation.concat())?))
    }

    /// The files to train on and those of each set to validate on, folders resolved, without empty ones.
    ///
    /// # Errors
    /// No path; a folder without data; only empty files to train on, or in a set.
    pub(crate) fn files_of_sets(&self) -> Result<(Vec<PathBuf>, Vec<Vec<PathBuf>>)> {
        let (train, sets) = self.resolved()?;
        Ok((without_empty(train)?, sets.into_iter().map(without_empty).collect::<Result<_>>()?))
    }

    /// The files of 0 bytes, which [`DataConfig::files`] leaves out: a caller should name them in a warning.
    ///
    /// # Errors
    /// No path; a folder without data.
    pub fn empty_files(&self) -> Result<Vec<PathBuf>> {
        let (train, validation) = self.resolved()?;
        Ok(train.into_iter().chain(validation.concat()).filter(|file| is_empty(file)).collect())
    }

    /// Bytes of the files that are text, which each rank tokenizes in memory. Those that cannot be read count nothing.
    ///
    /// # Errors
    /// No path; a folder without data.
    pub fn text_bytes(&self) -> Result<u64> {
        let (train, validation) = self.resolved()?;
        Ok(train
            .iter()
            .chain(validation.iter().flatten())
            .map(|file| shard::text_bytes(file))
            .sum())
    }

    /// The files to train on, and those of each set to validate on, folders resolved.
    fn resolved(&self) -> Result<(Vec<PathBuf>, Vec<Vec<PathBuf>>)> {
        if self.data.is_empty() {
            return Err(Error::config("data", "no data file given"));
        }
        let (mut train, mut validation) = (Vec::new(), Vec::new());
        for path in &self.data {
            if path.is_dir() {
                let files = folder(path)?;
                let part = |role: DatasetSplit| {
                    files.iter().filter(move |file| DatasetSplit::from_path(file) == role).cloned()
                };
                if part(DatasetSplit::Train).next().is_none() {
                    return Err(Error::io(
                        "data",
                        format!("folder '{}' has only validation or test files", path.display()),
                    ));
                }
                train.extend(part(DatasetSplit::Train));
                validation.extend(part(DatasetSplit::Validation));
            } else {
                train.push(path.clone());
            }
        }
        let set =
            |path: &PathBuf| if path.is_dir() { folder(path) } else { Ok(vec![path.clone()]) };
        let sets = match &self.validation_data[..] {
            [] => vec![validation],
            paths => paths.iter().map(set).collect::<Result<_>>()?,
        };
        Ok((train, sets))
    }

    /// The text of all training files, from which a char vocabulary is built. It is taken before the split, so that
    /// held-out text can be encoded too.
    ///
    /// # Errors
    /// Those of [`DataConfig::files`]; a file that is not UTF-8 text.
    pub fn text(&self) -> Result<String> {
        let purpose = "from which a char vocabulary could be built: name the tokenizer it was made with (gpt2 or \
                       a tokenizer.json), or the number of its token ids by --vocab-size";
        self.files()?.0.iter().map(|path| shard::read_text(path, purpose)).collect()
    }
}

/// The purpose of a file in a folder, by the words of its name.
#[derive(Clone, Copy, PartialEq, Eq)]
enum DatasetSplit {
    Train,
    Validation,
    Test,
}

impl DatasetSplit {
    fn from_path(path: &Path) -> DatasetSplit {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().to_ascii_lowercase();
        let mut words = stem.split(|c: char| !c.is_alphanumeric());
        let role = |word| match word {
            "val" | "valid" | "validation" => Some(DatasetSplit::Validation),
            "test" => Some(DatasetSplit::Test),
            _ => None,
        };
        words.find_map(role).unwrap_or(DatasetSplit::Train)
    }
}

/// Whether this is a file of 0 bytes. One that does not exist is not: opening it says so.
fn is_empty(file: &Path) -> bool {
    file.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.len() == 0)
}

/// Errors, naming them, if all of several files are empty.
fn without_empty(files: Vec<PathBuf>) -> Result<Vec<PathBuf>> {
    let rest: Vec<PathBuf> = files.iter().filter(|file| !is_empty(file)).cloned().collect();
    match (&files[..], rest.is_empty()) {
        ([], _) | (_, false) => Ok(rest),
        ([one], _) => Err(Error::io("data", format!("'{}' is empty", one.display()))),
        ([first, .., last], _) => Err(Error::io(
            "data",
            format!(
                "all {} files are empty, from '{}' to '{}'",
                files.len(),
                first.display(),
                last.display()
            ),
        )),
    }
}

/// The data files of a folder, sorted by name. Hidden files are left alone: those of editors and file managers have
/// the extensions of what they belong to.
fn folder(path: &Path) -> Result<Vec<PathBuf>> {
    let failed =
        |error| Error::io("data", format!("cannot list folder '{}': {error}", path.display()));
    let mut all = Vec::new();
    for entry in std::fs::read_dir(path).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if !entry.file_name().as_encoded_bytes().starts_with(b".") {
            all.push(entry.path());
        }
    }
    all.sort();
    for extension in ["bin", "txt"] {
        let matches = |file: &&PathBuf| {
            file.extension().is_some_and(|e| e.eq_ignore_ascii_case(extension)) && file.is_file()
        };
        let files: Vec<PathBuf> = all.iter().filter(matches).cloned().collect();
        if !files.is_empty() {
            return Ok(files);
        }
    }
    let below = match all.iter().any(|entry| entry.is_dir()) {
        true => ", and folders below are not read: name them",
        false => "",
    };
    Err(Error::io("data", format!("folder '{}' has no .bin or .txt file{below}", path.display())))
}

/// The two streams of a run.
///
/// ```
/// use ferrotron_data::{Dataset, Split};
/// use ferrotron_data::tokenizer::Tokenizer;
/// let dataset = Dataset::from_text("to be or not to be", &Tokenizer::Byte, Split::valid_fraction(0.5)?)?;
/// assert_eq!(dataset.train.len(), 9);
/// assert_eq!(dataset.validation.unwrap().len(), 9);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Dataset {
    /// The tokens to train on.
    pub train: TokenSource,
    /// The tokens to validate on; `None` where nothing was held out.
    pub validation: Option<TokenSource>,
}

impl Dataset {
    /// Opens the files of `config`.
    ///
    /// # Errors
    /// Those of [`DataConfig::files`], [`TokenSource::open`] and [`TokenSource::split`].
    pub fn open(config: &DataConfig, tokenizer: &Tokenizer) -> Result<Self> {
        let (train, validation) = config.files()?;
        Dataset::open_files(&train, &validation, config.split, tokenizer)
    }

    /// Opens the files of `config`, and returns beside them the stream of each path of [`DataConfig::validation_data`], in
    /// this order. The streams are parts of the dataset's validation, so each file is opened and tokenized once.
    ///
    /// # Errors
    /// Those of [`Dataset::open`]; a path with empty files alone.
    pub fn open_with_sets(
        config: &DataConfig,
        tokenizer: &Tokenizer,
    ) -> Result<(Self, Vec<TokenSource>)> {
        let (train, sets) = config.files_of_sets()?;
        let dataset = Dataset::open_files(&train, &sets.concat(), config.split, tokenizer)?;
        let Some(validation) = &dataset.validation else { return Ok((dataset, Vec::new())) };
        let mut end = 0;
        let stream = |files: &Vec<PathBuf>| {
            end += files.len();
            validation.files(end - files.len()..end)
        };
        let named = &sets[..config.validation_data.len()];
        let streams = named.iter().map(stream).collect::<Result<_>>()?;
        Ok((dataset, streams))
    }

    fn open_files(
        train: &[PathBuf],
        validation: &[PathBuf],
        split: Split,
        tokenizer: &Tokenizer,
    ) -> Result<Self> {
        let train = TokenSource::open(train, tokenizer)?;
        if validation.is_empty() {
            return Dataset::held_out(train, split);
        }
        let validation = TokenSource::open(validation, tokenizer)?;
        Ok(Dataset { train, validation: Some(validation) })
    }

    /// Tokenizes `text` and holds out what `split` says.
    ///
    /// # Errors
    /// Those of [`Tokenizer::encode`] and [`TokenSource::split`].
    pub fn from_text(text: &str, tokenizer: &Tokenizer, split: Split) -> Result<Self> {
        let tokens = tokenizer.encode(text)?;
        Dataset::held_out(TokenSource::from_tokens(tokens, tokenizer.vocab_size())?, split)
    }

    fn held_out(all: TokenSource, split: Split) -> Result<Self> {
        let (train, rest) = all.split(split)?;
        Ok(Dataset { train, validation: (!rest.is_empty()).then_some(rest) })
    }
}

#[cfg(test)]
mod tests;
