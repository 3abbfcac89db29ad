//! The weights of a Hugging Face folder, read one after another into a model.

use ferrotron_nn::Param;
use ferrotron_tensor::{DType, Device, Error, Tensor};
use std::collections::BTreeMap;
use std::path::Path;

use super::mapping::Mapping;
use crate::io::tensor_file::{Fault, TensorFile};

type Result<T> = std::result::Result<T, Fault>;

/// A tensor's file, by its number, and its name there.
type Stored = (usize, String);

/// The weight files of a folder, with what was not read yet.
pub(super) struct Source<'a> {
    folder: &'a Path,
    files: Vec<TensorFile>,
    stored: BTreeMap<String, Stored>,
    /// The one file that may be open.
    open: usize,
}

impl<'a> Source<'a> {
    /// The weights of `files`, which belong to `folder`, by the names that `rename` gives them; it leaves buffers out.
    pub fn new(
        folder: &'a Path,
        files: Vec<TensorFile>,
        rename: impl Fn(&str) -> Option<String>,
    ) -> Source<'a> {
        let mut stored = BTreeMap::new();
        for (file, opened) in files.iter().enumerate() {
            for key in opened.names() {
                if let Some(name) = rename(&key) {
                    stored.insert(name, (file, key));
                }
            }
        }
        Source { folder, files, stored, open: 0 }
    }

    /// Whether a weight is stored and was not read yet.
    pub fn has(&self, name: &str) -> bool {
        self.stored.contains_key(name)
    }

    /// Leaves out the weights that `unwanted` holds for.
    pub fn leave_out(&mut self, unwanted: impl Fn(&str) -> bool) {
        self.stored.retain(|name, _| !unwanted(name));
    }

    /// The dtypes of the weights, each once, the first stored first.
    pub fn dtypes(&self) -> Result<Vec<DType>> {
        let mut dtypes = Vec::new();
        for (file, key) in self.stored.values() {
            let (dtype, _) = describe(&self.files[*file], key)?;
            if !dtypes.contains(&dtype) {
                dtypes.push(dtype);
            }
        }
        Ok(dtypes)
    }

    /// Fills all of `params`, each as `mapping` tells for its name and rows; afterwards nothing may be left.
    pub fn fill(
        &mut self,
        params: &[Param],
        mapping: impl Fn(&str, usize) -> Option<Mapping>,
    ) -> Result<()> {
        for param in params {
            let dims = param.leaf().dims().to_vec();
            let mapping = mapping(param.name(), dims[0])
                .ok_or_else(|| format!("'{}' is unknown there", param.name()))?;
            let take = |(name, rows): &(String, usize)| {
                self.take(name, &mapping.dims(*rows, &dims), param.leaf().device())
            };
            let parts = mapping.parts.iter().map(take).collect::<Result<Vec<Tensor>>>()?;
            let write = |target: &mut Tensor| mapping.join(&parts, target);
            param.leaf().write_value(write).map_err(|error| error.to_string())?;
        }
        let Some(name) = self.stored.keys().next() else { return Ok(()) };
        let folder = self.folder.display();
        Err(format!("'{folder}' has a tensor '{name}' that this model has not"))
    }

    /// Reads a tensor of `dims`, once.
    fn take(&mut self, name: &str, dims: &[usize], device: &Device) -> Result<Tensor> {
        let folder = self.folder.display();
        let stored = self.stored.remove(name);
        let (file, key) = stored.ok_or_else(|| format!("'{folder}' has no tensor '{name}'"))?;
        let found = describe(&self.files[file], &key)?.1;
        if found != dims {
            return Err(format!(
                "'{key}' in '{folder}' is {found:?}, but config.json makes it {dims:?}"
            ));
        }
        self.read((file, &key), device)
    }

    /// Leaves `copy` out if it holds the numbers of `original`, as tied weights that are stored twice do. Errors if it
    /// holds others.
    pub fn check_copy(&mut self, copy: &str, original: &str, device: &Device) -> Result<()> {
        let Some(again) = self.stored.remove(copy) else { return Ok(()) };
        let Some(first) = self.stored.get(original).cloned() else { return Ok(()) };
        let again = self.read((again.0, &again.1), device)?;
        let first = self.read((first.0, &first.1), device)?;
        let dtype = common_dtype(&[again.dtype(), first.dtype()]);
        let same = || Ok(again.cast(dtype)?.bytes()? == first.cast(dtype)?.bytes()?);
        let same_bytes = same().map_err(|error: Error| error.to_string())?;
        if again.dims() != first.dims() || !same_bytes {
            let folder = self.folder.display();
            return Err(format!(
                "'{copy}' in '{folder}' differs from '{original}': config.json says that they are tied"
            ));
        }
        Ok(())
    }

    /// Reads a tensor as it is stored. At most one file stays open: a folder may have more than a process may open.
    fn read(&mut self, (file, key): (usize, &str), device: &Device) -> Result<Tensor> {
        if self.open != file {
            self.files[self.open].close();
            self.open = file;
        }
        let file = &mut self.files[file];
        let (dtype, dims) = file.describe(key)?;
        let mut tensor = Tensor::empty(device, dtype, dims).map_err(|error| error.to_string())?;
        let read = tensor.write_bytes(|bytes| Ok(file.read(key, 0, bytes)));
        read.map_err(|error| error.to_string())??;
        Ok(tensor)
    }
}

/// The narrowest dtype that holds every number of all `dtypes` exactly: for two that differ f32, unless one is f64.
pub fn common_dtype(dtypes: &[DType]) -> DType {
    match dtypes {
        [first, rest @ ..] if rest.iter().all(|dtype| dtype == first) => *first,
        several if several.contains(&DType::F64) => DType::F64,
        _ => DType::F32,
    }
}

/// Dtype and dims of a weight.
fn describe<'a>(file: &'a TensorFile, key: &str) -> Result<(DType, &'a [usize])> {
    let (dtype, dims) = file.describe(key)?;
    match dtype {
        DType::F64 | DType::F32 | DType::BF16 | DType::F16 => Ok((dtype, dims)),
        _ => Err(format!(
            "'{key}' in '{}' has dtype {dtype}: weights must be f64, f32, bf16 or f16",
            file.path().display()
        )),
    }
}
