//! Standard output for results. A reader that has seen enough closes the pipe; then the program ends
//! without a word, as if by SIGPIPE.

use std::io::{ErrorKind, Write};

/// Exit code of a program that SIGPIPE ended, as shells report it.
const CLOSED_PIPE: i32 = 141;

/// Prints `text` at once.
pub fn print(text: &str) {
    let mut stdout = std::io::stdout().lock();
    if let Err(error) = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        if error.kind() != ErrorKind::BrokenPipe {
            eprintln!("ferrotron: cannot write to standard output: {error}");
        }
        std::process::exit(CLOSED_PIPE);
    }
}

/// Prints a line.
pub fn line(text: &str) {
    print(&format!("{text}\n"));
}
