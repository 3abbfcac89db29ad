//! The parameters and random layers that a scope and its children have made. It finds parameters that a module forgets to
//! visit, or that no buffer owns, so that they would never be trained, and two layers that would draw the same numbers.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Every parameter that scopes of one root have made and that still exists, and the sites of their random layers.
#[derive(Clone, Default)]
pub(crate) struct Registry {
    params: Arc<Mutex<Vec<Weak<Entry>>>>,
    /// Number of parameters ever made.
    made: Arc<AtomicUsize>,
    sites: Arc<Mutex<HashMap<String, Weak<()>>>>,
}

/// The entry of one parameter, shared by its handles.
pub(crate) struct Entry {
    name: String,
    /// The tokens of the buffers that hold it, or treat it as frozen.
    buffers: Mutex<Vec<Weak<()>>>,
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
        self.made.fetch_add(1, Relaxed);
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

    /// Claims a path for a random layer, which holds it as long as the token exists. Returns `None` if another one holds
    /// it.
    pub fn claim_site(&self, path: &str) -> Option<Arc<()>> {
        let mut sites = self.sites.lock().unwrap_or_else(PoisonError::into_inner);
        if sites.get(path).is_some_and(|site| site.strong_count() > 0) {
            return None;
        }
        // Sites of models that are gone would add up in a scope that makes many.
        if sites.len().is_power_of_two() {
            sites.retain(|_, site| site.strong_count() > 0);
        }
        let token = Arc::new(());
        sites.insert(path.to_string(), Arc::downgrade(&token));
        Some(token)
    }

    fn entries(&self) -> MutexGuard<'_, Vec<Weak<Entry>>> {
        self.params.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    /// The name of the parameter.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Registers that buffers, which keep `token` alive, hold the parameter or treat it as frozen.
    pub fn add_buffers(&self, token: &Arc<()>) {
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        buffers.retain(|token| token.strong_count() > 0);
        buffers.push(Arc::downgrade(token));
    }

    /// Returns whether any buffers of [`Entry::add_buffers`] still exist.
    pub fn is_in_buffers(&self) -> bool {
        let buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        buffers.iter().any(|token| token.strong_count() > 0)
    }

    /// The existing parameters of the same root, itself included.
    pub fn siblings(&self) -> Vec<Arc<Entry>> {
        self.registry.existing()
    }

    /// The names of the existing parameters of the same root that no existing buffer holds.
    pub fn unowned_siblings(&self) -> Vec<String> {
        let unowned = self.siblings().into_iter().filter(|entry| !entry.is_in_buffers());
        unowned.map(|entry| entry.name.clone()).collect()
    }

    /// Number of parameters that scopes of the same root have ever made.
    pub fn made(&self) -> usize {
        self.registry.made.load(Relaxed)
    }

    /// The paths that random layers of the same root hold.
    pub fn sites(&self) -> Vec<String> {
        let sites = self.registry.sites.lock().unwrap_or_else(PoisonError::into_inner);
        let held = sites.iter().filter(|(_, site)| site.strong_count() > 0);
        held.map(|(path, _)| path.clone()).collect()
    }

    /// Returns whether scopes of the same root made both.
    fn has_root_of(&self, other: &Entry) -> bool {
        Arc::ptr_eq(&self.registry.params, &other.registry.params)
    }
}

/// One of the entries for each root.
pub(crate) fn roots<'a>(entries: impl Iterator<Item = &'a Arc<Entry>>) -> Vec<&'a Arc<Entry>> {
    let mut roots: Vec<&Arc<Entry>> = Vec::new();
    for entry in entries {
        if !roots.iter().any(|root| root.has_root_of(entry)) {
            roots.push(entry);
        }
    }
    roots
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
