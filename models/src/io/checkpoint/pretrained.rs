//! The weights of a checkpoint for a model with other heads.

use ferrotron_tensor::{Result, ShardSpec, Tensor};
use std::collections::BTreeSet;

use super::is_moment;
use super::load::Checkpoint;
use super::reader::CheckpointReader;
use crate::io::weight_source::WeightSource;

/// The weights that a model shares with the one of a checkpoint.
pub(crate) struct PretrainedWeights<'a> {
    checkpoint: &'a Checkpoint,
    reader: CheckpointReader<'a>,
    /// Parameters that the checkpoint has not.
    fresh: BTreeSet<String>,
}

impl Checkpoint {
    /// The weights for a model with the parameters `names`, whose heads' names begin with one of `heads`.
    ///
    /// # Errors
    /// A parameter other than a head's that one of both has not.
    pub(crate) fn pretrained_weights(
        &self,
        names: &[String],
        heads: &[&str],
    ) -> Result<PretrainedWeights<'_>> {
        let of_head = |name: &str| heads.iter().any(|head| name.starts_with(head));
        let stored = self.index.tensors.keys().filter(|name| !is_moment(name));
        let stray = stored.filter(|name| of_head(name)).map(String::as_str);
        self.check_names(names.iter().map(String::as_str).chain(stray))?;
        let absent = names.iter().filter(|name| !self.index.tensors.contains_key(*name));
        let fresh = absent.filter(|name| of_head(name)).cloned().collect();
        let reader = CheckpointReader::new(&self.folder);
        Ok(PretrainedWeights { checkpoint: self, reader, fresh })
    }
}

impl WeightSource for PretrainedWeights<'_> {
    fn copy(&mut self, name: &str, place: &ShardSpec, target: &mut Tensor) -> Result<()> {
        if self.fresh.contains(name) {
            return Ok(());
        }
        let checkpoint = self.checkpoint;
        let record = checkpoint.find_weight(name, place, target.dtype())?;
        self.reader.read(record, place, target)
    }

    fn fresh(&self) -> Vec<String> {
        self.fresh.iter().cloned().collect()
    }
}
