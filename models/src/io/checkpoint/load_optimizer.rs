//! Loading the state of an optimizer.

use ferrotron_nn::{EMA, MASTER, Optimizer};
use ferrotron_tensor::{DType, Error, Result, ShardSpec};
use std::collections::{BTreeMap, BTreeSet};

use super::index::TensorRecord;
use super::load::Checkpoint;
use super::reader::CheckpointReader;
use super::{OPTIMIZER, moment_name};

impl Checkpoint {
    /// Fills the moments of an optimizer, and sets its number of steps to the saved one.
    ///
    /// # Errors
    /// A checkpoint without moments or with another optimizer's; other dims or another dtype.
    pub fn load_optimizer(&self, optimizer: &mut Optimizer) -> Result<()> {
        self.check_optimizer(optimizer)?;
        let mut reader = CheckpointReader::new(&self.folder);
        optimizer.visit_mut(|name, moment, place, tensor| {
            reader.read(self.find_state(name, moment, place, tensor.dtype())?, place, tensor)
        })?;
        optimizer.set_steps(self.progress.optimizer_steps);
        Ok(())
    }

    /// Errors as [`Checkpoint::load_optimizer`], before anything is changed.
    pub(super) fn check_optimizer(&self, optimizer: &Optimizer) -> Result<()> {
        if !self.has_optimizer() {
            return Err(Error::io(
                "checkpoint",
                format!("{self} holds weights, but no optimizer state to go on from"),
            ));
        }
        self.check_rule(optimizer)?;
        optimizer.visit(|name, moment, place, tensor| {
            self.check_trained(name, moment)?;
            self.find_state(name, moment, place, tensor.dtype()).map(drop)
        })
    }

    /// The record of a state of the optimizer.
    pub(super) fn find_state(
        &self,
        name: &str,
        moment: &str,
        place: &ShardSpec,
        dtype: DType,
    ) -> Result<&TensorRecord> {
        match moment {
            // Weights of a run in f32 are as good as master weights.
            MASTER => self.find_weight(name, place, dtype),
            // A run may begin to average.
            EMA if !self.index.tensors.contains_key(&moment_name(EMA, name)) => {
                self.find_weight(name, place, dtype)
            }
            _ => self.find(&moment_name(moment, name), place, dtype),
        }
    }

    /// Errors if the checkpoint has states of a parameter of `optimizer` that its update rule does not have.
    fn check_rule(&self, optimizer: &Optimizer) -> Result<()> {
        let mut kept: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
        optimizer.visit(|name, moment, _, _| {
            kept.entry(name.to_string()).or_default().insert(moment);
            Ok(())
        })?;
        let foreign = self.index.tensors.keys().find_map(|key| {
            let (moment, name) = key.strip_prefix(OPTIMIZER)?.strip_prefix('.')?.split_once('.')?;
            let known = kept.get(name)?;
            (![MASTER, EMA].contains(&moment) && !known.contains(moment)).then_some((moment, name))
        });
        let Some((moment, name)) = foreign else { return Ok(()) };
        let message = format!(
            "{self} was saved with another optimizer: it has {moment} of '{name}'; go on with the same --optimizer"
        );
        Err(Error::config("checkpoint", message))
    }

    /// Errors if the checkpoint has a parameter without this moment, and others with it.
    fn check_trained(&self, name: &str, moment: &str) -> Result<()> {
        let tensors = &self.index.tensors;
        let prefix = moment_name(moment, "");
        if moment == MASTER
            || !tensors.contains_key(name)
            || tensors.contains_key(&moment_name(moment, name))
            || !tensors.keys().any(|key| key.starts_with(&prefix))
        {
            return Ok(());
        }
        let message = format!(
            "{self} has no {moment} of '{name}', which was frozen when it was saved: freeze it again with \
             --freeze-parameters"
        );
        Err(Error::config("checkpoint", message))
    }
}
