//! Modules: whatever has parameters.

use ferrotron_tensor::{Error, Result};

use crate::{ModuleSummary, Param};

/// A component with parameters. `#[derive(Module)]` implements it, as described in the documentation of
/// [the macro](derive@crate::Module).
///
/// ```
/// # extern crate ferrotron_nn as ferrotron;
/// use ferrotron_nn::{Bias, Init, Linear, Module, RmsNorm, Scope};
/// use ferrotron_tensor::{DType, Device};
///
/// #[derive(Module)]
/// struct Head {
///     width: usize,
///     norm: RmsNorm,
///     proj: Linear,
/// }
///
/// let scope = Scope::new(&Device::cpu(1)?, DType::F32, 1234);
/// let head = Head {
///     width: 3,
///     norm: RmsNorm::new(&scope.child("norm"), 3, 1e-5),
///     proj: Linear::new(&scope.child("proj"), 3, 5, Bias::No, Init::XavierNormal)?,
/// };
/// let names: Vec<String> = head.params().iter().map(|param| param.name().to_string()).collect();
/// assert_eq!(names, ["norm.weight", "proj.weight"]);
/// # assert_eq!(head.width, 3);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub trait Module {
    /// Calls `f` with every parameter in the order of the forward pass, once per use. A token embedding that is also
    /// the head is visited twice.
    fn visit(&self, f: &mut dyn FnMut(&Param));

    /// All parameters, each once.
    fn params(&self) -> Vec<Param> {
        let mut params: Vec<Param> = Vec::new();
        self.visit(&mut |param| {
            if !params.iter().any(|known| known.leaf() == param.leaf()) {
                params.push(param.clone());
            }
        });
        params
    }

    /// Describes all parameters: a table of names, shapes and totals.
    fn summary(&self) -> ModuleSummary {
        ModuleSummary { rows: self.params().iter().map(Param::summary_row).collect() }
    }

    /// Freezes the parameters whose name `filter` accepts, and returns their number: see [`Param::set_trainable`].
    ///
    /// ```
    /// use ferrotron_nn::{Bias, Init, Linear, Module, Scope};
    /// use ferrotron_tensor::{DType, Device};
    /// let scope = Scope::new(&Device::cpu(1)?, DType::F32, 1234);
    /// let layer = |name| Linear::new(&scope.child(name), 4, 4, Bias::Yes, Init::XavierNormal);
    /// let model = [layer("encoder")?, layer("head")?];
    /// assert_eq!(model.freeze(|name| !name.starts_with("head."))?, 2);
    /// assert!(!model[0].weight().is_trainable() && model[1].weight().is_trainable());
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    ///
    /// Errors if the filter accepts no name. A part of a model that may have none of them, such as a pipeline stage, calls
    /// [`Param::set_trainable`] instead. Errors as that; parameters before the offending one are then frozen.
    fn freeze(&self, filter: impl Fn(&str) -> bool) -> Result<usize>
    where
        Self: Sized,
    {
        let params = self.params();
        let chosen: Vec<&Param> = params.iter().filter(|param| filter(param.name())).collect();
        if let ([], [first, ..]) = (&chosen[..], &params[..]) {
            let last = params.last().unwrap_or(first);
            let message = format!(
                "the filter accepts none of {} parameters, from '{}' to '{}'",
                params.len(),
                first.name(),
                last.name()
            );
            return Err(Error::config("freeze", message));
        }
        chosen.iter().try_for_each(|param| param.set_trainable(false))?;
        Ok(chosen.len())
    }
}
