//! Whether a thread looks for NaN, and the check of a parameter's gradient before it is reduced over ranks.
//!
//! The mode is a value of each thread, like the recording mode.

use ferrotron_tensor::ops::reduce::{KeepDims, amax};
use ferrotron_tensor::{Error, Result, Tensor};
use std::cell::RefCell;

thread_local! {
    /// The search of this thread.
    static SEARCH: RefCell<Search> = const { RefCell::new(Search { detecting: false, parameter: None }) };
}

/// A search for NaN.
struct Search {
    detecting: bool,
    /// The address of the parameter whose gradient is NaN, until the engine names the operation. Names are not unique.
    parameter: Option<usize>,
}

/// Whether this thread looks for NaN.
pub(crate) fn detecting() -> bool {
    SEARCH.with_borrow(|search| search.detecting)
}

/// Sets the mode of this thread, and returns the one before. What an earlier search has found is forgotten.
pub(crate) fn set_detecting(on: bool) -> bool {
    SEARCH.with_borrow_mut(|search| {
        search.parameter = None;
        std::mem::replace(&mut search.detecting, on)
    })
}

/// The address of the parameter that [`check_parameter`] refused last; afterwards none.
pub(crate) fn take_nan_parameter() -> Option<usize> {
    SEARCH.with_borrow_mut(|search| search.parameter.take())
}

/// Errors if this thread looks for NaN and the gradient of the parameter `name` at `address` has one. Its leaf asks after each
/// contribution, before the gradient is reduced over ranks.
pub(crate) fn check_parameter(
    (name, address): (&str, usize),
    gradient: impl FnOnce() -> Result<Option<Tensor>>,
) -> Result<()> {
    if !detecting() {
        return Ok(());
    }
    match gradient()? {
        Some(gradient) if is_nan(&gradient)? => {
            SEARCH.with_borrow_mut(|search| search.parameter = Some(address));
            let (dtype, dims) = (gradient.dtype(), gradient.dims());
            let message = format!("the gradient of '{name}', {dtype} {dims:?}, is NaN");
            Err(Error::value("detect_anomaly", message))
        }
        _ => Ok(()),
    }
}

/// A maximum is NaN if any element is.
pub(crate) fn is_nan(x: &Tensor) -> Result<bool> {
    if x.numel() == 0 || !x.dtype().is_float() {
        return Ok(false);
    }
    let all: Vec<isize> = (0..x.rank() as isize).collect();
    Ok(amax(x, &all, KeepDims::Drop)?.item()?.is_nan())
}
