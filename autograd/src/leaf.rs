//! Leaves: trainable values that collect gradients.

use ferrotron_tensor::ops::pointwise::{add_assign, into_unique};
use ferrotron_tensor::{At, Category, DType, Device, Dims, Error, FlatBuffer, Result, Tensor};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::engine::backward::in_dtype;
use crate::engine::node::Source;
use crate::{Accum, Var};

/// A flat buffer shared by leaves and an optimizer.
pub type SharedFlatBuffer = Arc<Mutex<FlatBuffer>>;

type Init = Box<dyn FnOnce(&mut Tensor) -> Result<()> + Send>;
type Hook = Box<dyn FnMut(&Leaf) -> Result<()> + Send>;

/// Provides the flat buffer of a leaf's value or gradient. Called before each use.
pub type Fetch = Arc<dyn Fn() -> Result<()> + Send + Sync>;

/// A trainable value with its gradient. Cloning returns another handle of the same leaf.
///
/// Operations save the leaf, not its value, and read the value again in backward. The gradient is a persistent buffer
/// that backward adds to. After [`Leaf::zero_gradient`] the next contribution overwrites it, so no zero fill is
/// needed.
#[derive(Clone)]
pub struct Leaf(Arc<LeafInner>);

struct LeafInner {
    name: String,
    dims: Dims,
    dtype: DType,
    device: Device,
    /// Whether this is the input of a subgraph instead of a parameter.
    is_input: bool,
    version: AtomicU64,
    value: Mutex<Value>,
    gradient: Mutex<Gradient>,
    hook: Mutex<Option<(usize, Hook)>>,
    fetch_value: OnceLock<Fetch>,
    fetch_gradient: OnceLock<Fetch>,
}

enum Value {
    /// Not initialised yet.
    Init(Option<Init>),
    Own(Tensor),
    Flat(SharedFlatBuffer, usize),
}

struct Gradient {
    place: GradientPlace,
    /// Number of contributions since the last `zero_gradient`.
    contributions: usize,
}

enum GradientPlace {
    Own(Option<Tensor>),
    Flat(SharedFlatBuffer, usize),
}

impl Leaf {
    /// A leaf with a value of its own.
    pub fn new(name: impl Into<String>, value: Tensor) -> Leaf {
        let (device, dtype, dims) = (value.device().clone(), value.dtype(), value.dims().into());
        value.set_category(Category::Weights);
        Self::with_value(name.into(), device, dtype, dims, Value::Own(value))
    }

    /// A leaf that is initialised on first use. By then it may have been assigned to a [`FlatBuffer`], and a model can be
    /// described without being allocated.
    pub fn lazy(
        name: impl Into<String>,
        device: &Device,
        dtype: DType,
        dims: &[usize],
        init: impl FnOnce(&mut Tensor) -> Result<()> + Send + 'static,
    ) -> Leaf {
        Self::with_value(
            name.into(),
            device.clone(),
            dtype,
            dims.into(),
            Value::Init(Some(Box::new(init))),
        )
    }

    /// A leaf that is the input of a subgraph, such as a checkpoint region or a pipeline stage, and collects the
    /// gradient there. Unlike a parameter's, its gradient is never deferred and counts as workspace.
    pub fn input(name: impl Into<String>, value: Tensor) -> Leaf {
        let (device, dtype, dims) = (value.device().clone(), value.dtype(), value.dims().into());
        let mut leaf = Self::with_value(name.into(), device, dtype, dims, Value::Own(value));
        Arc::get_mut(&mut leaf.0).expect("the leaf is new").is_input = true;
        leaf
    }

    /// Returns whether it was made by [`Leaf::input`].
    pub(crate) fn is_input(&self) -> bool {
        self.0.is_input
    }

    /// Moves the gradient out, to its only user.
    pub(crate) fn take_gradient(&self) -> Result<Option<Tensor>> {
        let mut gradient = lock(&self.0.gradient);
        match &mut gradient.place {
            GradientPlace::Own(place) => Ok(place.take()),
            GradientPlace::Flat(..) => Ok(None),
        }
    }

    fn with_value(name: String, device: Device, dtype: DType, dims: Dims, value: Value) -> Leaf {
        let gradient = Gradient { place: GradientPlace::Own(None), contributions: 0 };
        Leaf(Arc::new(LeafInner {
            name,
            dims,
            dtype,
            device,
            is_input: false,
            version: AtomicU64::new(0),
            value: Mutex::new(value),
            gradient: Mutex::new(gradient),
            hook: Mutex::new(None),
            fetch_value: OnceLock::new(),
            fetch_gradient: OnceLock::new(),
        }))
    }

    /// The name, unique within a model.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Sizes, outermost first.
    pub fn dims(&self) -> &[usize] {
        &self.0.dims
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.0.dims.iter().product()
    }

    /// Type of the elements.
    pub fn dtype(&self) -> DType {
        self.0.dtype
    }

    /// The device of the elements.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Number of updates. Backward fails if an operation saved the leaf at another version.
    pub fn version(&self) -> u64 {
        self.0.version.load(Relaxed)
    }

    /// Increments the version. To be called after the value was changed through its flat buffer.
    pub fn mark_updated(&self) {
        self.0.version.fetch_add(1, Relaxed);
    }

    /// Registers `fetch`, which fills the flat buffer of the value before each use: a sharded parameter has no memory
    /// between uses. Errors if a function is already registered.
    pub fn set_unshard_hook(&self, fetch: Fetch) -> Result<()> {
        self.0.fetch_value.set(fetch).map_err(|_| self.fetched_already())
    }

    /// Registers `fetch`, which provides the flat buffer of the gradient before each contribution. Errors if a
    /// function is already registered.
    pub fn set_gradient_alloc_hook(&self, fetch: Fetch) -> Result<()> {
        self.0.fetch_gradient.set(fetch).map_err(|_| self.fetched_already())
    }

    fn fetched_already(&self) -> Error {
        Error::config("leaf", format!("'{}' belongs to somebody already", self.name()))
    }

    /// The value.
    pub fn value(&self) -> Result<Tensor> {
        self.0.fetch_value.get().map_or(Ok(()), |fetch| fetch()).at(self.name())?;
        let mut value = lock(&self.0.value);
        if let Value::Init(init) = &mut *value {
            let init = init.take().ok_or_else(|| self.init_failed())?;
            let mut tensor = Tensor::empty(self.device(), self.dtype(), self.dims())?;
            tensor.set_category(Category::Weights);
            init(&mut tensor)?;
            *value = Value::Own(tensor);
        }
        match &*value {
            Value::Own(tensor) => Ok(tensor.clone()),
            Value::Flat(flat, range) => lock(flat).tensor(*range),
            Value::Init(_) => Err(self.init_failed()),
        }
    }

    fn init_failed(&self) -> Error {
        Error::value(
            "leaf",
            format!("'{}' has no value: its initialisation failed before", self.name()),
        )
    }

    /// The value as a variable whose gradient accumulates in this leaf.
    pub fn var(&self) -> Result<Var> {
        Ok(Var::with_source(self.value()?, Source::Leaf(self.clone())))
    }

    /// Replaces the value.
    ///
    /// Errors if dims or dtype differ, or if a tensor still reads the range of the flat buffer.
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
        let mut value = lock(&self.0.value);
        match &mut *value {
            Value::Flat(flat, range) => {
                lock(flat).with_mut(*range, |tensor| tensor.copy_from(new))?
            }
            own => {
                let copy = new.copy()?;
                copy.set_category(Category::Weights);
                *own = Value::Own(copy);
            }
        }
        self.mark_updated();
        Ok(())
    }

    /// Lets `write` fill the value in place. It gets a unique, contiguous tensor of the leaf's dims with unspecified
    /// contents and must overwrite all of it. A lazy value is not initialised first.
    ///
    /// Errors if a tensor still reads the range of the flat buffer, or `write` does; an existing value may then be
    /// partly overwritten.
    pub fn write_value(&self, write: impl FnOnce(&mut Tensor) -> Result<()>) -> Result<()> {
        let mut value = lock(&self.0.value);
        match &mut *value {
            Value::Flat(flat, range) => lock(flat).with_mut(*range, write)?,
            Value::Own(tensor) if tensor.is_unique() && tensor.is_contiguous() => write(tensor)?,
            own => {
                let mut tensor = Tensor::empty(self.device(), self.dtype(), self.dims())?;
                tensor.set_category(Category::Weights);
                write(&mut tensor)?;
                *own = Value::Own(tensor);
            }
        }
        self.mark_updated();
        Ok(())
    }

    /// Moves the value into a range of `flat`; a lazy value is initialised there.
    pub fn bind_value(&self, flat: &SharedFlatBuffer, range: usize) -> Result<()> {
        let mut value = lock(&self.0.value);
        let old = std::mem::replace(&mut *value, Value::Flat(flat.clone(), range));
        lock(flat).with_mut(range, |tensor| match old {
            Value::Init(Some(init)) => init(tensor),
            Value::Own(source) => tensor.copy_from(&source),
            Value::Flat(from, range) if !Arc::ptr_eq(&from, flat) => {
                tensor.copy_from(&lock(&from).tensor(range)?)
            }
            _ => Err(Error::value(
                "leaf",
                format!("'{}' cannot move to the flat that it is in", self.name()),
            )),
        })
    }

    /// Places the gradient in a range of `flat`, whose dtype may be wider. The gradient accumulated so far is
    /// dropped.
    pub fn bind_gradient(&self, flat: &SharedFlatBuffer, range: usize) {
        *lock(&self.0.gradient) =
            Gradient { place: GradientPlace::Flat(flat.clone(), range), contributions: 0 };
    }

    /// The gradient accumulated since the last [`Leaf::zero_gradient`]; `None` without contributions.
    pub fn gradient(&self) -> Result<Option<Tensor>> {
        let gradient = lock(&self.0.gradient);
        Ok(match &gradient.place {
            _ if gradient.contributions == 0 => None,
            GradientPlace::Own(tensor) => tensor.clone(),
            GradientPlace::Flat(flat, range) => Some(lock(flat).tensor(*range)?),
        })
    }

    /// Discards the gradient: the next contribution overwrites it.
    pub fn zero_gradient(&self) {
        lock(&self.0.gradient).contributions = 0;
    }

    /// Number of contributions since the last [`Leaf::zero_gradient`]: uses times micro-batches.
    pub fn contributions(&self) -> usize {
        lock(&self.0.gradient).contributions
    }

    /// Calls `hook` when `expected` contributions (uses times micro-batches, including deferred ones) have arrived
    /// since the last [`Leaf::zero_gradient`]. The gradient is then complete and can be reduced.
    pub fn set_hook(
        &self,
        expected: usize,
        hook: impl FnMut(&Leaf) -> Result<()> + Send + 'static,
    ) {
        *lock(&self.0.hook) = Some((expected, Box::new(hook)));
    }

    /// Lets `write` add a contribution. It gets a unique, contiguous tensor of the leaf's dims, and whether to
    /// replace its contents or add to them.
    pub fn accumulate_with(
        &self,
        write: impl FnOnce(&mut Tensor, Accum) -> Result<()>,
    ) -> Result<()> {
        self.0.fetch_gradient.get().map_or(Ok(()), |fetch| fetch()).at(self.name())?;
        let mut gradient = lock(&self.0.gradient);
        let accum = if gradient.contributions == 0 { Accum::Replace } else { Accum::Add };
        match &mut gradient.place {
            GradientPlace::Flat(flat, range) => {
                lock(flat).with_mut(*range, |tensor| write(tensor, accum))?
            }
            GradientPlace::Own(place) => {
                let mut tensor = match place.take() {
                    Some(tensor) if accum == Accum::Add => into_unique(tensor)?,
                    Some(tensor) if tensor.is_unique() => tensor,
                    _ => Tensor::empty(self.device(), self.dtype(), self.dims())?,
                };
                if !self.is_input() {
                    tensor.set_category(Category::Gradients);
                }
                write(&mut tensor, accum)?;
                *place = Some(tensor);
            }
        }
        self.arrived(gradient)
    }

    /// Adds a contribution that exists as a tensor.
    pub(crate) fn accumulate(&self, contribution: Tensor) -> Result<()> {
        let mut gradient = lock(&self.0.gradient);
        if gradient.contributions == 0
            && let GradientPlace::Own(place) = &mut gradient.place
        {
            *place = Some(into_unique(in_dtype(contribution, self.dtype())?)?);
            return self.arrived(gradient);
        }
        drop(gradient);
        self.accumulate_with(|tensor, accum| {
            let contribution = contribution.cast(tensor.dtype())?;
            match accum {
                Accum::Replace => tensor.copy_from(&contribution),
                Accum::Add => add_assign(tensor, &contribution),
            }
        })
    }

    /// Counts a contribution, and calls the hook on the last expected one.
    fn arrived(&self, mut gradient: MutexGuard<'_, Gradient>) -> Result<()> {
        gradient.contributions += 1;
        let contributions = gradient.contributions;
        drop(gradient);
        match &mut *lock(&self.0.hook) {
            Some((expected, hook)) if *expected == contributions => hook(self),
            _ => Ok(()),
        }
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

/// Locks a value that changes only by single assignments. A poisoned lock then means that another thread panicked,
/// not that the value is inconsistent.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
