//! One start of the training command: a launcher with its ranks, or ranks whose connections go through a proxy.

use rustix::process::Signal;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::case::Layout;
use super::links::Links;
use super::processes::{MARK, children, is_marked, marked, send};
use super::write_faults::{self, NO_SPACE};

/// Longest from a fault to the end of the last process of the job.
pub const LIMIT: Duration = Duration::from_secs(20);
/// Longest that a start may train.
pub const TRAINING: Duration = Duration::from_secs(120);
/// Steps of a run.
pub const STEPS: usize = 60;

/// The options of all runs. Nothing in them depends on the case, so that all runs of a layout are the same.
const OPTIONS: &str = "train --data ../text.txt --save run --load run --save-interval 9 --save-retain 2 \
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --hidden-dropout 0.1 \
    --micro-batch-size 1 --global-batch-size 8 --threads 1 --eval-interval 0 --eval-iters 0 --sample-length 0 \
    --log-interval 0 --distributed-timeout-minutes 1";

/// The settings with which a job is started.
pub struct Start<'a> {
    pub layout: &'a Layout,
    /// The working folder; the run is in `run` in it.
    pub folder: PathBuf,
    /// A value that no other process has for [`MARK`].
    pub mark: String,
    /// Whether connections go through a proxy.
    pub through_links: bool,
    /// The library for faults of the disk, and the bytes after which checkpoint files of a process fail.
    pub full_disk: Option<(&'a Path, f64)>,
}

/// A job that was started.
pub struct Job {
    processes: Vec<Child>,
    pub links: Option<Links>,
    ranks: usize,
    mark: String,
}

/// The end of a job.
pub struct End {
    /// The exit code of the launcher, or those of all ranks; `None` for one that was killed.
    pub codes: Vec<Option<i32>>,
    /// Time from the call until the last process of the job was gone.
    pub took: Duration,
}

impl Job {
    pub fn new(start: &Start) -> Result<Job, String> {
        let (ranks, mark) = (start.layout.ranks, start.mark.clone());
        let mut job = Job { processes: Vec::new(), links: None, ranks, mark };
        if !start.through_links {
            let mut command = start.command()?;
            command.args(["--nproc", &ranks.to_string()]);
            job.add(command)?;
            return Ok(job);
        }
        let port = free_port(ranks, std::process::id())?;
        let links = Links::open(ranks, port);
        job.links = Some(links.map_err(|error| format!("the proxy cannot listen: {error}"))?);
        for rank in 0..ranks {
            let mut command = start.command()?;
            command.args(["--transport", "tcp"]);
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", ranks.to_string());
            command.env("MASTER_ADDR", Links::host(rank).to_string());
            command.env("MASTER_PORT", (port - 1).to_string());
            job.add(command)?;
        }
        Ok(job)
    }

    fn add(&mut self, mut command: Command) -> Result<(), String> {
        let child = command.spawn().map_err(|error| format!("it does not start: {error}"))?;
        self.processes.push(child);
        Ok(())
    }

    /// Kills a process of the job, or sends it another signal: the launcher, or the only rank.
    pub fn signal_launcher(&self, signal: Signal) {
        self.processes.iter().for_each(|process| send(signal, process.id()));
    }

    /// The ranks that are there.
    pub fn ranks(&self) -> Vec<u32> {
        match &self.processes[..] {
            [launcher] if self.ranks > 1 => {
                let ranks = children(launcher.id()).into_iter();
                ranks.filter(|&rank| is_marked(rank, &self.mark)).collect()
            }
            processes => processes.iter().map(Child::id).collect(),
        }
    }

    /// Whether its first process has ended.
    pub fn has_ended(&mut self) -> bool {
        self.processes.iter_mut().any(|process| matches!(process.try_wait(), Ok(Some(_)) | Err(_)))
    }

    /// Waits until no process of the job is left; `None` if that takes longer than `limit`.
    pub fn end(&mut self, limit: Duration) -> Option<End> {
        let begun = Instant::now();
        let mut codes = Vec::new();
        while let Some(process) = self.processes.get_mut(codes.len()) {
            match process.try_wait() {
                Ok(Some(status)) => codes.push(status.code()),
                Ok(None) if begun.elapsed() < limit => sleep(Duration::from_millis(5)),
                Ok(None) | Err(_) => return None,
            }
        }
        while !marked(&self.mark).is_empty() {
            if begun.elapsed() > limit {
                return None;
            }
            sleep(Duration::from_millis(20));
        }
        Some(End { codes, took: begun.elapsed() })
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.kill();
            let _ = process.wait();
        }
        marked(&self.mark).into_iter().for_each(|process| send(Signal::KILL, process));
    }
}

impl Start<'_> {
    fn command(&self) -> Result<Command, String> {
        let log = File::options().create(true).append(true).open(self.folder.join("log"));
        let log = log.map_err(|error| format!("there is no log: {error}"))?;
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrotron"));
        command.current_dir(&self.folder).args(OPTIONS.split_whitespace());
        command.args(["--train-iters", &STEPS.to_string()]);
        command.args(self.layout.options.split_whitespace());
        for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID"] {
            command.env_remove(name);
        }
        command.env(MARK, &self.mark);
        if let Some((library, bytes)) = self.full_disk {
            write_faults::inject(&mut command, library, bytes, NO_SPACE);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        Ok(command)
    }
}

/// A port that is free at the addresses of all ranks, below those that the system gives to connections.
fn free_port(ranks: usize, salt: u32) -> Result<u16, String> {
    let mut candidates = (0..1000).map(|i| 20_001 + ((salt * 37 + i * 13) % 9000) as u16);
    let is_free = |&port: &u16| {
        (0..ranks).all(|rank| std::net::TcpListener::bind((Links::host(rank), port)).is_ok())
    };
    candidates.find(is_free).ok_or_else(|| "no port is free".to_string())
}
