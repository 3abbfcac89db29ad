//! Versions of a stage's weights, for pipelines that are not flushed between steps.
//!
//! The newest version is in the flat buffers of the parameters, where the optimizer updates it in place. An update first
//! copies it to the oldest of the stored ones. To select a stored version, its memory changes places with that of the
//! newest one, so that parameters read it: no element moves.

use ferrotron_nn::{Param, ParamAndGradBucket, ParamAndGradBuffer};
use ferrotron_tensor::{Category, Error, FlatBuffer, Result};

/// The newest weights of a stage, and the versions before it that are stored.
///
/// Version v has v updates since [`WeightVersions::restart`]. Parameters have the newest version unless another one is
/// selected; frozen parameters have no versions.
///
/// ```
/// use ferrotron_nn::{Bias, Init, Linear, Module, ParamAndGradBuffer, Scope};
/// use ferrotron_parallel::pipeline::WeightVersions;
/// use ferrotron_tensor::{DType, Device};
/// let layer = Linear::new(&Scope::new(&Device::cpu(1)?, DType::F64, 1), 1, 1, Bias::No, Init::Ones)?;
/// let buffers = ParamAndGradBuffer::new(&layer.params())?;
/// let mut versions = WeightVersions::new(&buffers, 1)?;
/// let weight = || layer.weight().leaf().value()?.item();
/// versions.update(&buffers, || layer.weight().leaf().write_value(|w| w.zero_fill()))?;
/// assert_eq!(weight()?, 0.0);
/// versions.select(&buffers, 0)?;
/// assert_eq!(weight()?, 1.0);
/// assert!(versions.select(&buffers, 2).unwrap_err().to_string().contains("version 2"));
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
///
/// Weights change in place. A view of a parameter (narrowed, reshaped) that a model's backward has saved reads the
/// newest weights, not those of its forward: a model computes with its parameters themselves.
pub struct WeightVersions {
    /// Version v is in slot v modulo their number.
    stored: Vec<Stored>,
    newest: usize,
    selected: usize,
}

/// Memory for a version. While it is selected, this is the memory of the newest one.
struct Stored {
    version: Option<usize>,
    /// Weights of each bucket.
    weights: Vec<FlatBuffer>,
    /// The number of updates of each leaf, by which backward recognises the weights of its forward.
    updates: Vec<u64>,
}

impl WeightVersions {
    /// The weights in `buffers` as version 0, with memory for `stored` others. Errors if there is no memory.
    pub fn new(buffers: &ParamAndGradBuffer, stored: usize) -> Result<WeightVersions> {
        let memory = |_| {
            let weights = buffers.groups().iter().map(memory_like).collect::<Result<_>>()?;
            Ok(Stored { version: None, weights, updates: vec![0; buffers.params().count()] })
        };
        let stored = (0..stored).map(memory).collect::<Result<_>>()?;
        Ok(WeightVersions { stored, newest: 0, selected: 0 })
    }

    /// Bytes of the stored versions.
    pub fn bytes(&self) -> usize {
        let flats = self.stored.iter().flat_map(|stored| &stored.weights);
        flats.map(|flat| flat.numel() * flat.dtype().size()).sum()
    }

    /// Selects the newest weights, which are version 0 from then on, and forgets all others.
    pub fn restart(&mut self, buffers: &ParamAndGradBuffer) -> Result<()> {
        self.select(buffers, self.newest)?;
        self.stored.iter_mut().for_each(|stored| stored.version = None);
        (self.newest, self.selected) = (0, 0);
        Ok(())
    }

    /// Lets the parameters of `buffers` have the weights of `version`.
    ///
    /// Errors, without any change, if it is not stored.
    pub fn select(&mut self, buffers: &ParamAndGradBuffer, version: usize) -> Result<()> {
        if version == self.selected {
            return Ok(());
        }
        let wanted = match version == self.newest {
            true => None,
            false => Some(self.slot(version)?),
        };
        if self.selected != self.newest {
            let slot = self.slot(self.selected)?;
            self.stored[slot].exchange(buffers)?;
        }
        if let Some(slot) = wanted {
            self.stored[slot].exchange(buffers)?;
        }
        self.selected = version;
        Ok(())
    }

    fn slot(&self, version: usize) -> Result<usize> {
        let found = self.stored.iter().position(|stored| stored.version == Some(version));
        found.ok_or_else(|| {
            let kept = self.stored.iter().filter_map(|stored| stored.version);
            let kept: Vec<String> =
                kept.chain([self.newest]).map(|kept| kept.to_string()).collect();
            let message =
                format!("version {version} of the weights is not stored, only {}", kept.join(", "));
            Error::config("pipeline", message)
        })
    }

    /// Makes the next version by `update`, which updates the newest one in the buffers of the parameters, and selects it.
    /// The newest one so far takes the place of the oldest that is stored.
    ///
    /// Errors as `update` does.
    pub fn update(
        &mut self,
        buffers: &ParamAndGradBuffer,
        update: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        self.select(buffers, self.newest)?;
        if !self.stored.is_empty() {
            let slot = self.newest % self.stored.len();
            self.stored[slot].store(buffers, self.newest)?;
        }
        update()?;
        self.newest += 1;
        self.selected = self.newest;
        Ok(())
    }
}

/// Memory for other values of a bucket's weights.
fn memory_like(bucket: &ParamAndGradBucket) -> Result<FlatBuffer> {
    let weights = bucket.weights.lock()?;
    FlatBuffer::uninit(weights.device(), weights.dtype(), Category::Weights, &bucket.ranges())
}

impl Stored {
    /// Copies the weights of `buffers`.
    fn store(&mut self, buffers: &ParamAndGradBuffer, version: usize) -> Result<()> {
        self.version = Some(version);
        for (group, copy) in buffers.groups().iter().zip(&mut self.weights) {
            let weights = group.weights.lock()?;
            copy.with_slice_mut(.., |copy| copy.copy_from(&weights.slice(..)?))?;
        }
        self.updates = buffers.params().map(Param::leaf).map(|leaf| leaf.version()).collect();
        Ok(())
    }

    /// Exchanges this memory with that of the parameters.
    fn exchange(&mut self, buffers: &ParamAndGradBuffer) -> Result<()> {
        for (group, stored) in buffers.groups().iter().zip(&mut self.weights) {
            std::mem::swap(&mut *group.weights.lock()?, stored);
        }
        for (param, updates) in buffers.params().zip(&mut self.updates) {
            let now = param.leaf().version();
            param.leaf().set_version(*updates);
            *updates = now;
        }
        Ok(())
    }
}
