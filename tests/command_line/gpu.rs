//! The program on a GPU, for which a stand-in is here.

use super::bad_steps::{SPIKES, folder_with_outliers};
use super::{TINY, folder_with_text};
use std::path::Path;
use std::process::{Command, Output};

/// Runs the program where it finds the stand-in's libraries, and nothing of the machine's.
fn ferrotron(folder: &Path, arguments: &[&str]) -> Output {
    let libraries = ferrotron_cuda_sim::folder();
    Command::new(env!("CARGO_BIN_EXE_ferrotron"))
        .current_dir(folder)
        .args(arguments)
        .env("XDG_CACHE_HOME", libraries.join("cache"))
        .env("FERROTRON_CUDA_PATH", libraries)
        .output()
        .expect("the program starts")
}

fn lines(folder: &Path, arguments: &[&str]) -> (String, String) {
    let output = ferrotron(folder, arguments);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{arguments:?}: {error}");
    (String::from_utf8_lossy(&output.stdout).into_owned(), error)
}

/// The metrics of a run's steps.
fn metrics(run: &Path) -> Vec<serde_json::Value> {
    let text = std::fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_run_moves_between_devices() {
    if !ferrotron_cuda_sim::available("a_run_moves_between_devices") {
        return;
    }
    let folder = folder_with_text();
    let here = folder.path();
    // What a step does shall not depend on how many follow.
    let started = |save, more: &[&str]| {
        let constant = ["--lr-decay-style", "constant", "--sample-length", "0"];
        let words = ["train", "--data", "text.txt", "--save", save];
        lines(here, &[&words[..], TINY, &constant, more].concat())
    };
    let losses = |run: &str| -> Vec<f64> {
        metrics(&here.join(run)).iter().filter_map(|line| line["loss"].as_f64()).collect()
    };
    // Five steps there, as many here; what is made of them does not depend on where they were taken.
    let (_, told) = started("run", &["--device", "cuda:1", "--train-iters", "5"]);
    assert!(told.contains("cuda:1"), "{told}");
    // What it took is what it was said to take.
    let words = ["memory", "--data", "text.txt", "--device", "cuda:1", "--json"];
    let (said, _) = lines(here, &[&words[..], TINY].concat());
    let said: serde_json::Value = serde_json::from_str(&said).unwrap();
    let run = metrics(&here.join("run"));
    assert_eq!(run.last().unwrap()["mem_peak_bytes"], said["total_bytes"]);
    let goes_on = ["train", "--load", "run", "--train-iters", "10", "--sample-length", "0"];
    let (_, told) = lines(here, &goes_on);
    assert!(told.contains("1 thread"), "a checkpoint does not remember the device: {told}");
    started("whole", &["--train-iters", "10"]);
    let (moved, whole) = (losses("run"), losses("whole"));
    assert_eq!((moved.len(), whole.len()), (10, 10));
    for (step, (moved, whole)) in moved.iter().zip(&whole).enumerate() {
        assert!((moved / whole - 1.0).abs() < 1e-5, "step {step}: {moved}, want {whole}");
    }

    let eval = |device: &str| -> f64 {
        let (text, _) = lines(here, &["eval", "--load", "run", "--json", "--device", device]);
        serde_json::from_str::<serde_json::Value>(&text).unwrap()["loss"].as_f64().unwrap()
    };
    let (there, here_too) = (eval("cuda"), eval("cpu"));
    assert!((there / here_too - 1.0).abs() < 1e-5, "{there}, want {here_too}");
    let generate = |device: &str| {
        let words = ["generate", "--load", "run", "--prompt", "line", "--max-new-tokens", "8"];
        lines(here, &[&words[..], &["--temperature", "0", "--device", device]].concat()).0
    };
    assert_eq!(generate("cuda:0"), generate("cpu"));
}

#[test]
fn a_run_as_a_graph_has_the_same_losses() {
    if !ferrotron_cuda_sim::available("a_run_as_a_graph_has_the_same_losses") {
        return;
    }
    let folder = folder_with_text();
    let here = folder.path();
    let train = |save: &str, more: &[&str]| {
        let run = ["--train-iters", "8", "--eval-interval", "5", "--log-interval", "2"];
        let words = ["train", "--data", "text.txt", "--save", save, "--sample-length", "8"];
        let (_, told) = lines(here, &[&words[..], TINY, &run, more].concat());
        let shown = told.lines().filter(|line| line.starts_with("step ")).count();
        assert_eq!(shown, 6, "four lines, two evaluations: {told}");
        let steps = metrics(&here.join(save)).into_iter().map(|line| {
            ["step", "loss", "validation_loss", "mem_peak_bytes"].map(|field| line[field].clone())
        });
        steps.collect::<Vec<_>>()
    };
    let plain = train("plain", &["--device", "cuda"]);
    assert_eq!(plain.len(), 8);
    // A graph is let go before an evaluation, so even the memory is the same.
    assert_eq!(train("graph", &["--device", "cuda", "--enable-cuda-graph"]), plain);
    // A checkpoint does not remember it: the run may resume elsewhere.
    lines(here, &["train", "--load", "graph", "--train-iters", "9", "--sample-length", "0"]);

    for (part, more) in [
        ("add --device cuda", &["--device", "cpu"][..]),
        ("what NCCL sends", &["--device", "cuda:0", "--nproc", "2"]),
        (
            "a pipeline of 2 stages",
            &["--device", "cuda", "--nproc", "2", "--pipeline-model-parallel-size", "2"],
        ),
        ("offloading", &["--device", "cuda", "--offload-optimizer-states"]),
    ] {
        let words = ["train", "--data", "text.txt", "--enable-cuda-graph"];
        let output = ferrotron(here, &[&words[..], TINY, more].concat());
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{more:?}: {told}");
        assert!(told.contains("enable-cuda-graph") && told.contains(part), "{told}");
        assert_eq!(told.lines().count(), 1, "{told}");
    }
}

/// Ranks that start at once take the same algorithms, and so do later runs, which time nothing.
#[test]
fn timed_algorithms_are_kept_for_later_runs() {
    if !ferrotron_cuda_sim::available("timed_algorithms_are_kept_for_later_runs") {
        return;
    }
    let folder = folder_with_text();
    let here = folder.path();
    let libraries = ferrotron_cuda_sim::folder();
    let cache = here.join("cache");
    let kernels = libraries.join("cache/ferrotron/cubin");
    std::fs::create_dir_all(&kernels).unwrap();
    std::fs::create_dir_all(cache.join("ferrotron")).unwrap();
    std::os::unix::fs::symlink(&kernels, cache.join("ferrotron/cubin")).unwrap();
    let train = |save: &str, more: &[&str]| {
        let words = ["train", "--data", "text.txt", "--save", save];
        let short = ["--train-iters", "3", "--sample-length", "0"];
        let output = Command::new(env!("CARGO_BIN_EXE_ferrotron"))
            .current_dir(here)
            .args([&words[..], TINY, &short, more].concat())
            .env("XDG_CACHE_HOME", &cache)
            .env("FERROTRON_CUDA_PATH", &libraries)
            .output()
            .expect("the program starts");
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && !told.contains("autotuning"), "{told}");
        let losses = metrics(&here.join(save)).into_iter().map(|line| line["loss"].clone());
        losses.collect::<Vec<_>>()
    };
    // The files and their contents.
    let kept = || {
        let entries = std::fs::read_dir(cache.join("ferrotron/algorithms")).unwrap();
        let paths = entries.map(|entry| entry.unwrap().path());
        let mut kept: Vec<_> =
            paths.map(|path| (std::fs::read_to_string(&path).unwrap(), path)).collect();
        kept.sort();
        kept
    };
    let plain = train("plain", &["--device", "cuda"]);
    assert!(!cache.join("ferrotron/algorithms").exists());
    // The stand-in's algorithms differ in nothing but their times.
    let tuned = ["--device", "cuda:0", "--autotune-gemm"];
    assert_eq!(train("ranks", &[&tuned[..], &["--nproc", "2"]].concat()).len(), 3);
    let first = kept();
    assert!(first.len() > 5 && first.iter().all(|(text, _)| text.contains("\nalgorithm ")));
    assert_eq!(train("again", &[&tuned[..], &["--nproc", "2"]].concat()).len(), 3);
    assert_eq!(kept(), first);
    assert_eq!(train("graph", &[&tuned[..], &["--enable-cuda-graph"]].concat()), plain);
    let output = ferrotron(here, &["bench", "--autotune-gemm"]);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert_eq!(
        told,
        "ferrotron: --autotune-gemm: chooses among the algorithms of a GPU: add --device cuda\n"
    );
}

#[test]
fn steps_before_a_lost_one_are_in_the_metrics() {
    if !ferrotron_cuda_sim::available("steps_before_a_lost_one_are_in_the_metrics") {
        return;
    }
    let folder = folder_with_text();
    let here = folder.path();
    let train = |device: &str| {
        let lost = ["--lr", "1e6", "--clip-grad", "0", "--log-interval", "10"];
        let words = ["train", "--data", "text.txt", "--save", device, "--device", device];
        let output = ferrotron(here, &[&words[..], TINY, &lost].concat());
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{told}");
        let told = told.lines().last().unwrap().split("; ");
        let told = told.filter(|part| part.starts_with("first offender: ")).collect::<String>();
        (told, metrics(&here.join(device)).len())
    };
    let (here_it_is, there) = (train("cpu"), train("cuda"));
    assert!(here_it_is.0.starts_with("first offender: ") && here_it_is.1 > 1, "{here_it_is:?}");
    assert_eq!(there, here_it_is);
}

/// The host looks at each step before the update, which a GPU otherwise decides by itself.
#[test]
fn bad_steps_on_a_gpu_are_those_on_a_cpu() {
    if !ferrotron_cuda_sim::available("bad_steps_on_a_gpu_are_those_on_a_cpu") {
        return;
    }
    let folder = folder_with_outliers();
    let here = folder.path();
    let train = |reaction: &str, device: &str| {
        let save = format!("{reaction}-{device}");
        let words = ["train", "--data", "text.txt", "--save", &save, "--device", device];
        let more = ["--on-bad-step", reaction];
        lines(here, &[&words[..], TINY, SPIKES, &more].concat());
        metrics(&here.join(save))
    };
    for reaction in ["skip", "rewind"] {
        let (got, want) = (train(reaction, "cuda"), train(reaction, "cpu"));
        assert_eq!(got.len(), 120);
        let mut bad = 0;
        for (got, want) in got.iter().zip(&want) {
            let [a, b] = [got, want].map(|line| line["loss"].as_f64().unwrap());
            assert!((a - b).abs() < 1e-2, "{got} {want}");
            assert_eq!(got["rewound_to"], want["rewound_to"]);
            assert_eq!(got["bad_step"].is_string(), want["bad_step"].is_string(), "{got} {want}");
            bad += u64::from(got["bad_step"].is_string());
        }
        assert!(bad > 0, "{reaction}");
    }
}

#[test]
fn ranks_share_a_gpu_and_its_memory() {
    if !ferrotron_cuda_sim::available("ranks_share_a_gpu_and_its_memory") {
        return;
    }
    let folder = folder_with_text();
    let two = ["--nproc", "2", "--tensor-model-parallel-size", "2", "--device", "cuda:0"];
    let short = ["--train-iters", "2", "--sample-length", "0"];
    let train = [&["train", "--data", "text.txt"], TINY, &short].concat();
    lines(folder.path(), &[&train[..], &two].concat());

    let refused = |arguments: &[&str]| {
        let output = ferrotron(folder.path(), arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    // The stand-in's GPUs have 4 GiB, and there are eight.
    let large = ["memory", "--preset", "gpt2-774m", "--device", "cuda"];
    let told = refused(&large);
    assert!(told.contains("more than the 4") && told.contains("that the GPU has"), "{told}");
    let told = refused(&[&train[..], &["--nproc", "9", "--device", "cuda"]].concat());
    assert!(told.contains("there is no GPU 8, only 8 GPUs; --device cuda:0"), "{told}");
    assert_eq!(told.lines().count(), 1, "{told}");
}
