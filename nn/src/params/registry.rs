//! The parameters that a scope and its children have made. It finds those that a module forgets to visit, or that no
//! buffer owns, so that they would never be trained.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Every parameter that scopes of one root have made and that still exists.
#[derive(Clone, Default)]
pub(crate) struct Registry(Arc<Mutex<Vec<Weak<Entry>>>>);

/// The entry of one parameter, shared by its handles.
pub(crate) struct Entry {
    name: String,
    /// Belongs to the buffers that hold it, or treat it as frozen.
    buffers: Mutex<Weak<()>>,
    registry: Registry,
}

impl Registry {
    /// Adds a parameter.
    pub fn add(&self, name: &str) -> Arc<Entry> {
        let entry = Arc::new(Entry {
            name: name.to_string(),
            buffers: Mutex::default(),
            registry: self.clone(),
        });
        let mut entries = self.entries();
        // Entries of models that are gone would add up in a scope that makes many.
        if entries.len().is_power_of_two() {
            entries.retain(|entry| entry.strong_count() > 0);
        }
        entries.push(Arc::downgrade(&entry));
        entry
    }

    /// The parameters that still exist, in the order in which they were made.
    pub fn existing(&self) -> Vec<Arc<Entry>> {
        self.entries().iter().filter_map(Weak::upgrade).collect()
    }

    fn entries(&self) -> MutexGuard<'_, Vec<Weak<Entry>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    /// The name of the parameter.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Registers that buffers, which keep `token` alive, hold the parameter or treat it as frozen.
    pub fn set_buffers(&self, token: &Arc<()>) {
        *self.buffers.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(token);
    }

    /// Returns whether the buffers of the last [`Entry::set_buffers`] still exist.
    pub fn is_in_buffers(&self) -> bool {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner).strong_count() > 0
    }

    /// The names of the existing parameters of the same root that no existing buffer holds.
    pub fn unowned_siblings(&self) -> Vec<String> {
        let unowned = self.registry.existing().into_iter().filter(|entry| !entry.is_in_buffers());
        unowned.map(|entry| entry.name.clone()).collect()
    }

    /// Returns whether scopes of the same root made both.
    pub fn has_root_of(&self, other: &Entry) -> bool {
        Arc::ptr_eq(&self.registry.0, &other.registry.0)
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registry({} parameters)", self.existing().len())
    }
}

impl fmt::Debug for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Entry('{}')", self.name)
    }
}
