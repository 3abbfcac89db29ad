//! Lists of indexed data sets, as Megatron-LM's `--data-path` and the files that stand for it have them.

use ferrotron_tensor::{Error, Result};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Prefixes of indexed data sets, with their weights if they have any.
#[derive(Debug, Clone, PartialEq)]
pub struct BlendPaths {
    /// The option that names them, for messages.
    pub option: &'static str,
    /// The prefixes.
    pub prefixes: Vec<PathBuf>,
    /// A weight for each prefix; without weights, sets count by their size.
    pub weights: Option<Vec<f64>>,
}

impl BlendPaths {
    /// Reads `PREFIX ..` or `WEIGHT PREFIX WEIGHT PREFIX ..`. Words in even number of which every other one, from the first
    /// on, is a number are pairs.
    ///
    /// ```
    /// use ferrotron_data::BlendPaths;
    /// let words = |text: &str| text.split(' ').map(String::from).collect::<Vec<String>>();
    /// assert_eq!(BlendPaths::parse("--data-path", &words("30 a 70 b"))?.weights, Some(vec![30.0, 70.0]));
    /// assert_eq!(BlendPaths::parse("--data-path", &words("a b c"))?.weights, None);
    /// assert!(BlendPaths::parse("--data-path", &words("30 a b 70")).is_err());
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    ///
    /// # Errors
    /// No word; weights in front of some prefixes alone; a weight that is not above 0 and finite.
    pub fn parse(option: &'static str, words: &[String]) -> Result<BlendPaths> {
        let refuse = |why: String| Err(Error::config(option, why));
        let path = |word: &String| PathBuf::from(word.trim());
        if words.is_empty() {
            return refuse("names no data set".into());
        }
        let (pairs, rest) = words.as_chunks::<2>();
        let numbers: Vec<Option<f64>> =
            pairs.iter().map(|pair| pair[0].trim().parse().ok()).collect();
        if !rest.is_empty() || numbers.iter().all(Option::is_none) {
            let number = |word: &&String| word.parse::<f64>().is_ok() && !is_set(&path(word));
            if let Some(weight) = words.iter().find(number) {
                return refuse(format!(
                    "'{weight}' is no data set, and weights need one in front of each prefix: WEIGHT PREFIX WEIGHT PREFIX .."
                ));
            }
            return Ok(BlendPaths {
                option,
                prefixes: words.iter().map(path).collect(),
                weights: None,
            });
        }
        if let Some(place) = numbers.iter().position(Option::is_none) {
            let [word, _] = &pairs[place];
            return refuse(format!(
                "'{word}' stands where a weight should: give WEIGHT PREFIX WEIGHT PREFIX .., or prefixes alone"
            ));
        }
        let weights: Vec<f64> = numbers.into_iter().flatten().collect();
        if let Some(weight) = weights.iter().find(|weight| !(weight.is_finite() && **weight > 0.0))
        {
            return refuse(format!("{weight} is no weight of a data set: above 0 and finite"));
        }
        let prefixes = pairs.iter().map(|pair| path(&pair[1])).collect();
        Ok(BlendPaths { option, prefixes, weights: Some(weights) })
    }

    /// Reads such a list from a text file, whose words are divided by white space.
    ///
    /// # Errors
    /// A file that cannot be read as text; as [`BlendPaths::parse`].
    pub fn from_file(option: &'static str, file: &Path) -> Result<BlendPaths> {
        let words: Vec<String> = read(option, file)?.split_whitespace().map(String::from).collect();
        BlendPaths::parse(option, &words).map_err(|error| within(option, file, &error))
    }

    /// Reads the lists of a JSON file with the keys `train`, `valid` and `test`. A value is a string of words, a list of
    /// words, or null.
    ///
    /// # Errors
    /// A file that is not such JSON; as [`BlendPaths::parse`].
    pub fn per_split(option: &'static str, file: &Path) -> Result<[Option<BlendPaths>; 3]> {
        let refuse = |why: String| Err(within(option, file, &Error::config("", why)));
        let found = match serde_json::from_str(&read(option, file)?) {
            Ok(Value::Object(found)) => found,
            Ok(_) => return refuse("it is no JSON object".into()),
            Err(error) => return refuse(format!("it is no JSON: {error}")),
        };
        let names = ["train", "valid", "test"];
        if let Some(name) = found.keys().find(|name| !names.contains(&name.as_str())) {
            return refuse(format!("'{name}' is none of its keys: train, valid, test"));
        }
        let mut lists = [None, None, None];
        for (list, name) in lists.iter_mut().zip(names) {
            let text = |value: &Value| match value {
                Value::String(word) => Some(word.clone()),
                Value::Number(number) => Some(number.to_string()),
                _ => None,
            };
            let words: Option<Vec<String>> = match found.get(name) {
                None => return refuse(format!("it has no '{name}': give null for none")),
                Some(Value::Null) => continue,
                Some(Value::String(words)) => {
                    Some(words.split_whitespace().map(String::from).collect())
                }
                Some(Value::Array(words)) => words.iter().map(text).collect(),
                Some(_) => None,
            };
            let Some(words) = words else {
                return refuse(format!("'{name}' is no string and no list of strings"));
            };
            let parsed = BlendPaths::parse(option, &words);
            *list = Some(parsed.map_err(|error| within(option, file, &error))?);
        }
        Ok(lists)
    }
}

/// Whether a prefix names an indexed data set that is there.
fn is_set(prefix: &Path) -> bool {
    crate::IndexedDataset::index_path(prefix).is_some_and(|index| index.is_file())
}

fn read(option: &'static str, file: &Path) -> Result<String> {
    std::fs::read_to_string(file)
        .map_err(|error| Error::io(option, format!("cannot read '{}': {error}", file.display())))
}

fn within(option: &'static str, file: &Path, error: &Error) -> Error {
    Error::new(error.kind(), option, format!("'{}': {}", file.display(), error.context()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_as_megatron_reads_them() {
        let parse = |text: &str| {
            let words: Vec<String> = text.split(' ').map(String::from).collect();
            let found = BlendPaths::parse("--data-path", &words)?;
            let prefixes = found.prefixes.iter().map(|path| path.display().to_string());
            Ok::<_, Error>((prefixes.collect::<Vec<String>>().join(" "), found.weights))
        };
        assert_eq!(parse("a").unwrap(), ("a".into(), None));
        assert_eq!(parse("a b").unwrap(), ("a b".into(), None));
        assert_eq!(parse("1e-1 a .3 b").unwrap(), ("a b".into(), Some(vec![0.1, 0.3])));
        for (wrong, part) in [
            ("3 a b c", "--data-path: 'b' stands where a weight should"),
            ("3 a 4", "'3' is no data set, and weights need one in front of each"),
            ("0 a 1 b", "0 is no weight of a data set"),
            ("-1 a", "-1 is no weight"),
            ("inf a", "inf is no weight"),
        ] {
            let error = parse(wrong).unwrap_err().to_string();
            assert!(error.contains(part), "{wrong}: {error}");
        }
        assert!(BlendPaths::parse("--data-path", &[]).is_err());
    }

    #[test]
    fn lists_in_files_are_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("list");
        std::fs::write(&file, "30 a\n70 b\n").unwrap();
        let found = BlendPaths::from_file("--data-args-path", &file).unwrap();
        assert_eq!(found.weights, Some(vec![30.0, 70.0]));
        let text = r#"{ "train": ["1", "a", 2, "b"], "valid": "c d", "test": null }"#;
        std::fs::write(&file, text).unwrap();
        let [train, valid, test] = BlendPaths::per_split("--x", &file).unwrap();
        assert_eq!(train.unwrap().weights, Some(vec![1.0, 2.0]));
        assert_eq!((valid.unwrap().prefixes.len(), test), (2, None));
        for (text, part) in [
            ("[]", "it is no JSON object"),
            ("{", "it is no JSON"),
            (r#"{ "train": "a", "valid": null }"#, "it has no 'test'"),
            (r#"{ "train": 3, "valid": null, "test": null }"#, "'train' is no string"),
            (r#"{ "train": "3 a b c", "valid": null, "test": null }"#, "'b' stands where"),
            (r#"{ "trian": "a" }"#, "'trian' is none of its keys"),
        ] {
            std::fs::write(&file, text).unwrap();
            let error = BlendPaths::per_split("--x", &file).unwrap_err().to_string();
            assert!(error.starts_with("--x: '") && error.contains(part), "{text}: {error}");
        }
    }
}
