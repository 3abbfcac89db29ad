//! Parameters know where they live: a leaf, the part of the global tensor that it holds, which ranks hold the
//! same part, over which its gradient is spread, and its decay group. Initialisation, the reductions of
//! gradients, their norm, checkpoints and the optimizer follow from these facts, and from nothing else.

use ferrotron_autograd::{Leaf, Var};
use ferrotron_tensor::{DType, Device, Error, Place, RandomKey, Result};

use crate::{Axis, AxisSet, Init};

/// Whether weight decay applies to a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Decay {
    /// It does: matrices and embeddings.
    Yes,
    /// It does not: biases and norms.
    No,
}

/// A trainable tensor of a model. Cloning gives another handle of the same parameter.
#[derive(Debug, Clone)]
pub struct Param {
    leaf: Leaf,
    facts: Facts,
}

/// What is true of a parameter besides its value.
#[derive(Debug, Clone, PartialEq)]
struct Facts {
    place: Place,
    replicated: AxisSet,
    grad_partial: AxisSet,
    decay: Decay,
    blocks: Vec<usize>,
}

impl Param {
    /// The trainable value and its gradient.
    pub fn leaf(&self) -> &Leaf {
        &self.leaf
    }

    /// The value as a variable.
    pub fn var(&self) -> Result<Var> {
        self.leaf.var()
    }

    /// The global name, such as `blocks.3.attn.qkv.weight`.
    pub fn name(&self) -> &str {
        self.leaf.name()
    }

    /// Which part of the global tensor is held.
    pub fn place(&self) -> &Place {
        &self.facts.place
    }

    /// The axes along which every rank holds the same part. It counts once in a norm, and is written once
    /// into a checkpoint: by the first rank along each of them.
    pub fn replicated(&self) -> AxisSet {
        self.facts.replicated
    }

    /// The axes along which every rank's gradient is only a part of the gradient, which is their sum.
    pub fn grad_partial(&self) -> AxisSet {
        self.facts.grad_partial
    }

    /// Whether weight decay applies.
    pub fn decay(&self) -> Decay {
        self.facts.decay
    }

    /// The lengths, along dim 0, of the tensors that are packed in this one: of queries, keys and values, or of gate
    /// and up. Where there are none it is one tensor. Who looks at a tensor as a whole, such as a mean over all of
    /// it, looks at each of these.
    pub fn blocks(&self) -> &[usize] {
        &self.facts.blocks
    }

    /// The same parameter, in which tensors of these lengths along dim 0 are packed.
    ///
    /// Errors unless they are its global dim 0 together.
    pub fn packed(mut self, blocks: &[usize]) -> Result<Param> {
        let dims = self.facts.place.global_dims();
        if dims.first() != Some(&blocks.iter().sum()) {
            let message =
                format!("'{}' of {dims:?} cannot consist of blocks of {blocks:?}", self.name());
            return Err(Error::config("parameters", message));
        }
        self.facts.blocks = if blocks.len() > 1 { blocks.to_vec() } else { Vec::new() };
        Ok(self)
    }
}

/// Something with parameters.
pub trait Module {
    /// Calls `f` with every parameter, in the order of the forward pass, once for each time that the pass uses
    /// it: a token embedding that is the head too is met twice.
    fn visit(&self, f: &mut dyn FnMut(&Param));

    /// Every parameter, each once.
    fn params(&self) -> Vec<Param> {
        let mut params: Vec<Param> = Vec::new();
        self.visit(&mut |param| {
            if !params.iter().any(|known| known.leaf == param.leaf) {
                params.push(param.clone());
            }
        });
        params
    }
}

/// Where a module is being built: its path in the model, device, dtype and seed, and which part of the
/// batch its parameters' gradients see.
///
/// ```
/// use ferrotron_nn::{Decay, Init, Scope};
/// use ferrotron_tensor::{DType, Device};
/// let scope = Scope::new(&Device::cpu(1)?, DType::F32, 1234);
/// let weight = scope.child("blocks.0").param("weight", &[4, 2], Init::Normal { std: 0.02 }, Decay::Yes);
/// assert_eq!(weight.name(), "blocks.0.weight");
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Scope {
    path: String,
    device: Device,
    dtype: DType,
    seed: u64,
    replicated: AxisSet,
    grad_partial: AxisSet,
}

impl Scope {
    /// The root of a model. Ranks that see other samples or positions hold the same parameters, and each
    /// sees a part of their gradients.
    pub fn new(device: &Device, dtype: DType, seed: u64) -> Scope {
        let batch = AxisSet::from([Axis::Context, Axis::Data]);
        Scope {
            path: String::new(),
            device: device.clone(),
            dtype,
            seed,
            replicated: batch.with(Axis::Tensor),
            grad_partial: batch,
        }
    }

    /// The scope of parameters whose gradients are parts along `axis` too: of a norm that sees some of the
    /// positions, or of a tensor that two pipeline stages use.
    #[must_use]
    pub fn with_partial_gradients(mut self, axis: Axis) -> Scope {
        self.grad_partial = self.grad_partial.with(axis);
        self
    }

    /// The scope of parameters that are the same along `axis`.
    #[must_use]
    pub fn replicated_along(mut self, axis: Axis) -> Scope {
        self.replicated = self.replicated.with(axis);
        self
    }

    /// The scope of parameters that are cut along `axis`.
    #[must_use]
    pub fn sharded_along(mut self, axis: Axis) -> Scope {
        self.replicated = self.replicated.without(axis);
        self
    }

    /// The scope of a part.
    #[must_use]
    pub fn child(&self, name: &str) -> Scope {
        Scope { path: self.join(name), ..self.clone() }
    }

    /// The global path, the site of random numbers.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Type of the parameters.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where parameters are made.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// A parameter that is held whole. Its memory is taken when the value is first asked for.
    pub fn param(&self, name: &str, dims: &[usize], init: Init, decay: Decay) -> Param {
        self.param_at(name, Place::whole(dims), init, decay)
    }

    /// A parameter of which `place` is held.
    pub fn param_at(&self, name: &str, place: Place, init: Init, decay: Decay) -> Param {
        let name = self.join(name);
        let key = RandomKey::new(self.seed, 0, &name);
        let held = place.clone();
        let leaf = Leaf::lazy(name, &self.device, self.dtype, place.dims(), move |tensor| {
            init.fill(tensor, &held, &key)
        });
        let Scope { replicated, grad_partial, .. } = *self;
        Param { leaf, facts: Facts { place, replicated, grad_partial, decay, blocks: Vec::new() } }
    }

    fn join(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_string() } else { format!("{}.{name}", self.path) }
    }
}
