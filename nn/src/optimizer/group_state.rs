//! The optimizer state of one parameter group.

use ferrotron_tensor::Result;
use ferrotron_tensor::ops::round::widen;
use std::ops::Range;

use super::config::OptimizerConfig;
use super::mean_squares::{FactoredBlock, MeanSquares};
use super::moment::{Moment, ParamShard, Store};
use super::update_config::{UpdateConfig, WeightUpdate};
use crate::ParamAndGradBucket;

/// Name of the master weights in checkpoints.
pub const MASTER: &str = "master";

/// The state of one parameter group.
pub(super) struct GroupState {
    /// The ranges of the weights: parameters, the shards of them that this rank updates, or Adafactor's blocks.
    pub pieces: Vec<ParamShard>,
    /// Moments with the layout of the weights.
    pub moments: Vec<Moment>,
    /// Mean squares of Adafactor.
    pub mean_squares: Option<MeanSquares>,
    pub master: Option<Moment>,
}

impl GroupState {
    /// Zero moments, and master weights for 16-bit weights.
    pub fn new(
        config: &OptimizerConfig,
        group: &ParamAndGradBucket,
        update: &UpdateConfig,
    ) -> Result<GroupState> {
        let blocks = match config {
            OptimizerConfig::Adafactor(_) => Some(FactoredBlock::all(group)?),
            _ => None,
        };
        let own = |(param, place)| ParamShard { param, place, replicated: group.replicated };
        let pieces: Vec<ParamShard> = match &blocks {
            Some(blocks) => blocks.iter().map(|block| block.piece.clone()).collect(),
            None => group.pieces().into_iter().map(own).collect(),
        };
        group.with_owned(|(weights, range), _| {
            let (device, dtype) = (weights.device().clone(), weights.dtype().accumulator());
            let store = Store { kind: update.states, device, dtype };
            let moment = |&name: &&'static str| Moment::new(name, pieces.clone(), &store);
            let moments = config.moments().iter().map(moment).collect::<Result<_>>()?;
            let mean_squares = blocks.map(|blocks| MeanSquares::new(blocks, &store)).transpose()?;
            let has_master = weights.dtype() != dtype && update.weights == WeightUpdate::MasterCopy;
            let mut master = has_master.then(|| moment(&MASTER)).transpose()?;
            if let Some(master) = &mut master {
                let weights = weights.slice(range)?;
                master.flat.with_slice_mut(.., |master| widen(master, &weights))?;
            }
            Ok(GroupState { pieces: pieces.clone(), moments, mean_squares, master })
        })
    }

    /// Starts reading the state of these elements, if it is in mapped files.
    pub fn prefetch(&self, elements: &Range<usize>) {
        let kept = self.moments.iter().chain(&self.master);
        kept.for_each(|moment| moment.flat.prefetch(elements.clone()));
    }

    /// All moments, and the master weights.
    pub fn all(&self) -> impl Iterator<Item = &Moment> {
        let mean_squares = self.mean_squares.iter().flat_map(|means| &means.moments);
        self.moments.iter().chain(mean_squares).chain(&self.master)
    }

    /// All moments, and the master weights, to be changed.
    pub fn all_mut(&mut self) -> impl Iterator<Item = &mut Moment> {
        let mean_squares = self.mean_squares.iter_mut().flat_map(|means| &mut means.moments);
        self.moments.iter_mut().chain(mean_squares).chain(&mut self.master)
    }
}
