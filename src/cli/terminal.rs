//! Handles a terminal that is closed while the program writes to it. Writing there fails from then on, and printing
//! would end the program before it has saved.

use signal_hook::consts::SIGHUP;
use signal_hook::low_level;
use std::fs::File;
use std::io::{IsTerminal, Result, stderr, stdout};
use std::os::fd::AsRawFd;

/// Lets what is printed go nowhere once SIGHUP has come and the terminal is closed.
pub fn outlive() -> Result<()> {
    let streams = [
        (stdout().as_raw_fd(), stdout().is_terminal()),
        (stderr().as_raw_fd(), stderr().is_terminal()),
    ];
    let terminals = streams.map(|(fd, is_terminal)| is_terminal.then_some(fd));
    let nowhere = File::options().write(true).open("/dev/null")?;
    let redirect = move || {
        for fd in terminals.into_iter().flatten() {
            let mut terminal = libc::pollfd { fd, events: 0, revents: 0 };
            // SAFETY: `terminal` is one descriptor's, and outlives the call.
            let is_ready = unsafe { libc::poll(&mut terminal, 1, 0) } == 1;
            if is_ready && terminal.revents & libc::POLLHUP != 0 {
                // SAFETY: both descriptors are open; what was written to the terminal had nowhere to go.
                unsafe { libc::dup2(nowhere.as_raw_fd(), fd) };
            }
        }
    };
    // SAFETY: a handler may call poll and dup2 (POSIX.1-2017, 2.4.3), and `redirect` does nothing else.
    unsafe { low_level::register(SIGHUP, redirect) }.map(drop)
}
