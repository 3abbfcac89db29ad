//! The cache of keys and values for generation.

use ferrotron_tensor::{DType, Device, Error, Result, Tensor};

use crate::AttentionConfig;

/// Keys and values of the positions seen so far, for generation.
#[derive(Debug, Clone)]
pub struct KvCache {
    keys: Tensor,   // (B, capacity, G, D)
    values: Tensor, // (B, capacity, G, D)
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
        let dims = [batch, capacity, config.groups, config.head_dim];
        Ok(KvCache {
            keys: Tensor::zeros(device, dtype, &dims)?,
            values: Tensor::zeros(device, dtype, &dims)?,
            len: 0,
        })
    }

    /// The most positions that it can hold.
    pub fn capacity(&self) -> usize {
        self.keys.dims()[1]
    }

    /// Number of cached positions.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Removes all positions and keeps the memory.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Appends keys and values (B, T, G, D), and returns all cached ones.
    pub(crate) fn append(&mut self, keys: &Tensor, values: &Tensor) -> Result<(Tensor, Tensor)> {
        let (start, count) = (self.len, keys.dims()[1]);
        if start + count > self.keys.dims()[1] {
            return Err(Error::shape(
                "kv_cache",
                format!("{start} + {count} positions exceed the room for {}", self.keys.dims()[1]),
            ));
        }
        self.keys.narrow_mut(1, start, count, |place| place.copy_from(keys))?;
        self.values.narrow_mut(1, start, count, |place| place.copy_from(values))?;
        self.len += count;
        Ok((self.keys.narrow(1, 0, self.len)?, self.values.narrow(1, 0, self.len)?))
    }
}
