//! Comparisons with `transformers` (numbers checked in under tests/hf), there and back, and every refusal.

use super::*;
use crate::io::data::{Sampler, TokenSource};
use crate::model::gpt::{ActivationKind, Gpt, GptConfig};
use crate::training::batch_size::{BatchSize, BatchSizeConfig};
use crate::training::trainer::{Trainer, TrainerConfig};
use ferrotron_autograd::no_grad;
use ferrotron_nn::schedule::LrSchedule;
use ferrotron_nn::{Context, Mode, Module, Param, Scope};
use ferrotron_tensor::{DType, Device, Result, Tensor};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/hf/tiny-gpt2")
}

fn import(folder: &Path, dtype: DType) -> Result<Gpt> {
    super::import(folder, &Device::cpu(1)?, dtype)
}

/// The numbers of nested lists, in order.
pub(super) fn numbers(value: &Value) -> Vec<f64> {
    match value {
        Value::Array(list) => list.iter().flat_map(numbers).collect(),
        Value::Null => Vec::new(),
        other => vec![other.as_f64().unwrap()],
    }
}

fn message<T>(result: Result<T>) -> String {
    let error = result.err().expect("an error").to_string();
    assert!(!error.contains('\n'), "{error}");
    error
}

#[test]
fn logits_and_loss_equal_those_of_transformers() -> Result<()> {
    let text = fs::read_to_string(fixture().join("expected.json")).unwrap();
    let expected: Value = serde_json::from_str(&text).unwrap();
    let tokens: Vec<u32> = numbers(&expected["tokens"]).iter().map(|&x| x as u32).collect();
    let want = numbers(&expected["logits"]);
    let (batch, length) = (2, tokens.len() / 2);
    let targets: Vec<i64> = (0..tokens.len())
        .map(|i| if i % length == length - 1 { -100 } else { i64::from(tokens[i + 1]) })
        .collect();
    for folder in [fixture(), fixture().join("hub")] {
        // In f64 only the expected numbers' own rounding to f32 remains.
        for (dtype, tolerance) in [(DType::F64, 1e-5), (DType::F32, 2e-5)] {
            let gpt = import(&folder, dtype)?;
            let device = gpt.params()[0].leaf().device().clone();
            let tokens = Tensor::from_slice(&device, &tokens, &[batch, length])?;
            let targets = Tensor::from_slice(&device, &targets, &[batch, length])?;
            let ctx = Context::eval(batch, length);
            let got = no_grad(|| gpt.forward(&ctx, &tokens))?.value().to_f64()?;
            let gap = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(gap < tolerance && got.len() == want.len(), "{dtype} logits differ by {gap:e}");
            let loss = no_grad(|| gpt.loss(&ctx, &tokens, &targets))?;
            let mean = loss.sum.value().item()? / loss.num_valid_tokens()? as f64;
            let gap = (mean - expected["loss"].as_f64().unwrap()).abs();
            assert!(gap < tolerance, "{dtype} loss differs by {gap:e}");
        }
    }
    Ok(())
}

#[test]
fn what_goes_out_comes_back_bit_by_bit() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    // FERROTRON_HF_EXPORT keeps the export, for check_export.py.
    let kept = std::env::var_os("FERROTRON_HF_EXPORT").map(PathBuf::from);
    let folder = kept.unwrap_or_else(|| dir.path().join("export"));
    let gpt = import(&fixture(), DType::F32)?;
    export(&gpt, &folder)?;
    let again = import(&folder, DType::F32)?;
    assert_eq!(gpt.config(), again.config());
    assert!(is_folder(&folder) && !is_folder(dir.path()));
    assert!(read_tokenizer(&folder)?.is_none());
    export_tokenizer(&crate::io::tokenizer::Tokenizer::Byte, &folder)?;
    assert!(read_tokenizer(&folder)?.is_none());
    for (a, b) in gpt.params().iter().zip(again.params()) {
        assert_eq!(a.leaf().value()?.to_vec::<f32>()?, b.leaf().value()?.to_vec::<f32>()?);
    }
    // What transformers wrote and what we wrote hold the same bytes for every tensor.
    let read = |path: PathBuf| fs::read(path).unwrap();
    let (theirs, ours) =
        (read(fixture().join("model.safetensors")), read(folder.join("model.safetensors")));
    let theirs = safetensors::SafeTensors::deserialize(&theirs).unwrap();
    let ours = safetensors::SafeTensors::deserialize(&ours).unwrap();
    assert_eq!(ours.len(), theirs.len());
    for (name, tensor) in theirs.tensors() {
        assert_eq!(ours.tensor(&name).unwrap(), tensor, "{name}");
    }
    Ok(())
}

/// A parameter of the fixture as it is stored there.
fn as_stored(param: &Param) -> Result<(String, Tensor)> {
    let value = param.leaf().value()?;
    let (family, config) = config::read_family(&fixture())?;
    let mapping = family.mapping(&config, param.name(), value.dims()[0]).unwrap();
    Ok((mapping.parts[0].0.clone(), mapping.part(&value, 0)?))
}

/// The fixture's tensors with random bits (NaN, infinities and denormal numbers among them) of `dtype`, which
/// decides by name.
fn folder_of_random_bits(folder: &Path, dtype: impl Fn(&str) -> DType) -> Result<()> {
    let device = Device::cpu(1)?;
    let mut tensors = Vec::new();
    for (seed, param) in import(&fixture(), DType::F32)?.params().iter().enumerate() {
        let (name, value) = as_stored(param)?;
        let mut tensor = Tensor::empty(&device, dtype(&name), value.dims())?;
        let mut state = seed as u64 + 1;
        tensor.write_bytes(|bytes| {
            bytes.iter_mut().for_each(|byte| {
                // Constants of Knuth's MMIX generator.
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                *byte = (state >> 56) as u8;
            });
            Ok(())
        })?;
        tensors.push((name, tensor));
    }
    fs::copy(fixture().join("config.json"), folder.join("config.json")).unwrap();
    crate::io::tensor_file::write_tensors(&folder.join("model.safetensors"), None, tensors)
        .unwrap();
    Ok(())
}

#[test]
fn every_dtype_comes_in_and_goes_out_bit_by_bit() -> Result<()> {
    for (dtype, name) in [
        (DType::F64, "float64"),
        (DType::F32, "float32"),
        (DType::BF16, "bfloat16"),
        (DType::F16, "float16"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        folder_of_random_bits(dir.path(), |_| dtype)?;
        let stored = stored_dtypes(dir.path())?;
        assert_eq!((&stored[..], common_dtype(&stored)), (&[dtype][..], dtype));
        export(&import(dir.path(), dtype)?, &out)?;
        let read = |folder: &Path| fs::read(folder.join("model.safetensors")).unwrap();
        let (before, after) = (read(dir.path()), read(&out));
        let before = safetensors::SafeTensors::deserialize(&before).unwrap();
        let after = safetensors::SafeTensors::deserialize(&after).unwrap();
        assert_eq!(after.len(), before.len());
        for (name, tensor) in before.tensors() {
            assert_eq!(after.tensor(&name).unwrap(), tensor, "{dtype} {name}");
        }
        let config: Value =
            serde_json::from_slice(&fs::read(out.join("config.json")).unwrap()).unwrap();
        assert_eq!(config["dtype"], name);
    }
    Ok(())
}

#[test]
fn of_several_dtypes_the_narrowest_that_holds_all_is_taken() -> Result<()> {
    use DType::{BF16, F16, F32, F64};
    for (norms, others, wanted) in
        [(F32, BF16, F32), (BF16, F16, F32), (F16, F64, F64), (F32, F64, F64), (BF16, F32, F32)]
    {
        let dir = tempfile::tempdir().unwrap();
        let is_norm = |name: &str| name.contains("ln_");
        folder_of_random_bits(dir.path(), |name| if is_norm(name) { norms } else { others })?;
        let stored = stored_dtypes(dir.path())?;
        assert!(stored.len() == 2 && stored.contains(&norms) && stored.contains(&others));
        assert_eq!(common_dtype(&stored), wanted);
        let gpt = import(dir.path(), wanted)?;
        for param in &gpt.params() {
            let own = if is_norm(&as_stored(param)?.0) { norms } else { others };
            let wide = param.leaf().value()?;
            let back = wide.cast(own)?.cast(wanted)?;
            let same = |(a, b): (&f64, &f64)| a == b || (a.is_nan() && b.is_nan());
            assert!(wide.to_f64()?.iter().zip(&back.to_f64()?).all(same), "{}", param.name());
        }
    }
    Ok(())
}

#[test]
fn training_goes_on_from_its_weights() -> Result<()> {
    let gpt = import(&fixture(), DType::F64)?;
    let (device, vocab) = (gpt.scope().device().clone(), gpt.config().vocab_size);
    let (samples, length) = (2, 6);
    let tokens = (0..100).map(|i| i * 7 % vocab as u32).collect();
    let sampler = Sampler::new(TokenSource::from_tokens(tokens, vocab)?, length, 1)?;
    let batch = sampler.tokens(0, samples)?;
    let dims = [samples, length];
    let inputs = Tensor::from_slice(&device, &batch.inputs, &dims)?;
    let targets = Tensor::from_slice(&device, &batch.targets, &dims)?;
    let ctx = Context::new(1, 0, Mode::Train, samples, length);
    let want = gpt.loss(&ctx, &inputs, &targets)?.sum.value().item()? / (samples * length) as f64;

    let batch_size = BatchSizeConfig { micro_batch_size: samples, ..BatchSizeConfig::default() };
    let config = TrainerConfig::new(1, LrSchedule::constant(1e-3)?, BatchSize::new(batch_size)?);
    let scope = gpt.scope().clone();
    let report = Trainer::with_model(&scope, &gpt.config().clone(), gpt, config)?.step(&sampler)?;
    assert!((report.loss - want).abs() <= 1e-12 * want, "{}, want {want}", report.loss);
    Ok(())
}

#[test]
fn a_model_in_several_files_and_a_stored_head_are_read() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let gpt = import(&fixture(), DType::F32)?;
    let mut map = serde_json::Map::new();
    let mut tensors: Vec<(String, Tensor)> = Vec::new();
    for param in &gpt.params() {
        let (name, value) = as_stored(param)?;
        if name == "transformer.wte.weight" {
            tensors.push(("lm_head.weight".to_string(), value.clone()));
        }
        tensors.push((name, value));
    }
    for (part, tensors) in tensors.chunks(9).enumerate() {
        let file = format!("model-{part}.safetensors");
        tensors.iter().for_each(|(name, _)| drop(map.insert(name.clone(), file.clone().into())));
        crate::io::tensor_file::write_tensors(&dir.path().join(&file), None, tensors.to_vec())
            .unwrap();
    }
    let index = serde_json::json!({ "weight_map": map });
    fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    fs::copy(fixture().join("config.json"), dir.path().join("config.json")).unwrap();
    let again = import(dir.path(), DType::F32)?;
    for (a, b) in gpt.params().iter().zip(again.params()) {
        assert_eq!(a.leaf().value()?.to_vec::<f32>()?, b.leaf().value()?.to_vec::<f32>()?);
    }
    tensors[0].1 = Tensor::zeros(tensors[0].1.device(), DType::F32, tensors[0].1.dims())?;
    crate::io::tensor_file::write_tensors(&dir.path().join("model.safetensors"), None, tensors)
        .unwrap();
    let error = message(import(dir.path(), DType::F32));
    assert!(
        error.contains("differs from 'transformer.wte.weight', and config.json says"),
        "{error}"
    );
    Ok(())
}

#[test]
fn other_models_are_refused_by_name() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let text = fs::read_to_string(fixture().join("config.json")).unwrap();
    let refused = |what: &str, other: &str| {
        assert!(text.contains(what), "{what}");
        fs::write(dir.path().join("config.json"), text.replace(what, other)).unwrap();
        message(read_config(dir.path()))
    };
    for (what, other, wanted) in [
        ("\"gpt2\"", "\"mamba\"", "'mamba', which needs state-space layers: supported are gpt2, "),
        (
            "\"gpt2\"",
            "\"mixtral\"",
            "'mixtral', which needs a mixture of experts: supported are gpt2, ",
        ),
        ("\"gpt2\"", "\"llama\"", "has hidden_size null"),
        ("gelu_new", "silu", "activation_function 'silu': supported are gelu_new, "),
        ("\"n_embd\": 16", "\"n_embd\": \"wide\"", "has n_embd \"wide\""),
        ("\"n_head\": 2", "\"n_head\": 3", "num-attention-heads 3 does not divide"),
        ("inverse_layer_idx\": false", "inverse_layer_idx\": true", "only false is supported"),
        ("\"add_cross", "add_cross", "is damaged: "),
    ] {
        let error = refused(what, other);
        assert!(error.contains(wanted), "{error}");
    }
    assert!(message(read_config(&dir.path().join("none"))).contains("config.json' cannot be read"));

    let scope = Scope::new(&Device::cpu(1)?, DType::F32, 1);
    let relu = ActivationKind::Relu;
    let odd = GptConfig { activation: relu, ..GptConfig::llama(13, 1, 8, 2, 1, 8) };
    let odd = Gpt::new(&scope, &odd)?;
    let error = message(export(&odd, &dir.path().join("out")));
    let wanted = "where it would have activation \"swiglu\" instead of \"relu\"";
    assert!(error.ends_with(&format!("cannot be a Hugging Face llama, {wanted}")), "{error}");
    let error = message(export_as(&odd, "mistral", &dir.path().join("out")));
    assert!(error.ends_with(&format!("Hugging Face mistral, {wanted}")), "{error}");
    let error = message(export_as(&odd, "opt", &dir.path().join("out")));
    assert!(
        error.contains("'opt', which needs learned positions that begin at 2, and relu: supported"),
        "{error}"
    );
    assert!(!dir.path().join("out").exists());
    Ok(())
}

#[test]
fn malformed_files_are_named() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(fixture().join("config.json"), dir.path().join("config.json")).unwrap();
    let path = dir.path().join("model.safetensors");
    let imported = || message(import(dir.path(), DType::F32));
    assert!(imported().contains("has no model.safetensors"));
    fs::write(dir.path().join("pytorch_model.bin"), "").unwrap();
    assert!(imported().contains("safe_serialization"));
    let bytes = fs::read(fixture().join("model.safetensors")).unwrap();
    let mut garbled = bytes.clone();
    garbled[20] = b'"';
    for (broken, wanted) in [
        (&bytes[..5], "5 bytes are too few"),
        (&bytes[..100], "its header should have"),
        (&bytes[..bytes.len() - 1], "is truncated or has surplus bytes"),
        (&garbled[..], "its header is unreadable"),
        (&[0xFF; 64][..], "its header should have"),
    ] {
        fs::write(&path, broken).unwrap();
        let error = imported();
        assert!(error.contains(wanted) && error.contains("model.safetensors'"), "{error}");
    }
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = std::str::from_utf8(&bytes[8..8 + length]).unwrap();
    for (what, other, wanted) in [
        ("h.0.ln_1.weight", "h.0.ln_9.weight", "has no tensor 'transformer.h.0.ln_1.weight'"),
        ("[16,48]", "[48,16]", "is [48, 16], but config.json makes it [16, 48]"),
        ("\"F32\",\"shape\":[40,16]", "\"I32\",\"shape\":[40,16]", "has dtype I32"),
        (
            "\"F32\",\"shape\":[40,16]",
            "\"U32\",\"shape\":[40,16]",
            "has dtype u32: weights must be",
        ),
    ] {
        let mut broken = bytes.clone();
        assert!(header.contains(what), "{header}");
        broken[8..8 + length].copy_from_slice(header.replace(what, other).as_bytes());
        fs::write(&path, broken).unwrap();
        let error = imported();
        assert!(error.contains(wanted), "{error}");
    }
    Ok(())
}
