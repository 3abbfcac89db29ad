//! The output of ranks, line by line with the rank's number in front.

use std::io::{BufRead, BufReader, Read, Write};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Silence after which outputs that are still open are left alone.
const SILENCE: Duration = Duration::from_secs(1);

/// Passes on lines of several readers, each with one `write_all`.
pub struct Lines {
    /// Lives as long as anybody reads.
    reading: Sender<()>,
    done: Receiver<()>,
    counts: Arc<Counts>,
}

/// Lines of all readers so far.
#[derive(Default)]
struct Counts {
    read: AtomicU64,
    passed_on: AtomicU64,
}

impl Lines {
    /// Nothing to read yet.
    pub fn new() -> Lines {
        let (reading, done) = channel();
        Lines { reading, done, counts: Arc::default() }
    }

    /// Passes on what `from` yields until it ends. A last line without an end gets one.
    pub fn pass_on<W: Write + Send + 'static>(
        &self,
        rank: usize,
        from: impl Read + Send + 'static,
        to: &Arc<Mutex<W>>,
    ) {
        let (reading, counts, to) = (self.reading.clone(), self.counts.clone(), to.clone());
        std::thread::spawn(move || {
            let mut from = BufReader::new(from);
            let mut line = format!("[rank {rank}] ").into_bytes();
            let prefix = line.len();
            while from.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
                counts.read.fetch_add(1, SeqCst);
                if !line.ends_with(b"\n") {
                    line.push(b'\n');
                }
                let mut to = to.lock().unwrap_or_else(PoisonError::into_inner);
                // If the output has no reader any more, reading continues, so that the rank does not block.
                let _ = to.write_all(&line).and_then(|()| to.flush());
                line.truncate(prefix);
                counts.passed_on.fetch_add(1, SeqCst);
            }
            drop(reading);
        });
    }

    /// Waits until everything is passed on, however long the reader takes. If a rank leaves a process behind that keeps
    /// the output open, waits only while something comes.
    pub fn finish(self) {
        drop(self.reading);
        let mut before = None;
        while let Err(RecvTimeoutError::Timeout) = self.done.recv_timeout(SILENCE) {
            let passed_on = self.counts.passed_on.load(SeqCst);
            if before == Some(passed_on) && self.counts.read.load(SeqCst) == passed_on {
                return;
            }
            before = Some(passed_on);
        }
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

    /// Takes its time.
    struct Slow(Vec<u8>);

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            std::thread::sleep(SILENCE * 9 / 8);
            self.0.write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn what_is_taken_slowly_is_not_lost() {
        let (lines, to) = (Lines::new(), Arc::new(Mutex::new(Slow(Vec::new()))));
        lines.pass_on(1, &b"one\ntwo\nthree\n"[..], &to);
        lines.finish();
        assert_eq!(
            to.try_lock().expect("nobody writes").0,
            b"[rank 1] one\n[rank 1] two\n[rank 1] three\n"
        );
    }

    #[test]
    fn what_stays_open_in_silence_is_left_alone() {
        let (lines, to) = (Lines::new(), Arc::new(Mutex::new(Vec::new())));
        let (reader, mut writer) = std::io::pipe().unwrap();
        writer.write_all(b"one\n").unwrap();
        lines.pass_on(2, reader, &to);
        lines.finish();
        assert_eq!(*to.lock().unwrap(), b"[rank 2] one\n");
    }
}
