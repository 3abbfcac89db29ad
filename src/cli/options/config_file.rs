//! `--config FILE.toml`: options by their names.

use clap::Command;
use ferrotron::Result;
use std::path::Path;

use crate::cli::options::{Options, Source};

/// The options of a subcommand that stand in a TOML file.
pub fn read(definition: &Command, path: &Path) -> Result<Options> {
    let source = Source::File(path.display().to_string());
    let text = std::fs::read_to_string(path).map_err(|error| source.refuse(error))?;
    parse(definition, &text, &source)
}

fn parse(definition: &Command, text: &str, source: &Source) -> Result<Options> {
    let map = toml::from_str(text).map_err(|error: toml::de::Error| {
        let first = error.message().lines().next().unwrap_or_default();
        source.refuse(format!("not TOML: {first}"))
    })?;
    Options::from_map(definition, map, source)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, definition::Definition};
    use clap::CommandFactory;

    const FILE: &str = r#"
        # A run.
        data = ["a.txt", "b.txt"]
        lr = 1e-3
        swiglu = true
        rampup_batch_size = [1, 2, 3]
        tokenizer = "gpt2"
    "#;

    /// Bytes that TOML knows, and some that it does not.
    const BYTES: &[u8] = b"\"'[]{}=.#\n,-+e0x9_ \\u\0\xff";

    /// Files with random bytes replaced, removed or doubled are options or an error of one line.
    #[test]
    fn no_change_of_a_file_panics() {
        let definition = Definition::new(Cli::command());
        let train = definition.subcommand("train");
        let source = Source::File("run.toml".into());
        assert!(parse(&train, FILE, &source).is_ok());
        let mut state = 1_u64;
        let mut below = |limit: usize| {
            // Knuth's linear congruential generator, MMIX.
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as usize % limit
        };
        for _ in 0..5000 {
            let mut text = FILE.as_bytes().to_vec();
            for _ in 0..1 + below(4) {
                let at = below(text.len());
                match below(3) {
                    0 => text[at] = BYTES[below(BYTES.len())],
                    1 => drop(text.remove(at)),
                    _ => text.splice(at..at, FILE.bytes().skip(at).take(9)).for_each(drop),
                }
            }
            match parse(&train, &String::from_utf8_lossy(&text), &source) {
                Ok(options) => drop(definition.parse("train", &options)),
                Err(error) => assert!(!error.to_string().contains('\n'), "{error}"),
            }
        }
    }
}
