//! One computation of ring attention: the queries, the keys in transit, and the bias of their scores.

use ferrotron_nn::DimShard;
use ferrotron_tensor::ops::attention::AttentionConfig;
use ferrotron_tensor::ops::pointwise::add_assign;
use ferrotron_tensor::{Result, Tensor};

/// A rank's computation on a block of keys: `queries` of its queries, from `first` on, attend to `keys` of the block, from
/// `first_key` on.
pub(super) struct RingStep {
    pub first: usize,
    pub queries: usize,
    pub first_key: usize,
    pub keys: usize,
    /// The positions of these keys.
    pub columns: DimShard,
    /// The options without a bias of all positions.
    pub config: AttentionConfig,
}

impl RingStep {
    /// Whether a query sees a key.
    pub fn sees_keys(&self) -> bool {
        self.config.ranges.as_ref().is_none_or(|ranges| !ranges.is_empty())
    }

    pub fn rows(&self, x: &Tensor, dim: isize) -> Result<Tensor> {
        x.narrow(dim, self.first, self.queries)
    }

    /// The options with this step's rows and columns of a bias.
    pub fn options(&self, bias: Option<&Tensor>) -> Result<AttentionConfig> {
        let bias = bias.map(|bias| self.bias(bias)).transpose()?;
        Ok(AttentionConfig { bias, ..self.config.clone() })
    }

    /// The rows and columns of a bias (.., T or 1, all keys or 1) that this step adds to its scores.
    fn bias(&self, bias: &Tensor) -> Result<Tensor> {
        let [rows, columns] = last_two(bias);
        let bias = if rows <= 1 { bias.clone() } else { self.rows(bias, -2)? };
        if columns <= 1 {
            return Ok(bias);
        }
        let columns = self.columns.pieces.iter().map(|&(start, len)| bias.narrow(-1, start, len));
        let columns = columns.collect::<Result<Vec<_>>>()?;
        Tensor::concat(&columns.iter().collect::<Vec<_>>(), -1)
    }

    /// Adds the gradient of this step's bias to that of the whole.
    pub fn add_bias(&self, sum: &mut Tensor, dbias: &Tensor) -> Result<()> {
        let [rows, columns] = last_two(sum);
        let mut in_rows = |f: &mut dyn FnMut(&mut Tensor) -> Result<()>| match rows {
            0 | 1 => f(sum),
            _ => sum.narrow_mut(-2, self.first, self.queries, f),
        };
        if columns <= 1 {
            return in_rows(&mut |rows| add(rows, dbias));
        }
        let mut from = 0;
        for &(start, size) in &self.columns.pieces {
            let part = dbias.narrow(-1, from, size)?;
            in_rows(&mut |rows| rows.narrow_mut(-1, start, size, |place| add(place, &part)))?;
            from += size;
        }
        Ok(())
    }

    /// Splits keys and values out of a block (B, S, 2G, D).
    pub fn keys_and_values(&self, block: &Tensor) -> Result<(Tensor, Tensor)> {
        let seen = block.narrow(1, self.first_key, self.keys)?;
        let groups = seen.dims()[2] / 2;
        Ok((seen.narrow(2, 0, groups)?, seen.narrow(2, groups, groups)?))
    }
}

/// The sizes of rows and columns of a bias; 1 where it has no such dim.
fn last_two(bias: &Tensor) -> [usize; 2] {
    let size = |from_end: usize| bias.rank().checked_sub(from_end).map_or(1, |d| bias.dims()[d]);
    [size(2), size(1)]
}

/// Adds in the dtype of the sum.
pub(super) fn add(sum: &mut Tensor, part: &Tensor) -> Result<()> {
    add_assign(sum, &part.cast(sum.dtype())?)
}
