//! Checkpoints of one layout load in another.

use super::Checkpoint;
use super::folder::Staging;
use super::index::{INDEX, Index, SliceRecord};
use super::rank_files::RankFiles;
use super::shards::LocalShard;
use super::slices::Slice;
use crate::io::checked_file::{FileRecord, write_bytes};
use crate::io::tensor_file::write_tensors;
use crate::model::gpt::GptConfig;
use ferrotron_nn::{Init, Scope, WeightDecay};
use ferrotron_tensor::{DType, Device, Result, ShardSpec, Tensor};
use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;

fn config() -> GptConfig {
    GptConfig::gpt2(13, 2, 8, 2, 8)
}

#[test]
fn one_layout_loads_another() -> Result<()> {
    // A (6, 4) matrix cut into three pieces over two files, and a tensor of two boxes of columns.
    let dir = tempfile::tempdir().unwrap();
    let device = Device::cpu(1)?;
    let values: Vec<f32> = (0..24).map(|i| i as f32).collect();
    let whole = Tensor::from_slice(&device, &values, &[6, 4])?;
    let staging = Staging::begin(dir.path(), 1).unwrap();
    let mut index = Index::new();
    let owner = |pieces: [&[(usize, usize)]; 2]| ShardSpec::new(&[6, 4], &pieces).unwrap();
    let (top, left, right) = (
        owner([&[(0, 2)], &[(0, 4)]]),
        owner([&[(2, 4)], &[(0, 1), (3, 1)]]),
        owner([&[(2, 4)], &[(1, 2)]]),
    );
    let held =
        |place| LocalShard { name: "w".into(), tensor: read(&whole, place), place: place.clone() };
    write_shards(&staging.folder, &mut index, "a.safetensors", vec![held(&top)]).unwrap();
    write_shards(&staging.folder, &mut index, "b.safetensors", vec![held(&left)]).unwrap();
    write_shards(&staging.folder, &mut index, "c.safetensors", vec![held(&right)]).unwrap();
    finish(staging, &mut index);

    let scope = Scope::new(&device, DType::F32, 0);
    for place in [
        ShardSpec::unsharded(&[6, 4]),
        top,
        left,
        right,
        owner([&[(1, 3)], &[(0, 4)]]),
        owner([&[(0, 6)], &[(2, 2)]]),
        owner([&[(5, 1), (0, 2)], &[(3, 1), (0, 2)]]),
        owner([&[(3, 0)], &[(0, 4)]]),
    ] {
        let want = read(&whole, &place).to_vec::<f32>()?;
        let param = scope.param_at("w", place, Init::Zeros, WeightDecay::On);
        Checkpoint::open(dir.path())?.load_params(std::slice::from_ref(&param))?;
        assert_eq!(param.leaf().value()?.to_vec::<f32>()?, want, "{:?}", param.shard_spec());
    }
    Ok(())
}

/// Writes shards to one file, and enters it in the index.
fn write_shards(
    folder: &Path,
    index: &mut Index,
    file: &str,
    shards: Vec<LocalShard>,
) -> Result<()> {
    let mut files = RankFiles::new();
    files.add(file, shards)?;
    let written = files.write(folder, &AtomicBool::new(false)).unwrap();
    index.join(written).unwrap();
    Ok(())
}

/// The elements of `whole` at `place`.
fn read(whole: &Tensor, place: &ShardSpec) -> Tensor {
    let all = whole.to_vec::<f32>().unwrap();
    let rows: usize = place.dims()[..place.dims().len() - 1].iter().product();
    let values: Vec<f32> = (0..rows)
        .flat_map(|row| place.runs(row).collect::<Vec<_>>())
        .flat_map(|(start, len)| all[start as usize..start as usize + len].to_vec())
        .collect();
    Tensor::from_slice(whole.device(), &values, place.dims()).unwrap()
}

/// Adds the documents that every checkpoint has, and publishes it.
fn finish(staging: Staging, index: &mut Index) {
    let config = serde_json::json!({"model": config(), "run": null}).to_string();
    for (file, text) in
        [("config.json", config), ("progress.json", r#"{"step": 1, "consumed_samples": 0}"#.into())]
    {
        let record = write_bytes(&staging.folder.join(file), text.as_bytes()).unwrap();
        index.files.insert(file.into(), record);
    }
    let text = serde_json::to_vec(index).unwrap();
    write_bytes(&staging.folder.join(INDEX), &text).unwrap();
    staging.publish().unwrap();
}

/// Number of files of a checkpoint, and how many a process may have open.
const FILES: usize = 2000;
const LIMIT: usize = 64;

/// Names the checkpoint to a child.
const MANY: &str = "FERROTRON_TEST_MANY_FILES";

/// A checkpoint of a matrix whose rows lie in files of their own.
fn many_files(dir: &Path) -> Result<()> {
    let staging = Staging::begin(dir, 1).unwrap();
    let mut index = Index::new();
    let row = Tensor::full(&Device::cpu(1)?, DType::F32, &[1, 2], 0.0)?;
    let file_name = |i: usize| format!("model-{i:05}.safetensors");
    for i in 0..FILES {
        let place = ShardSpec::new(&[FILES, 2], &[&[(i, 1)], &[(0, 2)]])?;
        let held = vec![LocalShard { name: "w".into(), place, tensor: row.clone() }];
        // The disk need not have each of them: the last bytes are the values.
        if i == 0 {
            write_shards(&staging.folder, &mut index, &file_name(i), held).unwrap();
            continue;
        }
        let mut bytes = fs::read(staging.folder.join(file_name(0))).unwrap();
        let end = bytes.len();
        bytes[end - 4..].copy_from_slice(&(i as f32).to_le_bytes());
        fs::write(staging.folder.join(file_name(i)), &bytes).unwrap();
        let record = FileRecord { bytes: end as u64, crc32: crc32fast::hash(&bytes) };
        index.files.insert(file_name(i), record);
        let slice = Slice { offset: vec![i, 0], shape: vec![1, 2] };
        let piece = SliceRecord { file: file_name(i), key: "w#0".into(), slice, start: 0 };
        index.tensors.get_mut("w").unwrap().pieces.push(piece);
    }
    finish(staging, &mut index);
    Ok(())
}

#[test]
fn child_of_a_limit_on_open_files() -> Result<()> {
    let Some(dir) = std::env::var_os(MANY) else { return Ok(()) };
    assert!(
        (0..LIMIT)
            .map(|_| fs::File::open("/dev/null"))
            .collect::<Vec<_>>()
            .iter()
            .any(|f| f.is_err())
    );
    let checkpoint = Checkpoint::open(Path::new(&dir))?;
    let scope = Scope::new(&Device::cpu(1)?, DType::F32, 0);
    let (whole, column) = (
        ShardSpec::unsharded(&[FILES, 2]),
        ShardSpec::new(&[FILES, 2], &[&[(0, FILES)], &[(1, 1)]])?,
    );
    for (place, stride) in [(whole, 2), (column, 1)] {
        let param = scope.param_at("w", place, Init::Zeros, WeightDecay::On);
        checkpoint.load_params(std::slice::from_ref(&param))?;
        let values = param.leaf().value()?.to_vec::<f32>()?;
        let last = values.iter().skip(stride - 1).step_by(stride);
        assert!(last.copied().eq((0..FILES).map(|i| i as f32)));
    }
    println!("loaded");
    Ok(())
}

#[test]
fn two_thousand_files_load_where_64_may_be_open() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    many_files(dir.path())?;
    let script =
        format!("ulimit -n {LIMIT}; exec \"$0\" child_of_a_limit --nocapture --test-threads 1");
    let mut command = std::process::Command::new("sh");
    command.arg("-c").arg(script).arg(std::env::current_exe().unwrap()).env(MANY, dir.path());
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("loaded"), "{text}");
    Ok(())
}

#[test]
fn an_index_written_by_hand_loads() -> Result<()> {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("iter_0000001");
    fs::create_dir(&folder).unwrap();
    let device = Device::cpu(1)?;
    let part = |values: &[f32], dims: &[usize]| Tensor::from_slice(&device, values, dims).unwrap();
    let a = vec![
        ("w.0".to_string(), part(&[0.0, 1.0, 4.0, 5.0], &[2, 2])),
        ("w.1".to_string(), part(&[2.0, 3.0, 6.0, 7.0], &[2, 2])),
    ];
    let b = vec![("rest".to_string(), part(&[8.0, 9.0, 10.0, 11.0], &[1, 4]))];
    let mut files = serde_json::Map::new();
    let mut add =
        |file: &str, record| files.insert(file.into(), serde_json::to_value(record).unwrap());
    add("a.safetensors", write_tensors(&folder.join("a.safetensors"), None, a).unwrap());
    add("b.safetensors", write_tensors(&folder.join("b.safetensors"), None, b).unwrap());
    let documents = [
        ("config.json", serde_json::json!({"model": config(), "run": null}).to_string()),
        ("progress.json", r#"{"step": 1, "consumed_samples": 4, "loss_scale": 0.1}"#.to_string()),
    ];
    for (file, text) in documents {
        add(file, write_bytes(&folder.join(file), text.as_bytes()).unwrap());
    }
    let index = serde_json::json!({
        "format": "ferrotron checkpoint", "version": 1, "files": files,
        "tensors": {"w": {"dtype": "f32", "shape": [3, 4], "pieces": [
            {"file": "a.safetensors", "key": "w.0", "offset": [0, 0], "shape": [2, 2]},
            {"file": "a.safetensors", "key": "w.1", "offset": [0, 2], "shape": [2, 2]},
            {"file": "b.safetensors", "key": "rest", "offset": [2, 0], "shape": [1, 4]},
        ]}},
    });
    fs::write(folder.join("index.json"), index.to_string()).unwrap();
    let checkpoint = Checkpoint::open(&folder)?;
    assert_eq!(checkpoint.progress().extra["loss_scale"], 0.1);
    let scope = Scope::new(&device, DType::F32, 0);
    let load = |place: ShardSpec| {
        let param = scope.param_at("w", place, Init::Zeros, WeightDecay::On);
        checkpoint.load_params(std::slice::from_ref(&param))?;
        param.leaf().value()?.to_vec::<f32>()
    };
    assert_eq!(load(ShardSpec::unsharded(&[3, 4]))?, (0..12).map(|i| i as f32).collect::<Vec<_>>());
    assert_eq!(load(ShardSpec::new(&[3, 4], &[&[(1, 2)], &[(1, 2)]])?)?, [5.0, 6.0, 9.0, 10.0]);

    for (what, broken) in [
        ("\"offset\":[0,2]", "\"offset\":[0,1]"),   // overlaps
        ("\"offset\":[2,0]", "\"offset\":[3,0]"),   // outside
        ("\"key\":\"w.1\"", "\"key\":\"w.2\""),     // not in the file
        ("\"shape\":[3,4]", "\"shape\":[4,4]"),     // incomplete
        ("\"dtype\":\"f32\"", "\"dtype\":\"f64\""), // another type
        ("\"a.safetensors\":{", "\"../a.safetensors\":{"),
        ("\"version\":1", "\"version\":3"),
    ] {
        let text = index.to_string();
        assert!(text.contains(what), "{what}");
        fs::write(folder.join("index.json"), text.replacen(what, broken, 1)).unwrap();
        let error = Checkpoint::open(&folder).expect_err(broken).to_string();
        assert!(error.contains("index.json") || error.contains("safetensors"), "{broken}: {error}");
    }
    Ok(())
}
