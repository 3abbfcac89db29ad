//! The `ferrotron` program: parse the command line, call the library, report errors in one line.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::run(std::env::args_os().collect()).unwrap_or_else(|error| cli::failed("", &error))
}
