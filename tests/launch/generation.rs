//! Texts that several ranks continue, and exports that a launcher starts on several.

use super::{alone, command, finished, folder_with_text, srun, texts, wait};
use std::path::Path;
use std::process::Command;

/// One prompt, and more of them than ranks.
const ONE: [&str; 2] = ["--prompt", "line 7"];
const FIVE: [&str; 10] = [
    "--prompt",
    "line",
    "--prompt",
    " of ",
    "--prompt",
    "0",
    "--prompt",
    "it.\nline",
    "--prompt",
    "9",
];

/// Continues text with a run, by ranks that share it in a layout.
fn generate(folder: &Path, prompts: &[&str], rule: &str, layout: &str) -> Command {
    let line = format!("generate --load run --max-new-tokens 12 --threads 1 {rule} {layout}");
    let mut command = command(folder, &line);
    command.args(prompts);
    command
}

#[test]
fn ranks_continue_texts_as_one_does() {
    let folder = folder_with_text();
    let path = folder.path();
    alone(path, "run", "--lr 1e-2");
    let layouts = [
        "--nproc 2 --tensor-model-parallel-size 2",
        "--nproc 3 --pipeline-model-parallel-size 3",
        "--nproc 2 --context-parallel-size 2",
        "--nproc 4 --tensor-model-parallel-size 2 --transport tcp",
    ];
    for rule in ["--temperature 0", "--temperature 0.9 --top-k 9 --seed 5"] {
        for prompts in [&ONE[..], &FIVE] {
            let text = |layout: &str| {
                let output = finished(generate(path, prompts, rule, layout));
                let (out, err) = texts(&output);
                assert!(output.status.success(), "{layout}: {err}");
                out
            };
            let want = text("");
            // All prompts and new tokens are there, and more than one text if there are several prompts.
            assert!(want.len() > 12 && want.contains("--- text 5 of 5") == (prompts.len() > 2));
            for layout in layouts {
                assert_eq!(text(layout), want, "{rule} {layout} {prompts:?}");
            }
        }
    }
    let refusal = finished(generate(path, &["--prompt", "\u{2603}"], "", layouts[0]));
    let (out, err) = texts(&refusal);
    assert!(!refusal.status.success() && out.is_empty(), "{out}");
    assert!(err.contains("--prompt: tokenizer: character '\u{2603}'"), "{err}");
}

#[test]
fn a_launcher_gets_one_text_and_one_export() {
    let folder = folder_with_text();
    let path = folder.path();
    alone(path, "run", "");
    let ended = |line: &str, step: &str| {
        let mut tasks = srun(path, line, step);
        tasks.iter_mut().for_each(wait);
        let outputs = tasks.into_iter().map(|task| task.wait_with_output().unwrap());
        let outputs: Vec<_> = outputs.collect();
        for output in &outputs {
            assert!(output.status.success(), "{line}: {}", texts(output).1);
        }
        outputs.iter().map(|output| texts(output).0).collect::<Vec<_>>()
    };
    let line = "generate --load run --prompt line --max-new-tokens 5 --temperature 0";
    let want = texts(&finished(command(path, line))).0;
    assert_eq!(ended(line, "20"), [want, String::new()]);
    let export = "export --load run --dtype f32 --output";
    assert!(finished(command(path, &format!("{export} one"))).status.success());
    assert_eq!(ended(&format!("{export} two"), "21"), ["two\n", ""]);
    for file in ["config.json", "model.safetensors"] {
        let bytes = |folder: &str| std::fs::read(path.join(folder).join(file)).unwrap();
        assert!(bytes("one") == bytes("two"), "{file}");
    }
}
