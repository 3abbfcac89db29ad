//! The `ferrotron` program: parse the command line, call the library, report errors in one line.

mod cli;

use ferrotron::parallel::launch::INTERRUPTED;
use std::process::ExitCode;
use std::time::Duration;

/// Time that a program which was asked to end waits for a reader of its messages.
const LAST_MESSAGES: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    let ended = cli::run(std::env::args_os().collect());
    let code = ended.unwrap_or_else(|error| cli::failed("", &error));
    cli::finish((code == ExitCode::from(INTERRUPTED)).then_some(LAST_MESSAGES));
    code
}
