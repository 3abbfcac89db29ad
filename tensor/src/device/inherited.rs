//! Thread-local values that travel with the closures of [`Device::run`](crate::Device::run), which change threads.
//!
//! A mode that a caller sets around `run`, such as autograd's recording mode, is then in force inside it.

use std::any::Any;
use std::cell::RefCell;
use std::sync::{Mutex, PoisonError};

/// One value of each type that was asked for.
type Values = Vec<Box<dyn Any + Send>>;

thread_local! {
    static VALUES: RefCell<Values> = const { RefCell::new(Vec::new()) };
}

/// Calls `f` with this thread's value of a type: at first the default. `f` must not ask for another one.
///
/// ```
/// use ferrotron_tensor::{Device, inherited};
/// #[derive(Default)]
/// struct Depth(usize);
/// inherited(|depth: &mut Depth| depth.0 = 3);
/// let device = Device::cpu(2)?;
/// assert_eq!(device.run(|| inherited(|depth: &mut Depth| std::mem::take(&mut depth.0))), 3);
/// assert_eq!(inherited(|depth: &mut Depth| depth.0), 0); // and comes back as the closure left it
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
pub fn inherited<S: Default + Send + 'static, R>(f: impl FnOnce(&mut S) -> R) -> R {
    VALUES.with_borrow_mut(|values| {
        let found = values.iter().position(|value| value.is::<S>());
        let index = found.unwrap_or_else(|| {
            values.push(Box::new(S::default()));
            values.len() - 1
        });
        f(values[index].downcast_mut().expect("found by its type"))
    })
}

/// The values of a calling thread on their way to another one and back.
pub(super) struct Travelling(Mutex<Values>);

/// Exchanges the values of this thread with those that travel, now and when it is dropped, also by a panic.
pub(super) struct Exchanged<'a>(&'a Travelling);

impl Travelling {
    /// No values yet: the first exchange, on the calling thread, takes them along.
    pub fn new() -> Travelling {
        Travelling(Mutex::new(Vec::new()))
    }

    /// Exchanges the values until the result is dropped.
    pub fn exchange(&self) -> Exchanged<'_> {
        self.swap();
        Exchanged(self)
    }

    fn swap(&self) {
        let mut travelling = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        VALUES.with_borrow_mut(|values| std::mem::swap(values, &mut travelling));
    }
}

impl Drop for Exchanged<'_> {
    fn drop(&mut self) {
        self.0.swap();
    }
}
