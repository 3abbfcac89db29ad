//! Weights of modules in one file: round trips, casts, what does not fit, and shards over ranks.

use ferrotron_models::batch_size::BatchSize;
use ferrotron_models::checkpoint::ModuleWeights;
use ferrotron_models::gpt::{Gpt, GptConfig};
use ferrotron_models::trainer::{ParallelConfig, Trainer, TrainerConfig};
use ferrotron_nn::schedule::LrSchedule;
use ferrotron_nn::{
    Bias, Init, Linear, Module, Optimizer, OptimizerConfig, ParamAndGradBuffer, Scope, Sharding,
};
use ferrotron_parallel::collective::{WorldConfig, run_threads};
use ferrotron_parallel::data_parallel::DataParallelConfig;
use ferrotron_parallel::mesh::{Mesh, ParallelDims};
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{DType, Device, Result, ShardSpec, Tensor};

fn scope(dtype: DType, seed: u64) -> Scope {
    Scope::new(&Device::cpu(1).unwrap(), dtype, seed)
}

fn layer(scope: &Scope, inputs: usize) -> Result<Linear> {
    Linear::new(&scope.child("fc"), inputs, 3, Bias::Yes, Init::Normal { std: 1.0 })
}

fn values(module: &dyn Module) -> Result<Vec<Vec<f64>>> {
    module.params().iter().map(|param| param.leaf().value()?.to_f64()).collect()
}

#[test]
fn floats_are_cast_to_the_parameters() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights.safetensors");
    let source = layer(&scope(DType::F64, 1), 5)?;
    source.freeze(|name| name == "fc.bias")?;
    source.save(&path)?;
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
        let target = layer(&scope(dtype, 2), 5)?;
        target.load(&path)?;
        for (to, from) in target.params().iter().zip(source.params()) {
            let want = from.leaf().value()?.cast(dtype)?.to_f64()?;
            assert_eq!(to.leaf().value()?.to_f64()?, want);
        }
        target.save(&path)?; // in place of the first
        source.load(&path)?;
    }
    let files: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
    assert_eq!(files.len(), 1, "{files:?}");
    Ok(())
}

#[test]
fn what_does_not_fit_is_named_and_changes_nothing() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights.safetensors");
    let (a, b) = (scope(DType::F32, 1), scope(DType::F32, 2));
    [layer(&a.child("x"), 5)?, layer(&a.child("y"), 5)?].save(&path)?;
    let model = [layer(&b.child("x"), 5)?, layer(&b.child("z"), 5)?];
    let before = values(&model)?;
    let error = model.load(&path).unwrap_err().to_string();
    let shown = "missing z.fc.weight, z.fc.bias; unexpected y.fc.bias, y.fc.weight; `load_matching` takes what fits";
    assert!(error.starts_with("weights: '") && error.ends_with(shown), "{error}");
    assert_eq!(values(&model)?, before);
    let report = model.load_matching(&path)?;
    assert_eq!(report.missing, ["z.fc.weight", "z.fc.bias"]);
    let now = values(&model)?;
    assert!(now[0] != before[0] && now[1] == before[1] && now[2..] == before[2..]);

    let wider = [layer(&b.child("x"), 6)?, layer(&b.child("y"), 5)?];
    let report = wider.load_matching(&path)?;
    assert_eq!(report.mismatched, ["x.fc.weight (f32 [3, 5] there, [3, 6] here)"]);
    assert!(!report.is_complete() && report.missing.is_empty());
    assert_eq!(report.to_string(), "mismatched x.fc.weight (f32 [3, 5] there, [3, 6] here)");

    let error = model.load(folder.path().join("none")).unwrap_err().to_string();
    assert!(error.starts_with("weights: cannot read '"), "{error}");
    let error = model.save(folder.path().join("no/folder")).unwrap_err().to_string();
    assert!(error.starts_with("weights: cannot write '"), "{error}");
    let twice = [layer(&a, 5)?, layer(&a, 5)?];
    let error = twice.save(&path).unwrap_err().to_string();
    assert_eq!(error, "weights: two parameters are named 'fc.weight'");
    let place = ShardSpec::new(&[4, 2], &[&[(0, 2)], &[(0, 2)]])?;
    let shard = a.param_at("w", place, Init::Ones, ferrotron_nn::WeightDecay::On);
    let error = shard.save(&path).unwrap_err().to_string();
    assert!(error.starts_with("weights: 'w' is a shard [2, 2] of [4, 2]: give"), "{error}");
    Ok(())
}

#[test]
fn a_module_of_an_optimizer_is_not_overwritten_behind_its_back() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights.safetensors");
    let model = layer(&scope(DType::BF16, 1), 5)?;
    let buffers = ParamAndGradBuffer::new(&model.params())?;
    let optimizer = Optimizer::new(OptimizerConfig::ADAMW, &buffers)?;
    model.save(&path)?;
    let error = model.load(&path).unwrap_err().to_string();
    assert!(error.starts_with("weights: an optimizer exists for 'fc.weight'"), "{error}");
    drop((buffers, optimizer));
    model.load(&path)
}

/// The file of a sharded GPT with tied embeddings equals that of one rank, and every layout loads it. Layouts are tp 2
/// x pp 2, and dp 2 with ZeRO stage 3.
#[test]
fn shards_make_one_file_of_global_tensors() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let config = GptConfig::gpt2(37, 2, 16, 4, 8);
    let whole = Gpt::new(&scope(DType::F32, 7), &config)?;
    let path = folder.path().join("whole.safetensors");
    whole.save(&path)?;
    let bytes = std::fs::read(&path).unwrap();
    let dims = [
        (ParallelDims::new(4, 2, 1, 2)?, Sharding::None),
        (ParallelDims::new(2, 1, 1, 1)?, Sharding::Weights),
    ];
    for (dims, sharding) in dims {
        let file = folder.path().join("sharded.safetensors");
        let ranks: Vec<Result<()>> = run_threads(dims.world(), &WorldConfig::default(), |world| {
            let mesh = Mesh::new(&world, dims, SequenceParallel::Off)?;
            let data = mesh.layout().size(ferrotron_nn::Axis::Data);
            let sizes = BatchSize::constant(1, data, data)?;
            let data_parallel = DataParallelConfig { sharding, ..DataParallelConfig::default() };
            let parallel = ParallelConfig { data_parallel, ..ParallelConfig::default() };
            let trainer = TrainerConfig::new(7, LrSchedule::constant(0.1)?, sizes);
            let trainer = TrainerConfig { parallel, ..trainer };
            let made =
                Trainer::<Gpt>::on_mesh(&scope(DType::F32, 7), &mesh, &config, trainer.clone())?;
            made.parts().save_on(&mesh, &file)?;
            // Other weights, before an optimizer exists.
            let other = scope(DType::F32, 8);
            let chunks = made.parts().len();
            drop(made);
            let stage = mesh.axis(ferrotron_nn::Axis::Pipeline);
            let parts = ferrotron_models::trainer::ModelChunk::chunks(
                2,
                stage.rank(),
                stage.size(),
                chunks,
            )?;
            let parts: Vec<Gpt> = parts
                .iter()
                .map(|part| {
                    ferrotron_models::trainer::Model::new_chunk(&other, &mesh, &config, part)
                })
                .collect::<Result<_>>()?;
            let report = parts.load_matching(&path)?;
            assert!(report.missing.is_empty() && report.mismatched.is_empty(), "{report}");
            parts.save_on(&mesh, &file)?;
            Ok(())
        });
        ranks.into_iter().collect::<Result<Vec<()>>>()?;
        assert!(std::fs::read(&file).unwrap() == bytes, "{dims:?}");
        assert!(!folder.path().join("sharded.safetensors.shards").exists());
    }
    Ok(())
}

/// A folder of somebody else in the place of the temporary one.
#[test]
fn a_foreign_folder_of_shards_is_left() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let shards = folder.path().join("model.safetensors.shards");
    std::fs::create_dir(&shards).unwrap();
    let save = || {
        let ranks = run_threads(2, &WorldConfig::default(), |world| {
            let dims = ParallelDims::new(2, 1, 1, 1)?;
            let mesh = Mesh::new(&world, dims, SequenceParallel::Off)?;
            layer(&scope(DType::F32, 1), 2)?.save_on(&mesh, &file)
        });
        ranks.into_iter().map(|rank| rank.map_err(|error| error.to_string())).collect::<Vec<_>>()
    };
    let notes = shards.join("notes.txt");
    std::fs::write(&notes, "mine").unwrap();
    for saved in save() {
        let error = saved.unwrap_err();
        assert!(error.contains("model.safetensors.shards' holds 'notes.txt'"), "{error}");
    }
    assert_eq!(std::fs::read_to_string(&notes).unwrap(), "mine");
    assert!(!file.exists());
    // What a killed save has left goes.
    std::fs::remove_file(notes).unwrap();
    std::fs::create_dir(shards.join("iter_0000000.tmp")).unwrap();
    assert!(save().iter().all(|saved| saved.is_ok()));
    assert!(file.exists() && !shards.exists());
    Ok(())
}

/// A reader that knows safetensors alone finds names, shapes and values.
#[test]
fn the_file_is_plain_safetensors() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("weights.safetensors");
    let model = layer(&scope(DType::F32, 1), 2)?;
    model.save(&path)?;
    let bytes = std::fs::read(&path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let weight = file.tensor("fc.weight").unwrap();
    assert_eq!((weight.shape(), weight.dtype()), (&[3, 2][..], safetensors::Dtype::F32));
    let found: Vec<f32> =
        weight.data().chunks(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect();
    let want: Tensor = model.weight().leaf().value()?;
    assert_eq!(found, want.to_vec::<f32>()?);
    Ok(())
}
