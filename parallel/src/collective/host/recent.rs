//! The groups that were closed last. Programs make and drop groups for as long as they run, so that not all can be remembered.

use std::collections::{HashSet, VecDeque};
use std::hash::Hash;

/// Items that are remembered.
const MOST: usize = 4096;

/// The last few thousand items that were added.
pub struct Recent<T> {
    order: VecDeque<T>,
    items: HashSet<T>,
}

impl<T> Default for Recent<T> {
    fn default() -> Recent<T> {
        Recent { order: VecDeque::new(), items: HashSet::new() }
    }
}

impl<T: Copy + Eq + Hash> Recent<T> {
    /// Remembers an item. Returns the one that is forgotten for it.
    pub fn add(&mut self, item: T) -> Option<T> {
        if !self.items.insert(item) {
            return None;
        }
        self.order.push_back(item);
        if self.order.len() <= MOST {
            return None;
        }
        let forgotten = self.order.pop_front()?;
        self.items.remove(&forgotten);
        Some(forgotten)
    }

    /// Returns whether an item is remembered.
    pub fn contains(&self, item: &T) -> bool {
        self.items.contains(item)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_is_forgotten() {
        let mut recent = Recent::default();
        for item in 0..MOST {
            assert_eq!(recent.add(item), None);
        }
        assert_eq!(recent.add(0), None, "it is remembered already");
        for item in MOST..3 * MOST {
            assert_eq!(recent.add(item), Some(item - MOST));
        }
        assert!(!recent.contains(&0) && recent.contains(&(3 * MOST - 1)));
        assert_eq!((recent.order.len(), recent.items.len()), (MOST, MOST));
    }
}
