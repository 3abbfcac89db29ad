//! The optimizer state of one parameter group.

use ferrotron_tensor::ops::round::widen;
use ferrotron_tensor::{DType, Error, FlatBuffer, Result, Tensor};
use std::collections::HashMap;
use std::ops::Range;

use super::block::Block;
use super::config::OptimizerConfig;
use super::moment::{Moment, ParamShard, Store};
use super::rule::UpdateRule;
use super::shard_unit::ShardUnit;
use super::state::{StateShape, StateSpec};
use super::update_config::{UpdateConfig, WeightUpdate};
use crate::{Param, ParamAndGradBucket};

/// Name of the master weights in checkpoints.
pub const MASTER: &str = "master";

/// Name of the moving average of the weights in checkpoints.
pub const EMA: &str = "ema";

/// The state of one parameter group.
pub(super) struct GroupState {
    pub config: OptimizerConfig,
    pub rule: Box<dyn UpdateRule>,
    /// The dtype of states and updates.
    pub accumulator: DType,
    /// The ranges of the weights: parameters, the shards of them that this rank updates, or blocks.
    pub pieces: Vec<ParamShard>,
    /// The blocks, for rules that update one at a time.
    pub blocks: Vec<Block>,
    /// States with the layout of the weights.
    pub moments: Vec<Moment>,
    /// States that only some of the blocks have, or that have fewer than one number per element.
    reduced: Vec<Moment>,
    /// The states of each block, as declared: the index among all moments, and the range.
    slots: Vec<Vec<(usize, usize)>>,
    pub master: Option<Moment>,
    /// The moving average of the weights.
    ema: Option<Moment>,
}

impl GroupState {
    /// The state of a group in a run with the optimizer `config`.
    ///
    /// Errors, naming it, if an option of a parameter or a declared state does not fit.
    pub fn of_group(
        config: OptimizerConfig,
        group: &ParamAndGradBucket,
        update: &UpdateConfig,
    ) -> Result<GroupState> {
        group.params.iter().try_for_each(|param| param.options().check(param.name()))?;
        let own = group.options.optimizer.unwrap_or(config);
        own.validate()?;
        let is_split =
            |param: &&Param| param.is_hidden_matrix() && group.shard_unit == ShardUnit::Elements;
        let needs_whole = own.shard_unit() == ShardUnit::HiddenMatrices;
        if let Some(param) = group.params.iter().find(is_split).filter(|_| needs_whole) {
            let message = format!(
                "'{}' has to see the whole of '{}': name it as the `optimizer` of BufferConfig or DataParallelConfig",
                own.rule().name(),
                param.name()
            );
            return Err(Error::config("optimizer", message));
        }
        // The learning rate of a step is one number, which all parameters multiply.
        let rule = own.rule_of(group.shard_unit);
        let differs = |step| rule.learning_rate(2.0, step) != config.learning_rate(2.0, step);
        if [1, 9, 1000, 1_000_000].into_iter().any(differs) {
            let message = format!(
                "'{}' has an optimizer with a learning rate of its own: give it one that follows the schedule, such \
                 as Adafactor with `StepSize::Scheduled`",
                group.params[0].name()
            );
            return Err(Error::config("optimizer", message));
        }
        Self::new(own, group, update)
    }

    /// The declared states as zeros, master weights for 16-bit weights, and their moving average.
    fn new(
        config: OptimizerConfig,
        group: &ParamAndGradBucket,
        update: &UpdateConfig,
    ) -> Result<GroupState> {
        let rule = config.rule_of(group.shard_unit);
        let by_block = rule.shard_unit() != ShardUnit::Elements;
        let blocks = if by_block { blocks(rule.name(), group)? } else { Vec::new() };
        let own = |(param, place)| ParamShard { param, place, replicated: group.replicated };
        let pieces: Vec<ParamShard> = match by_block {
            true => blocks.iter().map(|block| block.piece.clone()).collect(),
            false => group.pieces().into_iter().map(own).collect(),
        };
        let dims: Vec<&[usize]> = match by_block {
            true => blocks.iter().map(Block::global_dims).collect(),
            false => pieces.iter().map(|piece| piece.place.global_dims()).collect(),
        };
        let declared: Vec<Vec<StateSpec>> = dims.iter().map(|dims| rule.states(dims)).collect();
        check_states(&*rule, &declared)?;
        let (aligned, reduced): (Vec<&str>, Vec<&str>) = names(&declared)
            .into_iter()
            .partition(|name| declared.iter().all(|specs| has_per_element(specs, name)));
        group.with_owned(|(weights, range), _| {
            let (device, dtype) = (weights.device().clone(), weights.dtype().accumulator());
            let store = |name: &str| {
                let given = declared.iter().flatten().find(|spec| spec.name == name);
                let dtype = given.and_then(|spec| spec.dtype).unwrap_or(dtype);
                Store { kind: update.states, device: device.clone(), dtype }
            };
            let moment = |name: &&'static str| Moment::new(name, pieces.clone(), &store(name));
            let moments = aligned.iter().map(moment).collect::<Result<_>>()?;
            let mut parts: Vec<Vec<ParamShard>> = reduced.iter().map(|_| Vec::new()).collect();
            let mut slots = Vec::new();
            for (index, (block, specs)) in blocks.iter().zip(&declared).enumerate() {
                let mut slot = |spec: &StateSpec| {
                    if let Some(moment) = aligned.iter().position(|&name| name == spec.name) {
                        return Ok((moment, index));
                    }
                    let own = reduced.iter().position(|&name| name == spec.name);
                    let own = own.expect("`names` has every state");
                    parts[own].push(block.state(spec.shape)?);
                    Ok((aligned.len() + own, parts[own].len() - 1))
                };
                slots.push(specs.iter().map(&mut slot).collect::<Result<_>>()?);
            }
            let reduced = reduced.iter().zip(parts);
            let reduced = reduced.map(|(name, pieces)| Moment::new(name, pieces, &store(name)));
            let reduced = reduced.collect::<Result<_>>()?;
            let has_master = weights.dtype() != dtype && update.weights == WeightUpdate::MasterCopy;
            let mut master = has_master.then(|| moment(&MASTER)).transpose()?;
            let mut ema = update.ema_decay.map(|_| moment(&EMA)).transpose()?;
            for copy in master.iter_mut().chain(&mut ema) {
                let weights = weights.slice(range.clone())?;
                copy.flat.with_slice_mut(.., |copy| match weights.dtype() == dtype {
                    true => copy.copy_from(&weights),
                    false => widen(copy, &weights),
                })?;
            }
            let pieces = pieces.clone();
            let accumulator = dtype;
            Ok(GroupState {
                config,
                rule,
                accumulator,
                pieces,
                blocks,
                moments,
                reduced,
                slots,
                master,
                ema,
            })
        })
    }

    /// Starts reading the state of these elements, if it is in mapped files.
    pub fn prefetch(&self, elements: &Range<usize>) {
        let kept = self.moments.iter().chain(&self.master).chain(&self.ema);
        kept.for_each(|moment| moment.flat.prefetch(elements.clone()));
    }

    /// All states, the master weights and the moving average.
    pub fn all(&self) -> impl Iterator<Item = &Moment> {
        self.moments.iter().chain(&self.reduced).chain(&self.master).chain(&self.ema)
    }

    /// All states, the master weights and the moving average, to be changed.
    pub fn all_mut(&mut self) -> impl Iterator<Item = &mut Moment> {
        let GroupState { moments, reduced, master, ema, .. } = self;
        moments.iter_mut().chain(reduced).chain(master).chain(ema)
    }

    /// Passes the declared states of a block to `f`.
    pub fn with_states(
        &mut self,
        block: usize,
        f: &mut dyn FnMut(&mut [&mut Tensor]) -> Result<()>,
    ) -> Result<()> {
        let moments = self.moments.iter_mut().chain(&mut self.reduced);
        let mut flats: Vec<_> = moments.map(|moment| Some(&mut moment.flat)).collect();
        lend(&mut flats, &self.slots[block], Vec::new(), f)
    }

    /// All that an update reads and writes.
    pub fn parts(&mut self) -> Parts<'_> {
        let GroupState { rule, pieces, blocks, moments, reduced, slots, master, ema, .. } = self;
        let (aligned, has_master) = (moments.len(), master.is_some());
        let kept = moments.iter_mut().chain(master).chain(ema);
        let kept = kept.map(|moment| &mut moment.flat).collect();
        let reduced = Reduced { aligned, moments: reduced, slots };
        Parts { rule: &**rule, pieces, blocks, kept, has_master, reduced }
    }
}

/// All that an update reads and writes.
pub(super) struct Parts<'a> {
    pub rule: &'a dyn UpdateRule,
    pub pieces: &'a [ParamShard],
    pub blocks: &'a [Block],
    /// The states with the layout of the weights, the master weights and the moving average.
    pub kept: Vec<&'a mut FlatBuffer>,
    pub has_master: bool,
    pub reduced: Reduced<'a>,
}

/// The states of blocks that do not have the layout of the weights.
pub(super) struct Reduced<'a> {
    /// Number of states with the layout of the weights.
    pub aligned: usize,
    moments: &'a mut [Moment],
    slots: &'a [Vec<(usize, usize)>],
}

impl Reduced<'_> {
    /// Passes all states of a block to `f`, as declared: those of the layout of the weights are `aligned`.
    pub fn with_states(
        &mut self,
        block: usize,
        aligned: &mut [&mut Tensor],
        f: &mut dyn FnMut(&mut [&mut Tensor]) -> Result<()>,
    ) -> Result<()> {
        // Groups by elements have no slots: their states are the aligned ones, as declared.
        let Some(slots) = self.slots.get(block) else { return f(aligned) };
        let mut flats: Vec<_> = std::iter::repeat_with(|| None).take(self.aligned).collect();
        flats.extend(self.moments.iter_mut().map(|moment| Some(&mut moment.flat)));
        let own: Vec<_> = slots.iter().filter(|slot| slot.0 >= self.aligned).copied().collect();
        lend(&mut flats, &own, Vec::new(), &mut |reduced| {
            let mut aligned: Vec<_> = aligned.iter_mut().map(|state| Some(&mut **state)).collect();
            let mut reduced = reduced.iter_mut().map(|state| &mut **state);
            let next = |&(moment, _): &(usize, usize)| match aligned.get_mut(moment) {
                Some(state) => state.take(),
                None => reduced.next(),
            };
            f(&mut slots.iter().filter_map(next).collect::<Vec<_>>())
        })
    }
}

/// Passes ranges of different flats to `f`.
fn lend(
    flats: &mut [Option<&mut FlatBuffer>],
    slots: &[(usize, usize)],
    mut lent: Vec<&mut Tensor>,
    f: &mut dyn FnMut(&mut [&mut Tensor]) -> Result<()>,
) -> Result<()> {
    let Some((&(index, range), rest)) = slots.split_first() else { return f(&mut lent) };
    let flat = flats[index].take().expect("a block has each state once");
    let (start, len) = flat.range(range)?;
    flat.with_slice_mut(start..start + len, |tensor| {
        lend(flats, rest, lent.into_iter().chain([tensor]).collect(), f)
    })
}

/// The names of declared states, each once.
fn names(declared: &[Vec<StateSpec>]) -> Vec<&'static str> {
    let mut names = Vec::new();
    for spec in declared.iter().flatten() {
        if !names.contains(&spec.name) {
            names.push(spec.name);
        }
    }
    names
}

fn has_per_element(specs: &[StateSpec], name: &str) -> bool {
    specs.iter().any(|spec| spec.name == name && spec.shape == StateShape::PerElement)
}

/// Errors unless names are unique and, for a rule by elements, all parameters have the same states of one number per
/// element.
fn check_states(rule: &dyn UpdateRule, declared: &[Vec<StateSpec>]) -> Result<()> {
    let by_elements = rule.shard_unit() == ShardUnit::Elements;
    let refuse = |message: String| {
        Err(Error::config("optimizer", format!("rule '{}': {message}", rule.name())))
    };
    let mut dtypes: HashMap<&str, Option<DType>> = HashMap::new();
    for specs in declared {
        for (index, StateSpec { name, shape, dtype }) in specs.iter().enumerate() {
            if dtypes.entry(*name).or_insert(*dtype) != dtype {
                return refuse(format!("the state '{name}' has several dtypes"));
            }
            if specs[..index].iter().any(|other| other.name == *name)
                || [MASTER, EMA].contains(name)
            {
                return refuse(format!("the name of the state '{name}' is taken"));
            }
            if name.is_empty() || name.contains('.') {
                return refuse(format!("a state cannot be named '{name}'"));
            }
            if by_elements && *shape != StateShape::PerElement {
                return refuse(format!(
                    "the state '{name}' has fewer numbers than elements, but the rule updates any ranges of elements: \
                     let its `shard_unit` be Parameters"
                ));
            }
        }
    }
    if by_elements && declared.windows(2).any(|two| two[0] != two[1]) {
        return refuse(
            "parameters have different states, but the rule updates any ranges of elements: let its `shard_unit` be \
             Parameters"
                .to_string(),
        );
    }
    Ok(())
}

/// The blocks of the parameters that this rank updates, in the order of the flat buffers.
///
/// Errors if this rank updates only a part of its shard of a parameter, or if a parameter is sharded along both of its
/// last dims.
fn blocks(rule: &'static str, group: &ParamAndGradBucket) -> Result<Vec<Block>> {
    let mut all = Vec::new();
    let params: HashMap<_, _> = group.params.iter().map(|param| (param.name(), param)).collect();
    for (name, place) in group.pieces() {
        let param = params[&name[..]]; // a group's pieces are of its parameters
        if *param.shard_spec() != place {
            let message = format!(
                "has to see the whole of '{name}', of which this rank's shard ends within: name it as the `optimizer` of \
                 BufferConfig or DataParallelConfig"
            );
            return Err(Error::config(rule, message));
        }
        all.extend(blocks_of(param, group));
    }
    match all.iter().find(|block| block.spans_ranks() == (true, true)) {
        None => Ok(all),
        Some(block) => {
            let message = format!("'{}' is cut into rows and into columns", block.name());
            Err(Error::config(rule, message))
        }
    }
}

/// The blocks of one parameter.
fn blocks_of(param: &Param, group: &ParamAndGradBucket) -> Vec<Block> {
    let (place, replicated) = (param.shard_spec(), group.replicated);
    let piece = |place| ParamShard { param: param.name().to_string(), place, replicated };
    let whole = place.global_dims().to_vec();
    if param.blocks().is_empty() {
        return vec![Block { piece: piece(place.clone()), number: (0, 1), whole }];
    }
    let mut start = 0;
    let block = |(number, &len): (usize, &usize)| {
        let place = place.intersect_dim(0, start..start + len);
        start += len;
        let (number, whole) = ((number, param.blocks().len()), [&[len], &whole[1..]].concat());
        Block { piece: piece(place), number, whole }
    };
    param.blocks().iter().enumerate().map(block).collect()
}
