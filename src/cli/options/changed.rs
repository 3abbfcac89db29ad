//! The line that names what a resumed run is given otherwise than its checkpoint remembers.

use clap::{Arg, Command};
use ferrotron::Result;
use ferrotron::models::checkpoint::Checkpoint;
use serde_json::Value;

use super::remembered::{canonical, dtype, may_change, of_checkpoint, same_number};
use super::{Options, SYNONYMS, text};
use crate::cli::definition::{Definition, help_and_default};

/// The options that state the precision, which is compared whatever states it.
const PRECISIONS: &[&str] = &["dtype", "bf16", "fp16"];

/// The line that names the `given` options whose values differ from those of the run of `checkpoint`, with both values.
/// So one command line that starts and resumes a run changes nothing without a word.
pub fn line(
    given: &Options,
    checkpoint: &Checkpoint,
    definition: &Definition,
) -> Result<Option<String>> {
    let (saved, _) = of_checkpoint(checkpoint, definition)?;
    let train = definition.subcommand("train");
    let changes = changes(given, &saved, &checkpoint.model().config, &train);
    Ok((!changes.is_empty())
        .then(|| format!("changed since the checkpoint: {}", changes.join(", "))))
}

/// The changes from the options `saved` with a model of the fields `model`.
fn changes(given: &Options, saved: &Options, model: &Value, train: &Command) -> Vec<String> {
    let mut changes = Vec::new();
    let (before, now) = (dtype(saved), dtype(&given.clone().over(saved.clone())));
    if before != now {
        changes.push(format!("--dtype {now} (was {before})"));
    }
    let names = given.iter().map(|(name, _)| name);
    for name in names.filter(|name| may_change(name) && !PRECISIONS.contains(name)) {
        // Options that state the same thing have one change together.
        let change = change(name, given, saved, model, train);
        changes.extend(change.filter(|change| !changes.contains(change)));
    }
    changes
}

/// The change of an option, and of all that one of them replaces, if it is one.
fn change(
    name: &str,
    given: &Options,
    saved: &Options,
    model: &Value,
    train: &Command,
) -> Option<String> {
    let synonyms = SYNONYMS.iter().find(|names| names.contains(&name));
    let alone = [name];
    let names = synonyms.copied().filter(|_| given.states_any(&alone)).unwrap_or(&alone);
    let (now, before) = (stated(given, names), stated(saved, names));
    let was = match (&now[..], &before[..]) {
        _ if now == before => return None,
        ([(name, _)], [(same, words)]) if name == same => words.clone(),
        ([(name, words)], []) => {
            let field = model.get(name.replace('-', "_")).map(|value| same_number(&text(value)));
            let arg = train.get_arguments().find(|arg| arg.get_long() == Some(name))?;
            match default_of(arg) {
                _ if field.as_ref() == Some(words) => return None,
                None if *name == "nproc" && words == "1" => return None, // a run without it is one process
                Some(default) if default == *words => return None,
                Some(default) if default.contains(' ') => format!("the default: {default}"),
                Some(default) => format!("{default}, the default"),
                None => "not given".to_string(),
            }
        }
        (_, []) => "not given".to_string(),
        _ => typed(&before),
    };
    Some(format!("{} (was {was})", typed(&now)))
}

/// Selects the options among `names` that are stated, with their words. A flag that is off states nothing about others.
fn stated<'a>(options: &Options, names: &[&'a str]) -> Vec<(&'a str, String)> {
    let states = |name: &&&str| match names {
        [_] => options.contains(name),
        _ => options.states_any(&[**name]),
    };
    let words = |name: &&'a str| {
        let words = options.values(name);
        let words = words.iter().map(|word| same_number(&canonical(name, word)));
        (*name, words.collect::<Vec<_>>().join(" "))
    };
    names.iter().filter(states).map(words).collect()
}

/// Options as they would be typed.
fn typed(options: &[(&str, String)]) -> String {
    let typed = options.iter().map(|(name, words)| match words.as_str() {
        "true" => format!("--{name}"),
        "false" => format!("--{name}=false"),
        words => format!("--{name} {words}"),
    });
    typed.collect::<Vec<_>>().join(" ")
}

/// The default of an option: a value, or a rule in words; `None` if it has none.
fn default_of(arg: &Arg) -> Option<String> {
    let values = arg.get_default_values().iter().map(|value| value.to_string_lossy());
    let value = Some(values.collect::<Vec<_>>().join(" ")).filter(|value| !value.is_empty());
    let default = value.or_else(|| help_and_default(arg).1)?;
    Some(same_number(&default))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use crate::cli::options::Source;
    use clap::CommandFactory;
    use serde_json::json;

    #[test]
    fn what_is_given_otherwise_is_named_with_what_it_was() {
        let train = Definition::new(Cli::command()).subcommand("train");
        let options = |value: &Value, source| {
            Options::from_map(&train, value.as_object().unwrap().clone(), &source).unwrap()
        };
        let model = json!({ "num_layers": 4, "hidden_size": 128 });
        for (given, saved, want) in [
            // The same value, the model's or the default.
            (json!({ "lr": "1e-4" }), json!({ "lr": 0.0001 }), ""),
            (json!({ "num-layers": 4 }), json!({}), ""),
            (
                json!({ "dtype": "f32", "lr": 0.001, "nproc": 1, "save-interval": 500, "seed": 1234 }),
                json!({}),
                "",
            ),
            (json!({ "swiglu": false, "save-retain-interval": 0 }), json!({}), ""),
            // Another one.
            (json!({ "lr": 1e-4 }), json!({}), "--lr 0.0001 (was 0.001, the default)"),
            (json!({ "lr": 1e-3 }), json!({ "lr": 1e-4 }), "--lr 0.001 (was 0.0001)"),
            (json!({ "num-layers": 6 }), json!({ "num-layers": 4 }), "--num-layers 6 (was 4)"),
            (
                json!({ "min-lr": 0, "eod-mask-loss": true }),
                json!({}),
                "--eod-mask-loss (was false, the default), \
                 --min-lr 0 (was the default: a tenth of the largest)",
            ),
            (
                json!({ "rampup-batch-size": [1, 1, 9] }),
                json!({}),
                "--rampup-batch-size 1 1 9 (was not given)",
            ),
            // The precision, whatever states it.
            (json!({ "dtype": "f32" }), json!({ "bf16": true }), "--dtype f32 (was bf16)"),
            (json!({ "bf16": false }), json!({ "bf16": true }), "--dtype f32 (was bf16)"),
            (json!({ "fp16": true }), json!({}), "--dtype f16 (was f32)"),
            (json!({ "bf16": true }), json!({ "dtype": "bf16" }), ""),
            (json!({ "fp16": false }), json!({ "bf16": true }), ""),
            // What another option displaces.
            (
                json!({ "train-iters": 120 }),
                json!({ "train-samples": 403 }),
                "--train-iters 120 (was --train-samples 403)",
            ),
            (
                json!({ "train-iters": 1200, "activation": "relu" }),
                json!({ "train-samples": 403, "swiglu": true }),
                "--activation relu (was --swiglu), --train-iters 1200 (was --train-samples 403)",
            ),
            (json!({ "swiglu": false }), json!({ "activation": "relu" }), ""),
            (json!({ "swiglu": false }), json!({ "swiglu": true }), "--swiglu=false (was true)"),
            (
                json!({ "train-data-path": ["/a"], "valid-data-path": ["/b"] }),
                json!({ "data": ["/c"] }),
                "--train-data-path /a --valid-data-path /b (was --data /c)",
            ),
        ] {
            let saved = options(&saved, Source::Checkpoint("the checkpoint 'k'".into()));
            let changes = changes(&options(&given, Source::Typed), &saved, &model, &train);
            assert_eq!(changes.join(", "), want, "{given}");
        }
    }
}
