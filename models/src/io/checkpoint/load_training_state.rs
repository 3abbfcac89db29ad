//! Loading weights and optimizer state in the layout of a run, by all ranks together.

use ferrotron_nn::Optimizer;
use ferrotron_parallel::collective::Group;
use ferrotron_parallel::data_parallel::DataParallel;
use ferrotron_tensor::{Result, Tensor};
use std::sync::atomic::Ordering::Relaxed;

use super::load::{Checkpoint, damaged};
use super::shared_load::{WINDOW, Wanted, load_shared};

/// A tensor that is filled, by its number among those of its kind.
enum Target {
    Weight { bucket: usize, number: usize },
    FrozenWeight(usize),
    State(usize),
}

impl Checkpoint {
    /// Fills the weights and the optimizer state that this rank holds. All ranks of `world` call this: together they read
    /// each file once, and compare checksums.
    ///
    /// Errors as [`Checkpoint::load_params_of_part`] and [`Checkpoint::load_optimizer`] before anything is changed; on all
    /// ranks if a file is damaged.
    pub(crate) fn load_training_state(
        &self,
        world: &Group,
        data_parallel: &DataParallel,
        optimizer: &mut Optimizer,
    ) -> Result<()> {
        let buffers = data_parallel.buffers();
        let (mut targets, mut wanted): (Vec<Target>, Vec<Wanted>) = (Vec::new(), Vec::new());
        for (bucket, group) in buffers.groups().iter().enumerate() {
            let dtype = group.params[0].leaf().dtype();
            for (number, (name, place)) in group.local_weights().into_iter().enumerate() {
                wanted.push((self.find_param(&name, &place, dtype)?, place));
                targets.push(Target::Weight { bucket, number });
            }
        }
        for (number, param) in buffers.frozen().iter().enumerate() {
            let (place, dtype) = (param.shard_spec().clone(), param.leaf().dtype());
            wanted.push((self.find_param(param.name(), &place, dtype)?, place));
            targets.push(Target::FrozenWeight(number));
        }
        self.check_optimizer(optimizer)?;
        let mut states = 0..;
        optimizer.visit(|name, moment, place, tensor| {
            wanted.push((self.find_state(name, moment, place, tensor.dtype())?, place.clone()));
            targets.extend(states.next().map(Target::State));
            Ok(())
        })?;

        data_parallel.reshard_weights()?;
        let mut write =
            |target: usize, write: &mut dyn FnMut(&mut Tensor) -> Result<()>| match targets[target]
            {
                Target::Weight { bucket, number } => {
                    buffers.groups()[bucket].write_weight(number, write)
                }
                Target::FrozenWeight(number) => buffers.frozen()[number].leaf().write_value(write),
                Target::State(number) => optimizer.write_state(number, write),
            };
        let loaded =
            load_shared((&self.folder, &self.index), (world, WINDOW), &wanted, &mut write)?;
        let bytes = loaded.map_err(|fault| damaged(&self.folder, fault))?;
        self.bytes_read.fetch_add(bytes, Relaxed);
        self.verified.store(true, Relaxed);
        buffers.mark_updated();
        optimizer.set_steps(self.progress.optimizer_steps);
        Ok(())
    }
}
