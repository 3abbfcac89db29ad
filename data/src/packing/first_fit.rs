//! First-fit bin packing: each item goes into the first bin that has room for it.
//!
//! A tree over the bins has the largest free space below each node, so an item takes O(log bins). First-fit needs at most
//! 1.7 times the fewest bins, from the longest item on 11/9 times (Johnson et al., SIAM J. Comput. 3, 1974).

use std::cmp::Reverse;

/// The order in which first-fit takes the samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PackingAlgorithm {
    /// The order of the data.
    FirstFit,
    /// Longest samples first; samples of equal length in the order of the data.
    FirstFitDecreasing,
}

/// The items of each bin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bins {
    /// The items of all bins, one bin after another; within a bin they ascend.
    pub items: Vec<u32>,
    /// The end of each bin in `items`.
    pub ends: Vec<u32>,
}

impl Bins {
    /// Packs items of these lengths, each of 1 to `capacity`, into bins of `capacity`.
    pub fn first_fit(lengths: &[u32], capacity: u32, algorithm: PackingAlgorithm) -> Bins {
        let mut order: Vec<u32> = (0..lengths.len() as u32).collect();
        if algorithm == PackingAlgorithm::FirstFitDecreasing {
            order.sort_by_key(|&item| Reverse(lengths[item as usize]));
        }
        let (mut space, mut bin_of) = (FreeSpace::new(), vec![0_u32; lengths.len()]);
        for item in order {
            let length = lengths[item as usize];
            bin_of[item as usize] = space.place(length, capacity) as u32;
        }
        let mut counts = vec![0_u32; space.bins];
        bin_of.iter().for_each(|&bin| counts[bin as usize] += 1);
        let sum = |end: &mut u32, count: u32| {
            *end += count;
            Some(*end)
        };
        let ends: Vec<u32> = counts.iter().copied().scan(0, sum).collect();
        let mut next: Vec<u32> = ends.iter().zip(&counts).map(|(end, count)| end - count).collect();
        let mut items = vec![0; lengths.len()];
        for (item, &bin) in bin_of.iter().enumerate() {
            let place = &mut next[bin as usize];
            items[*place as usize] = item as u32;
            *place += 1;
        }
        Bins { items, ends }
    }

    /// Number of bins.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// The items of a bin.
    pub fn bin(&self, bin: usize) -> &[u32] {
        let start = bin.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.items[start as usize..self.ends[bin] as usize]
    }
}

/// The free space of each bin, in a binary tree of maxima.
struct FreeSpace {
    bins: usize,
    /// Leaves of the tree, a power of two.
    leaves: usize,
    /// The root is node 1, the children of node n are 2n and 2n + 1. Leaves without a bin have no space.
    largest: Vec<u32>,
}

impl FreeSpace {
    fn new() -> FreeSpace {
        FreeSpace { bins: 0, leaves: 1, largest: vec![0; 2] }
    }

    /// Takes `length` from the first bin that has it, or from a new bin of `capacity`; returns the bin.
    fn place(&mut self, length: u32, capacity: u32) -> usize {
        let bin = match self.largest[1] >= length {
            true => self.first_with(length),
            false => self.open(capacity),
        };
        let left = self.largest[self.leaves + bin] - length;
        self.set(bin, left);
        bin
    }

    fn first_with(&self, length: u32) -> usize {
        let mut node = 1;
        while node < self.leaves {
            node *= 2;
            if self.largest[node] < length {
                node += 1;
            }
        }
        node - self.leaves
    }

    fn open(&mut self, capacity: u32) -> usize {
        if self.bins == self.leaves {
            let free = self.largest.split_off(self.leaves);
            self.leaves *= 2;
            self.largest = vec![0; 2 * self.leaves];
            self.largest[self.leaves..self.leaves + free.len()].copy_from_slice(&free);
            for node in (1..self.leaves).rev() {
                self.update(node);
            }
        }
        self.bins += 1;
        self.set(self.bins - 1, capacity);
        self.bins - 1
    }

    fn set(&mut self, bin: usize, free: u32) {
        let mut node = self.leaves + bin;
        self.largest[node] = free;
        while node > 1 {
            node /= 2;
            self.update(node);
        }
    }

    fn update(&mut self, node: usize) {
        self.largest[node] = self.largest[2 * node].max(self.largest[2 * node + 1]);
    }
}
