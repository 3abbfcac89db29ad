//! Training that begins with the weights of a Hugging Face folder or of another checkpoint, in any layout.

use ferrotron_nn::{EMA, MASTER};
use ferrotron_parallel::long_work::run_long;
use ferrotron_tensor::Result;

use super::Trainer;
use crate::io::checkpoint::Checkpoint;
use crate::io::hugging_face::FolderWeights;
use crate::io::weight_source::WeightSource;
use crate::training::model::{Model, parameter_names};

impl<M: Model> Trainer<M> {
    /// Takes the weights of a Hugging Face folder, at the step where the trainer is; the optimizer's state stays as it is.
    /// All ranks of the mesh call this.
    ///
    /// # Errors
    /// A tensor of another shape than the model's; files that cannot be read.
    pub fn load_weights(&mut self, weights: &mut FolderWeights) -> Result<()> {
        self.copy_weights(weights)
    }

    /// Takes the weights of a checkpoint of the same model with other heads, as [`Trainer::load_weights`] does, and returns
    /// the names of parameters that keep their initial values. [`Checkpoint::peek`] is enough: checksums are compared.
    ///
    /// # Errors
    /// A configuration that differs in more than heads and [`Model::TRAINING_FIELDS`]; files that are damaged or cannot be
    /// read.
    pub fn load_pretrained(&mut self, checkpoint: &Checkpoint) -> Result<Vec<String>> {
        let fields = [M::TRAINING_FIELDS, M::HEAD_FIELDS].concat();
        checkpoint.check_config(M::ARCHITECTURE, &self.model, &fields)?;
        let names = parameter_names::<M>(&self.model, self.scope.dtype())?;
        let mut weights = checkpoint.pretrained_weights(&names, M::HEAD_PARAMETERS)?;
        checkpoint.verify(self.mesh.world())?;
        self.copy_weights(&mut weights)?;
        Ok(weights.fresh())
    }

    fn copy_weights(&mut self, weights: &mut (dyn WeightSource + Send)) -> Result<()> {
        self.graph = None; // it knows where weights and moments were
        let world = self.mesh.world().clone();
        let (data_parallel, optimizer) = (&self.data_parallel, &mut self.optimizer);
        run_long(&world, |_| {
            data_parallel.reshard_weights()?;
            let buffers = data_parallel.buffers();
            for bucket in buffers.groups() {
                for (number, (name, place)) in bucket.local_weights().iter().enumerate() {
                    bucket.write_weight(number, |tensor| weights.copy(name, place, tensor))?;
                }
            }
            for param in buffers.frozen() {
                let (name, place) = (param.name(), param.shard_spec());
                param.leaf().write_value(|tensor| weights.copy(name, place, tensor))?;
            }
            buffers.mark_updated();
            optimizer.visit_mut(|name, moment, place, tensor| match moment {
                // These begin as the weights.
                MASTER | EMA => weights.copy(name, place, tensor),
                _ => Ok(()),
            })
        })
    }
}
