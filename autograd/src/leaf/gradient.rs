//! The gradient of a leaf: a tensor of its own or a range of a flat buffer, and the number of contributions to it.

use ferrotron_tensor::ops::pointwise::into_unique;
use ferrotron_tensor::{Category, Result, Tensor};

use super::shared_flat::SharedFlatBuffer;
use crate::Accum;
use crate::spec::TensorSpec;

pub(super) struct Gradient {
    place: GradientPlace,
    /// Number of contributions since the gradient was last zeroed.
    pub(super) contributions: usize,
    /// The contributions that a step has used since then.
    pub(super) used: usize,
}

enum GradientPlace {
    Own(Option<Tensor>),
    Flat(SharedFlatBuffer, usize),
}

impl Gradient {
    /// A gradient in a tensor of its own, which the first contribution allocates.
    pub(super) fn own() -> Gradient {
        Gradient { place: GradientPlace::Own(None), contributions: 0, used: 0 }
    }

    /// A gradient in a range of `flat`.
    pub(super) fn flat(flat: &SharedFlatBuffer, range: usize) -> Gradient {
        Gradient { place: GradientPlace::Flat(flat.clone(), range), contributions: 0, used: 0 }
    }

    /// Drops the contributions: the next one overwrites them.
    pub(super) fn zero(&mut self) {
        (self.contributions, self.used) = (0, 0);
    }

    /// Drops the contributions, and frees a tensor of its own.
    pub(super) fn forget(&mut self) {
        self.zero();
        if let GradientPlace::Own(tensor) = &mut self.place {
            *tensor = None;
        }
    }

    /// The sum of the contributions; `None` without any.
    pub(super) fn tensor(&self) -> Result<Option<Tensor>> {
        Ok(match &self.place {
            _ if self.contributions == 0 => None,
            GradientPlace::Own(tensor) => tensor.clone(),
            GradientPlace::Flat(flat, range) => Some(flat.lock()?.tensor(*range)?),
        })
    }

    /// Moves out a tensor of its own.
    pub(super) fn take(&mut self) -> Option<Tensor> {
        match &mut self.place {
            GradientPlace::Own(place) => place.take(),
            GradientPlace::Flat(..) => None,
        }
    }

    /// Makes `contribution` the gradient if it is the first one of a gradient with a tensor of its own; returns it
    /// otherwise.
    pub(super) fn start(
        &mut self,
        contribution: Tensor,
        spec: &TensorSpec,
    ) -> Result<Option<Tensor>> {
        match &mut self.place {
            GradientPlace::Own(place) if self.contributions == 0 => {
                *place = Some(into_unique(spec.cast(contribution)?)?);
                Ok(None)
            }
            _ => Ok(Some(contribution)),
        }
    }

    /// Lets `write` add a contribution. A tensor of its own counts as `category`, if there is one.
    pub(super) fn write(
        &mut self,
        spec: &TensorSpec,
        category: Option<Category>,
        write: impl FnOnce(&mut Tensor, Accum) -> Result<()>,
    ) -> Result<()> {
        let accum = if self.contributions == 0 { Accum::Replace } else { Accum::Add };
        match &mut self.place {
            GradientPlace::Flat(flat, range) => {
                flat.lock()?.with_mut(*range, |tensor| write(tensor, accum))
            }
            GradientPlace::Own(place) => {
                let mut tensor = match place.take() {
                    Some(tensor) if accum == Accum::Add => into_unique(tensor)?,
                    Some(tensor) if tensor.is_unique() => tensor,
                    _ => spec.empty()?,
                };
                if let Some(category) = category {
                    tensor.set_category(category);
                }
                write(&mut tensor, accum)?;
                *place = Some(tensor);
                Ok(())
            }
        }
    }
}
