//! The options of one `train` after all sources are merged: as arguments, as a checkpoint will remember them, and as
//! facts that ranks compare.

use clap::{ArgMatches, FromArgMatches};
use ferrotron::Result;
use ferrotron::models::checkpoint::Checkpoint;
use ferrotron::models::data::{DataFingerprint, Dataset, tokens_in_words};
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::parallel::agreement::Facts;
use ferrotron::parallel::launch::RankEnvironment;
use serde_json::Value;

use super::args::train::TrainArgs;
use super::definition::Definition;
use super::options::Options;
use super::options::changed;
use super::options::imported::{Imported, check_task};
use super::options::remembered;
use super::options::remembered::{MAY_DIFFER, canonical, same_number};
use super::usage;

/// The value of an option that has none.
pub const NOT_GIVEN: &str = "not given";

/// The merged options.
#[derive(Debug)]
pub struct Configuration {
    pub options: Options,
    pub args: TrainArgs,
    /// Every option that all ranks must have alike, defaults included.
    pub facts: Facts,
    /// The weights that the run begins with, if it does.
    pub imported: Option<Imported>,
    /// Lines about the options of the checkpoint: which are not taken from it, and which were given otherwise.
    pub notes: Vec<String>,
}

impl Configuration {
    /// Puts the options `given`, which were typed or stand in a file, over those of the checkpoint, if there is one.
    ///
    /// # Errors
    /// Options that do not parse or do not fit together.
    pub fn new(
        given: Options,
        resumed: Option<&Checkpoint>,
        rank: Option<&RankEnvironment>,
        definition: &Definition,
    ) -> Result<Configuration> {
        let mut notes = Vec::new();
        if let Some(checkpoint) = resumed {
            notes
                .push(format!("going on from step {} of {checkpoint}", checkpoint.progress().step));
            notes.extend(remembered::ignored_line(checkpoint, definition)?);
            notes.extend(changed::line(&given, checkpoint, definition)?);
            check_task(&given, checkpoint)?;
        }
        let imported = if resumed.is_none() { Imported::find(&given)? } else { None };
        let options = match (resumed, &imported) {
            (Some(checkpoint), _) => remembered::resumed(given, checkpoint, rank, definition)?,
            (None, Some(imported)) => {
                notes.push(imported.note());
                let options = imported.merged(given, definition)?;
                imported.check_tokenizer(&options)?;
                options
            }
            (None, None) => given,
        };
        let matches = definition.parse("train", &options)?;
        let matches = matches.subcommand_matches("train").expect("it was parsed");
        let args = TrainArgs::from_arg_matches(matches)
            .map_err(|error| usage::refuse(&error, "ferrotron train"))?;
        if let Some(imported) = &imported {
            notes.extend(imported.rounded_line(args.device.dtype()?));
        }
        let mut facts = facts(matches, definition);
        facts.extend(imported.as_ref().map(Imported::fact).transpose()?);
        Ok(Configuration { options, args, facts, imported, notes })
    }

    /// A table of all options that have a value, in Markdown.
    pub fn table(&self) -> String {
        let given = self.facts.iter().filter(|(_, value)| *value != NOT_GIVEN);
        let rows = given.map(|(name, value)| {
            // A bar would end the cell.
            format!("| {name} | {} |\n", value.replace('|', "\\|").replace('\n', " "))
        });
        format!("| option | value |\n|---|---|\n{}", rows.collect::<String>())
    }

    /// The options that the next checkpoint remembers, for a run with this global batch size.
    pub fn remembered(&self, global_batch_size: usize) -> Value {
        let mut remembered = remembered::of_options(&self.options);
        // Its default depends on the layout, which may change when the run resumes; the batch must not.
        remembered.entry("global-batch-size").or_insert(global_batch_size.into());
        remembered.into()
    }
}

/// Facts about the data of a run: as many tokens, with the same content.
pub fn data_facts(
    fingerprint: &DataFingerprint,
    dataset: &Dataset,
    tokenizer: &Tokenizer,
) -> Result<Facts> {
    let name = format!("{} with {}", tokenizer.name(), fingerprint.tokenizer());
    let validation = dataset.validation.as_ref().map(tokens_in_words).transpose()?;
    Ok(Facts::from([
        ("the tokenizer".to_string(), name),
        ("the training data".to_string(), fingerprint.training()),
        ("the validation data".to_string(), validation.unwrap_or_else(|| "none".to_string())),
    ]))
}

/// Every option that all ranks must have alike, with its value or default.
pub fn facts(matches: &ArgMatches, definition: &Definition) -> Facts {
    let definition = definition.subcommand("train");
    let names = definition.get_arguments().filter_map(|arg| Some((arg.get_long()?, arg.get_id())));
    let compared = names.filter(|(name, _)| !MAY_DIFFER.contains(name));
    let fact = |(name, id): (&str, &clap::Id)| {
        let words = matches.get_raw(id.as_str()).into_iter().flatten();
        let words: Vec<String> =
            words.map(|word| same_number(&canonical(name, &word.to_string_lossy()))).collect();
        let value = if words.is_empty() { NOT_GIVEN.to_string() } else { words.join(" ") };
        (format!("--{name}"), value)
    };
    compared.map(fact).collect()
}
