//! The value of a leaf: not initialised yet, a tensor of its own, or a range of a flat buffer.

use ferrotron_tensor::{Category, Error, Result, Tensor};

use super::shared_flat::SharedFlatBuffer;
use crate::spec::TensorSpec;

pub(super) type Init = Box<dyn FnOnce(&mut Tensor) -> Result<()> + Send>;

pub(super) enum Value {
    /// Initial values still to be computed; `None` after a failure.
    Init(Option<Init>),
    Own(Tensor),
    Flat(SharedFlatBuffer, usize),
}

impl Value {
    /// The tensor, which is initialised first if necessary.
    pub(super) fn tensor(&mut self, name: &str, spec: &TensorSpec) -> Result<Tensor> {
        let failed = || {
            Error::value("leaf", format!("'{name}' has no value: its initialisation failed before"))
        };
        match self {
            Value::Own(tensor) => Ok(tensor.clone()),
            Value::Flat(flat, range) => flat.lock()?.tensor(*range),
            Value::Init(init) => {
                let init = init.take().ok_or_else(failed)?;
                let mut tensor = weights(spec)?;
                init(&mut tensor)?;
                *self = Value::Own(tensor.clone());
                Ok(tensor)
            }
        }
    }

    /// Replaces the contents by a copy of `new`.
    pub(super) fn set(&mut self, new: &Tensor) -> Result<()> {
        match self {
            Value::Flat(flat, range) => {
                flat.lock()?.with_mut(*range, |tensor| tensor.copy_from(new))
            }
            own => {
                let copy = new.copy()?;
                copy.set_category(Category::Weights);
                *own = Value::Own(copy);
                Ok(())
            }
        }
    }

    /// Lets `write` overwrite a unique, contiguous tensor with unspecified contents.
    pub(super) fn write(
        &mut self,
        spec: &TensorSpec,
        write: impl FnOnce(&mut Tensor) -> Result<()>,
    ) -> Result<()> {
        match self {
            Value::Flat(flat, range) => flat.lock()?.with_mut(*range, write),
            Value::Own(tensor) if tensor.is_unique() && tensor.is_contiguous() => write(tensor),
            own => {
                let mut tensor = weights(spec)?;
                write(&mut tensor)?;
                *own = Value::Own(tensor);
                Ok(())
            }
        }
    }

    /// Moves the contents out of a flat buffer.
    pub(super) fn unbind(&mut self) -> Result<()> {
        if let Value::Flat(flat, range) = self {
            let own = flat.lock()?.tensor(*range)?.copy()?;
            own.set_category(Category::Weights);
            *self = Value::Own(own);
        }
        Ok(())
    }

    /// Moves the contents into a range of `flat`.
    pub(super) fn bind(&mut self, name: &str, flat: &SharedFlatBuffer, range: usize) -> Result<()> {
        let old = std::mem::replace(self, Value::Flat(flat.clone(), range));
        flat.lock()?.with_mut(range, |tensor| match old {
            Value::Init(Some(init)) => init(tensor),
            Value::Own(source) => tensor.copy_from(&source),
            Value::Flat(from, range) if !from.is(flat) => {
                tensor.copy_from(&from.lock()?.tensor(range)?)
            }
            _ => {
                Err(Error::value("leaf", format!("'{name}' cannot move to the flat that it is in")))
            }
        })
    }
}

fn weights(spec: &TensorSpec) -> Result<Tensor> {
    let tensor = spec.empty()?;
    tensor.set_category(Category::Weights);
    Ok(tensor)
}
