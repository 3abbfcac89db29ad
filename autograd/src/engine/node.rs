//! Nodes of the graph: a sequence number, edges to the sources of the operands, and one consumable [`Backward`]. It
//! gives the gradients of the operands to [`InputGrads`].

use ferrotron_tensor::ops::pointwise::{add_assign, into_unique};
use ferrotron_tensor::{Error, Result, Tensor};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use crate::engine::deferred::{DeferredGrads, WeightGrads};
use crate::spec::TensorSpec;
use crate::{Accum, Leaf, lock};

/// The source of a variable's value.
#[derive(Clone)]
pub(crate) enum Source {
    /// An output of an operation.
    Node(Arc<Node>, usize),
    /// A trainable value, or one that [`Leaf::set_trainable`] made data.
    Leaf(Leaf),
}

impl Source {
    /// Returns whether a gradient flows back to it.
    pub(crate) fn is_trainable(&self) -> bool {
        match self {
            Source::Node(..) => true,
            Source::Leaf(leaf) => leaf.is_trainable(),
        }
    }
}

/// An operand: its source, if a gradient is needed, and the spec of that gradient.
pub(crate) type Edge = (Option<Source>, TensorSpec);

/// One recorded operation.
pub(crate) struct Node {
    pub(crate) name: &'static str,
    /// Creation order, which is a topological order and the same on every rank.
    pub(crate) seq: u64,
    pub(crate) inputs: Vec<Edge>,
    pub(crate) outputs: Vec<TensorSpec>,
    backward: Mutex<Option<Box<dyn Backward>>>,
}

impl Node {
    pub(crate) fn new(
        inputs: Vec<Edge>,
        outputs: Vec<TensorSpec>,
        backward: Box<dyn Backward>,
    ) -> Node {
        static SEQUENCE: AtomicU64 = AtomicU64::new(0);
        Node {
            name: backward.name(),
            seq: SEQUENCE.fetch_add(1, Relaxed),
            inputs,
            outputs,
            backward: Mutex::new(Some(backward)),
        }
    }

    /// The backward; `None` if it was already taken.
    pub(crate) fn take(&self) -> Option<Box<dyn Backward>> {
        lock(&self.backward).take()
    }

    /// Calls `f` with the backward if it has not been consumed.
    pub(crate) fn peek<R>(&self, f: impl FnOnce(&dyn Backward) -> R) -> Option<R> {
        lock(&self.backward).as_deref().map(f)
    }
}

impl Drop for Node {
    /// Drops chains iteratively: dropping a graph of a million nodes must not recurse.
    fn drop(&mut self) {
        let mut orphans: Vec<Source> =
            self.inputs.drain(..).filter_map(|(source, _)| source).collect();
        while let Some(source) = orphans.pop() {
            if let Source::Node(node, _) = source
                && let Some(mut node) = Arc::into_inner(node)
            {
                orphans.extend(node.inputs.drain(..).filter_map(|(source, _)| source));
            }
        }
    }
}

/// Nodes whose results have gradients, by sequence number.
#[derive(Default)]
pub(crate) struct Pending(pub(crate) BTreeMap<u64, (Arc<Node>, Vec<Option<Tensor>>)>);

impl Pending {
    /// The slot for the gradient of a node's result.
    pub(crate) fn slot(&mut self, node: &Arc<Node>, output: usize) -> &mut Option<Tensor> {
        let fresh = || (node.clone(), node.outputs.iter().map(|_| None).collect());
        &mut self.0.entry(node.seq).or_insert_with(fresh).1[output]
    }

    /// The gradient of a node's result so far.
    pub(crate) fn get(&self, node: &Node, output: usize) -> Option<&Tensor> {
        self.0.get(&node.seq)?.1[output].as_ref()
    }
}

/// An operation's saved values, and the map from the gradients of its results to those of its operands.
///
/// The library's operations are small structs whose fields are exactly the saved values. A closure also works:
///
/// ```
/// use ferrotron_autograd::{InputGrads, Leaf, Var};
/// use ferrotron_tensor::{Device, Result, Tensor};
///
/// /// x^3 with its gradient.
/// fn cube(x: &Var) -> Result<Var> {
///     let value = x.value().square()?.mul(x.value())?;
///     let saved = x.save();
///     Var::record(&[x], value, || {
///         move |dy: Tensor, dx: &mut InputGrads| dx.accumulate(0, dy.mul(&saved.value()?.square()?.mul_scalar(3.0)?)?)
///     })
/// }
///
/// let x = Leaf::new("x", Tensor::from_slice(&Device::cpu(1)?, &[2.0_f64], &[1])?);
/// cube(&x.var()?)?.backward()?;
/// assert_eq!(x.gradient()?.unwrap().item()?, 12.0);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub trait Backward: Send + 'static {
    /// The operation's name, for errors and reports.
    fn name(&self) -> &'static str {
        "closure"
    }

    /// The saved tensors in device memory: [`Saved::resident_tensor`](crate::Saved::resident_tensor) of each saved value.
    fn saved(&self) -> Vec<Tensor> {
        Vec::new()
    }

    /// Computes the operands' gradients. Consumes the saved values, so that they are freed immediately.
    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()>;
}

impl<F: FnOnce(Tensor, &mut InputGrads) -> Result<()> + Send + 'static> Backward for F {
    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        self(dy.single()?, dx)
    }
}

/// A closure with the name of its operation, for operations that save no tensor.
pub(crate) struct Named<F>(pub(crate) &'static str, pub(crate) F);

impl<F: FnOnce(Tensor, &mut InputGrads) -> Result<()> + Send + 'static> Backward for Named<F> {
    fn name(&self) -> &'static str {
        self.0
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        self.1(dy.single()?, dx)
    }
}

/// The gradients of an operation's results. They are `None` for unused results.
pub struct Cotangents(pub(crate) Vec<Option<Tensor>>);

impl Cotangents {
    /// The gradient of the only result.
    pub fn single(self) -> Result<Tensor> {
        let count = self.0.len();
        match self.0.into_iter().next() {
            Some(Some(dy)) if count == 1 => Ok(dy),
            _ => Err(Error::graph(
                "backward",
                format!("expected one result with a gradient, got {count} results"),
            )),
        }
    }

    /// The gradients of all results, in order.
    pub fn into_vec(self) -> Vec<Option<Tensor>> {
        self.0
    }
}

/// The destinations of the gradients of an operation's operands.
pub struct InputGrads<'a> {
    pub(crate) node: &'a Node,
    pub(crate) pending: &'a mut Pending,
    pub(crate) mode: WeightGrads,
    pub(crate) deferred: &'a mut DeferredGrads,
}

impl InputGrads<'_> {
    /// Returns whether the gradient of operand `i` is needed; false for an omitted optional operand.
    pub fn needs_input_grad(&self, i: usize) -> bool {
        self.node.inputs.get(i).is_some_and(|(source, _)| source.is_some())
    }

    /// Adds the gradient of operand `i`. It may have the dims that the operand was broadcast to: they are summed. It
    /// may have the accumulator dtype, and is not rounded if the gradient is accumulated in that dtype. Ignored if
    /// the gradient is not needed.
    pub fn accumulate(&mut self, i: usize, gradient: Tensor) -> Result<()> {
        let Some((Some(source), spec)) = self.node.inputs.get(i) else { return Ok(()) };
        let summed = spec.sum(gradient)?;
        match source {
            Source::Leaf(leaf) => leaf.accumulate(summed),
            Source::Node(node, output) => {
                let gradient = spec.cast(summed)?;
                let entry = self.pending.slot(node, *output);
                *entry = Some(match entry.take() {
                    None => gradient,
                    Some(first) => {
                        // Either tensor may be overwritten if it has no other holder. Addition is commutative, so the
                        // bits do not depend on the choice.
                        let (mut sum, other) = if first.is_unique() || !gradient.is_unique() {
                            (into_unique(first)?, gradient)
                        } else {
                            (into_unique(gradient)?, first)
                        };
                        add_assign(&mut sum, &other)?;
                        sum
                    }
                });
                Ok(())
            }
        }
    }

    /// Takes the gradient that operand `i` has so far, for an operation that adds its share in the pass that computes it.
    pub(crate) fn take(&mut self, i: usize) -> Option<Tensor> {
        match self.node.inputs.get(i) {
            Some((Some(Source::Node(node, output)), _)) => self.pending.slot(node, *output).take(),
            _ => None,
        }
    }

    /// Passes the destination of operand `i`'s gradient to `write`: a unique, contiguous tensor of the operand's dims.
    /// The second argument says whether to replace its contents or add to them. Not called if the gradient is not
    /// needed.
    pub fn accumulate_with(
        &mut self,
        i: usize,
        write: impl FnOnce(&mut Tensor, Accum) -> Result<()>,
    ) -> Result<()> {
        let Some((Some(source), spec)) = self.node.inputs.get(i) else { return Ok(()) };
        match source {
            Source::Leaf(leaf) => leaf.accumulate_with(write),
            Source::Node(node, output) => {
                let entry = self.pending.slot(node, *output);
                let (mut sum, accum) = match entry.take() {
                    None => (spec.empty()?, Accum::Replace),
                    Some(first) => (into_unique(first)?, Accum::Add),
                };
                write(&mut sum, accum)?;
                *entry = Some(sum);
                Ok(())
            }
        }
    }

    /// Returns whether [`InputGrads::accumulate_or_defer`] queues the gradient of operand `i` instead of computing it.
    pub fn defers_weight(&self, i: usize) -> bool {
        self.deferred_leaf(i).is_some()
    }

    fn deferred_leaf(&self, i: usize) -> Option<&Leaf> {
        match self.node.inputs.get(i) {
            Some((Some(Source::Leaf(leaf)), _)) if self.mode == WeightGrads::Deferred => {
                Some(leaf).filter(|leaf| !leaf.is_input())
            }
            _ => None,
        }
    }

    /// Like [`InputGrads::accumulate_with`], for the weight of a linear layer. With [`WeightGrads::Deferred`] and a parameter
    /// as operand, `write` is queued instead of called.
    pub fn accumulate_or_defer(
        &mut self,
        i: usize,
        write: impl FnOnce(&mut Tensor, Accum) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        match self.deferred_leaf(i).cloned() {
            Some(leaf) => {
                self.deferred.push(leaf, Box::new(write));
                Ok(())
            }
            None => self.accumulate_with(i, write),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{Leaf, Var};
    use ferrotron_tensor::{DType, Device, Result, Tensor};

    #[test]
    fn a_chain_of_a_million_nodes_drops_without_recursion() -> Result<()> {
        let leaf = Leaf::new("x", Tensor::full(&Device::cpu(1)?, DType::F32, &[1], 1.0)?);
        let mut x: Var = leaf.var()?;
        for _ in 0..1_000_000 {
            x = x.neg()?;
        }
        drop(x);
        Ok(())
    }
}
