//! The backward pass through the graph.
//!
//! Nodes run by descending sequence number. Each therefore runs after all users of its results, and in the same order
//! on every rank, so collectives inside backward cannot deadlock. A node's backward is consumed, so its saved values
//! are freed during the pass.

pub(crate) mod anomaly;
pub(crate) mod calls;
pub(crate) mod deferred;
pub(crate) mod nan;
pub(crate) mod node;
pub(crate) mod recording;

use ferrotron_tensor::{Error, Result, Tensor};
use tracing::trace_span;

use crate::engine::anomaly::check_backward;
use crate::engine::deferred::{DeferredGrads, WeightGrads};
use crate::engine::node::{Cotangents, Edge, InputGrads, Pending, Source};
use crate::engine::recording::{Recording, with};
use crate::{LossGradient, Var};

/// A start of a backward pass: a variable without its value. A pipeline stage keeps this for an output that it has
/// sent.
#[derive(Clone)]
pub struct GradientEdge(Edge);

impl GradientEdge {
    /// Creates the root for a variable.
    pub fn from_var(var: &Var) -> GradientEdge {
        GradientEdge(var.edge())
    }

    /// The cotangent of a loss of one element.
    pub fn cotangent(&self, gradient: &LossGradient) -> Result<Tensor> {
        let (_, spec) = &self.0;
        gradient.tensor(&spec.device, spec.dtype, &spec.dims)
    }

    /// Runs backward from this root. See [`backward`].
    pub fn backward(self, cotangent: Tensor, mode: WeightGrads) -> Result<DeferredGrads> {
        backward_from(vec![(self, cotangent)], mode)
    }
}

impl Var {
    /// Accumulates the gradient of this scalar into the leaves it depends on.
    ///
    /// Errors if this is not a scalar, no gradient was recorded, or the graph was already consumed.
    pub fn backward(&self) -> Result<()> {
        self.backward_scaled(1.0)
    }

    /// Like [`Var::backward`], for `scale` times this scalar. The division by the number of valid tokens and the loss
    /// scale enter only here.
    pub fn backward_scaled(&self, scale: f64) -> Result<()> {
        if self.value().numel() != 1 {
            return Err(Error::shape(
                "backward",
                format!(
                    "needs a scalar, got {:?}; give cotangents to `backward(&[(&var, cotangent)], ..)`",
                    self.dims()
                ),
            ));
        }
        let cotangent = Tensor::full(self.device(), self.dtype(), self.dims(), scale)?;
        backward(&[(self, cotangent)], WeightGrads::Now)?.run()
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
    for (GradientEdge((source, spec)), cotangent) in outputs {
        if spec.dims[..] != *cotangent.dims() || spec.dtype != cotangent.dtype() {
            return Err(Error::shape(
                "backward",
                format!("cotangent {cotangent:?} for a value {} {:?}", spec.dtype, spec.dims),
            ));
        }
        match source {
            None => {
                return Err(Error::graph(
                    "backward",
                    "the value depends on no leaf that was recorded; was it made under no_grad, or is every parameter frozen?",
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
        let done = backward.backward(
            Cotangents(cotangents),
            &mut InputGrads { node: &node, pending, mode, deferred },
        );
        check_backward(&node, pending, done)?;
    }
    Ok(())
}
