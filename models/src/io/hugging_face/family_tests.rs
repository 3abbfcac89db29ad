//! Every family against `transformers` (numbers checked in under tests/hf/families), there and back.

use super::tests::numbers;
use super::*;
use crate::model::config::ActivationKind;
use crate::model::generate::{Sampling, generate};
use crate::model::gpt::{Gpt, GptConfig, WindowPattern};
use ferrotron_autograd::no_grad;
use ferrotron_nn::{Context, Module, Param, RopeScaling, Scope};
use ferrotron_tensor::{DType, Device, Result, Tensor};
use serde_json::Value;
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// The folders, with their families.
const FOLDERS: [(&str, &str); 11] = [
    ("gpt2", "gpt2"),
    ("llama", "llama"),
    ("smollm", "llama"),
    ("llama-biases", "llama"),
    ("mistral", "mistral"),
    ("qwen2", "qwen2"),
    ("qwen2-windows", "qwen2"),
    ("qwen3", "qwen3"),
    ("gemma2", "gemma2"),
    ("pythia", "gpt_neox"),
    ("neox-sequential", "gpt_neox"),
];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/hf/families").join(name)
}

/// The numbers that `transformers` computes from the model in `folder`.
struct Expected(Value);

impl Expected {
    fn read(folder: &Path) -> Expected {
        let text = fs::read_to_string(folder.join("expected.json")).unwrap();
        Expected(serde_json::from_str(&text).unwrap())
    }

    fn numbers(&self, name: &str) -> Vec<f64> {
        numbers(&self.0[name])
    }

    fn tokens(&self, name: &str) -> Vec<u32> {
        self.numbers(name).into_iter().map(|token| token as u32).collect()
    }
}

fn read(folder: &Path, dtype: DType) -> Result<Gpt> {
    import(folder, &Device::cpu(1)?, dtype)
}

#[test]
fn logits_loss_and_greedy_text_equal_those_of_transformers() -> Result<()> {
    for (name, _) in FOLDERS {
        let folder = fixture(name);
        let expected = Expected::read(&folder);
        let (tokens, want) = (expected.tokens("tokens"), expected.numbers("logits"));
        let (batch, length) = (2, tokens.len() / 2);
        let targets: Vec<i64> = (0..tokens.len())
            .map(|i| if i % length == length - 1 { -100 } else { i64::from(tokens[i + 1]) })
            .collect();
        for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-5)] {
            let gpt = read(&folder, dtype)?;
            let device = gpt.params()[0].leaf().device().clone();
            let tokens = Tensor::from_slice(&device, &tokens, &[batch, length])?;
            let targets = Tensor::from_slice(&device, &targets, &[batch, length])?;
            let ctx = Context::eval(batch, length);
            let got = no_grad(|| gpt.forward(&ctx, &tokens))?.value().to_f64()?;
            let gap = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(gap < tolerance && got.len() == want.len(), "{name} {dtype}: logits {gap:e}");
            let loss = no_grad(|| gpt.loss(&ctx, &tokens, &targets))?;
            let mean = loss.sum.value().item()? / loss.num_valid_tokens()? as f64;
            let gap = (mean - expected.numbers("loss")[0]).abs();
            assert!(gap < tolerance, "{name} {dtype}: loss {gap:e}");

            let greedy =
                Sampling { temperature: 0.0, top_k: None, top_p: None, seed: 1, end_of_text: None };
            let (prompt, want) = (expected.tokens("prompt"), expected.tokens("greedy"));
            let all = generate(&gpt, &prompt, want.len(), &greedy, |_| ControlFlow::Continue(()))?;
            assert_eq!(all[all.len() - want.len()..], want, "{name} {dtype}");
        }
    }
    Ok(())
}

#[test]
fn every_family_comes_in_and_goes_out_bit_by_bit() -> Result<()> {
    for (name, family) in FOLDERS {
        let (folder, dir) = (fixture(name), tempfile::tempdir().unwrap());
        let gpt = read(&folder, DType::F32)?;
        assert_eq!(model_type(&folder)?, family);
        export_as(&gpt, family, dir.path())?;
        assert_eq!(model_type(dir.path())?, family);
        assert_eq!(read_config(dir.path())?, *gpt.config(), "{name}");
        let weights = |folder: &Path| fs::read(folder.join("model.safetensors")).unwrap();
        let (theirs, ours) = (weights(&folder), weights(dir.path()));
        let theirs = safetensors::SafeTensors::deserialize(&theirs).unwrap();
        let ours = safetensors::SafeTensors::deserialize(&ours).unwrap();
        assert_eq!(ours.len(), theirs.len(), "{name}");
        for (tensor, value) in theirs.tensors() {
            assert_eq!(ours.tensor(&tensor).unwrap(), value, "{name}: {tensor}");
        }
    }
    Ok(())
}

/// A model goes to any family that holds it, and says the same there.
#[test]
fn a_model_moves_to_another_family() -> Result<()> {
    for (name, other) in [("smollm", "mistral"), ("llama", "mistral"), ("mistral", "qwen3")] {
        let dir = tempfile::tempdir().unwrap();
        let gpt = read(&fixture(name), DType::F32)?;
        match export_as(&gpt, other, dir.path()) {
            Ok(()) => {
                let again = read(dir.path(), DType::F32)?;
                assert_eq!(again.config(), gpt.config());
                for (a, b) in again.params().iter().zip(gpt.params()) {
                    assert_eq!(a.leaf().value()?.bytes()?, b.leaf().value()?.bytes()?);
                }
            }
            Err(error) => {
                let wanted = "cannot be a Hugging Face qwen3, where it would have qk_layernorm true instead of false";
                assert_eq!(other, "qwen3", "{error}");
                assert!(error.to_string().ends_with(wanted), "{error}");
            }
        }
    }
    Ok(())
}

#[test]
fn an_export_takes_the_first_family_that_holds_the_model() -> Result<()> {
    let llama = GptConfig::llama(13, 1, 8, 2, 1, 8);
    let rotated = GptConfig { rope_scaling: Some(RopeScaling::llama3(8.0)), ..llama.clone() };
    let window = GptConfig { window_size: Some(4), ..llama.clone() };
    let biased = GptConfig { add_qkv_bias: true, ..window.clone() };
    let normed = GptConfig { qk_layernorm: true, ..llama.clone() };
    let gpt2 = GptConfig::gpt2(13, 1, 8, 2, 8);
    let gemma = GptConfig::gemma2(13, 2, 8, 2, 1, 8);
    let all_biases = GptConfig { add_bias: true, ..llama.clone() };
    let listed = GptConfig {
        num_layers: 3,
        window_attn_skip_freq: Some(WindowPattern::Blocks(vec![0, 1, 0])),
        ..biased.clone()
    };
    for (config, family) in [
        (&gpt2, "gpt2"),
        (&llama, "llama"),
        (&rotated, "llama"),
        (&window, "mistral"),
        (&biased, "qwen2"),
        (&normed, "qwen3"),
        (&gemma, "gemma2"),
        (&all_biases, "llama"),
        (&listed, "qwen2"),
        // Every block has the window, whatever the pattern is called.
        (
            &GptConfig {
                window_attn_skip_freq: Some(WindowPattern::SkipEvery(2)),
                ..window.clone()
            },
            "mistral",
        ),
        (&GptConfig { query_pre_attn_scalar: Some(4.0), ..llama.clone() }, "llama"),
    ] {
        assert_eq!(families::family_of(config)?.model_type, family);
    }
    Ok(())
}

/// Files of both versions of `transformers`, and variants that are not supported.
#[test]
fn variants_are_read_or_refused_by_name() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let read = |name: &str, changes: &[(&str, Value)]| {
        let text = fs::read_to_string(fixture(name).join("config.json")).unwrap();
        let mut config: Value = serde_json::from_str(&text).unwrap();
        for (field, value) in changes {
            config[*field] = value.clone();
        }
        fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        read_config(dir.path())
    };
    let null = Value::Null;
    let old = serde_json::json!({ "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192 });
    let version_4 = [
        ("rope_parameters", null.clone()),
        ("rope_theta", 500_000.0.into()),
        ("rope_scaling", old),
    ];
    let config = read("llama", &version_4)?;
    assert_eq!(config.rotary_base, 500_000.0);
    assert_eq!(config.rope_scaling, Some(RopeScaling::llama3(8.0)));
    assert_eq!(read("mistral", &[("sliding_window", null.clone())])?.window_size, None);
    let windows = |first: u64| {
        let on = ("use_sliding_window", true.into());
        [
            on,
            ("sliding_window", 7.into()),
            ("max_window_layers", first.into()),
            ("layer_types", Value::Null),
        ]
    };
    assert_eq!(read("qwen2", &windows(0))?.window_size, Some(7));
    assert_eq!(read("qwen2", &windows(2))?.window_size, None);
    let some = read("qwen2", &windows(1))?;
    assert_eq!((some.window_size, some.block_attention(0).window), (Some(7), None));
    assert_eq!(some.block_attention(1).window, Some(7));
    let attention = read("llama", &[("attention_bias", true.into())])?;
    assert_eq!((attention.add_attention_bias, attention.add_mlp_bias), (true, false));
    // As GPT-NeoX-20B's file.
    let fast = read("pythia", &[("hidden_act", "gelu_fast".into())])?;
    assert_eq!(fast.activation, ActivationKind::GeluTanh);
    // As Gemma 2's first files: fields that have their defaults are left out.
    let defaults = ["tie_word_embeddings", "layer_types", "hidden_activation", "head_dim"];
    let gemma = read("gemma2", &defaults.map(|name| (name, null.clone())))?;
    assert_eq!(gemma.kv_channels, 6, "a head_dim of null is hidden / heads");
    assert!(gemma.tie_embeddings);
    assert_eq!(gemma.window_attn_skip_freq, Some(WindowPattern::SkipEvery(2)));
    let yarn = serde_json::json!({ "rope_type": "yarn", "factor": 4.0 });
    for (name, changes, wanted) in [
        ("gemma2", vec![("hidden_activation", "gelu".into())], "only gelu_pytorch_tanh"),
        ("gemma2", vec![("use_bidirectional_attention", true.into())], "only false"),
        ("gemma2", vec![("layer_types", vec!["full_attention"].into())], "1 layer_types for 3"),
        (
            "qwen2-windows",
            vec![("layer_types", vec!["chunked_attention"; 3].into())],
            "has layer type \"chunked_attention\": supported are sliding_attention, full_attention",
        ),
        ("llama", vec![("hidden_act", "gelu".into())], "has hidden_act 'gelu': only silu"),
        ("llama", vec![("rope_parameters", yarn)], "has rope_type 'yarn': supported are default"),
        ("pythia", vec![("attention_bias", false.into())], "has attention_bias false: only true"),
        ("qwen3", vec![("head_dim", "wide".into())], "has head_dim \"wide\""),
    ] {
        let error = read(name, &changes).unwrap_err().to_string();
        assert!(error.contains(wanted) && !error.contains('\n'), "{error}");
    }
    Ok(())
}

/// Every known family that is not supported is refused with the switch that it would need.
#[test]
fn other_families_are_refused_with_the_switch_that_they_need() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |name: &str| {
        let config = serde_json::json!({ "model_type": name }).to_string();
        fs::write(dir.path().join("config.json"), config).unwrap();
        model_kind(dir.path()).unwrap_err().to_string()
    };
    let supported =
        "supported are gpt2, llama, mistral, qwen2, qwen3, gemma2, gpt_neox, bert, megatron-bert";
    for (name, switch) in families::OTHERS {
        let wanted = format!("describes model_type '{name}', which needs {switch}: {supported}");
        assert!(refused(name).ends_with(&wanted), "{}", refused(name));
        assert!(!families::FAMILIES.iter().any(|family| family.model_type == *name), "{name}");
    }
    for (name, part) in [
        ("mixtral", "a mixture of experts"),
        ("bloom", "ALiBi"),
        ("falcon", "multi-query attention"),
        ("gpt_bigcode", "multi-query attention"),
        ("gptj", "a parallel residual with one norm"),
        ("olmo2", "norms behind attention and MLP alone"),
        ("mamba", "state-space layers"),
        ("deepseek_v3", "multi-head latent attention"),
        ("smollm3", "rotary positions in some blocks only"),
        ("granite", "multipliers of embeddings"),
    ] {
        assert!(refused(name).contains(&format!("'{name}', which needs ")), "{name}");
        assert!(refused(name).contains(part), "{}", refused(name));
    }
    let names: Vec<&str> = families::OTHERS.iter().map(|(name, _)| *name).collect();
    assert!(names.is_sorted(), "{names:?}");
    // A family that nobody knows.
    assert!(refused("made_up").ends_with(&format!("model_type 'made_up': {supported}")));
}

/// The same files come out of a model that is not in memory, and few parameters are held at a time.
#[test]
fn parameters_are_read_once_and_few_are_held() -> Result<()> {
    let many_blocks = GptConfig::llama(65, 40, 32, 4, 2, 16);
    let of_families = FOLDERS.iter().map(|(name, _)| read_config(&fixture(name)));
    for config in of_families.chain([Ok(many_blocks)]) {
        let config = config?;
        let scope = |device: &Device| Scope::new(device, DType::F32, 1234);
        let gpt = Gpt::new(&scope(&Device::cpu(1)?), &config)?;
        let described = Gpt::new(&scope(&Device::fake(1)?), &config)?;
        let dir = tempfile::tempdir().unwrap();
        let [whole, streamed] = ["whole", "streamed"].map(|name| dir.path().join(name));
        export(&gpt, &whole)?;
        let (params, device) = (gpt.params(), Device::cpu(1)?);
        let mut reads: Vec<String> = Vec::new();
        export_from(&described, None, &streamed, &mut |param| {
            reads.push(param.name().to_string());
            let value = params.iter().find(|other| other.name() == param.name()).unwrap();
            let value = value.leaf().value()?;
            Tensor::from_slice(&device, &value.to_vec::<f32>()?, value.dims())
        })?;
        for file in ["model.safetensors", "config.json"] {
            let [a, b] = [&whole, &streamed].map(|folder| fs::read(folder.join(file)).unwrap());
            assert!(a == b, "{file} of {config:?}");
        }
        let mut names: Vec<&str> = params.iter().map(Param::name).collect();
        names.sort_unstable();
        reads.sort_unstable();
        assert_eq!(reads, names, "{config:?}");
        let bytes = |param: &Param| 4 * param.leaf().dims().iter().product::<usize>();
        let largest = params.iter().map(bytes).max().unwrap();
        // Four that are held, one being read, and the copies of a part that is being written.
        let (peak, limit) = (device.memory().peak, 8 * largest + 65_536);
        assert!(peak <= limit, "{peak} of {limit} bytes for {config:?}");
        if config.num_layers == 40 {
            assert!(3 * limit < params.iter().map(bytes).sum(), "the limit says nothing");
        }
    }
    Ok(())
}
