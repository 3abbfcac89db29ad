//! The sites of random layers in a model. Two layers at one site would draw the same numbers wherever a pass does not
//! count both, as on two stages of a pipeline, and different numbers elsewhere.

use ferrotron_tensor::{Error, Result};
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::Scope;

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

/// The sites in use, of scopes of one root.
#[derive(Clone, Default)]
pub(crate) struct RandomSites(Arc<Mutex<HashMap<String, Weak<()>>>>);

impl RandomSite {
    /// The global path, which is the site of the random numbers: see [`Context::next_key`](crate::Context::next_key).
    pub fn path(&self) -> &str {
        &self.path
    }
}

impl Scope {
    /// Claims this scope's path for a layer that draws random numbers. The layer keeps the site.
    ///
    /// Errors if a layer that still exists holds the site: layers on different stages of a pipeline would draw the same
    /// numbers, and other ones than on one stage.
    pub fn random_site(&self) -> Result<RandomSite> {
        let path = self.path();
        let mut sites = self.sites.0.lock().unwrap_or_else(PoisonError::into_inner);
        if sites.get(path).is_some_and(|site| site.strong_count() > 0) {
            let message = "another layer draws random numbers at this path: give each a scope of its own, such as \
                           `scope.child(..)`, or call one layer twice";
            return Err(Error::config("random_site", message).at(path));
        }
        // Sites of models that are gone would add up in a scope that makes many.
        if sites.len().is_power_of_two() {
            sites.retain(|_, site| site.strong_count() > 0);
        }
        let token = Arc::new(());
        sites.insert(path.to_string(), Arc::downgrade(&token));
        Ok(RandomSite { path: path.to_string(), _token: token })
    }
}

impl fmt::Debug for RandomSites {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RandomSites(..)")
    }
}
