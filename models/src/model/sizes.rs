//! Checks the sizes of a transformer's configuration, which come from a file or a command line and may be anything.

use ferrotron_tensor::{Error, Result};

/// Most layers: a hundred times as many as the deepest models have. Every layer is an object before anything of it is
/// memory of a device.
const MAX_LAYERS: usize = 10_000;

/// Widest head: rotary positions take a table of that width for each position.
const MAX_HEAD_WIDTH: usize = 65_536;

/// Most parameters, a thousand times as many as the largest models have. Byte counts of weights, gradients and
/// optimizer states stay below 2^63, and so do numbers of floating-point operations of a token.
const MAX_PARAMETERS: u64 = 1_000_000_000_000_000;

/// Most tokens of a vocabulary, and most positions: their ids are u32.
const MAX_IDS: usize = 1 << 32;

/// The fields of a configuration that can be refused, by name.
pub(crate) struct SizeCheck<'a> {
    /// The model, in errors.
    pub model: &'static str,
    /// Sizes that must be positive, among them `num-layers`, `hidden-size`, `num-attention-heads`, and perhaps
    /// `num-query-groups`.
    pub sizes: &'a [(&'static str, usize)],
    /// Dim of a head.
    pub kv_channels: usize,
    /// Counts of ids.
    pub ids: &'a [(&'static str, usize)],
    /// Number of parameters, unless it is beyond a `u64`.
    pub parameters: Option<u64>,
    /// Numbers that must be at least 0.
    pub numbers: &'a [(&'static str, f64)],
    /// Probabilities below 1.
    pub probabilities: &'a [(&'static str, f64)],
}

impl SizeCheck<'_> {
    /// Errors, naming the values, if the sizes are inconsistent.
    pub fn check(&self) -> Result<()> {
        self.reason().map_or(Ok(()), |message| Err(Error::config(self.model, message)))
    }

    fn reason(&self) -> Option<String> {
        let size = |wanted: &str| {
            self.sizes.iter().find(|(name, _)| *name == wanted).map_or(1, |(_, size)| *size)
        };
        if let Some((name, _)) = self.sizes.iter().find(|(_, size)| *size == 0) {
            return Some(format!("{name} must be positive, got 0"));
        }
        let [layers, hidden, heads, groups] =
            ["num-layers", "hidden-size", "num-attention-heads", "num-query-groups"].map(size);
        if layers > MAX_LAYERS {
            return Some(format!("num-layers {layers} is more than {MAX_LAYERS}"));
        }
        let width = self.kv_channels;
        if width == 0 || (width == hidden / heads && !hidden.is_multiple_of(heads)) {
            return Some(format!(
                "num-attention-heads {heads} does not divide hidden-size {hidden}"
            ));
        }
        if !heads.is_multiple_of(groups) {
            return Some(format!(
                "num-query-groups {groups} does not divide num-attention-heads {heads}"
            ));
        }
        if let Some((name, ids)) = self.ids.iter().find(|(_, ids)| *ids > MAX_IDS) {
            return Some(format!(
                "{name} {ids} is more than {MAX_IDS}, the number of ids of 32 bits"
            ));
        }
        if self.parameters.is_none_or(|number| number > MAX_PARAMETERS) {
            let sizes: Vec<String> =
                self.sizes.iter().map(|(name, size)| format!("{name} {size}")).collect();
            return Some(format!(
                "a model of {}, kv-channels {width} would have more than 10^15 parameters: check these sizes",
                sizes.join(", ")
            ));
        }
        if width > MAX_HEAD_WIDTH {
            return Some(format!("kv-channels {width} is more than {MAX_HEAD_WIDTH}"));
        }
        let negative = self.numbers.iter().find(|(_, value)| !(*value >= 0.0 && value.is_finite()));
        if let Some((name, value)) = negative {
            return Some(format!("{name} must be at least 0, got {value}"));
        }
        let beyond = self.probabilities.iter().find(|(_, p)| !(0.0..1.0).contains(p));
        beyond.map(|(name, p)| format!("{name} must be in [0, 1), got {p}"))
    }
}

/// The product of sizes, unless it is beyond 128 bits: three sizes of 64 bits may be.
pub(crate) fn product(sizes: &[usize]) -> Option<u128> {
    sizes.iter().try_fold(1_u128, |product, &size| product.checked_mul(size as u128))
}

/// The sum of products, unless one of them or the sum is beyond 128 bits.
pub(crate) fn sum(terms: &[Option<u128>]) -> Option<u128> {
    terms.iter().try_fold(0_u128, |sum, term| sum.checked_add((*term)?))
}
