//! Files beside the weights of a Hugging Face folder that training does not change: settings of generation and of the
//! tokenizer. They travel from the folder through checkpoints to an export.

use ferrotron_tensor::{Error, Result};
use serde_json::{Map, Value};
use std::fs;
use std::path::Path;

use crate::io::checked_file::{cannot, replace, write_bytes};

/// Files that go with the model, whatever its tokenizer.
const OF_MODEL: &[&str] = &["generation_config.json"];

/// Files that go with the folder's own tokenizer, beside `tokenizer.json`.
const OF_TOKENIZER: &[&str] = &[
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
];

/// The entry of a checkpoint's progress that holds them.
const ENTRY: &str = "hugging_face_files";

/// The most bytes of a file that travels: tokenizers with many added tokens have a few hundred thousand.
const LARGEST: u64 = 4 << 20;

/// The companion files of a folder: text by name.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct CompanionFiles(Map<String, Value>);

impl CompanionFiles {
    /// Reads the companion files of `folder`.
    ///
    /// # Errors
    /// A file that cannot be read, is no text or has more than 4 MiB, by name.
    pub fn read(folder: &Path) -> Result<CompanionFiles> {
        let mut files = Map::new();
        for name in OF_MODEL.iter().chain(OF_TOKENIZER) {
            let path = folder.join(name);
            let refuse =
                |what: String| Error::io("hugging_face", format!("'{}' {what}", path.display()));
            if !path.exists() {
                continue;
            }
            let found =
                fs::metadata(&path).map_err(|error| refuse(format!("cannot be read: {error}")))?;
            if found.len() > LARGEST {
                return Err(refuse(format!(
                    "has {} bytes, more than 4 MiB: move it away",
                    found.len()
                )));
            }
            let text = fs::read_to_string(&path)
                .map_err(|error| refuse(format!("cannot be read: {error}")))?;
            files.insert(name.to_string(), text.into());
        }
        Ok(CompanionFiles(files))
    }

    /// Leaves out the files of the tokenizer, for a model that goes on with another one.
    #[must_use]
    pub fn without_tokenizer(mut self) -> CompanionFiles {
        self.0.retain(|name, _| OF_MODEL.contains(&name.as_str()));
        self
    }

    /// Adds them to the extra entries of a [`TrainState`](crate::checkpoint::TrainState), if there are any.
    pub fn record(self, extra: &mut Map<String, Value>) {
        if !self.0.is_empty() {
            extra.insert(ENTRY.into(), self.0.into());
        }
    }

    /// Returns the files that [`record`](CompanionFiles::record) added.
    pub fn recorded(extra: &Map<String, Value>) -> CompanionFiles {
        match extra.get(ENTRY) {
            Some(Value::Object(files)) => CompanionFiles(files.clone()),
            _ => CompanionFiles::default(),
        }
    }

    /// Writes them into an exported `folder`.
    ///
    /// # Errors
    /// A folder that cannot be written.
    pub fn write(&self, folder: &Path) -> Result<()> {
        let write = || {
            fs::create_dir_all(folder).map_err(|error| cannot("create", folder, &error))?;
            for name in OF_MODEL.iter().chain(OF_TOKENIZER) {
                if let Some(Value::String(text)) = self.0.get(*name) {
                    replace(folder, name, |path| write_bytes(path, text.as_bytes()))?;
                }
            }
            Ok(())
        };
        write().map_err(|fault: String| Error::io("hugging_face", fault))
    }
}
