//! The weights of any module in one safetensors file, with the global names and shapes of its parameters.
//!
//! A file is written under a temporary name and renamed when it is complete. Where parameters are sharded over ranks,
//! each rank first writes its shards into a checkpoint beside the file, from which the first rank assembles the whole
//! tensors in host memory. Loading reads only what a rank holds.

use ferrotron_nn::{Axis, Module, Param};
use ferrotron_parallel::mesh::Mesh;
use ferrotron_tensor::{DType, Error, Result, Tensor};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::{read_dir, remove_dir_all};
use std::path::{Path, PathBuf};

use super::folder;
use super::index::{SliceRecord, TensorRecord};
use super::load::Checkpoint;
use super::reader::CheckpointReader;
use super::save::{Snapshot, save};
use super::shards::LocalShard;
use super::slices::Slice;
use super::{SavedModel, TrainState};
use crate::io::checked_file::{Fault, replace};
use crate::io::tensor_file::{TensorFile, write_tensors};

/// Saves and loads the weights of any [`Module`].
///
/// ```
/// use ferrotron_models::checkpoint::ModuleWeights;
/// use ferrotron_nn::{Bias, Init, Linear, Scope};
/// use ferrotron_tensor::{DType, Device};
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("model.safetensors");
/// let device = Device::cpu(1)?;
/// let scope = |seed| Scope::new(&device, DType::F32, seed).child("head");
/// let model = Linear::new(&scope(1), 3, 2, Bias::Yes, Init::XavierNormal)?;
/// model.save(&path)?;
///
/// let other = Linear::new(&scope(2), 3, 2, Bias::Yes, Init::XavierNormal)?;
/// other.load(&path)?;
/// assert_eq!(other.weight().leaf().value()?.to_f64()?, model.weight().leaf().value()?.to_f64()?);
///
/// // Another model takes what fits.
/// let unbiased = Linear::new(&scope(3), 3, 2, Bias::No, Init::XavierNormal)?;
/// assert!(unbiased.load(&path).is_err());
/// assert_eq!(unbiased.load_matching(&path)?.unexpected, ["head.bias"]);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub trait ModuleWeights: Module {
    /// Writes all parameters to a new safetensors file, frozen ones too, each once. A file of the same name is replaced
    /// when the new one is complete. PyTorch reads it by `safetensors.torch.load_file`.
    ///
    /// Errors if a parameter is a shard: see [`ModuleWeights::save_on`]; if two have the same name; and if the file cannot
    /// be written.
    fn save(&self, path: impl AsRef<Path>) -> Result<()>
    where
        Self: Sized,
    {
        save_params(&self.params(), &Mesh::single(), path.as_ref())
    }

    /// Saves a module that is sharded over the ranks of `mesh`, like [`ModuleWeights::save`]. All ranks call this with
    /// the same path on one file system. The first rank needs host memory for all weights. The folder `<path>.shards`
    /// exists meanwhile; one that is there must be that of a save that was killed.
    ///
    /// Errors on every rank.
    fn save_on(&self, mesh: &Mesh, path: impl AsRef<Path>) -> Result<()>
    where
        Self: Sized,
    {
        save_params(&self.params(), mesh, path.as_ref())
    }

    /// Fills all parameters from a file, each rank its shards. A stored float is cast to the dtype of its parameter,
    /// rounded to nearest, ties to even.
    ///
    /// # Errors
    ///
    /// Errors, naming them and without any change, if the file lacks a parameter, has a tensor that is none, or has one
    /// with another shape or an integer dtype. Errors if an optimizer exists for the parameters, whose master weights
    /// and shards would stay as they are: load before it is made. Errors for a file that cannot be read.
    fn load(&self, path: impl AsRef<Path>) -> Result<()>
    where
        Self: Sized,
    {
        load_params(&self.params(), path.as_ref(), true).map(drop)
    }

    /// [`ModuleWeights::load`] of the parameters that the file has with the same name and shape. Others keep their values;
    /// the report names them. A pipeline stage finds the tensors of the others unexpected.
    ///
    /// Errors as [`ModuleWeights::load`] if an optimizer exists or the file cannot be read.
    fn load_matching(&self, path: impl AsRef<Path>) -> Result<LoadReport>
    where
        Self: Sized,
    {
        load_params(&self.params(), path.as_ref(), false)
    }
}

impl<M: Module> ModuleWeights for M {}

/// The names that a file and a module do not share.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LoadReport {
    /// Parameters that the file lacks.
    pub missing: Vec<String>,
    /// Tensors of the file that are no parameter.
    pub unexpected: Vec<String>,
    /// Parameters that the file has with another shape or an integer dtype, with both.
    pub mismatched: Vec<String>,
}

impl LoadReport {
    /// Returns whether file and module have the same parameters.
    pub fn is_complete(&self) -> bool {
        *self == LoadReport::default()
    }
}

/// Number of names of each kind that an error shows.
const SHOWN: usize = 4;

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LoadReport { missing, unexpected, mismatched } = self;
        let kinds = [("missing", missing), ("unexpected", unexpected), ("mismatched", mismatched)];
        let shown = kinds.iter().filter(|(_, names)| !names.is_empty()).map(|(kind, names)| {
            let more = match names.len().saturating_sub(SHOWN) {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            format!("{kind} {}{more}", names[..names.len().min(SHOWN)].join(", "))
        });
        match self.is_complete() {
            true => write!(f, "all parameters"),
            false => write!(f, "{}", shown.collect::<Vec<_>>().join("; ")),
        }
    }
}

fn save_params(params: &[Param], mesh: &Mesh, path: &Path) -> Result<()> {
    let mut names = BTreeSet::new();
    if let Some(twice) = params.iter().find(|param| !names.insert(param.name())) {
        return Err(refused(format!("two parameters are named '{}'", twice.name())));
    }
    if mesh.world().size() == 1 {
        return save_whole(params, path);
    }
    // On every rank, since values that ZeRO shards are gathered here.
    let shards = LocalShard::params(params)?;
    let own = shards.into_iter().zip(params).filter(|(_, param)| writes(param, mesh));
    let folder = path.with_file_name(format!("{}.shards", file_name(path)?));
    check_ours(&folder)?;
    let saved = save(
        &folder,
        mesh.world(),
        Snapshot {
            weights: own.map(|(shard, _)| shard).collect(),
            moments: None,
            model: SavedModel::new("weights", &())?,
            progress: &TrainState::default(),
            tokenizer: None,
            run: serde_json::Value::Null,
        },
    );
    let assembled = saved.and_then(|saved| match mesh.world().rank() {
        0 => write(path, Checkpoint::peek(&saved)?.whole_weights()?),
        _ => Ok(()),
    });
    if mesh.world().rank() == 0 {
        // The first error is the one to report.
        let _ = remove_dir_all(&folder);
    }
    assembled?;
    mesh.world().barrier().wait()
}

/// Checks that the folder `path` may be written and deleted.
///
/// # Errors
/// A folder that holds something else than what a killed [`ModuleWeights::save_on`] leaves: on every rank, since the
/// others' files are of that kind.
fn check_ours(path: &Path) -> Result<()> {
    let Ok(entries) = read_dir(path) else {
        return match path.symlink_metadata() {
            Ok(_) => Err(refused(format!("'{}' is in the way: move it away", path.display()))),
            Err(_) => Ok(()),
        };
    };
    let ours = [folder::name(0), folder::LATEST.to_string()];
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let plain = name.trim_end_matches(".tmp").trim_end_matches(".old");
        if !ours.iter().any(|known| known == plain) {
            let path = path.display();
            let message =
                format!("'{path}' holds '{name}', which no save has written: move it away");
            return Err(refused(message));
        }
    }
    Ok(())
}

fn save_whole(params: &[Param], path: &Path) -> Result<()> {
    let mut tensors = Vec::new();
    for param in params {
        let spec = param.shard_spec();
        if spec.dims() != spec.global_dims() {
            return Err(refused(format!(
                "'{}' is a shard {:?} of {:?}: give the ranks that have the others, `save_on(mesh, path)`",
                param.name(),
                spec.dims(),
                spec.global_dims()
            )));
        }
        tensors.push((param.name().to_string(), param.leaf().value()?));
    }
    write(path, tensors)
}

fn write(path: &Path, tensors: Vec<(String, Tensor)>) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new(""));
    let written = replace(folder, &file_name(path)?, |new| {
        write_tensors(new, Some(("format", "pt")), tensors)
    });
    written.map_err(refused)
}

/// Returns whether this rank writes its shard of `param`: the first along the axes that hold the same.
fn writes(param: &Param, mesh: &Mesh) -> bool {
    param.replicated().iter().all(|axis| match axis {
        Axis::Pipeline => mesh.stages().embedding_group.rank() == 0,
        axis => mesh.axis(axis).rank() == 0,
    })
}

fn load_params(params: &[Param], path: &Path, strict: bool) -> Result<LoadReport> {
    if let Some(held) = params.iter().find(|param| param.is_in_buffers()) {
        return Err(refused(format!(
            "an optimizer exists for '{}', and would keep master weights and shards of the old values: load before \
             ParamAndGradBuffer, DataParallel or Trainer is made",
            held.name()
        )));
    }
    let file = TensorFile::open(path).map_err(refused)?;
    let name = file_name(path)?;
    let mut unexpected: BTreeSet<String> = file.names().into_iter().collect();
    let mut report = LoadReport::default();
    let mut records: BTreeMap<&str, TensorRecord> = BTreeMap::new();
    for param in params {
        if !unexpected.remove(param.name()) {
            report.missing.push(param.name().to_string());
            continue;
        }
        let (dtype, shape) = file.describe(param.name()).map_err(refused)?;
        let wanted = param.shard_spec().global_dims();
        if shape != wanted || !is_float(dtype) {
            let found = format!("{dtype} {shape:?} there, {wanted:?} here");
            report.mismatched.push(format!("{} ({found})", param.name()));
            continue;
        }
        let slice = Slice { offset: vec![0; shape.len()], shape: shape.to_vec() };
        let piece =
            SliceRecord { file: name.clone(), key: param.name().to_string(), slice, start: 0 };
        let (dtype, shape) = (dtype.to_string(), shape.to_vec());
        records.insert(param.name(), TensorRecord { dtype, shape, pieces: vec![piece] });
    }
    report.unexpected = unexpected.into_iter().collect();
    if strict && !report.is_complete() {
        return Err(refused(format!(
            "'{}' is not of this model: {report}; `load_matching` takes what fits",
            path.display()
        )));
    }
    let folder = path.parent().map_or(PathBuf::new(), Path::to_path_buf);
    let mut reader = CheckpointReader::new(&folder);
    for param in params {
        if let Some(record) = records.get(param.name()) {
            let read = |tensor: &mut _| reader.read(record, param.shard_spec(), tensor);
            param.leaf().write_value(read)?;
        }
    }
    Ok(report)
}

fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F64 | DType::F32 | DType::BF16 | DType::F16)
}

fn file_name(path: &Path) -> Result<String> {
    match path.file_name() {
        Some(name) => Ok(name.to_string_lossy().into_owned()),
        None => Err(refused(format!("'{}' names no file", path.display()))),
    }
}

fn refused(fault: Fault) -> Error {
    Error::io("weights", fault)
}
