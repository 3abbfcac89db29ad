//! The program with MPI as the backend of its collectives: the same losses as with its own transports.

use serde::Deserialize;
use std::path::Path;
use std::process::{Command, Output};

/// Layouts of four ranks in which every kind of call occurs.
const LAYOUTS: [&str; 6] = [
    "--zero-stage 0",
    "--zero-stage 3",
    "--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 1",
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
    "--pipeline-model-parallel-size 2 --zero-stage 2 --num-layers 4 --num-virtual-stages-per-pipeline-rank 2",
    "--context-parallel-size 2 --optimizer muon --zero-stage 1",
];

const RUN: &str = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 \
    --global-batch-size 16 --train-iters 3 --eval-interval 0 --eval-iters 0 --sample-length 0 --log-interval 1 --dtype f64";

#[derive(Deserialize)]
struct Line {
    step: Option<u64>,
    loss: Option<f64>,
}

/// Runs `words` of the program behind `launcher`, which begins with a program.
fn run(folder: &Path, launcher: &[&str], words: &str) -> Output {
    let program = env!("CARGO_BIN_EXE_ferrotron");
    let mut all = launcher.to_vec();
    all.push(program);
    let mut command = Command::new(all[0]);
    command.args(&all[1..]).args(words.split_whitespace()).current_dir(folder);
    command.env("FERROTRON_THREADS", "1").env("TMPDIR", folder);
    command.output().expect("a program that starts")
}

const MPIRUN: &[&str] = &["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "4"];

fn losses(folder: &Path, name: &str, launcher: &[&str], words: &str) -> Vec<f64> {
    let words = format!("train --data t.txt {RUN} {words} --save {name}");
    let output = run(folder, launcher, &words);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words}: {told}");
    let library = "collectives go through Open MPI";
    assert_eq!(told.matches(library).count(), usize::from(!launcher.is_empty()), "{told}");
    let metrics = std::fs::read_to_string(folder.join(name).join("metrics.jsonl")).unwrap();
    let lines = metrics.lines().map(|line| serde_json::from_str::<Line>(line).unwrap());
    let found: Vec<f64> =
        lines.filter(|line| line.step.is_some()).filter_map(|line| line.loss).collect();
    assert_eq!(found.len(), 3, "{metrics}");
    found
}

#[test]
fn layouts_have_the_losses_of_our_own_transports() {
    let folder = tempfile::tempdir().unwrap();
    let text: String = (0..4000).map(|i| char::from(b'a' + (i * i % 23) as u8)).collect();
    std::fs::write(folder.path().join("t.txt"), text).unwrap();
    for (number, layout) in LAYOUTS.into_iter().enumerate() {
        let own =
            losses(folder.path(), &format!("own{number}"), &[], &format!("--nproc 4 {layout}"));
        let mpi = format!("--distributed-backend mpi {layout}");
        let mpi = losses(folder.path(), &format!("mpi{number}"), MPIRUN, &mpi);
        for (own, mpi) in own.iter().zip(&mpi) {
            assert!((own - mpi).abs() < 1e-13 * own, "{layout}: {own} {mpi}");
        }
    }
    // What MPI has trained is resumed by our own transports, in another layout.
    let resumed = "--load mpi2 --save mpi2 --nproc 2 --tensor-model-parallel-size 1 --sequence-parallel=false \
        --train-iters 4";
    let output = run(folder.path(), &[], &format!("train {resumed}"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn ranks_that_mpi_has_not_started_are_refused_in_a_line() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("t.txt"), "some text ".repeat(200)).unwrap();
    let words = format!("train --data t.txt {RUN} --save a --distributed-backend mpi --nproc 2");
    let output = run(folder.path(), &[], &words);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(told.contains("leave --nproc out, and put mpirun -n N in front"), "{told}");
}
