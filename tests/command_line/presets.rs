//! `--preset`: the published numbers of parameters, counted on a device without memory, and options that change a preset.

use super::models_and_data::refused;
use super::{ferrotron, folder_with_text, succeeded};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

/// The parameters of each model as Hugging Face counts them in its files.
const PUBLISHED: &[(&str, u64)] = &[
    ("gemma2-2b", 2_614_341_888),
    ("gemma2-9b", 9_241_705_984),
    ("gemma2-27b", 27_227_128_320),
    ("llama2-7b", 6_738_415_616),
    ("llama2-13b", 13_015_864_320),
    ("llama2-70b", 68_976_648_192),
    ("llama3-8b", 8_030_261_248),
    ("llama3-70b", 70_553_706_496),
    ("llama3.1-8b", 8_030_261_248),
    ("llama3.1-70b", 70_553_706_496),
    ("llama3.1-405b", 405_853_388_800),
    ("llama3.2-1b", 1_235_814_400),
    ("llama3.2-3b", 3_212_749_824),
    ("tinyllama-1.1b", 1_100_048_384),
    ("mistral-7b", 7_241_732_096),
    ("mistral-7b-v0.3", 7_248_023_552),
    ("qwen2-0.5b", 494_032_768),
    ("qwen2-1.5b", 1_543_714_304),
    ("qwen2-7b", 7_615_616_512),
    ("qwen2-72b", 72_706_203_648),
    ("qwen2.5-0.5b", 494_032_768),
    ("qwen2.5-1.5b", 1_543_714_304),
    ("qwen2.5-3b", 3_085_938_688),
    ("qwen2.5-7b", 7_615_616_512),
    ("qwen2.5-14b", 14_770_033_664),
    ("qwen2.5-32b", 32_763_876_352),
    ("qwen2.5-72b", 72_706_203_648),
    ("qwen3-0.6b", 596_049_920),
    ("qwen3-1.7b", 1_720_574_976),
    ("qwen3-4b", 4_022_468_096),
    ("qwen3-8b", 8_190_735_360),
    ("qwen3-14b", 14_768_307_200),
    ("qwen3-32b", 32_762_123_264),
    ("smollm-135m", 134_515_008),
    ("smollm-360m", 361_821_120),
    ("smollm-1.7b", 1_711_376_384),
    ("smollm2-135m", 134_515_008),
    ("smollm2-360m", 361_821_120),
    ("smollm2-1.7b", 1_711_376_384),
    // These also in the tables of EleutherAI's pages, which count all.
    ("pythia-14m", 14_067_712),
    ("pythia-31m", 30_494_720),
    ("pythia-70m", 70_426_624),
    ("pythia-160m", 162_322_944),
    ("pythia-410m", 405_334_016),
    ("pythia-1b", 1_011_781_632),
    ("pythia-1.4b", 1_414_647_808),
    ("pythia-2.8b", 2_775_208_960),
    ("pythia-6.9b", 6_857_302_016),
    ("pythia-12b", 11_846_072_320),
    ("gpt-neox-20b", 20_554_567_680),
];

fn run(folder: &Path, line: &str) -> std::process::Output {
    ferrotron(folder, &line.split_whitespace().collect::<Vec<_>>())
}

/// Weights of bf16 on a device that only counts have two bytes for each published parameter.
#[test]
fn presets_have_the_published_sizes() {
    let folder = tempfile::tempdir().unwrap();
    for (preset, parameters) in PUBLISHED {
        let line = format!("memory --preset {preset} --bf16 --seq-length 64 --json");
        let report: Value = serde_json::from_str(&succeeded(run(folder.path(), &line))).unwrap();
        assert_eq!(report["parameters"], *parameters, "{preset}");
        assert_eq!(report["stages"][0]["weights_bytes"], 2 * parameters, "{preset}");
    }
    // Those of GPT-2's shape, whose papers round the numbers, are compared where they are defined.
    let line = refused(run(folder.path(), "memory --preset none"), 2);
    let names: BTreeSet<&str> =
        line.split("the presets are ").nth(1).unwrap().trim().split(", ").collect();
    let own = |name: &&str| !["gpt2-", "megatron-", "ptd-"].iter().any(|p| name.starts_with(p));
    let known: BTreeSet<&str> = PUBLISHED.iter().map(|(name, _)| *name).collect();
    assert_eq!(names.into_iter().filter(own).collect::<BTreeSet<_>>(), known);
}

/// A preset trains in small, with its family's switches, and is exported as its family.
#[test]
fn a_preset_made_small_is_a_model_of_its_family() {
    let folder = folder_with_text();
    let path = folder.path();
    let small = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 4 --kv-channels 8 \
        --ffn-hidden-size 48 --seq-length 16 --micro-batch-size 2 --train-iters 2 --sample-length 0 --threads 1";
    for (preset, family, fields) in [
        (
            "llama3.2-1b",
            "llama",
            &[
                ("rope_theta", "500000.0"),
                ("tie_word_embeddings", "true"),
                ("max_position_embeddings", "131072"),
                ("factor", "32.0"),
            ][..],
        ),
        ("mistral-7b", "mistral", &[("sliding_window", "4096"), ("rope_theta", "10000.0")]),
        ("qwen2.5-0.5b", "qwen2", &[("rms_norm_eps", "1e-6"), ("rope_theta", "1000000.0")]),
        ("qwen3-0.6b", "qwen3", &[("head_dim", "8"), ("tie_word_embeddings", "true")]),
        ("pythia-70m", "gpt_neox", &[("rotary_pct", "0.25"), ("use_parallel_residual", "true")]),
        ("gpt-neox-20b", "gpt_neox", &[("hidden_act", "\"gelu_new\""), ("rotary_pct", "0.25")]),
        ("qwen2.5-14b", "qwen2", &[("rms_norm_eps", "0.00001"), ("rope_theta", "1000000.0")]),
        ("smollm2-135m", "llama", &[("rope_theta", "100000.0"), ("rope_type", "\"default\"")]),
    ] {
        succeeded(run(
            path,
            &format!("train --data text.txt --preset {preset} {small} --save {family}-{preset}"),
        ));
        succeeded(run(path, &format!("export --load {family}-{preset} --output hf-{preset}")));
        let config =
            std::fs::read_to_string(path.join(format!("hf-{preset}/config.json"))).unwrap();
        assert!(config.contains(&format!("\"model_type\": \"{family}\"")), "{config}");
        for (name, value) in fields {
            assert!(config.contains(&format!("\"{name}\": {value}")), "{name} {value}: {config}");
        }
    }
    for (words, part) in [
        (
            "--preset gemma2-2b --architecture llama",
            "'gemma2-2b' is of --architecture gemma2: leave llama out",
        ),
        (
            "--preset llama3-8b --architecture gemma2",
            "'llama3-8b' is of --architecture llama: leave gemma2 out",
        ),
        (
            "--preset pythia-70m --architecture llama",
            "'pythia-70m' is of the family GPT-NeoX: leave llama out",
        ),
    ] {
        let line = refused(run(path, &format!("train --data text.txt {words}")), 2);
        assert!(line.contains("--preset: ") && line.contains(part), "{words}: {line}");
    }
}
