//! The cache of keys and values for generation.

use ferrotron_tensor::{DType, Device, Error, Result, Tensor};

use crate::AttentionConfig;

/// Keys and values of the positions seen so far, for generation: those of each sequence by themselves, so that sequences
/// of a batch may have different lengths.
#[derive(Debug, Clone)]
pub struct KvCache {
    sequences: Vec<CachedSequence>,
}

/// Keys and values of one sequence.
#[derive(Debug, Clone)]
pub(crate) struct CachedSequence {
    keys: Tensor,   // (1, capacity, G, D)
    values: Tensor, // (1, capacity, G, D)
    len: usize,
}

impl KvCache {
    /// An empty cache for `capacity` positions of `batch` sequences: 2 x batch x capacity x G x D elements of
    /// `dtype`.
    pub fn new(
        device: &Device,
        dtype: DType,
        batch: usize,
        capacity: usize,
        config: &AttentionConfig,
    ) -> Result<KvCache> {
        let dims = [1, capacity, config.groups, config.head_dim];
        let sequence = |_| {
            Ok(CachedSequence {
                keys: Tensor::zeros(device, dtype, &dims)?,
                values: Tensor::zeros(device, dtype, &dims)?,
                len: 0,
            })
        };
        Ok(KvCache { sequences: (0..batch).map(sequence).collect::<Result<_>>()? })
    }

    /// The cache of the sequences of `parts`, in order.
    pub fn join(parts: impl IntoIterator<Item = KvCache>) -> KvCache {
        KvCache { sequences: parts.into_iter().flat_map(|part| part.sequences).collect() }
    }

    /// A cache for each sequence.
    pub fn split(self) -> Vec<KvCache> {
        let alone = |sequence| KvCache { sequences: vec![sequence] };
        self.sequences.into_iter().map(alone).collect()
    }

    /// The most positions of a sequence that it can hold.
    pub fn capacity(&self) -> usize {
        self.sequences.first().map_or(0, CachedSequence::capacity)
    }

    /// Number of cached positions, of the longest sequence.
    pub fn len(&self) -> usize {
        self.lens().into_iter().max().unwrap_or(0)
    }

    /// Number of cached positions of each sequence.
    pub fn lens(&self) -> Vec<usize> {
        self.sequences.iter().map(CachedSequence::len).collect()
    }

    /// Returns whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Removes all positions and keeps the memory.
    pub fn clear(&mut self) {
        self.sequences.iter_mut().for_each(|sequence| sequence.len = 0);
    }

    /// The sequences.
    pub(crate) fn sequences_mut(&mut self) -> &mut [CachedSequence] {
        &mut self.sequences
    }
}

impl CachedSequence {
    pub(crate) fn capacity(&self) -> usize {
        self.keys.dims()[1]
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Appends keys and values (1, T, G, D), and returns all cached ones.
    pub(crate) fn append(&mut self, keys: &Tensor, values: &Tensor) -> Result<(Tensor, Tensor)> {
        let (start, count) = (self.len, keys.dims()[1]);
        if start + count > self.capacity() {
            return Err(Error::shape(
                "kv_cache",
                format!("{start} + {count} positions exceed the room for {}", self.capacity()),
            ));
        }
        self.keys.narrow_mut(1, start, count, |place| place.copy_from(keys))?;
        self.values.narrow_mut(1, start, count, |place| place.copy_from(values))?;
        self.len += count;
        Ok((self.keys.narrow(1, 0, self.len)?, self.values.narrow(1, 0, self.len)?))
    }
}
