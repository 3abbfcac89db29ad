//! Leaves: trainable values that collect gradients.

mod gradient;
mod hooks;
mod owner;
mod shared_flat;
mod value;

pub use hooks::{Fetch, GradientReduction, HookId};
pub use shared_flat::SharedFlatBuffer;

use ferrotron_tensor::ops::pointwise::add_assign;
use ferrotron_tensor::{Category, DType, Device, Error, Result, Tensor};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::engine::nan::check_parameter;
use crate::spec::TensorSpec;
use crate::{Accum, lock};
use gradient::Gradient;
use hooks::{FetchSlot, HookList, ReductionSlot};
use value::Value;

type Hook = dyn FnMut(&Leaf, &Tensor) -> Result<()> + Send;

/// A trainable value with its gradient. Cloning returns another handle of the same leaf.
///
/// Operations save the leaf, not its value, and read the value again in backward. The gradient is a persistent buffer
/// that backward adds to. After [`Leaf::zero_gradient`] the next contribution overwrites it, so no zero fill is
/// needed.
#[derive(Clone)]
pub struct Leaf(Arc<LeafInner>);

struct LeafInner {
    name: String,
    spec: TensorSpec,
    /// Whether this is the input of a subgraph instead of a parameter.
    is_input: bool,
    trainable: AtomicBool,
    version: AtomicU64,
    value: Mutex<Value>,
    gradient: Mutex<Gradient>,
    hooks: HookList<Hook>,
    reduction: ReductionSlot,
    fetch_value: FetchSlot,
    fetch_gradient: FetchSlot,
}

impl Leaf {
    /// A leaf with a value of its own.
    pub fn new(name: impl Into<String>, value: Tensor) -> Leaf {
        value.set_category(Category::Weights);
        Self::with_value(name.into(), TensorSpec::from_tensor(&value), Value::Own(value))
    }

    /// A leaf that is initialised on first use. By then it may have been assigned to a
    /// [`FlatBuffer`](ferrotron_tensor::FlatBuffer), and a model can be described without being allocated.
    pub fn lazy(
        name: impl Into<String>,
        device: &Device,
        dtype: DType,
        dims: &[usize],
        init: impl FnOnce(&mut Tensor) -> Result<()> + Send + 'static,
    ) -> Leaf {
        let spec = TensorSpec { dims: dims.into(), dtype, device: device.clone() };
        Self::with_value(name.into(), spec, Value::Init(Some(Box::new(init))))
    }

    /// A leaf that is the input of a subgraph, such as a checkpoint region or a pipeline stage, and collects the
    /// gradient there. Unlike a parameter's, its gradient is never deferred and counts as workspace.
    pub fn input(name: impl Into<String>, value: Tensor) -> Leaf {
        let spec = TensorSpec::from_tensor(&value);
        let mut leaf = Self::with_value(name.into(), spec, Value::Own(value));
        Arc::get_mut(&mut leaf.0).expect("the leaf is new").is_input = true;
        leaf
    }

    /// Dims, dtype and device, known even while the value is sharded.
    pub(crate) fn spec(&self) -> &TensorSpec {
        &self.0.spec
    }

    /// Returns whether it was made by [`Leaf::input`].
    pub(crate) fn is_input(&self) -> bool {
        self.0.is_input
    }

    /// Moves the gradient out, to its only user.
    pub(crate) fn take_gradient(&self) -> Option<Tensor> {
        lock(&self.0.gradient).take()
    }

    fn with_value(name: String, spec: TensorSpec, value: Value) -> Leaf {
        Leaf(Arc::new(LeafInner {
            name,
            spec,
            is_input: false,
            trainable: AtomicBool::new(true),
            version: AtomicU64::new(0),
            value: Mutex::new(value),
            gradient: Mutex::new(Gradient::own()),
            hooks: HookList::new(),
            reduction: ReductionSlot::default(),
            fetch_value: FetchSlot::default(),
            fetch_gradient: FetchSlot::default(),
        }))
    }

    /// The name, unique within a model.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Sizes, outermost first.
    pub fn dims(&self) -> &[usize] {
        &self.0.spec.dims
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.0.spec.dims.iter().product()
    }

    /// Type of the elements.
    pub fn dtype(&self) -> DType {
        self.0.spec.dtype
    }

    /// The device of the elements.
    pub fn device(&self) -> &Device {
        &self.0.spec.device
    }

    /// Returns whether variables of this leaf need a gradient: true unless [`Leaf::set_trainable`] changed it.
    pub fn is_trainable(&self) -> bool {
        self.0.trainable.load(Relaxed)
    }

    /// Chooses whether variables of this leaf need a gradient: PyTorch's `requires_grad_`. Operations treat a leaf that
    /// is not trainable as data, and save nothing for its gradient. Its gradient so far is dropped.
    ///
    /// ```
    /// use ferrotron_autograd::Leaf;
    /// use ferrotron_tensor::{Device, Tensor};
    /// let device = Device::cpu(1)?;
    /// let tensor = |value: f64| Tensor::from_slice(&device, &[value], &[1]);
    /// let (w, x) = (Leaf::new("w", tensor(3.0)?), Leaf::new("x", tensor(0.5)?));
    /// w.set_trainable(false);
    /// w.var()?.mul(&x.var()?)?.backward()?;
    /// assert_eq!((w.contributions(), x.gradient()?.unwrap().item()?), (0, 3.0));
    /// assert!(!w.var()?.square()?.needs_gradient());
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn set_trainable(&self, trainable: bool) {
        self.0.trainable.store(trainable, Relaxed);
        if !trainable {
            lock(&self.0.gradient).forget();
        }
    }

    /// Number of updates. Backward fails if an operation saved the leaf at another version.
    pub fn version(&self) -> u64 {
        self.0.version.load(Relaxed)
    }

    /// Increments the version. To be called after the value was changed through its flat buffer.
    pub fn mark_updated(&self) {
        self.0.version.fetch_add(1, Relaxed);
    }

    /// Sets the number of updates, after the flat buffer of the value has been exchanged with that of another version.
    pub fn set_version(&self, version: u64) {
        self.0.version.store(version, Relaxed);
    }

    /// The value.
    pub fn value(&self) -> Result<Tensor> {
        self.0.fetch_value.call(self.name())?;
        lock(&self.0.value).tensor(self.name(), &self.0.spec)
    }

    /// Replaces the value.
    ///
    /// Errors if dims or dtype differ, if a tensor still reads the range of the flat buffer, or if the value is fetched
    /// before each use, as a sharded one is ([`Leaf::set_unshard_hook`]).
    pub fn set_value(&self, new: &Tensor) -> Result<()> {
        if new.dims() != self.dims() || new.dtype() != self.dtype() {
            return Err(Error::shape(
                "set_value",
                format!(
                    "{new:?} does not fit '{}' {} {:?}",
                    self.name(),
                    self.dtype(),
                    self.dims()
                ),
            ));
        }
        self.check_whole()?;
        lock(&self.0.value).set(new)?;
        self.mark_updated();
        Ok(())
    }

    /// Lets `write` fill the value in place. It gets a unique, contiguous tensor of the leaf's dims with unspecified
    /// contents and must overwrite all of it. A lazy value is not initialised first.
    ///
    /// Errors as [`Leaf::set_value`], or as `write`; an existing value may then be partly overwritten.
    pub fn write_value(&self, write: impl FnOnce(&mut Tensor) -> Result<()>) -> Result<()> {
        self.check_whole()?;
        lock(&self.0.value).write(&self.0.spec, write)?;
        self.mark_updated();
        Ok(())
    }

    /// The gradient accumulated since the last [`Leaf::zero_gradient`]; `None` without contributions.
    pub fn gradient(&self) -> Result<Option<Tensor>> {
        lock(&self.0.gradient).tensor()
    }

    /// Discards the gradient: the next contribution overwrites it.
    pub fn zero_gradient(&self) {
        lock(&self.0.gradient).zero();
    }

    /// Number of contributions since the last [`Leaf::zero_gradient`]: uses times micro-batches.
    pub fn contributions(&self) -> usize {
        lock(&self.0.gradient).contributions
    }

    /// Notes that a step of an optimizer has used the gradient.
    pub fn mark_used(&self) {
        let mut gradient = lock(&self.0.gradient);
        gradient.used = gradient.contributions;
    }

    /// Returns whether contributions were added to a gradient that a step has used: see [`Leaf::mark_used`].
    pub fn has_added_to_used(&self) -> bool {
        let gradient = lock(&self.0.gradient);
        gradient.used > 0 && gradient.contributions > gradient.used
    }

    /// Calls `hook` after each contribution, with the gradient accumulated so far: PyTorch's
    /// `register_post_accumulate_grad_hook`. Contributions come once per use and micro-batch, deferred ones included;
    /// [`Leaf::contributions`] counts them. Ranks call it before they reduce the gradient.
    ///
    /// Hooks are called in the order in which they were added. A hook must drop the tensor and its views before it
    /// returns: the next contribution is written to their memory, and refused while they read it. An error of a hook
    /// comes out of backward, and so does one for a hook that adds to the gradient of its own leaf.
    ///
    /// ```
    /// use ferrotron_autograd::Leaf;
    /// use ferrotron_tensor::{Device, Error, Tensor};
    /// let w = Leaf::new("w", Tensor::from_slice(&Device::cpu(1)?, &[2.0_f64, -1.0], &[2])?);
    /// let finite = w.add_hook(|leaf, gradient| match gradient.to_f64()?.iter().all(|g| g.is_finite()) {
    ///     true => Ok(()),
    ///     false => Err(Error::value("hook", format!("the gradient of '{}' is not finite", leaf.name()))),
    /// });
    /// w.var()?.square()?.sum_all()?.backward()?;
    /// w.zero_gradient();
    /// let error = w.var()?.mul_scalar(f64::NAN)?.sum_all()?.backward().unwrap_err();
    /// assert_eq!(error.to_string(), "hook: the gradient of 'w' is not finite");
    /// assert!(w.remove_hook(finite));
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn add_hook(
        &self,
        hook: impl FnMut(&Leaf, &Tensor) -> Result<()> + Send + 'static,
    ) -> HookId {
        self.0.hooks.add(Box::new(hook))
    }

    /// Removes a hook of this leaf. Returns whether it was there.
    pub fn remove_hook(&self, id: HookId) -> bool {
        self.0.hooks.remove(id)
    }

    /// Lets `write` add a contribution. It gets a unique, contiguous tensor of the leaf's dims, and whether to
    /// replace its contents or add to them.
    pub fn accumulate_with(
        &self,
        write: impl FnOnce(&mut Tensor, Accum) -> Result<()>,
    ) -> Result<()> {
        self.0.fetch_gradient.call(self.name())?;
        let mut gradient = lock(&self.0.gradient);
        let category = Some(Category::Gradients).filter(|_| !self.is_input());
        gradient.write(&self.0.spec, category, write)?;
        self.arrived(gradient)
    }

    /// Adds a contribution that exists as a tensor.
    pub(crate) fn accumulate(&self, contribution: Tensor) -> Result<()> {
        let mut gradient = lock(&self.0.gradient);
        let Some(contribution) = gradient.start(contribution, &self.0.spec)? else {
            return self.arrived(gradient);
        };
        drop(gradient);
        self.accumulate_with(|tensor, accum| {
            let contribution = contribution.cast(tensor.dtype())?;
            match accum {
                Accum::Replace => tensor.copy_from(&contribution),
                Accum::Add => add_assign(tensor, &contribution),
            }
        })
    }

    /// The address that all handles of this leaf share.
    pub(crate) fn address(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    /// Counts a contribution, and calls the hooks, then the reduction on the last expected one.
    fn arrived(&self, mut gradient: MutexGuard<'_, Gradient>) -> Result<()> {
        gradient.contributions += 1;
        let contributions = gradient.contributions;
        drop(gradient);
        check_parameter((self.name(), self.address()), || self.gradient())?;
        for hook in self.0.hooks.all() {
            let Some(gradient) = self.gradient()? else { break };
            hook.call(self.name(), |hook| hook(self, &gradient))?;
        }
        self.0.reduction.arrived(contributions)
    }
}

impl PartialEq for Leaf {
    fn eq(&self, other: &Leaf) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for Leaf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Leaf('{}' {} {:?})", self.name(), self.dtype(), self.dims())
    }
}

/// The names of the leaves without a gradient since their last [`Leaf::zero_gradient`]. Usually these are part of a
/// model that the loss does not depend on by mistake.
pub fn missing_gradients<'a>(leaves: impl IntoIterator<Item = &'a Leaf>) -> Vec<String> {
    leaves
        .into_iter()
        .filter(|leaf| leaf.contributions() == 0)
        .map(|leaf| leaf.name().to_string())
        .collect()
}
