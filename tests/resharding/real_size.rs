//! A model of real size: GPT-2 of 124 million parameters in bf16 is trained, saved, continued in another layout and
//! exported.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn ferrotron(folder: &Path, words: &str) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ferrotron"));
    let output = command.current_dir(folder).args(words.split_whitespace()).output().unwrap();
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "{words}: {:?}\n{out}\n{err}", output.status);
    out.into_owned()
}

fn steps(run: &Path) -> Vec<f64> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let loss =
        |line: &str| serde_json::from_str::<serde_json::Value>(line).unwrap()["loss"].as_f64();
    text.lines().map(|line| loss(line).unwrap()).collect()
}

/// Whether a process has a handler of SIGTERM, which is number 15.
fn catches_sigterm(process: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
    u64::from_str_radix(caught.trim(), 16).unwrap() & 1 << 14 != 0
}

#[test]
fn gpt2_in_bf16_goes_on_in_another_layout_and_is_exported() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let text: String = (0..300).map(|i| format!("line {} of it.\n", i * 7919 % 1000)).collect();
    std::fs::write(path.join("text.txt"), text).unwrap();
    let run = path.join("run");
    ferrotron(
        path,
        "train --data text.txt --preset gpt2-124m --bf16 --tokenizer gpt2 --seq-length 64 --micro-batch-size 1 --lr 1e-4 \
         --global-batch-size 1 --train-iters 3 --eval-iters 1 --sample-length 0 --save-retain 1 --save run",
    );
    ferrotron(path, "train --load run --nproc 2 --tensor-model-parallel-size 2 --train-iters 4");
    let losses = steps(&run);
    assert_eq!(losses.len(), 4);
    // Weights of a random initialisation guess among 50257 tokens with ln(50257) = 10.8; then they learn.
    assert!((10.0..12.0).contains(&losses[0]) && losses[3] < losses[0], "{losses:?}");
    // While it loads there is nothing to save, and the checkpoint stays as it was.
    for delay in [0, 100] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferrotron"));
        command.current_dir(path).args(["train", "--load", "run", "--train-iters", "5"]);
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        while !catches_sigterm(child.id()) {
            assert!(child.try_wait().unwrap().is_none(), "it has ended");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(delay));
        let asked = Instant::now();
        let (id, kill) = (child.id().to_string(), &mut Command::new("kill"));
        assert!(kill.args(["-TERM", &id]).status().unwrap().success());
        let mut said = String::new();
        child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(130), "{said}");
        assert!(said.is_empty() && asked.elapsed() < Duration::from_secs(5), "{said}");
    }
    ferrotron(path, "checkpoint verify run");
    ferrotron(path, "export --load run --output exported");
    let bytes = std::fs::metadata(path.join("exported/model.safetensors")).unwrap().len();
    // Two bytes for each of 123.7 million parameters: there are 64 positions instead of 1024.
    assert!((247_400_000..247_500_000).contains(&bytes), "{bytes}");
}
