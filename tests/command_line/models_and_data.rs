//! `generate`, `eval` and `export` with models, prompts and data that are wrong, odd or damaged.

use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::process::Output;

use super::{TINY, ferrotron, folder_with_text, succeeded, train};

/// A run in `run` and the same model, with its tokenizer, as a Hugging Face folder in `hf`.
fn run_and_folder(path: &Path) {
    succeeded(train(path, &["--save", "run"]));
    succeeded(ferrotron(path, &["export", "--load", "run", "--output", "hf"]));
    std::fs::copy(path.join("run/iter_0000020/tokenizer.json"), path.join("hf/tokenizer.json"))
        .unwrap();
}

/// Overwrites every number of an f32 tensor.
fn set_weights(folder: &Path, tensor: &str, value: f32) {
    let file = folder.join("model.safetensors");
    let (mut bytes, (start, header)) = (std::fs::read(&file).unwrap(), header(folder));
    let offsets = &header[tensor]["data_offsets"];
    let [from, to] = [0, 1].map(|i| start + offsets[i].as_u64().unwrap() as usize);
    bytes[from..to].chunks_mut(4).for_each(|x| x.copy_from_slice(&value.to_le_bytes()));
    std::fs::write(file, bytes).unwrap();
}

/// The header of `model.safetensors`, and where it ends.
fn header(folder: &Path) -> (usize, serde_json::Value) {
    let file = std::fs::read(folder.join("model.safetensors")).unwrap();
    let end = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    (end, serde_json::from_slice(&file[8..end]).unwrap())
}

/// The one line of an error with this exit code; nothing may be on standard output.
pub fn refused(output: Output, code: i32) -> String {
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{message}");
    assert!(message.lines().count() == 1 && !message.contains("panicked"), "{message}");
    message
}

/// The dtype in `config.json` and those in the header of `model.safetensors`.
fn dtypes(folder: &Path) -> (String, Vec<String>) {
    let config = std::fs::read(folder.join("config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
    let (_, header) = header(folder);
    let tensors = header.as_object().unwrap().values();
    let mut found: Vec<String> =
        tensors.filter_map(|tensor| Some(tensor["dtype"].as_str()?.to_string())).collect();
    found.sort();
    found.dedup();
    (config["dtype"].as_str().unwrap().to_string(), found)
}

#[test]
fn numbers_that_are_not_finite_are_errors() {
    let folder = folder_with_text();
    let path = folder.path();
    run_and_folder(path);
    let eval = |more: &[&str]| {
        ferrotron(path, &[&["eval", "--load", "hf", "--data", "text.txt"], more].concat())
    };
    let generate = || ferrotron(path, &["generate", "--load", "hf", "--prompt", "x"]);
    assert!(succeeded(eval(&[])).starts_with("loss "));
    for (value, named) in [(f32::NAN, "is NaN"), (f32::NEG_INFINITY, "is -inf")] {
        set_weights(&path.join("hf"), "transformer.wpe.weight", value);
        for more in [&[][..], &["--json"]] {
            let output = eval(more);
            assert!(output.stdout.is_empty());
            let line = refused(output, 1);
            assert!(line.contains("the loss is") && line.contains(named), "{line}");
            assert!(line.contains("wpe.weight[0, 0]"), "{line}");
        }
        let line = refused(generate(), 1);
        assert!(line.contains("wpe.weight[0, 0]") && line.contains(named), "{line}");
        // Written as they are, but not without a word.
        let output = ferrotron(path, &["export", "--load", "hf", "--output", "again"]);
        let warning = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success() && warning.contains("wpe.weight[0, 0]"), "{warning}");
        let file = |name: &str| std::fs::read(path.join(name).join("model.safetensors")).unwrap();
        assert_eq!(file("hf"), file("again"));
    }
    // All weights are finite, but activations overflow.
    set_weights(&path.join("hf"), "transformer.wpe.weight", 0.0);
    set_weights(&path.join("hf"), "transformer.h.0.mlp.c_fc.weight", f32::MAX);
    let line = refused(eval(&["--valid-fraction", "1", "--micro-batch-size", "1"]), 1);
    assert!(line.contains("first in batch 0, tokens 0 to 8, though"), "{line}");
    assert!(line.contains("f32 overflows"), "{line}");
    let line = refused(generate(), 1);
    assert!(line.contains("a logit after token 1 is") && line.contains("f32 overflows"), "{line}");
}

#[test]
fn weights_keep_their_type_unless_told_otherwise() {
    let folder = folder_with_text();
    let path = folder.path();
    for (dtype, name, stored) in [
        ("f64", "float64", "F64"),
        ("f32", "float32", "F32"),
        ("bf16", "bfloat16", "BF16"),
        ("f16", "float16", "F16"),
    ] {
        let [run, once, twice] = ["run", "once", "twice"].map(|what| format!("{dtype}-{what}"));
        succeeded(train(path, &["--dtype", dtype, "--save", &run]));
        for (from, to) in [(&run, &once), (&once, &twice)] {
            succeeded(ferrotron(path, &["export", "--load", from, "--output", to]));
            assert_eq!(dtypes(&path.join(to)), (name.to_string(), vec![stored.to_string()]));
        }
        let file = |name: &str| std::fs::read(path.join(name).join("model.safetensors")).unwrap();
        assert_eq!(file(&once), file(&twice), "{dtype}");
        let other = if dtype == "f32" { ("bf16", "BF16") } else { ("f32", "F32") };
        let export = ["export", "--load", &once, "--output", "other", "--dtype", other.0];
        succeeded(ferrotron(path, &export));
        assert_eq!(dtypes(&path.join("other")).1, [other.1]);
    }
}

#[test]
fn the_defaults_of_schedules_fit_any_run() {
    let folder = folder_with_text();
    let wsd = ["--lr-decay-style", "WSD", "--sample-length", "0"];
    for more in [
        &["--train-iters", "1"][..],
        &["--train-iters", "9"],
        &["--train-iters", "20", "--lr-warmup-iters", "19"],
        &["--train-iters", "40", "--lr-decay-iters", "1"],
        &["--train-iters", "40", "--lr-decay-iters", "2", "--lr-decay-style", "cosine"],
    ] {
        succeeded(train(folder.path(), &[&wsd, more].concat()));
    }
    for (typed, named) in [("0", "1..=5"), ("6", "got 6")] {
        let more = ["--train-iters", "5", "--lr-wsd-decay-iters", typed];
        let line = refused(train(folder.path(), &[&wsd[..], &more].concat()), 2);
        assert!(line.contains("--lr-wsd-decay-iters") && line.contains(named), "{line}");
    }
}

#[test]
fn prompts_and_sampling_at_the_edges() {
    let folder = folder_with_text();
    let path = folder.path();
    run_and_folder(path);
    let generate = |more: &[&str]| {
        ferrotron(path, &[&["generate", "--load", "run", "--prompt", "line"], more].concat())
    };
    assert_eq!(succeeded(generate(&["--max-new-tokens", "0"])), "line\n");
    let greedy = succeeded(generate(&["--temperature", "0"]));
    assert_eq!(greedy.trim_end_matches('\n').chars().count(), 304, "{greedy:?}");
    assert_eq!(succeeded(generate(&["--top-k", "1", "--seed", "7"])), greedy);
    let all = succeeded(generate(&["--top-k", "18446744073709551615"]));
    assert_eq!(all, succeeded(generate(&[])));
    // A prompt that is longer than the context, and one that fills it.
    for prompt in ["a small text.\nline", "a small "] {
        let more = ["--max-new-tokens", "3", "--prompt", prompt];
        assert!(
            succeeded(ferrotron(path, &[&["generate"][..], &more, &["--load", "hf"]].concat()))
                .starts_with(prompt)
        );
    }
    // Several are continued as each alone.
    let alone = |prompt: &str| {
        let more = ["--load", "run", "--max-new-tokens", "9", "--prompt", prompt];
        succeeded(ferrotron(path, &[&["generate"][..], &more].concat()))
    };
    let [line, small] = ["line", "a small "].map(alone);
    let together = succeeded(generate(&["--prompt", "a small ", "--max-new-tokens", "9"]));
    assert_eq!(together, format!("--- text 1 of 2\n{line}--- text 2 of 2\n{small}"));
    std::fs::write(path.join("prompts"), "line\na small \n").unwrap();
    std::fs::write(path.join("gap"), "line\n\nline\n").unwrap();
    let of_file = |file: &str| {
        let more = ["--load", "run", "--max-new-tokens", "9", "--prompts-file", file];
        ferrotron(path, &[&["generate"][..], &more].concat())
    };
    assert_eq!(succeeded(of_file("prompts")), together);
    let more = ["--prompt=line", "--prompt=-"];
    let line = refused(ferrotron(path, &[&["generate", "--load", "run"][..], &more].concat()), 1);
    assert!(line.contains("--prompt: tokenizer: character '-'"), "{line}");
    for (file, named) in [("gap", "'gap' has an empty line 2"), ("gone", "'gone' cannot be read")] {
        let line = refused(of_file(file), 2);
        assert!(line.contains(named), "{line}");
    }
    std::fs::remove_file(path.join("hf/tokenizer.json")).unwrap();
    std::fs::create_dir(path.join("none")).unwrap();
    for (more, code, named) in [
        (&["--prompt", ""][..], 2, "--prompt: is empty"),
        (&["--prompt", "li\u{2603}"], 1, "--prompt: tokenizer: character '\u{2603}'"),
        (&["--temperature", "-1"], 2, "--temperature must be at least 0 and finite, got -1"),
        (&["--temperature", "NaN"], 2, "--temperature must be at least 0 and finite, got NaN"),
        (&["--top-k", "0"], 2, "--top-k must be at least 1, got 0"),
        (&["--top-p", "0"], 2, "--top-p must be above 0 and at most 1, got 0"),
        (&["--load", "none"], 1, "'none' is not a checkpoint"),
        (&["--load", "absent"], 1, "there is no 'absent'"),
        (&["--load", "hf"], 2, "hf has no tokenizer: put its tokenizer.json into hf"),
    ] {
        let line = refused(generate(more), code);
        assert!(line.contains(named), "{more:?}: {line}");
    }
    for (more, named) in [
        (["--max-new-tokens", "-1"], "--max-new-tokens"),
        (["--top-k", "-1"], "--top-k"),
        (["--seed", "-1"], "--seed"),
    ] {
        let output = generate(&more);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.contains(named) && message.contains("-1"), "{message}");
    }
}

#[test]
fn evaluations_of_the_wrong_thing() {
    let folder = folder_with_text();
    let path = folder.path();
    run_and_folder(path);
    std::fs::write(path.join("one.txt"), "l").unwrap();
    std::fs::write(path.join("other.txt"), "\u{2603}").unwrap();
    for (more, code, named) in [
        (&["--load", "hf"][..], 2, "--data: must be given"),
        (&["--load", "absent"], 1, "there is no 'absent'"),
        (&["--valid-fraction", "0"], 2, "--valid-fraction: is the share that is evaluated"),
        (&["--valid-fraction", "1.5"], 2, "above 0, at most 1, got 1.5"),
        (&["--valid-fraction", "NaN"], 2, "got NaN"),
        (&["--seq-length", "9"], 2, "--seq-length: 9 is more than the 8 tokens"),
        (&["--seq-length", "0"], 2, "--seq-length 0"),
        (&["--micro-batch-size", "0"], 2, "--micro-batch-size 0"),
        (&["--data", "absent.txt"], 1, "cannot open 'absent.txt'"),
        (&["--data", "one.txt", "--valid-fraction", "1"], 1, "has 1 tokens, but needs at least 2"),
        (&["--data", "other.txt", "--valid-fraction", "1"], 1, "other.txt"),
    ] {
        let load = if more.contains(&"--load") { &[][..] } else { &["--load", "run"] };
        let line = refused(ferrotron(path, &[&["eval"], load, more].concat()), code);
        assert!(line.contains(named), "{more:?}: {line}");
    }
    std::fs::remove_file(path.join("text.txt")).unwrap();
    let line = refused(ferrotron(path, &["eval", "--load", "run"]), 1);
    assert!(line.contains("--data of the run: data: cannot open '/"), "{line}");
    assert!(line.contains("/text.txt'"), "{line}");
}

#[test]
fn data_files_that_are_empty_or_of_another_machine() {
    let folder = folder_with_text();
    let path = folder.path();
    std::fs::create_dir(path.join("texts")).unwrap();
    std::fs::copy(path.join("text.txt"), path.join("texts/b.txt")).unwrap();
    std::fs::write(path.join("texts/a.txt"), "").unwrap();
    let output = train(path, &["--data", "texts", "--save", "run"]);
    let warning = String::from_utf8_lossy(&output.stderr).into_owned();
    succeeded(output);
    assert!(warning.contains("left out, for they are empty: 'texts/a.txt'"), "{warning}");
    let output = ferrotron(path, &["eval", "--load", "run"]);
    let warning = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && warning.contains("/texts/a.txt'"), "{warning}");

    let header = [20_240_520_i32, 1, 4].iter().flat_map(|word| word.to_be_bytes());
    let mut shard: Vec<u8> = header.collect();
    shard.resize(1024, 0);
    shard.extend([0, 1, 0, 2, 0, 3, 0, 4]);
    std::fs::write(path.join("be.bin"), shard).unwrap();
    let line = refused(train(path, &["--data", "be.bin", "--tokenizer", "gpt2"]), 1);
    assert!(line.contains("'be.bin' is a big-endian llm.c shard"), "{line}");
}

/// Plain text is what no other format is, so files of documents would be read with their JSON or their compression.
#[test]
fn files_of_documents_are_told_apart_from_text() {
    let folder = folder_with_text();
    let line = "{\"text\": \"A document of a few words.\"}\n".repeat(40);
    std::fs::write(folder.path().join("a.jsonl"), line).unwrap();
    std::fs::write(folder.path().join("b.parquet"), [0xff, 0xfe, 0x00, 0x01].repeat(100)).unwrap();
    let train = |data: &str| {
        let words = ["train", "--data", data, "--valid-data", "text.txt", "--tokenizer", "gpt2"];
        ferrotron(folder.path(), &[&words[..], TINY].concat())
    };
    let told = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
    let warning = |file: &str| {
        format!("warning: '{file}' is read as plain text: ferrotron tokenize --input {file} makes")
    };
    for (file, trains) in [("a.jsonl", true), ("b.parquet", false)] {
        let output = train(file);
        assert_eq!(output.status.success(), trains, "{}", told(&output));
        assert_eq!(told(&output).matches(&warning(file)).count(), 1, "{}", told(&output));
    }
    assert!(!told(&train("text.txt")).contains("is read as plain text"));
}

/// Bytes are read in place, other text is tokenized in memory.
#[test]
fn much_text_is_recommended_to_be_tokenized_once() {
    let folder = folder_with_text();
    let path = folder.path();
    // A sparse file whose last byte ends the call before it is tokenized.
    let mut file = std::fs::File::create(path.join("large.txt")).unwrap();
    file.set_len(101_000_000).unwrap();
    file.seek(SeekFrom::End(0)).unwrap();
    file.write_all(&[0xff]).unwrap();
    for (tokenizer, data, told) in
        [("gpt2", "large.txt", true), ("gpt2", "text.txt", false), ("byte", "large.txt", false)]
    {
        let words = ["train", "--data", data, "--valid-data", "text.txt", "--tokenizer", tokenizer];
        let output = ferrotron(path, &[&words[..], TINY].concat());
        assert_eq!(output.status.success(), !told);
        let lines = String::from_utf8_lossy(&output.stderr).into_owned();
        let warning = "warning: each rank tokenizes 101 MB of text and keeps the tokens in memory: ferrotron tokenize";
        assert_eq!(lines.contains(warning), told, "{tokenizer} {data}: {lines}");
    }
}
