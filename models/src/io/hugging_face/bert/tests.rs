//! Comparisons with `transformers` (numbers checked in under tests/hf), there and back, and the refusals.

use super::*;
use crate::io::data::{Batch, ChoiceBatch, PairBatch};
use crate::io::hugging_face::tests::numbers;
use crate::training::microbatch::Microbatch;
use crate::training::model::Model;
use ferrotron_autograd::no_grad;
use ferrotron_nn::Context;
use ferrotron_parallel::mesh::Mesh;
use serde_json::Value;
use std::fs;
use std::path::PathBuf;

const NAMES: [&str; 4] = ["bert", "bert-mlm", "megatron-bert", "megatron-bert-mlm"];

/// Models with one logit a choice.
const CHOICES: [&str; 2] = ["bert-choices", "megatron-bert-choices"];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/hf/tiny-bert").join(name)
}

fn gap(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

#[test]
fn logits_and_losses_equal_those_of_transformers() -> Result<()> {
    for name in NAMES {
        let text = fs::read_to_string(fixture(name).join("expected.json")).unwrap();
        let expected: Value = serde_json::from_str(&text).unwrap();
        let ids = |key: &str| numbers(&expected[key]).iter().map(|&x| x as u32).collect::<Vec<_>>();
        let labels =
            |key: &str| numbers(&expected[key]).iter().map(|&x| x as i64).collect::<Vec<i64>>();
        let (tokens, segments, targets) = (ids("tokens"), ids("segments"), labels("labels"));
        let (samples, length) = (2, tokens.len() / 2);
        // In f64 only the expected numbers' own rounding to f32 remains.
        for (dtype, tolerance) in [(DType::F64, 1e-5), (DType::F32, 1e-5)] {
            let device = Device::cpu(1)?;
            let bert = import(&fixture(name), &device, dtype)?;
            let mut batch = PairBatch::blank(0, samples, length, 0);
            batch.tokens.clone_from(&tokens);
            batch.segments.clone_from(&segments);
            batch.targets.clone_from(&targets);
            if bert.config().binary_head {
                batch.order = labels("order");
            }
            let batch = Batch::try_from(batch)?;
            let ctx = Context::eval(samples, length);
            let microbatch = Microbatch::new(&device, &Mesh::single(), &batch, ctx)?;
            let (tokens, segments) =
                (microbatch.get(PairBatch::TOKENS)?, microbatch.get(PairBatch::SEGMENTS)?);
            let output = no_grad(|| bert.forward(microbatch.ctx(), tokens, segments))?;
            let off = gap(&output.token_logits.value().to_f64()?, &numbers(&expected["logits"]));
            assert!(off < tolerance, "{name}: {dtype} logits differ by {off:e}");
            let order =
                output.order_logits.map_or(Ok(Vec::new()), |logits| logits.value().to_f64())?;
            let off = gap(&order, &numbers(&expected["order_logits"]));
            assert!(off < tolerance, "{name}: {dtype} logits of the order differ by {off:e}");

            let losses = no_grad(|| Model::forward(&bert, &microbatch, None))?.losses;
            let terms = Bert::loss_terms(bert.config(), &batch)?;
            let mut loss = 0.0;
            for ((name, sum), term) in losses.iter().zip(&terms) {
                assert_eq!(*name, term.name);
                loss += term.weight * sum.value().item()? / term.count;
            }
            let off = (loss - expected["loss"].as_f64().unwrap()).abs();
            assert!(off < tolerance, "{name}: {dtype} loss differs by {off:e}");
        }
    }
    Ok(())
}

/// Rows of several lengths, of which the logit of each choice and the loss leave out the padding.
#[test]
fn logits_of_choices_equal_those_of_transformers() -> Result<()> {
    for name in CHOICES {
        let text = fs::read_to_string(fixture(name).join("expected.json")).unwrap();
        let expected: Value = serde_json::from_str(&text).unwrap();
        let all = |key: &str| numbers(&expected[key]).into_iter();
        for dtype in [DType::F64, DType::F32] {
            let device = Device::cpu(1)?;
            let bert = import(&fixture(name), &device, dtype)?;
            let length = expected["tokens"][0][0].as_array().unwrap().len();
            let batch = ChoiceBatch {
                tokens: all("tokens").map(|x| x as u32).collect(),
                segments: all("segments").map(|x| x as u32).collect(),
                answers: all("labels").map(|x| x as i64).collect(),
                lengths: all("lengths").map(|x| x as usize).collect(),
                ..ChoiceBatch::blank(0, [2, 4, length], 0)
            };
            let batch = Batch::try_from(batch)?;
            let ctx = Context::eval(2, length);
            let microbatch = Microbatch::new(&device, &Mesh::single(), &batch, ctx)?;
            let ids = [microbatch.get(PairBatch::TOKENS)?, microbatch.get(PairBatch::SEGMENTS)?];
            let logits = no_grad(|| bert.choice_logits(microbatch.ctx(), ids[0], ids[1]))?;
            let off = gap(&logits.value().to_f64()?, &numbers(&expected["logits"]));
            assert!(off < 1e-5, "{name}: {dtype} logits differ by {off:e}");
            let losses = no_grad(|| Model::forward(&bert, &microbatch, None))?.losses;
            let off = losses[0].1.value().item()? / 2.0 - expected["loss"].as_f64().unwrap();
            assert!(off.abs() < 1e-5, "{name}: {dtype} loss differs by {off:e}");
        }
    }
    Ok(())
}

#[test]
fn what_goes_out_comes_back_bit_by_bit() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    // FERROTRON_HF_EXPORT keeps the exports, for check_bert_export.py.
    let kept = std::env::var_os("FERROTRON_HF_EXPORT").map(PathBuf::from);
    let root = kept.unwrap_or_else(|| dir.path().to_path_buf());
    for name in NAMES.into_iter().chain(CHOICES) {
        let folder = root.join(name);
        let bert = import(&fixture(name), &Device::cpu(1)?, DType::F32)?;
        export(&bert, &folder)?;
        assert_eq!(bert.config(), &read_config(&folder)?);
        let file = |folder: &Path| fs::read(folder.join("model.safetensors")).unwrap();
        let (theirs, ours) = (file(&fixture(name)), file(&folder));
        let theirs = safetensors::SafeTensors::deserialize(&theirs).unwrap();
        let ours = safetensors::SafeTensors::deserialize(&ours).unwrap();
        assert_eq!(ours.len(), theirs.len(), "{name}");
        for (key, tensor) in theirs.tensors() {
            assert_eq!(ours.tensor(&key).unwrap(), tensor, "{name}: {key}");
        }
        let json = |folder: &Path| -> Value {
            serde_json::from_str(&fs::read_to_string(folder.join("config.json")).unwrap()).unwrap()
        };
        let (ours, theirs) = (json(&folder), json(&fixture(name)));
        for key in ["architectures", "model_type", "hidden_act", "layer_norm_eps", "dtype"] {
            assert_eq!(ours[key], theirs[key], "{name}");
        }
    }
    Ok(())
}

/// A copy of a fixture with another `config.json`.
fn changed(name: &str, change: impl FnOnce(&mut Value)) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().to_path_buf();
    fs::copy(fixture(name).join("model.safetensors"), folder.join("model.safetensors")).unwrap();
    let text = fs::read_to_string(fixture(name).join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    change(&mut config);
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    (dir, folder)
}

#[test]
fn other_models_are_refused_by_name() {
    type Change = fn(&mut Value);
    let cases: [(Change, &str); 6] = [
        (|config| config["model_type"] = "roberta".into(), "describes model_type 'roberta'"),
        (|config| config["hidden_act"] = "silu".into(), "has hidden_act 'silu': supported are"),
        (|config| config["is_decoder"] = true.into(), "has is_decoder true: only false"),
        (
            |config| config["position_embedding_type"] = "relative_key".into(),
            "has position_embedding_type 'relative_key': only absolute",
        ),
        (
            |config| config["hidden_size"] = 32.into(),
            "is [40, 16], but config.json makes it [40, 32]",
        ),
        (
            |config| config["model_type"] = "megatron-bert".into(),
            "has no tensor 'bert.encoder.layer.0.attention.ln.weight'",
        ),
    ];
    for (change, part) in cases {
        let (_dir, folder) = changed("bert", change);
        let error = import(&folder, &Device::cpu(1).unwrap(), DType::F32).unwrap_err().to_string();
        assert!(error.contains(part) && !error.contains('\n'), "{error}");
    }
}
