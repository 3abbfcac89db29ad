//! What ranks print, line by line with the rank's number in front.

use std::io::{BufRead, BufReader, Read, Write};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Passes on lines of several readers, each with one `write_all`.
pub struct Lines {
    /// Lives as long as anybody reads.
    reading: Sender<()>,
    done: Receiver<()>,
}

impl Lines {
    /// Nothing to read yet.
    pub fn new() -> Lines {
        let (reading, done) = channel();
        Lines { reading, done }
    }

    /// Passes on what `from` yields until it ends. A last line without an end gets one.
    pub fn pass_on<W: Write + Send + 'static>(
        &self,
        rank: usize,
        from: impl Read + Send + 'static,
        to: &Arc<Mutex<W>>,
    ) {
        let (reading, to) = (self.reading.clone(), to.clone());
        std::thread::spawn(move || {
            let mut from = BufReader::new(from);
            let mut line = format!("[rank {rank}] ").into_bytes();
            let prefix = line.len();
            while from.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
                if !line.ends_with(b"\n") {
                    line.push(b'\n');
                }
                let mut to = to.lock().unwrap_or_else(PoisonError::into_inner);
                // Where nobody reads any more, the rank shall not block: it is read on.
                let _ = to.write_all(&line).and_then(|()| to.flush());
                line.truncate(prefix);
            }
            drop(reading);
        });
    }

    /// Waits until everything is passed on, for a second at most: a process that a rank has left behind
    /// could keep its output open.
    pub fn finish(self) {
        drop(self.reading);
        let _ = self.done.recv_timeout(Duration::from_secs(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_stay_whole_and_carry_their_rank() {
        let (lines, to) = (Lines::new(), Arc::new(Mutex::new(Vec::new())));
        lines.pass_on(3, &b"one\n\nthree \xff\nno end"[..], &to);
        lines.finish();
        let want = b"[rank 3] one\n[rank 3] \n[rank 3] three \xff\n[rank 3] no end\n";
        assert_eq!(*to.lock().unwrap(), want);
    }
}
