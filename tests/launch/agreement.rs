//! Ranks that were started with different options, checkpoints or data, as by a script: all end with one line.

use super::{MODEL, command, finished, folder_with_text, metrics, port, succeeded, texts, wait};
use std::path::Path;
use std::process::{Child, Output, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Longest that ranks may take to find a difference, on a machine with other work.
const SOON: Duration = Duration::from_secs(30);

/// Runs one rank for each of `ranks`, its words, which stand behind `start`.
fn job<T: AsRef<str>>(folder: &Path, start: &str, ranks: &[T]) -> Vec<Output> {
    let port = port();
    let size = ranks.len().to_string();
    let started = Instant::now();
    let spawn = |(rank, words): (usize, &T)| {
        let words = format!("{start} --rendezvous-port {port} {}", words.as_ref());
        let mut command = command(folder, &words);
        let rank = rank.to_string();
        command.envs([("RANK", &rank), ("LOCAL_RANK", &rank)]);
        command.envs([("WORLD_SIZE", &size), ("LOCAL_WORLD_SIZE", &size)]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut ranks: Vec<Child> = ranks.iter().enumerate().map(spawn).collect();
    ranks.iter_mut().for_each(wait);
    assert!(started.elapsed() < SOON, "it took {:?}", started.elapsed());
    ranks.into_iter().map(|rank| rank.wait_with_output().unwrap()).collect()
}

/// Asserts that all ranks refuse the job with the line `want`.
fn assert_refused(outputs: &[Output], want: &str) {
    for (rank, output) in outputs.iter().enumerate() {
        let (_, message) = texts(output);
        assert_eq!(output.status.code(), Some(2), "rank {rank}: {message}\nwant: {want}");
        assert_eq!(message, format!("ferrotron: rank {rank}: {want}\n"));
    }
}

/// A rank of two takes `--nproc 3` for a request to start more; the other one hears of it.
#[test]
fn nproc_given_to_one_started_rank_ends_both() {
    let folder = folder_with_text();
    let start = format!("{MODEL} --save run --train-iters 6");
    let outputs = job(folder.path(), &start, &["", "--nproc 3"]);
    for (rank, output) in outputs.iter().enumerate() {
        let (_, message) = texts(output);
        assert_eq!(output.status.code(), Some(2), "rank {rank}: {message}");
        assert_eq!(message.lines().count(), 1, "rank {rank}: {message}");
        for part in ["rank 1", "--nproc: 3 would start more ranks", "leave it out"] {
            assert!(message.contains(part), "rank {rank}: {part} is missing: {message}");
        }
    }
}

#[test]
fn ranks_with_other_options_end_with_the_same_line() {
    let folder = folder_with_text();
    let path = folder.path();
    let text = std::fs::read_to_string(path.join("text.txt")).unwrap();
    std::fs::create_dir(path.join("copy")).unwrap();
    std::fs::write(path.join("copy/text.txt"), text).unwrap();
    let here = path.canonicalize().unwrap();
    let start = format!("{MODEL} --save run --train-iters 6 --global-batch-size 12");
    for (rank_0, rank_1, option, values) in [
        ("--lr 1e-3", "--lr 0.002", "--lr", ["0.001", "0.002"]),
        ("--seed 1", "--seed 2", "--seed", ["1", "2"]),
        ("--train-iters 6", "--train-iters 8", "--train-iters", ["6", "8"]),
        ("--ffn-hidden-size 64", "--ffn-hidden-size 64 --swiglu", "--swiglu", ["false", "true"]),
        ("", "--num-layers 4", "--num-layers", ["3", "4"]),
        ("", "--min-lr 0", "--min-lr", ["not given", "0"]),
    ] {
        let want = format!(
            "{option} is {} on ranks 0, 2 and {} on rank 1: give all ranks the same",
            values[0], values[1]
        );
        assert_refused(&job(path, &start, &[rank_0, rank_1, rank_0]), &want);
    }
    // Several --data are one list of files, so no rank has one before its own.
    let start = start.replace("--data text.txt ", "").replace("--save run ", "");
    let paths = [
        ("--save", ["--data text.txt --save run", "--data text.txt --save elsewhere"]),
        // The same text under another name.
        ("--data", ["--save run --data text.txt", "--save run --data copy/text.txt"]),
    ];
    for (option, ranks) in paths {
        let [first, second] = ranks.map(|words| here.join(words.split(' ').next_back().unwrap()));
        let want = format!(
            "{option} is {} on rank 0 and {} on rank 1: give all ranks the same",
            first.display(),
            second.display()
        );
        assert_refused(&job(path, &start, &ranks), &want);
    }
    assert!(!path.join("run").exists() && !path.join("elsewhere").exists());

    // Each rank may have its own of these, and paths may be written in any way.
    let ranks = [
        "--threads 2 --data ./text.txt --save run",
        "--memory-limit 8GiB --lr 0.001 --data text.txt --save ./run",
    ];
    for output in job(path, &format!("{start} --lr 1e-3"), &ranks) {
        succeeded(output);
    }
    assert_eq!(metrics(&path.join("run")).len(), 6);
}

/// Machines with disks of their own may have other contents at the same path.
#[test]
fn ranks_with_other_prompts_end_with_the_same_line() {
    let folder = folder_with_text();
    let path = folder.path();
    let run = format!("{MODEL} --save run --train-iters 1");
    succeeded(finished(command(path, &run)));
    let start = "generate --load run --tensor-model-parallel-size 2 --max-new-tokens 3";
    for output in job(path, start, &["--prompt line", "--prompt file"]) {
        let (out, message) = texts(&output);
        assert_eq!((output.status.code(), &*out), (Some(2), ""), "{message}");
        for part in ["--prompt is digest ", " (texts: 1) on rank 0 and digest ", " on rank 1"] {
            assert!(message.contains(part), "{part} is missing: {message}");
        }
    }
}

#[test]
fn ranks_with_other_data_of_equal_length_end_with_the_same_line() {
    let folder = folder_with_text();
    let machine = folder_with_text();
    let text = std::fs::read_to_string(folder.path().join("text.txt")).unwrap();
    assert!(text.contains("line 0 of"));
    std::fs::write(machine.path().join("text.txt"), text.replace("line 0 of", "line 1 of"))
        .unwrap();
    let start = MODEL.replace("--data text.txt", "--data /proc/self/cwd/text.txt");
    for message in refused_machines(&start, [folder.path(), machine.path()]) {
        assert!(message.contains("the training data is "), "{message}");
        assert!(message.contains(" tokens with checksum "), "{message}");
    }
}

/// Texts of tasks with other contents would give each rank other requests.
#[test]
fn ranks_with_other_data_of_a_task_end_with_a_line_that_names_the_task() {
    let machines = [folder_with_text(), folder_with_text()];
    for (machine, number) in machines.iter().zip([1, 2]) {
        let text = format!("line {number} of line 3\n").repeat(4);
        std::fs::write(machine.path().join("task.txt"), text).unwrap();
    }
    let machines = machines.each_ref().map(TempDir::path);
    let task = "--task-data wikitext=/proc/self/cwd/task.txt";
    let train = MODEL.replace("--data text.txt", "--data /proc/self/cwd/text.txt");
    let train = refused_machines(&format!("{train} --eval-tasks wikitext {task}"), machines);
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hf/tasks");
    let eval = format!("eval --load {} --tasks wikitext {task}", model.display());
    for message in [train, refused_words(&eval, machines)].concat() {
        assert!(message.contains("the data of task wikitext is CRC-32 "), "{message}");
        assert!(message.contains(" on rank 0 and CRC-32 "), "{message}");
    }
}

/// The lines of two ranks that train.
fn refused_machines(start: &str, machines: [&Path; 2]) -> Vec<String> {
    let words = format!("{start} --save /proc/self/cwd/run --train-iters 4");
    refused_words(&words, machines)
}

/// The lines of two ranks whose working folders are their machines: files are read by a name that is the same for both.
fn refused_words(words: &str, machines: [&Path; 2]) -> Vec<String> {
    let port = port();
    let rank = |(rank, folder): (usize, &&Path)| {
        let words = format!("{words} --rendezvous-port {port}");
        let mut command = command(folder, &words);
        let rank = rank.to_string();
        command.envs([("RANK", &*rank), ("LOCAL_RANK", &*rank)]);
        command.envs([("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut ranks: Vec<Child> = machines.iter().enumerate().map(rank).collect();
    ranks.iter_mut().for_each(wait);
    let line = |rank: Child| {
        let output = rank.wait_with_output().unwrap();
        let (_, message) = texts(&output);
        assert_eq!((output.status.code(), message.lines().count()), (Some(2), 1), "{message}");
        message
    };
    ranks.into_iter().map(line).collect()
}

/// Two copies of a Hugging Face folder of which one went on training: the same header, other numbers.
#[test]
fn ranks_with_other_weights_of_equal_shape_end_with_the_same_line() {
    let machines = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hf/families/smollm");
    for machine in &machines {
        std::fs::create_dir(machine.path().join("hf")).unwrap();
        for file in ["config.json", "model.safetensors"] {
            std::fs::copy(source.join(file), machine.path().join("hf").join(file)).unwrap();
        }
        let tokens: Vec<u8> = (0..400_u16).flat_map(|i| (i % 32).to_le_bytes()).collect();
        std::fs::write(machine.path().join("text.bin"), tokens).unwrap();
    }
    let weights = machines[1].path().join("hf/model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&weights, bytes).unwrap();
    let start = "train --load /proc/self/cwd/hf --data /proc/self/cwd/text.bin --vocab-size 32 --seq-length 16";
    for message in refused_machines(start, machines.each_ref().map(TempDir::path)) {
        assert!(message.contains("the Hugging Face folder is config.json "), "{message}");
        assert!(
            message.contains(" on rank 0 and ") && message.contains(" bytes in 1 files"),
            "{message}"
        );
    }
}

#[test]
fn ranks_resume_from_the_checkpoint_that_rank_0_names() {
    let folder = folder_with_text();
    let path = folder.path();
    let here = path.canonicalize().unwrap();
    for (run, seed) in [("k", 1), ("m", 2)] {
        let start = format!("{MODEL} --seed {seed} --train-iters 6 --save-interval 2 --save {run}");
        succeeded(finished(command(path, &format!("{start} --exit-interval 4"))));
    }
    let on = |values: [&str; 2]| {
        let [first, second] = values.map(|run| here.join(run).display().to_string());
        format!("--load is {first} on rank 0 and {second} on rank 1")
    };
    for (ranks, parts) in [
        (["--load k", "--load m"], vec![on(["k", "m"]), "the checkpoint is step 4 with".into()]),
        (
            ["--load k/iter_0000002", "--load k/iter_0000004"],
            vec![on(["k/iter_0000002", "k/iter_0000004"]), "step 2 with index ".into()],
        ),
        (["--load k", ""], vec!["and not given on rank 1".into()]),
        (["", "--load k"], vec!["--load is not given on rank 0 and ".into()]),
        (
            ["--load k", "--load absent"],
            vec![on(["k", "absent"]), "there is no 'absent/iter_0000004' on rank 1".into()],
        ),
    ] {
        let outputs = job(path, &format!("{MODEL} --save together"), &ranks);
        let (_, first) = texts(&outputs[0]);
        let line =
            first.trim_end().strip_prefix("ferrotron: rank 0: ").expect("a line").to_string();
        assert_refused(&outputs, &line);
        for part in parts {
            assert!(line.contains(&part), "{ranks:?}: {part} is missing: {line}");
        }
    }
    // A file that rank 0 cannot open is trained on no rank.
    let absent = "--load: there is no 'absent'; to start a run there, give --save absent as well";
    for (rank, output) in job(path, "train", &["--load absent", "--load k"]).iter().enumerate() {
        let (_, message) = texts(output);
        assert_eq!(output.status.code(), Some(1), "{message}");
        let who = if rank == 0 { "rank 0: " } else { "rank 1: rank 0: " };
        assert_eq!(message, format!("ferrotron: {who}{absent}\n"));
    }
    // An option of one rank alone.
    let want = "--lr is not given on rank 0 and 0.5 on rank 1: give all ranks the same";
    assert_refused(&job(path, "train --load k", &["", "--lr 0.5"]), want);
    // The same in other words.
    let here = here.display();
    for output in job(path, "train", &["--load ./k", &format!("--load {here}/k")]) {
        succeeded(output);
    }
    assert_eq!(metrics(&path.join("k")).len(), 6);
}

#[test]
fn a_rank_that_refuses_ends_all_ranks_with_its_reason() {
    let folder = folder_with_text();
    let path = folder.path();
    let start = format!("{MODEL} --save refused --train-iters 6 --global-batch-size 12");
    // All ranks say it themselves.
    let outputs = job(path, &format!("{start} --num-attention-heads 5"), &["", ""]);
    for (rank, output) in outputs.iter().enumerate() {
        let (_, message) = texts(output);
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.starts_with(&format!("ferrotron: rank {rank}: ")), "{message}");
        assert!(message.lines().count() == 1 && message.contains('5'), "{message}");
    }
    let outputs = job(path, &start, &["", "--memory-limit 1000", ""]);
    for (rank, output) in outputs.iter().enumerate() {
        let (_, message) = texts(output);
        assert_eq!(output.status.code(), Some(2), "{message}");
        let who = if rank == 1 { "rank 1: memory: " } else { ": rank 1: memory: " };
        assert!(message.contains(who) && message.contains("--memory-limit"), "{message}");
        assert_eq!(message.lines().count(), 1, "{message}");
    }
    // Each knows its own stage, and all tell of the one that takes most.
    let cut = format!("{start} --pipeline-model-parallel-size 3 --memory-limit 1000");
    let cut = cut.replace("--global-batch-size 12", "--global-batch-size 4");
    let mut lines = Vec::new();
    for (rank, output) in job(path, &cut, &["", "", ""]).iter().enumerate() {
        let (_, message) = texts(output);
        assert_eq!(output.status.code(), Some(2), "{message}");
        let line = message.strip_prefix(&format!("ferrotron: rank {rank}: memory: rank "));
        lines.push(line.unwrap_or_else(|| panic!("{message}")).to_string());
    }
    assert!(lines[0].contains(", of pipeline stage ") && lines[0].contains("--memory-limit"));
    assert!(lines.iter().all(|line| *line == lines[0] && line.lines().count() == 1), "{lines:?}");
    assert!(!path.join("refused").exists());
}
