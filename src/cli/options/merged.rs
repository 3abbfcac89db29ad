//! The options of a run that is thought about and not started: those `given` over those of its `--load`.

use clap::ArgMatches;
use ferrotron::Result;
use ferrotron::models::checkpoint::Checkpoint;

use super::imported::Imported;
use super::{Options, remembered};
use crate::cli::args::train::TrainArgs;
use crate::cli::definition::Definition;
use crate::cli::output;

/// The options, and where they come from.
pub struct MergedOptions {
    pub options: Options,
    /// The checkpoint that would be resumed from.
    pub resumed: Option<Checkpoint>,
    /// The weights with which the run would begin.
    pub imported: Option<Imported>,
}

impl MergedOptions {
    /// Merges the options, and tells the user which of the checkpoint's count for nothing.
    pub fn new(
        train: &TrainArgs,
        given: Options,
        definition: &Definition,
    ) -> Result<MergedOptions> {
        let imported = Imported::find(&given)?;
        let load = train.run.load.as_deref().filter(|_| imported.is_none());
        let resumed = load.map(Checkpoint::peek).transpose()?;
        let ignored =
            resumed.as_ref().map(|checkpoint| remembered::ignored_line(checkpoint, definition));
        if let Some(line) = ignored.transpose()?.flatten() {
            output::note(&line);
        }
        let options = match (&resumed, &imported) {
            (Some(checkpoint), _) => remembered::resumed(given, checkpoint, None, definition)?,
            (None, Some(folder)) => folder.merged(given, definition)?,
            (None, None) => given,
        };
        Ok(MergedOptions { options, resumed, imported })
    }

    /// The options as those of a subcommand.
    pub fn matches(&self, subcommand: &str, definition: &Definition) -> Result<ArgMatches> {
        let matches = definition.parse(subcommand, &self.options)?;
        Ok(matches.subcommand_matches(subcommand).expect("it was parsed").clone())
    }
}
