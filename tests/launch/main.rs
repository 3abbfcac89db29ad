//! Jobs of several processes as a user starts them. Losses are the same in every layout and with every launcher, and if
//! a rank dies the job's end names the cause.

#![cfg(target_os = "linux")]

mod agreement;
mod asynchronous;
mod generation;
mod killed_or_stopped;
mod local_steps;
#[cfg(feature = "mpi")]
mod mpi;
mod trace;
mod two_jobs;
mod unflushed;

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A model whose layers, vocabulary and heads are cut unevenly where they can be.
const MODEL: &str = "train --data text.txt --num-layers 3 --hidden-size 16 --num-attention-heads 4 \
    --seq-length 8 --micro-batch-size 2 --global-batch-size 8 --hidden-dropout 0.1 --attention-dropout 0.1 \
    --threads 1 --log-interval 0 --eval-interval 3 --eval-iters 2 --sample-length 4";

/// Longest that anything here may take: a job that hangs fails instead of hanging the tests.
const PATIENCE: Duration = Duration::from_secs(120);

fn folder_with_text() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let text: String = (0..90).map(|i| format!("line {} of it.\n", i * 7919 % 1000)).collect();
    std::fs::write(folder.path().join("text.txt"), text).unwrap();
    folder
}

/// The program with options as typed, in `folder`, without what a launcher of the tests may have set.
fn command(folder: &Path, words: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrotron"));
    command.current_dir(folder).args(words.split_whitespace());
    for name in ["RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"] {
        command.env_remove(name);
    }
    command
}

fn finished(mut command: Command) -> Output {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait(&mut child);
    child.wait_with_output().unwrap()
}

fn wait(child: &mut Child) {
    let started = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if started.elapsed() > PATIENCE {
            let _ = child.kill();
            panic!("it did not end within {PATIENCE:?}");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn succeeded(output: Output) -> String {
    let (out, err) = texts(&output);
    assert!(output.status.success(), "status {:?}\n{out}\n{err}", output.status);
    out + &err
}

fn texts(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

/// Loss and gradient norm of every step.
fn metrics(run: &Path) -> Vec<[f64; 2]> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let parse = |line: &str| {
        let value: serde_json::Value = serde_json::from_str(line).unwrap();
        ["loss", "grad_norm"].map(|name| value[name].as_f64().unwrap())
    };
    text.lines().map(parse).collect()
}

fn assert_same(what: &str, got: &Path, want: &Path, tolerance: f64) {
    let (got, want) = (metrics(got), metrics(want));
    assert_eq!(got.len(), want.len(), "{what}: steps");
    for (step, (got, want)) in got.iter().zip(&want).enumerate() {
        for (got, want) in got.iter().zip(want) {
            let difference = (got - want).abs() / want.abs();
            assert!(difference <= tolerance, "{what}: step {}: got {got}, want {want}", step + 1);
        }
    }
}

/// Trains six steps alone in f64, into the run folder `name`.
fn alone(folder: &Path, name: &str, options: &str) -> PathBuf {
    let line = format!("{MODEL} --dtype f64 --train-iters 6 --save {name} {options}");
    succeeded(finished(command(folder, &line)));
    folder.join(name)
}

#[test]
fn layouts_of_processes_give_the_losses_of_one() {
    let folder = folder_with_text();
    let path = folder.path();
    let alone = alone(path, "alone", "");
    for (name, layout) in [
        ("tp-pp", "--nproc 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
        ("sp-tcp", "--nproc 2 --tensor-model-parallel-size 2 --sequence-parallel --transport tcp"),
        ("dp-zero", "--nproc 4 --zero-stage 3 --ddp-bucket-size 500 --recompute-granularity full"),
        ("cp", "--nproc 2 --context-parallel-size 2 --recompute-granularity selective"),
        ("zb", "--nproc 3 --pipeline-model-parallel-size 3 --pipeline-schedule zb-h1"),
    ] {
        let line = format!("{MODEL} --dtype f64 --train-iters 6 --save {name} {layout}");
        let text = succeeded(finished(command(path, &line)));
        assert!(text.contains(" ranks: tensor "), "{name}: {text}");
        assert_same(name, &path.join(name), &alone, 1e-10);
    }
    let text = succeeded(finished(command(path, &format!("{MODEL} --train-iters 6 --save f32"))));
    assert!(text.contains("sample: ") && !text.contains("ranks"), "{text}");
    let layout = "--nproc 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2";
    let line = format!("{MODEL} --train-iters 6 --save f32-4 {layout}");
    let text = succeeded(finished(command(path, &line)));
    assert!(text.contains("no sample: "), "{text}");
    assert_same("f32", &path.join("f32-4"), &path.join("f32"), 1e-5);
}

#[test]
fn a_trace_shows_every_rank() {
    let folder = folder_with_text();
    let path = folder.path();
    let layout = "--nproc 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel";
    let traced = "--save run --trace trace.json --trace-steps 2-3";
    succeeded(finished(command(path, &format!("{MODEL} --train-iters 4 {layout} {traced}"))));
    // A forward and a backward of each of the 4 microbatches.
    trace::check(&path.join("trace.json"), &[2, 3], 8);

    let run =
        command(path, "train --load run --train-iters 5 --nproc 1 --trace missing/trace.json");
    let (_, err) = texts(&finished(run));
    assert!(err.contains("trace: cannot write missing/trace.json"), "{err}");
}

#[test]
fn a_run_goes_on_in_another_layout() {
    let folder = folder_with_text();
    let path = folder.path();
    let alone = alone(path, "alone", "");
    let layout = "--nproc 4 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2";
    for (name, layout_after, ranks) in [
        ("same", "", Some("4 ranks: tensor 2 x context 1 x data 1 x pipeline 2")),
        ("one", "--nproc 1", None),
        ("dp", "--nproc 4 --tensor-model-parallel-size 1", Some("tensor 1 x context 1 x data 4")),
        (
            "chunks",
            "--nproc 2 --pipeline-model-parallel-size 2 --pipeline-schedule gpipe --zero-stage 1",
            Some("pipeline 2 (gpipe)"),
        ),
    ] {
        let line =
            format!("{MODEL} --dtype f64 --train-iters 6 --exit-interval 3 --save {name} {layout}");
        succeeded(finished(command(path, &line)));
        let text =
            succeeded(finished(command(path, &format!("train --load {name} {layout_after}"))));
        assert_eq!(text.contains(" ranks: "), ranks.is_some(), "{name}: {text}");
        assert!(text.contains(ranks.unwrap_or_default()), "{name}: {text}");
        assert_same(name, &path.join(name), &alone, 1e-10);
    }
}

#[test]
fn a_run_resumes_with_as_many_ranks_each_time() {
    let folder = folder_with_text();
    let path = folder.path();
    let layout = "--nproc 2 --tensor-model-parallel-size 2";
    let line = format!("{MODEL} --train-iters 8 --exit-interval 2 --save k {layout}");
    let mut texts = vec![succeeded(finished(command(path, &line)))];
    for _ in 0..2 {
        texts.push(succeeded(finished(command(path, "train --load k --exit-interval 2"))));
    }
    for text in texts {
        assert!(text.contains("2 ranks: tensor 2 x context 1 x data 1"), "{text}");
    }
    assert_eq!(metrics(&path.join("k")).len(), 6);
}

#[test]
fn the_global_batch_of_a_run_survives_another_layout() {
    let folder = folder_with_text();
    let path = folder.path();
    let model = MODEL.replace("--global-batch-size 8", "");
    let line = format!("{model} --train-iters 4 --exit-interval 2 --save run --nproc 4");
    succeeded(finished(command(path, &line)));
    succeeded(finished(command(path, "train --load run --nproc 1")));
    let tokens = std::fs::read_to_string(path.join("run/metrics.jsonl")).unwrap();
    assert_eq!(tokens.matches("\"tokens\":64,").count(), 4, "{tokens}");
}

#[test]
fn what_is_refused_is_refused_once_before_anything_starts() {
    let folder = folder_with_text();
    let path = folder.path();
    for (options, named) in [
        (
            "--nproc 4 --tensor-model-parallel-size 3",
            &["4 ranks", "tensor-model-parallel-size 3"][..],
        ),
        ("--tensor-model-parallel-size 2", &["--nproc", "torchrun"]),
        ("--nproc 8 --tensor-model-parallel-size 8", &["num-attention-heads 4", "size 8"]),
        ("--nproc 4 --pipeline-model-parallel-size 4", &["num-layers 3", "4 stages"]),
        ("--nproc 2 --context-parallel-size 2 --seq-length 6", &["seq-length 6", "2 x"]),
        ("--nproc 3", &["--global-batch-size 8", "data-parallel size 3"]),
        (
            "--nproc 4 --pipeline-model-parallel-size 2 --zero-stage 2 --pipeline-schedule zb-h1",
            &["ZeRO stage 2", "zb-h1", "or the schedule 1f1b"],
        ),
        (
            "--nproc 3 --pipeline-model-parallel-size 3 --num-layers 6 --num-virtual-stages-per-pipeline-rank 2",
            &["4 microbatches", "3 stages"],
        ),
        (
            "--nproc 2 --pipeline-model-parallel-size 2 --pipeline-schedule gpipe \
             --num-virtual-stages-per-pipeline-rank 2 --num-layers 4",
            &["2 chunks", "gpipe"],
        ),
        ("--nproc 2 --pipeline-schedule 2f2b", &["--pipeline-schedule", "2f2b"]),
        ("--nproc 0", &["--nproc", "0"]),
        ("--nproc 2 --ddp-bucket-size 0", &["--ddp-bucket-size"]),
        ("--nproc 2 --threads 0", &["0"]),
        ("--nproc 2 --local-sgd-steps 0", &["--local-sgd-steps", "0"]),
        ("--nproc 2 --local-sgd-steps 4", &["eval-interval 3", "local-sgd-steps 4", "take 4"]),
        (
            "--nproc 2 --local-sgd-steps 8 --eval-interval 0 --save-interval 500",
            &["save-interval 500", "local-sgd-steps 8", "take 496 or 504"],
        ),
        (
            "--nproc 2 --local-sgd-steps 8 --eval-interval 0 --train-iters 12",
            &["train-iters 12", "take 8 or 16"],
        ),
        ("--nproc 2 --max-staleness 2", &["--max-staleness", "needs --async-data-parallel"]),
        ("--nproc 2 --drain-interval 2", &["--drain-interval", "needs --async-data-parallel"]),
        ("--nproc 2 --async-data-parallel --drain-interval 0", &["--drain-interval", "got 0"]),
        (
            "--nproc 2 --async-data-parallel --max-staleness 9 --drain-interval 9",
            &["--max-staleness 9", "--drain-interval 9", "below"],
        ),
        ("--nproc 2 --async-data-parallel", &["eval-interval 3", "drain-interval 10", "take 10"]),
        (
            "--nproc 2 --async-data-parallel --tensor-model-parallel-size 2",
            &["--async-data-parallel", "--tensor-model-parallel-size 2", "--max-staleness 0"],
        ),
        (
            "--nproc 2 --async-data-parallel --pipeline-model-parallel-size 2",
            &["--async-data-parallel", "--pipeline-model-parallel-size 2", "--max-staleness 0"],
        ),
        (
            "--nproc 2 --async-data-parallel --context-parallel-size 2",
            &["--async-data-parallel", "--context-parallel-size 2", "--max-staleness 0"],
        ),
        (
            "--nproc 2 --async-data-parallel --zero-stage 1",
            &["--async-data-parallel", "--zero-stage 1", "use --zero-stage 0"],
        ),
        (
            "--nproc 2 --async-data-parallel --local-sgd-steps 3",
            &[
                "--async-data-parallel",
                "--local-sgd-steps 3",
                "use --local-sgd-steps 1, or --async-data-parallel=false",
            ],
        ),
        (
            "--nproc 2 --async-data-parallel --fp16",
            &["--async-data-parallel", "dynamic loss scale", "--loss-scale"],
        ),
        (
            "--nproc 2 --async-data-parallel --on-bad-step skip",
            &["--async-data-parallel", "--on-bad-step skip", "--on-bad-step stop"],
        ),
    ] {
        let output = finished(command(path, &format!("{MODEL} --save refused {options}")));
        let (_, message) = texts(&output);
        assert_eq!(output.status.code(), Some(2), "{options}: {message}");
        assert_eq!(message.lines().count(), 1, "{options}: {message}");
        for part in named {
            assert!(message.contains(part), "{options}: {part} is missing in: {message}");
        }
        assert!(!path.join("refused").exists(), "{options}");
    }
    for (variables, options, named) in [
        (&[("RANK", "0")][..], "", "WORLD_SIZE"),
        (&[("RANK", "2"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")], "", "RANK is 2"),
        (&[("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a")], "--nproc 4", "rank 0 of 2"),
    ] {
        let mut command = command(path, &format!("{MODEL} --save refused {options}"));
        command.envs(variables.iter().copied());
        let output = finished(command);
        let (_, message) = texts(&output);
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.contains(named) && message.lines().count() == 1, "{named}: {message}");
    }
}

/// The path of another launcher.
fn tool(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found =
        std::env::split_paths(&path).map(|folder| folder.join(name)).find(|path| path.is_file());
    if found.is_none() {
        println!("skipped: {name} is not installed");
    }
    found
}

const MPIRUN: &str = "--allow-run-as-root --oversubscribe -n 4";

/// The command behind another launcher and its words.
fn behind(tool: &Path, words: &str, path: &Path, inner: &Command) -> Command {
    let mut outer = Command::new(tool);
    outer.current_dir(path).args(words.split_whitespace());
    outer.arg(inner.get_program()).args(inner.get_args());
    outer
}

/// Trains under another launcher, whose words stand in front of the program's.
fn under(tool: &Path, words: &str, name: &str, layout: &str) {
    let folder = folder_with_text();
    let path = folder.path();
    let alone = alone(path, "alone", "");
    let train = format!("{MODEL} --dtype f64 --train-iters 6 --save {name} {layout}");
    let text = succeeded(finished(behind(tool, words, path, &command(path, &train))));
    assert!(text.contains("4 ranks: "), "{text}");
    assert_same(name, &path.join(name), &alone, 1e-10);
}

/// A free port before another one, both below those that the system gives to connections. No other call has them.
fn port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Below the ports that jobs derive from their ids.
    let base = 10_000 + (std::process::id() % 40) as u16 * 200;
    let is_free = |port| TcpListener::bind(("127.0.0.1", port)).is_ok();
    loop {
        let port = base + NEXT.fetch_add(2, Ordering::Relaxed) % 2000;
        if is_free(port) && is_free(port + 1) {
            return port;
        }
    }
}

#[test]
fn torchrun_starts_ranks() {
    if let Some(torchrun) = tool("torchrun") {
        under(
            &torchrun,
            "--standalone --nproc-per-node 4 --no-python",
            "torchrun",
            "--tensor-model-parallel-size 2",
        );
    }
}

#[test]
fn mpirun_starts_ranks() {
    if let Some(mpirun) = tool("mpirun") {
        let layout = "--pipeline-model-parallel-size 2 --zero-stage 1";
        under(&mpirun, MPIRUN, "mpirun", layout);
    }
}

/// Two tasks of a step, as srun starts them.
fn srun(path: &Path, line: &str, step: &str) -> Vec<Child> {
    // Of a job that no other test has, so that the port is its own.
    let job = std::process::id().to_string();
    let start = |task: usize| {
        let mut command = command(path, line);
        let number = task.to_string();
        command.envs([("SLURM_PROCID", &*number), ("SLURM_LOCALID", &*number)]);
        command.envs([("SLURM_NTASKS", "2"), ("SLURM_NODEID", "0"), ("SLURM_STEP_ID", step)]);
        command.env("SLURM_JOB_ID", &job);
        command.envs([("SLURM_STEP_TASKS_PER_NODE", "2"), ("SLURM_STEP_NODELIST", "node7")]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    (0..2).map(start).collect()
}

#[test]
fn srun_variables_are_understood() {
    let folder = folder_with_text();
    let path = folder.path();
    let alone = alone(path, "alone", "");
    let mut tasks = srun(path, &format!("{MODEL} --dtype f64 --train-iters 6 --save srun"), "0");
    tasks.iter_mut().for_each(wait);
    for task in tasks {
        succeeded(task.wait_with_output().unwrap());
    }
    assert_same("srun", &path.join("srun"), &alone, 1e-10);
}
