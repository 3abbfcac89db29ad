//! `ferrotron completions`.

use clap::{Args, Command};
use clap_complete::Shell;
use ferrotron::Result;
use std::process::ExitCode;

use crate::cli::output;

#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell that reads them
    shell: Shell,
}

/// Prints a script with which a shell completes the words of `definition`.
pub fn completions(args: &CompletionsArgs, mut definition: Command) -> Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut definition, "ferrotron", &mut script);
    output::print(&String::from_utf8_lossy(&script));
    Ok(ExitCode::SUCCESS)
}
