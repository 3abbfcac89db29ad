//! Words that do not parse: one line each, with what to do.

use super::models_and_data::refused;
use super::{TINY, ferrotron, folder_with_text, succeeded, train};

#[test]
fn words_that_do_not_parse_get_one_line() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("own.toml"), "num_workers = 2\n").unwrap();
    std::fs::write(folder.path().join("steps.toml"), "train_iters = \"many\"\n").unwrap();
    let scheduler = "override_opt_param_scheduler = true\n";
    std::fs::write(folder.path().join("scheduler.toml"), scheduler).unwrap();
    for (words, want) in [
        ("fly", "unrecognized subcommand 'fly' (`ferrotron -h` lists what there is)"),
        ("trian", "unrecognized subcommand 'trian': do you mean train? ("),
        ("help", "unrecognized subcommand 'help'"),
        ("--foo", "there is no option --foo (`ferrotron -h` lists"),
        (
            "train --seq-lengt 3",
            "there is no option --seq-lengt: do you mean --seq-length? (`ferrotron train -h`",
        ),
        (
            "train --no-such-flag=3",
            "there is no option --no-such-flag (`ferrotron train -h` lists what there is)",
        ),
        ("eval -x", "there is no option -x (`ferrotron eval -h` lists"),
        ("train text.txt", "'text.txt' belongs to no option (`ferrotron train -h` lists"),
        ("train -- text.txt", "'text.txt' belongs to no option"),
        ("checkpoint look", "unrecognized subcommand 'look' (`ferrotron checkpoint -h` lists"),
        (
            "checkpoint ls --newest",
            "there is no option --newest (`ferrotron checkpoint ls -h` lists",
        ),
        ("train --lr", "a value is required for '--lr <X>' but none was supplied"),
        ("train --config", "a value is required for '--config <FILE>'"),
        (
            "train --lr fast",
            "invalid value 'fast' for '--lr <X>': invalid float literal (`ferrotron train -h` lists",
        ),
        ("train --lr a\n\nb", r"invalid value 'a\n\nb' for '--lr <X>': invalid float literal ("),
        ("train --foo\n\nbar", r"there is no option --foo\n\nbar"),
        ("train --nproc 99999999999999999999", "for '--nproc <N>': number too large"),
        (
            "train --swiglu=off",
            "invalid value 'off' for '--swiglu[=<BOOL>]' [possible values: true, false]",
        ),
        (
            "train --optimizer adm",
            "[possible values: adam, sgd, adafactor, lion, muon]: do you mean adam? (`ferrotron train -h`",
        ),
        (
            "train --swiglu --activation relu",
            "'--activation <ACTIVATION>' cannot be used with '--swiglu[=<BOOL>]'",
        ),
        (
            "train --rampup-batch-size 1 2",
            "3 values required for '--rampup-batch-size <START> <INCREMENT> <SAMPLES>'",
        ),
        (
            "train --config steps.toml",
            "invalid value 'many' for '--train-iters <N>': invalid digit found in string (`ferrotron train -h`",
        ),
        (
            "export",
            "the following required arguments were not provided: --load <PATH> --output <DIR> (`ferrotron export",
        ),
        ("completions", "the following required arguments were not provided: <SHELL>"),
        ("completions tcsh", "[possible values: bash, elvish, fish, powershell, zsh]"),
        ("train --num-workers 2", "there is no option --num-workers: one thread reads the samples"),
        ("train --num-workers=2", "there is no option --num-workers: one thread reads the samples"),
        ("train --config own.toml", "own.toml: there is no option --num-workers: one thread reads"),
        (
            "train --tokenizer-type GPT2BPETokenizer",
            "no option --tokenizer-type: --tokenizer takes gpt2",
        ),
        (
            "train --vocab-file vocab.json",
            "no option --vocab-file: --tokenizer takes gpt2, whose files",
        ),
        (
            "train --data-cache-path cache",
            "no option --data-cache-path: the order of samples is computed",
        ),
        (
            "train --override-opt_param-scheduler",
            "no option --override-opt_param-scheduler: options that are given go before",
        ),
        (
            "train --override-opt-param-scheduler",
            "no option --override-opt-param-scheduler: options that are given go before",
        ),
        (
            "train --config scheduler.toml",
            "scheduler.toml: there is no option --override-opt-param-scheduler: options that are",
        ),
        ("train --warmup 0.1", "no option --warmup: --lr-warmup-fraction, --lr-warmup-iters"),
        ("train --fp8-format hybrid", "no option --fp8-format: --bf16 and --fp16"),
        (
            "tokenize --partitions 4",
            "no option --partitions: documents stay in the order of the input; --workers",
        ),
    ] {
        let words: Vec<&str> = words.split(' ').collect();
        let line = refused(ferrotron(folder.path(), &words), 2);
        assert!(line.starts_with("ferrotron: ") && line.contains(want), "{words:?}: {line}");
    }
    for help in ["train --help", "train -h", "--help", "--version", "checkpoint ls --help"] {
        let words: Vec<&str> = help.split(' ').collect();
        assert!(succeeded(ferrotron(folder.path(), &words)).contains("errotron"), "{help}");
    }
}

#[test]
fn without_a_command_help_is_printed_as_an_error() {
    let folder = tempfile::tempdir().unwrap();
    for words in [&[][..], &["checkpoint"]] {
        let output = ferrotron(folder.path(), words);
        let told = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{words:?}: {told}");
        assert!(told.contains("Usage: ferrotron"), "{words:?}: {told}");
        assert!(output.stdout.is_empty(), "{words:?}");
    }
}

/// Proportions that are left out are 0, as in Megatron-LM.
#[test]
fn a_split_with_one_proportion_is_all_for_training() {
    let folder = folder_with_text();
    let path = folder.path();
    std::fs::write(path.join("all.toml"), "split = 100\nsave = \"file\"\n").unwrap();
    let steps = |run: &str| super::losses(path.join(run).join("metrics.jsonl"));
    succeeded(train(path, &["--split", "100,0,0", "--save", "three"]));
    succeeded(train(path, &["--split", "100", "--save", "one"]));
    succeeded(train(path, &["--config", "all.toml"]));
    assert_eq!(steps("three").len(), 20);
    assert!(steps("one") == steps("three") && steps("file") == steps("three"));
    for run in ["one", "file"] {
        succeeded(ferrotron(path, &["train", "--load", run, "--train-iters", "21"]));
        assert_eq!(steps(run).len(), 21);
    }
    let tokenize = "tokenize --input text.txt --output-prefix t --tokenizer byte";
    succeeded(ferrotron(path, &tokenize.split(' ').collect::<Vec<_>>()));
    let set = ["train", "--data-path", "t_text_document", "--tokenizer", "byte", "--split", "100"];
    succeeded(ferrotron(path, &[&set[..], TINY].concat()));
}
