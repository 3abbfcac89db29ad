//! A trained model whose weights stay in their files until they are asked for, one by one.

use ferrotron::models::checkpoint::Checkpoint;
use ferrotron::models::hugging_face::{self, FolderWeights};
use ferrotron::models::tokenizer::Tokenizer;
use ferrotron::nn::{Param, Scope};
use ferrotron::parallel::mesh::Mesh;
use ferrotron::{Device, Result, Tensor};
use std::collections::HashMap;
use std::path::Path;

use super::architecture::TrainedModel;
use super::args::device::DeviceArgs;
use super::job::ModelRank;
use super::loaded::{chunk, folder_dtype, folder_tokenizer, refuse_average, scopes};

/// A trained model without its weights, and where these are.
pub struct StoredModel<M: TrainedModel> {
    /// The model, on a fake device.
    pub model: M,
    pub config: M::Config,
    pub tokenizer: Option<Tokenizer>,
    pub weights: StoredWeights,
}

/// The weights of a model, in their files.
pub struct StoredWeights {
    source: Source,
    device: Device,
    /// The parameters in the dtypes in which they are read, if these are converted afterwards.
    read_as: HashMap<String, Param>,
}

enum Source {
    Checkpoint(Checkpoint),
    Folder(FolderWeights),
}

impl<M: TrainedModel> StoredModel<M> {
    /// Opens a run folder, a checkpoint or a Hugging Face folder; with `averaged` the moving average of a run's weights.
    pub fn open(path: &Path, args: &DeviceArgs, averaged: bool) -> Result<StoredModel<M>> {
        let device = args.open()?;
        let (fake, mesh) = (Device::fake(1)?, Mesh::single());
        if hugging_face::is_folder(path) {
            refuse_average(path, averaged)?;
            let config = M::folder_config(path)?;
            let place = ModelRank { mesh: mesh.clone(), device: device.clone() };
            let scope = Scope::new(&fake, folder_dtype(path, args, &place)?, 0);
            let source = Source::Folder(M::folder_weights(path, &config)?);
            return Ok(StoredModel {
                model: chunk::<M>(&scope, &mesh, &config)?,
                tokenizer: folder_tokenizer::<M>(path, &config, &place)?,
                config,
                weights: StoredWeights { source, device, read_as: HashMap::new() },
            });
        }
        let checkpoint = Checkpoint::open(path)?;
        let checkpoint = if averaged { checkpoint.averaged()? } else { checkpoint };
        let config = M::config_from(&checkpoint)?;
        let (scope, of_result) = scopes(&checkpoint, &fake, args.given_dtype()?)?;
        let mut model = chunk::<M>(&scope, &mesh, &config)?;
        checkpoint.check_params(&model.params())?;
        let mut read_as = HashMap::new();
        if let Some(scope) = of_result {
            let named = |param: Param| (param.name().to_string(), param);
            read_as.extend(model.params().into_iter().map(named));
            model = chunk::<M>(&scope, &mesh, &config)?;
        }
        let tokenizer = checkpoint.tokenizer().cloned();
        let source = Source::Checkpoint(checkpoint);
        Ok(StoredModel {
            model,
            config,
            tokenizer,
            weights: StoredWeights { source, device, read_as },
        })
    }
}

impl StoredWeights {
    /// The checkpoint that has them, unless they are in a Hugging Face folder.
    pub fn checkpoint(&self) -> Option<&Checkpoint> {
        match &self.source {
            Source::Checkpoint(checkpoint) => Some(checkpoint),
            Source::Folder(_) => None,
        }
    }

    /// The value of a parameter of the model.
    pub fn read(&mut self, param: &Param) -> Result<Tensor> {
        match &mut self.source {
            Source::Folder(folder) => folder.read_param(param, &self.device),
            Source::Checkpoint(checkpoint) => match self.read_as.get(param.name()) {
                None => checkpoint.read_param(param, &self.device),
                Some(read_as) => {
                    checkpoint.read_param(read_as, &self.device)?.cast(param.leaf().dtype())
                }
            },
        }
    }
}
