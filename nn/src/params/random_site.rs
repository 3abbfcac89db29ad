//! The sites of random layers in a model. Two layers at one site would draw the same numbers wherever a pass does not
//! count both, as on two stages of a pipeline, and different numbers elsewhere.

use std::sync::Arc;

/// The place of a random layer in its model: a global path that no other layer draws by. Clones are the same site.
///
/// ```
/// use ferrotron_nn::{Context, Mode, Scope};
/// use ferrotron_tensor::{DType, Device};
/// let scope = Scope::new(&Device::cpu(1)?, DType::F32, 1234).child("noise");
/// let site = scope.random_site()?; // in a layer's constructor
/// let key = Context::new(1234, 0, Mode::Train, 8, 128).next_key(site.path()); // in its forward
/// assert!(scope.random_site().is_err());
/// drop(site);
/// assert!(scope.random_site().is_ok());
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct RandomSite {
    path: String,
    /// Alive as long as a layer holds the site.
    _token: Arc<()>,
}

impl RandomSite {
    pub(super) fn new(path: &str, token: Arc<()>) -> RandomSite {
        RandomSite { path: path.to_string(), _token: token }
    }

    /// The global path, which is the site of the random numbers: see [`Context::next_key`](crate::Context::next_key).
    pub fn path(&self) -> &str {
        &self.path
    }
}
