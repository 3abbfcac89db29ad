//! Round trips and every kind of damage.

use super::*;
use crate::io::tokenizer::Tokenizer;
use crate::model::gpt::{Gpt, GptConfig};
use crate::training::model::{Model, parameter_names};
use ferrotron_nn::{
    Context, Mode, Module, Optimizer, OptimizerConfig, Param, ParamAndGradBuffer, Scope, StepConfig,
};
use ferrotron_parallel::collective::Group;
use ferrotron_tensor::{DType, Device, Result, Tensor};
use std::fs;
use std::path::{Path, PathBuf};

/// A GPT in training.
struct Run {
    gpt: Gpt,
    buffers: ParamAndGradBuffer,
    optimizer: Optimizer,
}

impl Run {
    fn new(config: &GptConfig, seed: u64) -> Result<Run> {
        let gpt = Gpt::new(&Scope::new(&Device::cpu(1)?, DType::F32, seed), config)?;
        let buffers = ParamAndGradBuffer::new(&gpt.params())?;
        let optimizer = Optimizer::new(OptimizerConfig::ADAMW, &buffers)?;
        Ok(Run { gpt, buffers, optimizer })
    }

    /// Trains one step on tokens that depend on its number; returns the loss.
    fn step(&mut self, step: u64) -> Result<f64> {
        let device = self.gpt.params()[0].leaf().device().clone();
        let tokens: Vec<u32> = (0..16).map(|i| (i * 5 + step as u32 * 3) % 13).collect();
        let targets: Vec<i64> = tokens.iter().map(|&token| i64::from(token + 1) % 13).collect();
        let tokens = Tensor::from_slice(&device, &tokens, &[2, 8])?;
        let targets = Tensor::from_slice(&device, &targets, &[2, 8])?;
        let ctx = Context::new(7, step, Mode::Train, 2, 8);
        self.buffers.zero_gradients();
        let loss = self.gpt.loss(&ctx, &tokens, &targets)?;
        let value = loss.sum.value().item()?;
        loss.sum.backward_scaled(1.0 / 16.0)?;
        drop(loss);
        self.optimizer.step(&self.buffers, &StepConfig { lr: 1e-2, grad_scale: 1.0 })?;
        Ok(value)
    }

    fn save(&self, dir: &Path, step: u64) -> Result<PathBuf> {
        let progress = TrainState { step, consumed_samples: 2 * step, ..TrainState::default() };
        save(
            dir,
            &Group::single(),
            Snapshot {
                weights: LocalShard::params(&self.gpt.params())?,
                moments: Some(Moments::from_optimizer(&self.optimizer, |_, _| true)?),
                model: SavedModel::new("gpt", self.gpt.config())?,
                progress: &progress,
                tokenizer: Some(&Tokenizer::char("hello")?),
                run: serde_json::json!({"seed": 7}),
            },
        )
    }

    fn load(&mut self, path: &Path) -> Result<Checkpoint> {
        let checkpoint = Checkpoint::open(path)?;
        Gpt::check_checkpoint(&checkpoint, self.gpt.config())?;
        checkpoint.load_params(&self.gpt.params())?;
        checkpoint.load_optimizer(&mut self.optimizer)?;
        Ok(checkpoint)
    }

    fn bits(&self) -> Vec<Vec<f32>> {
        let mut all = Vec::new();
        self.gpt.visit(&mut |param| all.push(param.leaf().value().unwrap().to_vec().unwrap()));
        let visited = self.optimizer.visit(|_, _, _, moment| {
            all.push(moment.to_vec()?);
            Ok(())
        });
        visited.map(|()| all).unwrap()
    }
}

fn config() -> GptConfig {
    GptConfig { hidden_dropout: 0.1, ..GptConfig::gpt2(13, 2, 8, 2, 8) }
}

fn message<T>(result: Result<T>) -> String {
    result.err().expect("an error").to_string()
}

#[test]
fn a_run_goes_on_bit_by_bit() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let mut whole = Run::new(&config(), 1)?;
    for step in 0..3 {
        whole.step(step)?;
    }
    let folder = whole.save(dir.path(), 3)?;
    assert_eq!(folder, dir.path().join("iter_0000003"));
    assert_eq!(fs::read_to_string(dir.path().join("latest")).unwrap(), "iter_0000003\n");
    let mut resumed = Run::new(&config(), 2)?;
    let checkpoint = resumed.load(dir.path())?;
    let progress = checkpoint.progress();
    assert_eq!((progress.step, progress.consumed_samples, progress.optimizer_steps), (3, 6, 3));
    assert_eq!(checkpoint.run()["seed"], 7);
    assert_eq!(checkpoint.tokenizer().unwrap().encode("hole")?, [1, 3, 2, 0]);
    assert_eq!((Gpt::config_from(&checkpoint)?, checkpoint.dtype()?), (config(), DType::F32));
    for step in 3..6 {
        assert_eq!(whole.step(step)?.to_bits(), resumed.step(step)?.to_bits());
    }
    assert_eq!(whole.bits(), resumed.bits());

    // Loading into a model that has no buffers yet, and did not make its values, is the same.
    let bare = Gpt::new(&Scope::new(&Device::cpu(1)?, DType::F32, 3), &config())?;
    let latest = whole.save(dir.path(), 6)?;
    Checkpoint::open(&latest)?.load_params(&bare.params())?;
    for (a, b) in bare.params().iter().zip(whole.gpt.params()) {
        assert_eq!(a.leaf().value()?.to_vec::<f32>()?, b.leaf().value()?.to_vec::<f32>()?);
    }
    Ok(())
}

#[test]
fn numbers_of_the_configuration_come_back_to_the_last_bit() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    // A number that serde_json misreads by default.
    let config = GptConfig {
        norm_epsilon: 1.2345678901234567e-5,
        rotary_base: 9876.543210987654,
        ..config()
    };
    Run::new(&config, 1)?.save(dir.path(), 1)?;
    assert_eq!(Gpt::config_from(&Checkpoint::open(dir.path())?)?, config);
    Ok(())
}

#[test]
fn damage_is_named_and_the_previous_checkpoint_offered() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let mut run = Run::new(&config(), 1)?;
    let first = run.save(dir.path(), 1)?;
    run.step(1)?;
    let second = run.save(dir.path(), 2)?;
    let damage = |file: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let path = second.join(file);
        let original = fs::read(&path).unwrap();
        let mut bytes = original.clone();
        change(&mut bytes);
        fs::write(&path, bytes).unwrap();
        let errors = [dir.path(), second.as_path()].map(|path| message(Checkpoint::open(path)));
        fs::write(&path, original).unwrap();
        for error in &errors {
            assert!(error.contains(file) && !error.contains('\n'), "{error}");
            let offer = format!(
                "; the newest other one is --load {} (its checksums have not been compared)",
                first.display()
            );
            assert!(error.ends_with(&offer), "{error}");
        }
        errors[0].clone()
    };
    let half = |bytes: &mut Vec<u8>| bytes.truncate(bytes.len() / 2);
    let flip = |bytes: &mut Vec<u8>| *bytes.last_mut().unwrap() ^= 1;
    assert!(damage("model.safetensors", &half).contains("is truncated: "));
    assert!(damage("optimizer.safetensors", &flip).contains("is damaged: checksum "));
    assert!(damage("progress.json", &flip).contains("is damaged: "));
    assert!(damage("index.json", &half).contains("is damaged: "));
    assert!(damage("config.json", &|bytes| bytes.push(b' ')).contains("is damaged: "));

    // To word an error, tensors of other checkpoints are not read: this one is damaged, too.
    let weights = first.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    flip(&mut bytes);
    fs::write(&weights, &bytes).unwrap();
    assert!(damage("model.safetensors", &flip).contains("is damaged: checksum "));
    flip(&mut bytes);
    fs::write(&weights, &bytes).unwrap();

    // Undamaged again, then without a file, then without the folder.
    assert_eq!(Checkpoint::open(dir.path())?.folder(), second);
    fs::remove_file(second.join("model.safetensors")).unwrap();
    assert!(message(Checkpoint::open(dir.path())).contains("cannot read '"));
    fs::remove_dir_all(&second).unwrap();
    let error = message(Checkpoint::open(dir.path()));
    assert!(error.contains("iter_0000002") && error.contains("--load"), "{error}");
    fs::remove_file(dir.path().join("latest")).unwrap();
    let error = message(Checkpoint::open(dir.path()));
    assert!(error.contains("latest' is missing; the newest other one"), "{error}");
    fs::write(dir.path().join("latest"), "../elsewhere").unwrap();
    assert!(message(Checkpoint::open(dir.path())).contains("does not name a checkpoint"));
    fs::remove_dir_all(&first).unwrap();
    assert!(message(Checkpoint::open(dir.path())).contains("there is no other one"));
    fs::remove_file(dir.path().join("latest")).unwrap();
    assert!(message(Checkpoint::open(dir.path())).contains("is not a checkpoint"));
    assert!(message(Checkpoint::open(&first)).contains("there is no '"));
    Ok(())
}

#[test]
fn another_shape_is_refused_and_nothing_loaded() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    Run::new(&config(), 1)?.save(dir.path(), 1)?;
    let checkpoint = Checkpoint::open(dir.path())?;
    let gpt = |config: &GptConfig, dtype| Gpt::new(&Scope::new(&Device::cpu(1)?, dtype, 5), config);
    let refused = |config: &GptConfig, dtype| {
        let (model, same) = (gpt(config, dtype).unwrap(), gpt(config, dtype).unwrap());
        let error = message(checkpoint.load_params(&model.params()));
        for (a, b) in model.params().iter().zip(same.params()) {
            let value = |param: &Param| param.leaf().value().unwrap().to_f64().unwrap();
            assert_eq!(value(a), value(&b));
        }
        error
    };
    let wider = GptConfig { vocab_size: 14, ..config() };
    let error = refused(&wider, DType::F32);
    assert!(
        error.contains("of another shape: 'wte.weight' is [13, 8] there, [14, 8] here"),
        "{error}"
    );
    let error = refused(&GptConfig { num_layers: 3, ..config() }, DType::F32);
    assert!(error.contains("it has no 'blocks.2.norm_1.weight'"), "{error}");
    let error = refused(&GptConfig { num_layers: 1, ..config() }, DType::F32);
    assert!(error.contains("it has 'blocks.1."), "{error}");
    let error = refused(&config(), DType::F64);
    assert!(error.ends_with("load it with --dtype f32"), "{error}");

    // Other heads fit the shapes, but compute something else.
    let heads =
        GptConfig { num_attention_heads: 4, num_query_groups: 4, kv_channels: 2, ..config() };
    let error = message(Gpt::check_checkpoint(&checkpoint, &heads));
    assert!(error.contains("num_attention_heads 2 there, 4 here"), "{error}");
    Gpt::check_checkpoint(&checkpoint, &GptConfig { hidden_dropout: 0.0, ..config() })?;

    let model = gpt(&config(), DType::F32)?;
    let buffers = ParamAndGradBuffer::new(&model.params())?;
    let sgd = OptimizerConfig::Sgd { momentum: 0.9, weight_decay: 0.0 };
    let error = message(checkpoint.load_optimizer(&mut Optimizer::new(sgd, &buffers)?));
    assert!(error.contains("was saved with another optimizer: it has exp_avg of '"), "{error}");
    // A stage of a pipeline loads its own, of a model that has all weights of the checkpoint.
    let names = parameter_names::<Gpt>(&config(), DType::F32)?;
    let part: Vec<Param> = model.params().into_iter().take(3).collect();
    checkpoint.load_params_of_part(&part, &names)?;
    let (last, others) = names.split_last().expect("there are parameters");
    let error = message(checkpoint.load_params_of_part(&part, others));
    assert!(error.ends_with(&format!("it has '{last}', which the model has not")), "{error}");
    Ok(())
}

#[test]
fn what_a_killed_process_left_is_ignored_and_cleaned_up() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let run = Run::new(&config(), 1)?;
    let first = run.save(dir.path(), 1)?;
    let stale = dir.path().join("iter_0000002.tmp");
    fs::create_dir(&stale).unwrap();
    fs::write(stale.join("model.safetensors"), "half a fi").unwrap();
    assert_eq!(Checkpoint::open(dir.path())?.folder(), first);
    // Killed between the two renames of a checkpoint that replaces one of the same step.
    let old = dir.path().join("iter_0000001.old");
    fs::rename(&first, &old).unwrap();
    assert_eq!(Checkpoint::open(dir.path())?.folder(), old);
    let mine = dir.path().join("notes.tmp");
    fs::write(&mine, "not a checkpoint").unwrap();
    run.save(dir.path(), 2)?;
    assert!(!stale.exists() && !old.exists() && first.exists() && mine.exists());
    assert_eq!(Checkpoint::open(&first)?.progress().step, 1);
    Ok(())
}

#[test]
fn a_folder_that_cannot_be_written_is_named() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let error = message(Run::new(&config(), 1)?.save(&file.join("runs"), 1));
    assert!(error.contains("step 1 was not saved: cannot create '"), "{error}");
    Ok(())
}
