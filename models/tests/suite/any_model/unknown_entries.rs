//! A checkpoint with entries that the program does not know, kept or refused by name, or of another processor.

use ferrotron_models::checkpoint::{
    Checkpoint, LocalShard, SavedModel, Snapshot, processor_change, record_processor, save,
};
use ferrotron_models::trainer::{Model, Trainer};
use ferrotron_nn::Scope;
use ferrotron_parallel::mesh::Mesh;
use ferrotron_tensor::{DType, Device, Result, ShardSpec, Tensor};
use std::fs;

use super::{ALONE, CONFIG, Mlp, POINTS};

fn trainer() -> Result<Trainer<Mlp>> {
    let scope = Scope::new(&Device::cpu(1)?, DType::F64, 7);
    Trainer::<Mlp>::new(&scope, &CONFIG, ALONE.config()?)
}

#[test]
fn unknown_entries_of_the_progress_survive_a_resumed_run() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let mut first = trainer()?;
    first.step(&POINTS)?;
    let mut progress = first.progress().clone();
    progress.extra.insert("of_a_later_version".into(), serde_json::json!({ "kept": [1, 2] }));
    first.set_progress(progress);
    let saved = first.save(folder.path(), None, serde_json::Value::Null)?;

    let mut second = trainer()?;
    second.load(&Checkpoint::open(&saved)?)?;
    second.step(&POINTS)?;
    let saved = second.save(folder.path(), None, serde_json::Value::Null)?;
    let kept = Checkpoint::open(&saved)?.progress().extra["of_a_later_version"].clone();
    assert_eq!(kept, serde_json::json!({ "kept": [1, 2] }));
    Ok(())
}

/// The next checkpoint would lose it.
#[test]
fn an_unknown_weight_is_refused_by_name_and_nothing_is_loaded() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let first = trainer()?;
    let (mut weights, moments) = first.local_shards()?;
    let tensor = Tensor::full(&Device::cpu(1)?, DType::F64, &[3], 1.0)?;
    let place = ShardSpec::unsharded(&[3]);
    weights.push(LocalShard { name: "layers.9.scale".to_string(), place, tensor });
    let model = SavedModel::new(Mlp::ARCHITECTURE, &CONFIG)?;
    let (progress, run) = (first.progress(), serde_json::Value::Null);
    let snapshot =
        Snapshot { weights, moments: Some(moments), model, progress, tokenizer: None, run };
    let saved = save(folder.path(), Mesh::single().world(), snapshot)?;

    let mut second = trainer()?;
    second.step(&POINTS)?;
    let error = second.load(&Checkpoint::open(&saved)?).unwrap_err().to_string();
    assert!(error.contains("it has 'layers.9.scale', which the model has not"), "{error}");
    assert_eq!(second.progress().step, 1);
    Ok(())
}

/// A later version may have other fields; this one has no others.
#[test]
fn a_later_version_is_refused_by_its_number_and_an_unknown_field_by_its_name() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let saved = trainer()?.save(folder.path(), None, serde_json::Value::Null)?;
    let path = saved.join("index.json");
    let index: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for (version, told) in [(3, "version 3; this program reads"), (2, "unknown field `shards`")] {
        let mut later = index.clone();
        later["version"] = version.into();
        later["shards"] = 4.into();
        fs::write(&path, later.to_string()).unwrap();
        let error = Checkpoint::open(&saved).expect_err("a field of later").to_string();
        assert!(error.contains(told), "{error}");
    }
    Ok(())
}

#[test]
fn another_processor_is_named_where_it_computes_other_bits() -> Result<()> {
    let device = Device::cpu(1)?;
    let mut progress = serde_json::Map::new();
    let change = |progress: &_, dtype| processor_change(progress, &device, dtype);
    assert_eq!(change(&progress, DType::F32), None, "a checkpoint of before");
    record_processor(&mut progress, &device);
    assert_eq!([DType::F32, DType::BF16].map(|dtype| change(&progress, dtype)), [None, None]);

    let own = progress["processor"]["f32"].as_str().expect("a name").to_string();
    progress["processor"]["bf16"] = "tiles".into();
    assert_eq!(change(&progress, DType::F32), None, "only products of bf16 are other ones");
    let line = change(&progress, DType::BF16).expect("a line");
    let start = format!("the run was computed by {own} and tiles so far, and is by {own}");
    assert!(line.starts_with(&start), "{line}");
    progress["processor"] = serde_json::json!({ "gpu": "sm_90" });
    let line = change(&progress, DType::F32).expect("a line");
    assert!(line.starts_with("the run was computed by a GPU of sm_90 so far, and is by"), "{line}");
    assert!(line.ends_with("the last bits of its numbers will differ"), "{line}");
    progress["processor"] = "unknown".into();
    assert_eq!(change(&progress, DType::F32), None);
    Ok(())
}
