//! All that the program prints.
//!
//! Standard output has results, standard error the rest. A reader of results that has seen enough closes the pipe;
//! then the program ends without a word, as if by SIGPIPE. What is only told of a run must not end it: a stream that
//! is closed, broken or full is written to in vain, and one that nobody reads stops a thread of its own only.

use ferrotron::parallel::launch::COMMUNICATION_FAILED;
use std::io::{self, ErrorKind, Write};
use std::process::ExitCode;

use super::log_writer;

/// Exit code of a program that SIGPIPE ended, as shells report it.
const CLOSED_PIPE: i32 = 141;

/// Prints results at once. Ends the program if standard output has no reader.
pub fn print(text: &str) {
    if let Err(error) = write(io::stdout().lock(), text) {
        if error.kind() == ErrorKind::BrokenPipe {
            std::process::exit(CLOSED_PIPE);
        }
        note(&format!("ferrotron: cannot write to standard output: {error}"));
        std::process::exit(1);
    }
}

/// Prints a line of results, as [`print`].
pub fn line(text: &str) {
    print(&format!("{text}\n"));
}

/// Prints a line of results that are also elsewhere: the program continues without a reader.
pub fn report(text: &str) {
    if let Err(error) = write(io::stdout().lock(), &format!("{text}\n"))
        && error.kind() != ErrorKind::BrokenPipe
    {
        note(&format!("ferrotron: cannot write to standard output: {error}"));
    }
}

/// Prints a line on standard error, if anybody reads it.
pub fn note(text: &str) {
    log_writer::write(format!("{text}\n").into_bytes());
}

/// Prints an error, with `place` if that is not empty, and returns the exit code. As for flags that do not parse, it is
/// 2 for mistakes of the user.
pub fn failed(place: &str, error: &ferrotron::Error) -> ExitCode {
    note(&format!("ferrotron: {place}{error}"));
    ExitCode::from(match error.kind() {
        ferrotron::ErrorKind::Config => 2,
        ferrotron::ErrorKind::Communication => COMMUNICATION_FAILED,
        _ => 1,
    })
}

fn write(mut stream: impl Write, text: &str) -> io::Result<()> {
    stream.write_all(text.as_bytes())?;
    stream.flush()
}
