//! Options of one optimizer, where another one is chosen: no option that was given is ignored without a word.

use ferrotron::{Error, Result};
use serde_json::Value;

use crate::cli::args::optimizer::DEFAULT_OPTIMIZER;
use crate::cli::options::{Options, Source};

/// The prefixes of the names of optimizers' options, and the optimizers that read them.
const READERS: [(&str, &[&str]); 5] = [
    ("adam-", &["adam", "muon"]),
    ("sgd-", &["sgd"]),
    ("lion-", &["lion"]),
    ("adafactor-", &["adafactor"]),
    ("muon-", &["muon"]),
];

/// Errors if an option was given that the optimizer of the run does not read.
///
/// A checkpoint may remember options of the optimizer before this one, and a file may state those of its own optimizer
/// under a typed `--optimizer`.
pub fn check(options: &Options) -> Result<()> {
    let optimizer = options.values("optimizer").pop();
    let optimizer = optimizer.as_deref().unwrap_or(DEFAULT_OPTIMIZER);
    let was_typed = matches!(options.0.get("optimizer"), Some((_, Source::Typed)));
    for (name, (value, source)) in &options.0 {
        let is_given = match source {
            Source::Typed => true,
            Source::File(_) => !was_typed,
            Source::Checkpoint(_) | Source::Folder(_) => false,
        };
        let readers = READERS.iter().find(|(start, _)| name.starts_with(start));
        let Some((_, readers)) = readers.filter(|(_, readers)| !readers.contains(&optimizer))
        else {
            continue;
        };
        if is_given && *value != Value::Bool(false) {
            let message = format!(
                "is an option of --optimizer {}, and this run has --optimizer {optimizer}: leave it out, or choose that \
                 optimizer",
                readers.join(" and ")
            );
            return Err(Error::config("", format!("--{name} {message}")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, definition::Definition};
    use clap::CommandFactory;
    use serde_json::json;

    fn stated(source: Source, value: Value) -> Options {
        let definition = Definition::new(Cli::command()).subcommand("train");
        Options::from_map(&definition, value.as_object().unwrap().clone(), &source).unwrap()
    }

    #[test]
    fn an_option_of_another_optimizer_is_refused_unless_it_is_remembered() {
        let typed = |value| stated(Source::Typed, value);
        let file = |value| stated(Source::File("run.toml".into()), value);
        let saved = |value| stated(Source::Checkpoint("the checkpoint 'k'".into()), value);
        for (options, wrong) in [
            (typed(json!({ "optimizer": "lion", "muon-momentum": 0.9 })), Some("muon-momentum")),
            (typed(json!({ "optimizer": "sgd", "adam-beta1": 0.9 })), Some("adam-beta1")),
            (typed(json!({ "sgd-nesterov": true })), Some("sgd-nesterov")),
            (typed(json!({ "sgd-nesterov": false })), None),
            (
                typed(json!({ "optimizer": "muon", "adam-eps": "1e-8", "muon-num-ns-steps": 6 })),
                None,
            ),
            (typed(json!({ "optimizer": "adafactor", "adafactor-eps2": 0.1 })), None),
            (file(json!({ "optimizer": "sgd", "lion-beta1": 0.9 })), Some("lion-beta1")),
            (typed(json!({ "optimizer": "sgd" })).over(file(json!({ "lion-beta1": 0.9 }))), None),
            (typed(json!({ "lion-beta1": 0.9 })).over(saved(json!({ "optimizer": "lion" }))), None),
            (typed(json!({ "optimizer": "sgd" })).over(saved(json!({ "adam-beta1": 0.8 }))), None),
        ] {
            let error = check(&options).err().map(|error| error.to_string());
            match wrong {
                None => assert_eq!(error, None),
                Some(name) => {
                    let error = error.unwrap();
                    assert!(error.starts_with(&format!("--{name} is an option of")), "{error}");
                }
            }
        }
    }

    /// Every option with such a name belongs to an optimizer, and all optimizers are known.
    #[test]
    fn the_readers_are_optimizers() {
        let train = Definition::new(Cli::command()).subcommand("train");
        let arg = train.get_arguments().find(|arg| arg.get_long() == Some("optimizer")).unwrap();
        let known = arg.get_possible_values();
        for (start, readers) in READERS {
            let mut options = train.get_arguments().filter_map(|arg| arg.get_long());
            assert!(options.any(|name| name.starts_with(start)), "{start}");
            for reader in readers {
                assert!(known.iter().any(|value| value.get_name() == *reader), "{reader}");
            }
        }
        assert!(known.iter().any(|value| value.get_name() == DEFAULT_OPTIMIZER));
    }
}
