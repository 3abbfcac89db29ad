//! A thread that writes to standard error: a reader who pauses (Ctrl-S, a pager, a stuck collector of logs) stops no run.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Time for which the program waits until a text is written, so that texts stay in order with those on standard output.
const PATIENCE: Duration = Duration::from_millis(200);

/// Texts that are kept for a reader who pauses.
const KEPT: usize = 10_000;

type Job = Box<dyn FnOnce() + Send>;

static WRITER: LazyLock<&LogWriter> = LazyLock::new(|| LogWriter::start(KEPT));

/// Writes a text. Returns when it is written, or soon if nobody reads.
pub fn write(text: Vec<u8>) {
    WRITER.run(Box::new(move || {
        let mut stream = std::io::stderr().lock();
        let _ = stream.write_all(&text).and_then(|()| stream.flush());
    }));
}

/// Draws something, behind all that is written. Does not wait.
pub fn draw(job: impl FnOnce() + Send + 'static) {
    WRITER.add(Box::new(job));
}

/// Waits until everything is written, at most for `limit` if there is one.
pub fn finish(limit: Option<Duration>) {
    WRITER.wait(limit);
}

/// Jobs that a thread does one after another.
struct LogWriter {
    state: Mutex<State>,
    changed: Condvar,
    /// Jobs that are kept at most.
    most: usize,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// Whether a job is being done.
    is_busy: bool,
    /// Whether a job has taken long, and nobody need wait.
    is_paused: bool,
    /// Jobs that were dropped.
    lost: u64,
}

impl LogWriter {
    fn start(most: usize) -> &'static LogWriter {
        let state = Mutex::default();
        let writer: &_ = Box::leak(Box::new(LogWriter { state, changed: Condvar::new(), most }));
        let work = || writer.work();
        // Without a thread nothing is said, and the run goes on.
        let _ = std::thread::Builder::new().name("log".to_string()).spawn(work);
        writer
    }

    fn work(&self) {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                state.is_busy = true;
                drop(state);
                job();
                state = self.lock();
                state.is_busy = false;
            } else {
                state.is_paused = false;
                let lost = std::mem::take(&mut state.lost);
                if lost > 0 {
                    let told = format!("ferrotron: warning: {lost} lines are lost: nobody read\n");
                    let tell = move || drop(std::io::stderr().write_all(told.as_bytes()));
                    state.jobs.push_back(Box::new(tell));
                    continue;
                }
                self.changed.notify_all();
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    fn add(&self, job: Job) {
        let state = &mut *self.lock();
        match state.jobs.len() < self.most {
            true => state.jobs.push_back(job),
            false => state.lost += 1,
        }
        self.changed.notify_all();
    }

    fn run(&self, job: Job) {
        self.add(job);
        if !self.lock().is_paused && !self.wait(Some(PATIENCE)) {
            self.lock().is_paused = true;
        }
    }

    /// Waits until everything is done; returns whether it is.
    fn wait(&self, limit: Option<Duration>) -> bool {
        let has_work = |state: &mut State| state.is_busy || !state.jobs.is_empty();
        let limit = limit.unwrap_or(Duration::MAX);
        let waited = self.changed.wait_timeout_while(self.lock(), limit, has_work);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;
    use std::time::Instant;

    #[test]
    fn a_reader_who_pauses_stops_nobody_and_gets_what_was_kept() {
        let writer = LogWriter::start(5);
        let ((pause, paused), (said, heard)) = (channel::<()>(), channel());
        writer.run(Box::new(move || paused.recv().unwrap_or_default()));
        let begun = Instant::now();
        for line in 0..1000 {
            let said = said.clone();
            writer.run(Box::new(move || said.send(line).unwrap()));
        }
        assert!(begun.elapsed() < PATIENCE && !writer.wait(Some(Duration::ZERO)));
        assert_eq!(writer.lock().lost, 995);
        drop(pause);
        assert!(writer.wait(None));
        assert_eq!(heard.try_iter().collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
        writer.run(Box::new(move || said.send(7).unwrap()));
        assert_eq!(heard.try_recv(), Ok(7), "it is waited for again");
    }
}
