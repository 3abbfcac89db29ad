//! The gradient of one operation: the `Backward` trait and the destinations of gradients.

use ferrotron_tensor::ops::pointwise::{add_assign, into_unique};
use ferrotron_tensor::ops::reduce::sum_to_size;
use ferrotron_tensor::{DType, Error, Result, Tensor};

use crate::engine::node::{Node, Source};
use crate::engine::{DeferredGrads, Pending, WeightGrads};
use crate::{Accum, Leaf};

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
        let Some((Some(source), slot)) = self.node.inputs.get(i) else { return Ok(()) };
        let summed = sum_to_size(&gradient, &slot.dims)?;
        drop(gradient); // often the same tensor, which then has one holder
        match source {
            Source::Leaf(leaf) => leaf.accumulate(summed),
            Source::Node(node, output) => {
                let gradient = in_dtype(summed, slot.dtype)?;
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

    /// Passes the destination of operand `i`'s gradient to `write`: a unique, contiguous tensor of the operand's
    /// dims, and whether to replace its contents or add to them. Not called if the gradient is not needed.
    pub fn accumulate_with(
        &mut self,
        i: usize,
        write: impl FnOnce(&mut Tensor, Accum) -> Result<()>,
    ) -> Result<()> {
        let Some((Some(source), slot)) = self.node.inputs.get(i) else { return Ok(()) };
        match source {
            Source::Leaf(leaf) => leaf.accumulate_with(write),
            Source::Node(node, output) => {
                let entry = self.pending.slot(node, *output);
                let (mut sum, accum) = match entry.take() {
                    None => (Tensor::empty(&slot.device, slot.dtype, &slot.dims)?, Accum::Replace),
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

/// Casts to another dtype; a tensor that has it keeps its number of holders.
pub(crate) fn in_dtype(tensor: Tensor, dtype: DType) -> Result<Tensor> {
    if tensor.dtype() == dtype { Ok(tensor) } else { tensor.cast(dtype) }
}
