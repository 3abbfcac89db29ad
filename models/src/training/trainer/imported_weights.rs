//! Training that begins with the weights of a Hugging Face folder, in any layout.

use ferrotron_nn::{EMA, MASTER};
use ferrotron_parallel::long_work::run_long;
use ferrotron_tensor::Result;

use super::Trainer;
use crate::io::hugging_face::FolderWeights;
use crate::training::model::Model;

impl<M: Model> Trainer<M> {
    /// Takes the weights of a Hugging Face folder, at the step where the trainer is; the optimizer's state stays as it is.
    /// All ranks of the mesh call this.
    ///
    /// # Errors
    /// A tensor of another shape than the model's; files that cannot be read.
    pub fn load_weights(&mut self, weights: &mut FolderWeights) -> Result<()> {
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
            weights.fill(buffers.frozen())?;
            buffers.mark_updated();
            optimizer.visit_mut(|name, moment, place, tensor| match moment {
                // These begin as the weights.
                MASTER | EMA => weights.copy(name, place, tensor),
                _ => Ok(()),
            })
        })
    }
}
