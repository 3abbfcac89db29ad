//! Variables: values with their history.

use ferrotron_tensor::{DType, Device, Error, Result, Tensor};
use std::fmt;
use std::sync::Arc;

use crate::engine::anomaly::check_forward;
use crate::engine::node::{Edge, Named, Node, Source};
use crate::engine::recording::{Recording, current};
use crate::saved::Recipe;
use crate::spec::{TensorSpec, cast};
use crate::{Backward, InputGrads, Leaf, Saved};

/// A tensor and, if a gradient is needed, the node that produced it.
#[derive(Clone)]
pub struct Var {
    value: Tensor,
    source: Option<Source>,
    recompute: Option<Recipe<Tensor>>,
}

impl Var {
    /// A value without gradient: data, masks, targets.
    pub fn constant(value: Tensor) -> Var {
        Var { value, source: None, recompute: None }
    }

    pub(crate) fn with_source(value: Tensor, source: Source) -> Var {
        Var { value, source: Some(source), recompute: None }
    }

    /// The value.
    pub fn value(&self) -> &Tensor {
        &self.value
    }

    /// The value, without its history.
    pub fn into_value(self) -> Tensor {
        self.value
    }

    /// The same value without history.
    pub fn detach(&self) -> Var {
        Var::constant(self.value.clone())
    }

    /// Sizes, outermost first.
    pub fn dims(&self) -> &[usize] {
        self.value.dims()
    }

    /// Type of the elements.
    pub fn dtype(&self) -> DType {
        self.value.dtype()
    }

    /// The device of the elements.
    pub fn device(&self) -> &Device {
        self.value.device()
    }

    /// Returns whether a gradient flows back from this variable.
    pub fn needs_gradient(&self) -> bool {
        self.source.as_ref().is_some_and(Source::is_trainable)
    }

    /// Saves this operand: a parameter as itself, not its value; a recipe if the producer provided one; else the
    /// value.
    pub fn save(&self) -> Saved {
        match (&self.source, &self.recompute) {
            (Some(Source::Leaf(leaf)), _) => Saved::leaf(leaf.clone(), self.dtype()),
            (_, Some(recipe)) => Saved::recipe(recipe),
            _ => Saved::tensor(&self.value),
        }
    }

    /// Makes consumers of this variable save `recompute` instead of the value. It must return the same bits.
    #[must_use]
    pub fn with_recompute(
        mut self,
        recompute: impl Fn() -> Result<Tensor> + Send + Sync + 'static,
    ) -> Var {
        if self.needs_gradient() {
            self.recompute = Some(Recipe::Whole(Arc::new(recompute)));
        }
        self
    }

    /// Makes consumers of this variable save `part` instead of the value: a compressed form, or a shard of a value
    /// that other ranks also hold. `whole` restores the value from it, with the same bits.
    ///
    /// A parameter is still saved as itself.
    ///
    /// ```
    /// use ferrotron_autograd::Leaf;
    /// use ferrotron_tensor::{DType, Device, Tensor};
    /// let device = Device::cpu(1)?;
    /// let x = Leaf::new("x", Tensor::full(&device, DType::F32, &[8], 3.0)?);
    /// let half = Tensor::full(&device, DType::BF16, &[8], 6.0)?; // exact in 16 bits
    /// let y = x.var()?.mul_scalar(2.0)?.save_as(half, |half| half.cast(DType::F32));
    /// let z = y.square()?.sum_all()?;
    /// assert_eq!(z.saved_bytes(), 8 * 2);
    /// z.backward()?;
    /// assert_eq!(x.gradient()?.unwrap().to_f64()?, [24.0; 8]); // 2 (2 x) 2
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    #[must_use]
    pub fn save_as(
        mut self,
        part: Tensor,
        whole: impl Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Var {
        if self.needs_gradient() {
            self.recompute = Some(Recipe::From(part, Arc::new(whole)));
        }
        self
    }

    /// Returns the same value, and calls `f` in backward with the gradient that reaches it, before the value's producer
    /// runs. What `f` returns is the gradient from there on. If recording is off, `f` is dropped.
    ///
    /// Errors as `f` does, from backward.
    ///
    /// ```
    /// use ferrotron_autograd::Leaf;
    /// use ferrotron_tensor::{Device, Tensor};
    /// let w = Leaf::new("w", Tensor::from_slice(&Device::cpu(1)?, &[3.0_f64], &[1])?);
    /// let y = w.var()?.square()?.register_hook(|gradient| gradient.clamp(-0.5, 0.5))?;
    /// y.sum_all()?.backward()?;
    /// assert_eq!(w.gradient()?.unwrap().item()?, 3.0); // 0.5 times 2 w
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn register_hook(
        self,
        f: impl FnOnce(Tensor) -> Result<Tensor> + Send + 'static,
    ) -> Result<Var> {
        Var::record(&[&self], self.value.clone(), || {
            Named("register_hook", move |dy: Tensor, dx: &mut InputGrads| dx.accumulate(0, f(dy)?))
        })
    }

    /// Calls `f` with the value and returns this variable: to look into a chain of operations.
    ///
    /// ```
    /// use ferrotron_autograd::Var;
    /// use ferrotron_tensor::{Device, Tensor};
    /// let x = Var::constant(Tensor::from_slice(&Device::cpu(1)?, &[1.0_f32, 4.0], &[2])?);
    /// let y = x.sqrt()?.inspect(|roots| println!("{roots}")).sum_all()?;
    /// assert_eq!(y.value().item()?, 3.0);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    #[must_use]
    pub fn inspect(self, f: impl FnOnce(&Tensor)) -> Var {
        f(&self.value);
        self
    }

    /// The name of the leaf or operation that the value is from.
    fn origin(&self) -> &str {
        match &self.source {
            None => "constant",
            Some(Source::Leaf(leaf)) => leaf.name(),
            Some(Source::Node(node, _)) => node.name,
        }
    }

    /// Records the result of an operation on `inputs`. `make` builds the operation's backward; it is called only if
    /// an input needs a gradient and this thread records.
    ///
    /// A closure `FnOnce(Tensor, &mut InputGrads) -> Result<()>` also works: see [`Backward`].
    pub fn record<B: Backward>(
        inputs: &[&Var],
        value: Tensor,
        make: impl FnOnce() -> B,
    ) -> Result<Var> {
        let edges = inputs.iter().map(|input| input.edge()).collect();
        Ok(match node(edges, std::slice::from_ref(&value), make)? {
            Some(node) => Var::with_source(value, Source::Node(node, 0)),
            None => Var::constant(value),
        })
    }

    /// Like [`Var::record`], for an operation with several results.
    pub fn record_many<B: Backward>(
        inputs: &[&Var],
        values: Vec<Tensor>,
        make: impl FnOnce() -> B,
    ) -> Result<Vec<Var>> {
        let edges: Vec<Edge> = inputs.iter().map(|input| input.edge()).collect();
        Self::record_edges(edges, values, make)
    }

    /// Like [`Var::record_many`], for operands whose values need not be in memory.
    pub(crate) fn record_edges<B: Backward>(
        edges: Vec<Edge>,
        values: Vec<Tensor>,
        make: impl FnOnce() -> B,
    ) -> Result<Vec<Var>> {
        let Some(node) = node(edges, &values, make)? else {
            return Ok(values.into_iter().map(Var::constant).collect());
        };
        let with_node = |(i, value)| Var::with_source(value, Source::Node(node.clone(), i));
        Ok(values.into_iter().enumerate().map(with_node).collect())
    }

    /// Logs this variable as a leaf used by a checkpoint region, if it is one.
    ///
    /// Errors if an operation produced it: recording is off inside a region, so it was made outside.
    pub(crate) fn log_use(&self, log: &mut Vec<Leaf>) -> Result<()> {
        log_source(self.edge().0.as_ref(), log)
    }

    /// Bytes of device memory saved for backward by all nodes reachable from here, each buffer counted once. Excludes
    /// parameters and tensors in [host memory](ferrotron_tensor::MemoryKind::Host).
    pub fn saved_bytes(&self) -> usize {
        let mut nodes = std::collections::BTreeMap::new();
        let mut stack: Vec<&Source> = self.source.iter().collect();
        while let Some(source) = stack.pop() {
            if let Source::Node(node, _) = source
                && nodes.insert(node.seq, node).is_none()
            {
                stack.extend(node.inputs.iter().filter_map(|(source, _)| source.as_ref()));
            }
        }
        let mut buffers = std::collections::BTreeMap::new();
        for node in nodes.values() {
            node.peek(|backward| {
                for tensor in backward.saved() {
                    buffers.insert(tensor.buffer_id(), tensor.buffer_bytes());
                }
            });
        }
        buffers.values().sum()
    }

    /// This variable's place in the graph, without its value.
    pub(crate) fn edge(&self) -> Edge {
        let source = self.source.clone().filter(Source::is_trainable);
        (source, TensorSpec::from_tensor(&self.value))
    }
}

/// The node of an operation with these results, if an input needs a gradient and this thread records.
fn node<B: Backward>(
    edges: Vec<Edge>,
    values: &[Tensor],
    make: impl FnOnce() -> B,
) -> Result<Option<Arc<Node>>> {
    let wanted = current(|recording| match recording {
        Recording::On | Recording::Hooked(_) => {
            Ok(edges.iter().any(|(source, _)| source.is_some()))
        }
        Recording::Off => Ok(false),
        Recording::Region(log) => {
            edges.iter().try_for_each(|(source, _)| log_source(source.as_ref(), log))?;
            Ok(false)
        }
    })?;
    if !wanted {
        return Ok(None);
    }
    let outputs = values.iter().map(TensorSpec::from_tensor).collect();
    let node = Arc::new(Node::new(edges, outputs, Box::new(make())));
    check_forward(&node, values)?;
    Ok(Some(node))
}

fn log_source(source: Option<&Source>, log: &mut Vec<Leaf>) -> Result<()> {
    match source {
        None => Ok(()),
        Some(Source::Leaf(leaf)) => {
            log.push(leaf.clone());
            Ok(())
        }
        Some(Source::Node(node, _)) => Err(Error::graph(
            "checkpoint",
            format!(
                "the region uses a variable made outside by {}; pass it as an input",
                node.name
            ),
        )),
    }
}

impl fmt::Debug for Var {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Var({:?} from {})", self.value, self.origin())
    }
}

/// Prints the value as [`Tensor`] does, and its origin.
impl fmt::Display for Var {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.value.to_string();
        let open = text.strip_suffix(')').unwrap_or(&text);
        write!(f, "{open}, from={})", self.origin())
    }
}

impl From<Tensor> for Var {
    /// [`Var::constant`].
    fn from(value: Tensor) -> Var {
        Var::constant(value)
    }
}

impl AsRef<Tensor> for Var {
    fn as_ref(&self) -> &Tensor {
        &self.value
    }
}

impl Leaf {
    /// The value as a variable whose gradient accumulates in this leaf, if it is trainable.
    pub fn var(&self) -> Result<Var> {
        self.var_as(self.dtype())
    }

    /// The value as a variable of `dtype`: cast, if this is another one. The gradient accumulates in this leaf in its own
    /// dtype and is never rounded to `dtype`. Operations save the leaf, and backward casts it again.
    ///
    /// ```
    /// use ferrotron_autograd::Leaf;
    /// use ferrotron_tensor::{DType, Device, Tensor};
    /// let device = Device::cpu(1)?;
    /// let w = Leaf::new("w", Tensor::from_slice(&device, &[1.0_f32 + 1.0 / 1024.0], &[1])?);
    /// let y = w.var_as(DType::BF16)?.square()?;
    /// assert_eq!((y.dtype(), y.value().item()?), (DType::BF16, 1.0));
    /// y.sum_all()?.backward()?;
    /// assert_eq!(w.gradient()?.unwrap().dtype(), DType::F32);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn var_as(&self, dtype: DType) -> Result<Var> {
        Ok(Var::with_source(cast(self.value()?, dtype)?, Source::Leaf(self.clone())))
    }
}
