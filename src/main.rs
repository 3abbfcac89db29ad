//! The `ferrotron` program: parse the command line, call the library, report errors in one line.

mod cli;

use ferrotron::ErrorKind;
use std::process::ExitCode;

fn main() -> ExitCode {
    match cli::run(std::env::args_os().collect()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("ferrotron: {error}");
            // As for flags that do not parse: 2 for what the user asked for, 1 for what went wrong.
            ExitCode::from(if error.kind() == ErrorKind::Config { 2 } else { 1 })
        }
    }
}
