//! Jobs that are killed, whole or in part, and jobs that are asked to stop.

use super::{MODEL, PATIENCE, command, folder_with_text, metrics, texts, wait};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The command of a job that would train for ever.
fn endless_command(folder: &Path, options: &str) -> Command {
    let line = format!("{MODEL} --train-iters 1000000 --save-interval 0 --save run {options}");
    command(folder, &line.replace("--eval-interval 3", "--eval-interval 0"))
}

/// The same from a shell that ignores SIGINT, as those do that start a job in the background.
fn in_the_background(command: Command) -> Command {
    by("sh", &["-c", "trap '' INT; exec \"$0\" \"$@\""], command)
}

/// The same with the default reaction to SIGHUP, which these tests may have been started without (`nohup`).
fn heeding_hangups(command: Command) -> Command {
    by("env", &["--default-signal=HUP"], command)
}

/// `command` as the last arguments of another program, which becomes it.
fn by(program: &str, arguments: &[&str], command: Command) -> Command {
    let mut outer = Command::new(program);
    outer.current_dir(command.get_current_dir().unwrap()).args(arguments);
    outer.arg(command.get_program()).args(command.get_args());
    for (name, _) in command.get_envs() {
        outer.env_remove(name);
    }
    outer
}

/// A job that would train for ever, once its first step is done.
fn endless(folder: &Path, options: &str) -> Child {
    started(folder, endless_command(folder, options))
}

/// A job of [`endless_command`], once its first step is done.
fn started(folder: &Path, mut command: Command) -> Child {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (metrics, started) = (folder.join("run/metrics.jsonl"), Instant::now());
    while std::fs::metadata(&metrics).map_or(0, |data| data.len()) == 0 {
        assert!(started.elapsed() < PATIENCE, "no first step");
        assert!(child.try_wait().unwrap().is_none(), "ended before its first step");
        std::thread::sleep(Duration::from_millis(10));
    }
    child
}

/// The ranks that a launcher has started, in order.
fn ranks_of(launcher: &Child) -> Vec<u32> {
    let path = format!("/proc/{0}/task/{0}/children", launcher.id());
    let text = std::fs::read_to_string(path).unwrap();
    text.split_whitespace().map(|id| id.parse().unwrap()).collect()
}

fn send(signal: &str, process: u32) {
    assert!(Command::new("kill").args([signal, &process.to_string()]).status().unwrap().success());
}

/// Whether a process computes, or could.
fn is_alive(process: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // A zombie waits for its parent to take notice only.
    !stat.is_empty() && !stat.contains(") Z ")
}

#[test]
fn a_killed_rank_ends_the_job_and_is_named() {
    let folder = folder_with_text();
    let layout = "--nproc 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2";
    let mut job = endless(folder.path(), layout);
    let ranks = ranks_of(&job);
    assert_eq!(ranks.len(), 4);
    send("-KILL", ranks[2]);
    wait(&mut job);
    let output = job.wait_with_output().unwrap();
    let (_, message) = texts(&output);
    assert_eq!(output.status.code(), Some(128 + 9), "{message}");
    assert!(message.contains("ferrotron: rank 2 was killed by signal 9 (SIGKILL)"), "{message}");
    let marked = message.lines().find(|line| line.starts_with("[rank 1] ferrotron: rank 1: "));
    assert!(marked.is_some_and(|line| line.contains("rank 2 is gone")), "{message}");
    assert!(!ranks.into_iter().any(is_alive));
}

#[test]
fn an_interrupt_of_the_launcher_finishes_the_step_and_saves() {
    let as_it_is: fn(Command) -> Command = std::convert::identity;
    for (signal, start, ranks) in [
        ("-INT", as_it_is, "--nproc 2"),
        ("-TERM", as_it_is, "--nproc 2"),
        ("-INT", in_the_background, "--nproc 2"),
        ("-INT", in_the_background, "--nproc 1"),
        ("-HUP", heeding_hangups, "--nproc 2"),
        ("-USR1", as_it_is, "--nproc 2"),
        ("-USR1", as_it_is, "--nproc 1"),
        ("-USR2", as_it_is, "--nproc 1"),
    ] {
        let folder = folder_with_text();
        let mut job = started(folder.path(), start(endless_command(folder.path(), ranks)));
        send(signal, job.id());
        wait(&mut job);
        let output = job.wait_with_output().unwrap();
        let (_, message) = texts(&output);
        assert_eq!(output.status.code(), Some(130), "{signal} {ranks}: {message}");
        let last = metrics(&folder.path().join("run")).len();
        assert!(folder.path().join(format!("run/iter_{last:07}/index.json")).exists(), "{message}");
        assert!(!message.contains("ferrotron:"), "{message}");
    }
}

/// Some ranks take their first step while others still load, and end at once.
#[test]
fn a_signal_between_loading_and_the_first_step_is_an_interrupt_on_all_ranks() {
    for _ in 0..8 {
        let folder = folder_with_text();
        let options = "--nproc 8 --micro-batch-size 1 --global-batch-size 8";
        let mut command = endless_command(folder.path(), options);
        let mut job = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(job.stderr.take().unwrap()).lines().map(Result::unwrap);
        assert!(lines.any(|line| line.contains("memory of a rank")), "it does not train");
        send("-TERM", job.id());
        let said: Vec<_> = lines.collect();
        assert_eq!(job.wait().unwrap().code(), Some(130), "{said:#?}");
    }
}

#[test]
fn no_rank_outlives_a_killed_launcher() {
    let folder = folder_with_text();
    let mut job = endless(folder.path(), "--nproc 2");
    let ranks = ranks_of(&job);
    job.kill().unwrap();
    job.wait().unwrap();
    let started = Instant::now();
    while ranks.iter().any(|&rank| is_alive(rank)) {
        assert!(started.elapsed() < Duration::from_secs(60), "{ranks:?} are alive");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_rank_that_is_stopped_goes_on_at_a_signal_and_saves() {
    let folder = folder_with_text();
    let mut job = endless(folder.path(), "--nproc 3 --pipeline-model-parallel-size 3");
    let ranks = ranks_of(&job);
    send("-STOP", ranks[1]);
    std::thread::sleep(Duration::from_millis(1500)); // long enough to be named
    let asked = Instant::now();
    send("-TERM", job.id());
    wait(&mut job);
    assert!(asked.elapsed() < Duration::from_secs(30), "{:?}", asked.elapsed());
    let (code, message) = code_and_message(job);
    assert_eq!(code, Some(130), "{message}");
    let named = format!("[launcher] rank 1 is stopped (process {})", ranks[1]);
    assert!(message.contains(&named), "{message}");
    let last = metrics(&folder.path().join("run")).len();
    assert!(folder.path().join(format!("run/iter_{last:07}/index.json")).exists(), "{message}");
}

fn code_and_message(job: Child) -> (Option<i32>, String) {
    let output = job.wait_with_output().unwrap();
    (output.status.code(), texts(&output).1)
}

/// `nohup` starts its program so.
#[test]
fn a_job_that_ignores_hangups_trains_on() {
    for ranks in ["--nproc 2", "--nproc 1"] {
        let folder = folder_with_text();
        let inner = endless_command(folder.path(), ranks);
        let mut shell = Command::new("sh");
        shell.current_dir(folder.path()).args(["-c", "trap '' HUP; exec \"$0\" \"$@\""]);
        shell.arg(inner.get_program()).args(inner.get_args());
        let mut job = started(folder.path(), shell);
        send("-HUP", job.id());
        let before = metrics(&folder.path().join("run")).len();
        let begun = Instant::now();
        while metrics(&folder.path().join("run")).len() < before + 20 {
            assert!(job.try_wait().unwrap().is_none(), "{ranks}: it has ended");
            assert!(begun.elapsed() < PATIENCE, "{ranks}: it hangs");
            std::thread::sleep(Duration::from_millis(10));
        }
        send("-TERM", job.id());
        wait(&mut job);
        let (code, message) = code_and_message(job);
        assert_eq!(code, Some(130), "{ranks}: {message}");
    }
}

/// A window is closed: `script` gives a shell a terminal, which ends with it, and the shell tells its job.
#[test]
fn a_job_whose_terminal_is_closed_saves() {
    for ranks in ["--nproc 2", "--nproc 1"] {
        let folder = folder_with_text();
        let path = folder.path();
        let inner = endless_command(path, ranks);
        let words: Vec<_> = inner.get_args().map(|word| word.to_str().unwrap()).collect();
        let (program, words) = (inner.get_program().display(), words.join(" "));
        let shell = format!(
            "{program} {words} &
            trap \"kill -HUP $!\" HUP
            wait $!
            wait $!
            echo $? >code.part && mv code.part code"
        );
        std::fs::write(path.join("job.sh"), shell).unwrap();
        let mut script = Command::new("script");
        script
            .args(["-qefc", "exec env --default-signal=HUP sh job.sh", "/dev/null"])
            .env("SHELL", "/bin/sh");
        script.current_dir(path).stdin(Stdio::null());
        let mut terminal = started(path, script);
        terminal.kill().unwrap();
        terminal.wait().unwrap();
        let begun = Instant::now();
        while !path.join("code").exists() {
            assert!(begun.elapsed() < PATIENCE, "{ranks}: it hangs");
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(std::fs::read_to_string(path.join("code")).unwrap(), "130\n", "{ranks}");
        let last = metrics(&path.join("run")).len();
        assert!(path.join(format!("run/iter_{last:07}/index.json")).exists(), "{ranks}");
    }
}

#[test]
fn too_low_a_limit_of_open_files_is_refused_before_anything_starts() {
    let folder = folder_with_text();
    let inner = endless_command(folder.path(), "--nproc 16 --global-batch-size 32");
    let mut shell = Command::new("sh");
    shell.current_dir(folder.path()).args(["-c", "ulimit -n 64; exec \"$0\" \"$@\""]);
    shell.arg(inner.get_program()).args(inner.get_args());
    shell.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut job = shell.spawn().unwrap();
    wait(&mut job);
    let (code, message) = code_and_message(job);
    assert_eq!(code, Some(2), "{message}");
    for part in ["a rank of 16 needs 160", "the limit is 64", "ulimit -n 160"] {
        assert!(message.contains(part), "no '{part}' in {message}");
    }
    assert_eq!(message.lines().count(), 1, "{message}");
}

/// `sbatch --signal=USR1@120` sends the signal to every task, once while they train and once while they load.
#[test]
fn slurm_warns_of_the_time_limit_and_requeues_the_job() {
    let folder = folder_with_text();
    let path = folder.path();
    let alone = super::alone(path, "alone", "--train-iters 300");
    let line = format!("{MODEL} --dtype f64 --train-iters 300 --save run --load run");
    let ended = |mut tasks: Vec<Child>| {
        tasks.iter_mut().for_each(wait);
        let outputs = tasks.into_iter().map(|task| task.wait_with_output().unwrap());
        outputs.map(|task| (task.status.code(), texts(&task).1)).collect::<Vec<_>>()
    };
    let tasks = super::srun(path, &line, "1");
    let started = Instant::now();
    while std::fs::metadata(path.join("run/metrics.jsonl")).map_or(0, |data| data.len()) == 0 {
        assert!(started.elapsed() < PATIENCE, "no first step");
        std::thread::sleep(Duration::from_millis(5));
    }
    tasks.iter().for_each(|task| send("-USR1", task.id()));
    let ends = ended(tasks);
    assert!(ends.iter().all(|(code, _)| *code == Some(130)), "{ends:?}");
    let taken = metrics(&path.join("run")).len();
    assert!((1..300).contains(&taken), "{taken} steps");

    // One task waits for the other.
    let mut tasks = super::srun(path, &line, "2");
    send("-STOP", tasks[1].id());
    std::thread::sleep(Duration::from_millis(500));
    tasks.iter().for_each(|task| send("-USR1", task.id()));
    send("-CONT", tasks[1].id());
    tasks.iter_mut().for_each(wait);
    let ends = ended(tasks);
    // 138 is that of a process which was stopped before it was the program.
    assert_eq!(ends[0].0, Some(130), "{ends:?}");
    assert_eq!(metrics(&path.join("run")).len(), taken);

    let ends = ended(super::srun(path, &line, "3"));
    assert!(ends.iter().all(|(code, _)| *code == Some(0)), "{ends:?}");
    super::assert_same("requeued", &path.join("run"), &alone, 1e-10);
}

/// torchrun starts the same command line again after a rank was killed, and the run resumes from its last checkpoint.
#[test]
fn torchrun_restarts_a_job_that_goes_on() {
    let Some(torchrun) = super::tool("torchrun") else { return };
    let folder = folder_with_text();
    let path = folder.path();
    let alone = super::alone(path, "alone", "--train-iters 400");
    let train = format!(
        "{MODEL} --dtype f64 --train-iters 400 --save run --load run --save-interval 20 --pipeline-model-parallel-size 2"
    );
    let inner = command(path, &train);
    let mut outer = Command::new(torchrun);
    outer
        .current_dir(path)
        .args("--standalone --nproc-per-node 2 --max-restarts 1 --no-python".split(' '));
    outer.arg(inner.get_program()).args(inner.get_args());
    let mut job = outer.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let started = Instant::now();
    while !path.join("run/latest").exists() {
        let ended = job.try_wait().unwrap().is_some();
        if ended || started.elapsed() > PATIENCE {
            // Ends its ranks too.
            send("-TERM", job.id());
            panic!("no checkpoint: {:?}", texts(&job.wait_with_output().unwrap()));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let killed = *ranks_of(&job).last().unwrap();
    send("-KILL", killed);
    wait(&mut job);
    let output = job.wait_with_output().unwrap();
    let (out, message) = texts(&output);
    assert!(output.status.success(), "{out}\n{message}");
    assert!(!is_alive(killed) && message.contains("going on from step "), "{message}");
    super::assert_same("torchrun, restarted", &path.join("run"), &alone, 1e-10);
}
