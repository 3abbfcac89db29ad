//! Two jobs at the same time on one machine, as users start them: each trains what it would alone.

use super::{MODEL, alone, assert_same, command, folder_with_text, port, texts, tool, wait};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

/// The jobs differ in this.
const SEEDS: [&str; 2] = ["", "--seed 7"];

fn spawned(mut command: Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn ended(mut child: Child) -> Output {
    wait(&mut child);
    child.wait_with_output().unwrap()
}

/// Starts two jobs at the same time and checks that both train as one process would: `start` makes the commands of a
/// job's processes.
fn both_train(start: impl Fn(&Path, usize, &str) -> Vec<Command>) {
    let folder = folder_with_text();
    let path = folder.path();
    let children: Vec<Child> = SEEDS
        .iter()
        .enumerate()
        .flat_map(|(job, seed)| {
            let line = format!("{MODEL} --dtype f64 --train-iters 6 --save job{job} {seed}");
            start(path, job, &line)
        })
        .map(spawned)
        .collect();
    for child in children {
        let output = ended(child);
        let (out, err) = texts(&output);
        assert!(output.status.success(), "{:?}\n{out}\n{err}", output.status);
    }
    for (job, seed) in SEEDS.iter().enumerate() {
        let want = alone(path, &format!("alone{job}"), seed);
        assert_same("two jobs", &path.join(format!("job{job}")), &want, 1e-10);
    }
}

#[test]
fn of_nproc() {
    both_train(|path, _, line| vec![command(path, &format!("{line} --nproc 2"))]);
}

#[test]
fn of_mpirun_and_torchrun() {
    for (name, words) in [
        ("mpirun", "--allow-run-as-root --oversubscribe -n 2"),
        ("torchrun", "--nproc-per-node 2 --no-python"),
    ] {
        let Some(launcher) = tool(name) else { continue };
        both_train(|path, job, line| {
            let inner = command(path, line);
            // Two runs of Open MPI 4 that start at the same time can both want to make their common folder of sessions.
            let sessions = path.join(format!("sessions{job}"));
            std::fs::create_dir(&sessions).unwrap();
            let mut outer = Command::new(&launcher);
            outer.current_dir(path).env("TMPDIR", &sessions).args(words.split_whitespace());
            if name == "torchrun" {
                // The port behind one of its own choice may be that of a connection.
                outer.arg(format!("--master-port={}", port()));
            }
            outer.arg(inner.get_program()).args(inner.get_args());
            vec![outer]
        });
    }
}

/// The ranks of a job that a user starts by hand.
fn by_hand(path: &Path, line: &str, variables: &[(&str, &str)]) -> Vec<Command> {
    let rank = |rank: &str| {
        let mut command = command(path, line);
        command.envs([("RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")]);
        command.envs(variables.iter().copied());
        command
    };
    vec![rank("1"), rank("0")]
}

#[test]
fn by_hand_with_a_port_or_a_secret() {
    let ports = [port(), port()];
    both_train(|path, job, line| {
        by_hand(path, &format!("{line} --rendezvous-port {}", ports[job]), &[])
    });
    let secrets = ["open sesame", "open barley"];
    both_train(|path, job, line| by_hand(path, line, &[("FERROTRON_JOB_SECRET", secrets[job])]));
}

#[test]
fn by_hand_without_either_is_refused() {
    let folder = folder_with_text();
    for command in by_hand(folder.path(), &format!("{MODEL} --save run"), &[]) {
        let output = ended(spawned(command));
        let (_, message) = texts(&output);
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert_eq!(message.lines().count(), 1, "{message}");
        for remedy in ["--rendezvous-port", "MASTER_PORT", "FERROTRON_JOB_SECRET"] {
            assert!(message.contains(remedy), "no {remedy} in {message}");
        }
    }
}

#[test]
fn by_hand_at_one_port() {
    let folder = folder_with_text();
    let path = folder.path();
    let line = format!("{MODEL} --train-iters 1000000 --eval-interval 0 --save-interval 0");
    let line = format!("{line} --rendezvous-port {}", port());
    let mut first: Vec<Child> =
        by_hand(path, &format!("{line} --save first"), &[]).into_iter().map(spawned).collect();
    let metrics = path.join("first/metrics.jsonl");
    while std::fs::metadata(&metrics).map_or(0, |data| data.len()) == 0 {
        assert!(first.iter_mut().all(|rank| rank.try_wait().unwrap().is_none()));
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let second = by_hand(path, &format!("{line} --save second"), &[]);
    for (command, want) in second.into_iter().zip(["has all its ranks", "probably another job"]) {
        let output = ended(spawned(command));
        let (_, message) = texts(&output);
        assert_eq!(output.status.code(), Some(3), "{message}");
        assert!(message.contains(want) && message.contains("--rendezvous-port"), "{message}");
    }
    // All are asked before one is killed, which the others notice.
    let ended = first.iter_mut().any(|rank| rank.try_wait().unwrap().is_some());
    for rank in &mut first {
        rank.kill().unwrap();
        rank.wait().unwrap();
    }
    assert!(!ended, "the first job has noticed");
}
