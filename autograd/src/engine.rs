//! The backward pass through the graph.
//!
//! Nodes run by descending sequence number. Each therefore runs after all users of its results, and in the same order
//! on every rank, so collectives inside backward cannot deadlock. A node's backward is consumed, so its saved values
//! are freed during the pass.

pub(crate) mod backward;
pub(crate) mod node;
pub(crate) mod recording;

use ferrotron_tensor::{At, Error, Result, Tensor};
use std::collections::BTreeMap;
use std::sync::Arc;
use tracing::trace_span;

use crate::engine::node::{Node, Slot, Source};
use crate::engine::recording::{Recording, with};
use crate::{Accum, Cotangents, InputGrads, Leaf, Var};

/// The time at which weight gradients of linear layers are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightGrads {
    /// Within backward.
    Now,
    /// In [`DeferredGrads::run`]: a zero-bubble pipeline schedules them into its bubbles.
    Deferred,
}

type Write = Box<dyn FnOnce(&mut Tensor, Accum) -> Result<()> + Send>;

/// Deferred weight gradients, in backward order.
#[derive(Default)]
#[must_use = "deferred weight gradients are lost unless they are run"]
pub struct DeferredGrads(Vec<(Leaf, Write)>);

impl DeferredGrads {
    pub(crate) fn push(&mut self, leaf: Leaf, write: Write) {
        self.0.push((leaf, write));
    }

    pub(crate) fn append(&mut self, mut other: DeferredGrads) {
        self.0.append(&mut other.0);
    }

    /// Number of deferred gradients.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Computes them.
    pub fn run(self) -> Result<()> {
        self.0.into_iter().try_for_each(|(leaf, write)| {
            let _span = trace_span!("weight gradient", name = leaf.name()).entered();
            leaf.accumulate_with(write).at(leaf.name())
        })
    }
}

/// Nodes whose results have gradients, by sequence number.
#[derive(Default)]
pub(crate) struct Pending(BTreeMap<u64, (Arc<Node>, Vec<Option<Tensor>>)>);

impl Pending {
    /// The slot for the gradient of a node's result.
    pub(crate) fn slot(&mut self, node: &Arc<Node>, output: usize) -> &mut Option<Tensor> {
        let fresh = || (node.clone(), node.outputs.iter().map(|_| None).collect());
        &mut self.0.entry(node.seq).or_insert_with(fresh).1[output]
    }
}

/// A start of a backward pass: a variable without its value. A pipeline stage keeps this for an output that it has
/// sent.
#[derive(Clone)]
pub struct GradientEdge {
    source: Option<Source>,
    slot: Slot,
}

impl GradientEdge {
    /// Creates the root for a variable.
    pub fn from_var(var: &Var) -> GradientEdge {
        GradientEdge { source: var.source().cloned(), slot: Slot::from_tensor(var.value()) }
    }

    /// A cotangent filled with `value`.
    pub fn full(&self, value: f64) -> Result<Tensor> {
        Tensor::full(&self.slot.device, self.slot.dtype, &self.slot.dims, value)
    }

    /// Runs backward from this root. See [`backward`].
    pub fn backward(self, cotangent: Tensor, mode: WeightGrads) -> Result<DeferredGrads> {
        backward_from(vec![(self, cotangent)], mode)
    }
}

/// Runs backward from `outputs`, each with its cotangent, and accumulates gradients into the leaves.
///
/// Errors if an output does not need a gradient, a cotangent has other dims, or a node was already consumed.
pub fn backward(outputs: &[(&Var, Tensor)], mode: WeightGrads) -> Result<DeferredGrads> {
    let roots =
        outputs.iter().map(|(var, cotangent)| (GradientEdge::from_var(var), cotangent.clone()));
    backward_from(roots.collect(), mode)
}

fn backward_from(outputs: Vec<(GradientEdge, Tensor)>, mode: WeightGrads) -> Result<DeferredGrads> {
    let mut deferred = DeferredGrads::default();
    let mut pending = Pending::default();
    for (GradientEdge { source, slot }, cotangent) in outputs {
        if slot.dims[..] != *cotangent.dims() || slot.dtype != cotangent.dtype() {
            return Err(Error::shape(
                "backward",
                format!("cotangent {cotangent:?} for a value {} {:?}", slot.dtype, slot.dims),
            ));
        }
        match source {
            None => {
                return Err(Error::graph(
                    "backward",
                    "the value depends on no leaf that was recorded; was it made under no_grad?",
                ));
            }
            Some(Source::Leaf(leaf)) => leaf.accumulate(cotangent)?,
            Some(Source::Node(node, output)) => {
                let slot = pending.slot(&node, output);
                *slot = Some(match slot.take() {
                    None => cotangent,
                    Some(first) => first.add(&cotangent)?,
                });
            }
        }
    }
    // Backward formulas use tensors, but a user's closure might use variables: recording is off.
    with(Recording::Off, || walk(&mut pending, mode, &mut deferred)).0?;
    Ok(deferred)
}

fn walk(pending: &mut Pending, mode: WeightGrads, deferred: &mut DeferredGrads) -> Result<()> {
    while let Some((_, (node, cotangents))) = pending.0.pop_last() {
        let Some(backward) = node.take() else {
            return Err(Error::graph(
                "backward",
                format!(
                    "the graph through {} was walked before; its saved values are gone. Run forward again",
                    node.name
                ),
            ));
        };
        let _span = trace_span!("backward", name = node.name).entered();
        backward.backward(
            Cotangents(cotangents),
            &mut InputGrads { node: &node, pending, mode, deferred },
        )?;
    }
    Ok(())
}
