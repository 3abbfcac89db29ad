//! The weights of a folder, read by our names: for a whole model, or for the shard that a rank holds.

use ferrotron_nn::Param;
use ferrotron_tensor::{DType, Device, Error, Result, ShardSpec, Tensor};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::files::{Stored, common_dtype, describe, open_files, read};
use super::mapping::Mapping;
use crate::io::checked_file::Fault;
use crate::io::tensor_file::TensorFile;
use crate::io::weight_source::WeightSource;
use crate::training::model::{Model, parameter_names};

/// The tensors there that make one of our parameters, by its name and number of rows.
type Mappings = Box<dyn Fn(&str, usize) -> Option<Mapping> + Send>;

/// The name of a stored tensor in new files; `None` for a buffer.
pub(super) type CurrentName = Box<dyn Fn(&str) -> Option<String> + Send>;

/// The names of a family of models.
pub(super) struct Naming {
    /// The name of the family, for messages.
    pub family: &'static str,
    /// The name of a stored tensor in new files; `None` for a buffer.
    pub current_name: CurrentName,
    /// The tensors there that make one of our parameters.
    pub mapping: Mappings,
    /// Tensors that may be stored twice: the copy, and the original.
    pub tied: Vec<(&'static str, String)>,
    /// Beginnings of the names of tensors that this model leaves out.
    pub left_out: &'static [&'static str],
    /// Beginnings of the names of our parameters that need not be stored.
    pub optional: &'static [&'static str],
}

/// The weights of a Hugging Face folder. [`Trainer::load_weights`](crate::trainer::Trainer::load_weights) takes them in
/// any layout.
pub struct FolderWeights {
    folder: PathBuf,
    naming: Naming,
    files: Vec<TensorFile>,
    stored: BTreeMap<String, Stored>,
    /// The one file that may be open.
    open: usize,
    /// The parameter that was read last: shards of one follow one another.
    last: Option<(String, Tensor)>,
    /// The parameters that are not stored.
    fresh: BTreeSet<String>,
}

impl FolderWeights {
    /// Opens the weights of `folder` for a model of `config`.
    ///
    /// # Errors
    /// Malformed or missing files; tensors that are missing or unknown; a tied tensor that differs from its original.
    pub(super) fn open<M: Model>(
        folder: &Path,
        naming: Naming,
        config: &M::Config,
    ) -> Result<FolderWeights> {
        let parameters = parameter_names::<M>(config, DType::F32)?;
        let open = || -> std::result::Result<FolderWeights, Fault> {
            let files = open_files(folder)?;
            let mut stored = stored_weights(&files, &naming.current_name);
            stored.retain(|name, _| !naming.left_out.iter().any(|part| name.starts_with(part)));
            let folder = folder.to_path_buf();
            let (last, fresh) = (None, BTreeSet::new());
            let mut weights = FolderWeights { folder, naming, files, stored, open: 0, last, fresh };
            weights.check_copies()?;
            weights.fresh = weights.check_names(&parameters)?;
            Ok(weights)
        };
        open().map_err(|fault| Error::io("hugging_face", fault))
    }

    /// Fills parameters, whole ones or shards, on their device and rounded to their dtype.
    ///
    /// # Errors
    /// A tensor of another shape; files that cannot be read.
    pub fn fill(&mut self, params: &[Param]) -> Result<()> {
        for param in params {
            let fill = |tensor: &mut Tensor| self.copy(param.name(), param.shard_spec(), tensor);
            param.leaf().write_value(fill)?;
        }
        Ok(())
    }

    /// Reads the value of one parameter, rounded to its dtype. The parameter itself may be on a fake device.
    ///
    /// # Errors
    /// Errors of [`FolderWeights::fill`]; a parameter that is not stored.
    pub fn read_param(&mut self, param: &Param, device: &Device) -> Result<Tensor> {
        if self.fresh.contains(param.name()) {
            return Err(Error::io("hugging_face", self.missing(param.name())));
        }
        let place = param.shard_spec();
        let mut value = Tensor::empty(device, param.leaf().dtype(), place.dims())?;
        self.copy(param.name(), place, &mut value)?;
        self.last = None; // a whole parameter is not asked for again
        Ok(value)
    }

    /// The parameters of the model that the folder has not, and that keep their initial values: those of a new head.
    pub fn fresh(&self) -> impl Iterator<Item = &str> {
        self.fresh.iter().map(String::as_str)
    }

    /// Writes the shard `place` of the parameter `name` to `target`, a tensor of its local dims, in the target's type. A
    /// parameter that is not stored stays as it is.
    fn copy(&mut self, name: &str, place: &ShardSpec, target: &mut Tensor) -> Result<()> {
        if self.fresh.contains(name) {
            return Ok(());
        }
        let known = self
            .last
            .take()
            .filter(|(last, value)| last.as_str() == name && value.device() == target.device());
        let whole = match known {
            Some((_, whole)) => whole,
            None => self.whole(name, place.global_dims(), target.device())?,
        };
        target.copy_from(&shard(&whole, place)?.cast(target.dtype())?)?;
        self.last = Some((name.to_string(), whole));
        Ok(())
    }

    /// The parameter `name` of global `dims`, in the dtype in which it is stored.
    fn whole(&mut self, name: &str, dims: &[usize], device: &Device) -> Result<Tensor> {
        let refuse = |fault: Fault| Error::io("hugging_face", fault);
        let mapping = (self.naming.mapping)(name, dims[0])
            .ok_or_else(|| refuse(format!("{} has no '{name}'", self.naming.family)))?;
        let parts = mapping.parts.iter().map(|(name, rows)| {
            let part = self.read(name, &mapping.dims(*rows, dims), device).map_err(refuse)?;
            mapping.to_ours(&part)
        });
        let parts = parts.collect::<Result<Vec<Tensor>>>()?;
        match &parts[..] {
            [one] => Ok(one.clone()),
            several => {
                let dtypes: Vec<DType> = several.iter().map(Tensor::dtype).collect();
                let several = several.iter().map(|part| part.cast(common_dtype(&dtypes)));
                let several = several.collect::<Result<Vec<Tensor>>>()?;
                Tensor::concat(&several.iter().collect::<Vec<_>>(), 0)
            }
        }
    }

    /// Reads a tensor of `dims`.
    fn read(
        &mut self,
        name: &str,
        dims: &[usize],
        device: &Device,
    ) -> std::result::Result<Tensor, Fault> {
        let (file, key) = self.stored.get(name).cloned().ok_or_else(|| self.missing(name))?;
        let found = describe(&self.files[file], &key)?.1;
        if found != dims {
            let folder = self.folder.display();
            return Err(format!(
                "'{key}' in '{folder}' is {found:?}, but config.json makes it {dims:?}"
            ));
        }
        if self.open != file {
            self.files[self.open].close();
            self.open = file;
        }
        read(&mut self.files[file], &key, device)
    }

    fn missing(&self, name: &str) -> Fault {
        format!("'{}' has no tensor '{name}'", self.folder.display())
    }

    /// Errors unless every parameter is stored, and nothing else; returns those that are not and need not be.
    fn check_names(&self, parameters: &[String]) -> std::result::Result<BTreeSet<String>, Fault> {
        let mut fresh = BTreeSet::new();
        let mut unknown: Vec<&str> = self.stored.keys().map(String::as_str).collect();
        for ours in parameters {
            let mapping = (self.naming.mapping)(ours, 0)
                .ok_or_else(|| format!("{} has no '{ours}'", self.naming.family))?;
            let optional = self.naming.optional.iter().any(|begin| ours.starts_with(begin));
            if optional && mapping.parts.iter().all(|(name, _)| !self.stored.contains_key(name)) {
                fresh.insert(ours.clone());
                continue;
            }
            for (name, _) in mapping.parts {
                match unknown.binary_search(&name.as_str()) {
                    Ok(at) => drop(unknown.remove(at)),
                    Err(_) => return Err(self.missing(&name)),
                }
            }
        }
        let Some(name) = unknown.first() else { return Ok(fresh) };
        let (folder, family) = (self.folder.display(), self.naming.family);
        Err(format!("'{folder}' has a tensor '{name}' that {family} has not"))
    }

    /// Takes tensors that are stored twice out; errors if the two differ.
    fn check_copies(&mut self) -> std::result::Result<(), Fault> {
        let host = Device::cpu(1).map_err(|error| error.to_string())?;
        for (copy, original) in &self.naming.tied {
            let Some((file, key)) = self.stored.remove(*copy) else { continue };
            let Some((first_file, first)) = self.stored.get(original).cloned() else { continue };
            let again = read(&mut self.files[file], &key, &host)?;
            let value = read(&mut self.files[first_file], &first, &host)?;
            self.files[file].close();
            self.files[first_file].close();
            let dtype = common_dtype(&[again.dtype(), value.dtype()]);
            let same = || Ok(again.cast(dtype)?.bytes()? == value.cast(dtype)?.bytes()?);
            let same_bytes = same().map_err(|error: Error| error.to_string())?;
            if again.dims() != value.dims() || !same_bytes {
                let folder = self.folder.display();
                return Err(format!(
                    "'{copy}' in '{folder}' differs from '{original}', and config.json says that they are tied"
                ));
            }
        }
        Ok(())
    }
}

impl WeightSource for FolderWeights {
    fn copy(&mut self, name: &str, place: &ShardSpec, target: &mut Tensor) -> Result<()> {
        FolderWeights::copy(self, name, place, target)
    }

    fn fresh(&self) -> Vec<String> {
        self.fresh.iter().cloned().collect()
    }
}

/// The weights of `files` by the names of new files.
pub(super) fn stored_weights(
    files: &[TensorFile],
    current_name: &CurrentName,
) -> BTreeMap<String, Stored> {
    let keys = files.iter().enumerate();
    let keys =
        keys.flat_map(|(file, opened)| opened.names().into_iter().map(move |key| (file, key)));
    keys.filter_map(|(file, key)| Some((current_name(&key)?, (file, key)))).collect()
}

/// The part of `whole` that lies at `place`.
fn shard(whole: &Tensor, place: &ShardSpec) -> Result<Tensor> {
    (0..place.dims().len()).try_fold(whole.clone(), |value, dim| {
        let pieces = place.pieces(dim).iter();
        let pieces = pieces.map(|&(offset, length)| value.narrow(dim as isize, offset, length));
        let pieces = pieces.collect::<Result<Vec<Tensor>>>()?;
        match &pieces[..] {
            [one] => Ok(one.clone()),
            several => Tensor::concat(&several.iter().collect::<Vec<_>>(), dim as isize),
        }
    })
}
