//! A table of a module's parameters.

use ferrotron_tensor::DType;
use std::fmt;

/// The parameters of a module, each once: [`Module::summary`](crate::Module::summary).
///
/// [`Display`](fmt::Display) writes a table with the totals below it:
///
/// ```
/// use ferrotron_nn::{Bias, Init, Linear, Module, Scope};
/// use ferrotron_tensor::{DType, Device};
/// let scope = Scope::new(&Device::cpu(1)?, DType::F32, 1234);
/// let layer = |name, outputs| Linear::new(&scope.child(name), 4, outputs, Bias::Yes, Init::XavierNormal);
/// let model = [layer("encoder.fc", 300)?, layer("head", 10)?];
/// model.freeze(|name| name.starts_with("encoder."))?;
/// let table = "\
/// parameter          dtype  shape     count  trainable
/// encoder.fc.weight  f32    [300, 4]  1,200  no
/// encoder.fc.bias    f32    [300]       300  no
/// head.weight        f32    [10, 4]      40  yes
/// head.bias          f32    [10]         10  yes
/// total                               1,550  6,200 bytes
/// trainable                              50
/// frozen                              1,500
/// ";
/// assert_eq!(model.summary().to_string(), table);
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct ModuleSummary {
    /// One row for each parameter, or for each module after [`ModuleSummary::depth`].
    pub rows: Vec<SummaryRow>,
}

/// A parameter, or the parameters of a module.
#[derive(Debug, Clone, PartialEq)]
pub struct SummaryRow {
    /// The global name of the parameter, or the path of the module.
    pub name: String,
    /// Dtype of the weights; `None` if those of a module differ.
    pub dtype: Option<DType>,
    /// Dims of the global tensor; empty for a module.
    pub shape: Vec<usize>,
    /// Dims of the shard on this rank.
    pub local_shape: Vec<usize>,
    /// Number of parameters of a module; `None` for a single parameter.
    pub params: Option<usize>,
    /// Number of elements of the global tensors.
    pub numel: usize,
    /// Number of those that are trained.
    pub trainable: usize,
    /// Bytes of the weights on this rank.
    pub bytes: usize,
}

impl ModuleSummary {
    /// Merges the parameters of modules into one row each: with `depth` 1 those of `blocks`, with 2 those of each
    /// `blocks.0`. A parameter that is not deeper keeps its row.
    ///
    /// ```
    /// use ferrotron_nn::{Bias, Init, Linear, Module, Scope};
    /// use ferrotron_tensor::{DType, Device};
    /// let scope = Scope::new(&Device::cpu(1)?, DType::F32, 1234);
    /// let layer = Linear::new(&scope.child("encoder.fc"), 4, 300, Bias::Yes, Init::XavierNormal)?;
    /// let summary = layer.summary().depth(1);
    /// assert_eq!((summary.rows[0].name.as_str(), summary.rows[0].numel), ("encoder", 1500));
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    #[must_use]
    pub fn depth(self, depth: usize) -> ModuleSummary {
        let mut rows: Vec<SummaryRow> = Vec::new();
        for row in self.rows {
            let end = row.name.match_indices('.').nth(depth.max(1) - 1).map(|(end, _)| end);
            let Some(path) = end.map(|end| &row.name[..end]) else {
                rows.push(row);
                continue;
            };
            match rows.iter_mut().find(|known| known.params.is_some() && known.name == path) {
                Some(module) => {
                    module.dtype = module.dtype.filter(|_| module.dtype == row.dtype);
                    module.params = module.params.map(|count| count + 1);
                    module.numel += row.numel;
                    module.trainable += row.trainable;
                    module.bytes += row.bytes;
                }
                None => rows.push(SummaryRow {
                    name: path.to_string(),
                    shape: Vec::new(),
                    local_shape: Vec::new(),
                    params: Some(1),
                    ..row
                }),
            }
        }
        ModuleSummary { rows }
    }

    /// Number of elements of the global tensors.
    pub fn numel(&self) -> usize {
        self.rows.iter().map(|row| row.numel).sum()
    }

    /// Number of elements that are trained.
    pub fn trainable(&self) -> usize {
        self.rows.iter().map(|row| row.trainable).sum()
    }

    /// Bytes of the weights on this rank, without those that ZeRO shards further.
    pub fn bytes(&self) -> usize {
        self.rows.iter().map(|row| row.bytes).sum()
    }
}

impl SummaryRow {
    /// The cells of the table: name, dtype, shape, count, whether it is trained.
    fn cells(&self) -> [String; 5] {
        let shape = match self.params {
            Some(1) => "1 parameter".to_string(),
            Some(count) => format!("{count} parameters"),
            None if self.shape == self.local_shape => format!("{:?}", self.shape),
            None => format!("{:?} of {:?}", self.local_shape, self.shape),
        };
        let trainable = match self.trainable {
            all if all == self.numel => "yes".to_string(),
            0 => "no".to_string(),
            some => thousands(some),
        };
        let dtype = self.dtype.map_or("mixed".to_string(), |dtype| dtype.to_string());
        [self.name.clone(), dtype, shape, thousands(self.numel), trainable]
    }
}

impl fmt::Display for ModuleSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table =
            vec![["parameter", "dtype", "shape", "count", "trainable"].map(String::from)];
        table.extend(self.rows.iter().map(SummaryRow::cells));
        let (numel, trainable) = (self.numel(), self.trainable());
        let bytes = format!("{} bytes", thousands(self.bytes()));
        let total = |name: &str, count: usize, note: String| {
            [name.to_string(), String::new(), String::new(), thousands(count), note]
        };
        table.push(total("total", numel, bytes));
        table.push(total("trainable", trainable, String::new()));
        table.push(total("frozen", numel - trainable, String::new()));
        let widths: Vec<usize> = (0..5)
            .map(|column| table.iter().map(|row| row[column].len()).max().unwrap_or(0))
            .collect();
        for [name, dtype, shape, count, note] in &table {
            let [names, dtypes, shapes, counts, _] = widths[..] else { return Err(fmt::Error) };
            let line = format!(
                "{name:names$}  {dtype:dtypes$}  {shape:shapes$}  {count:>counts$}  {note}"
            );
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// The digits of a number in groups of three.
fn thousands(number: usize) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (i, digit) in digits.char_indices() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Init, Module, Scope, WeightDecay};
    use ferrotron_tensor::{Device, Result, ShardSpec};

    #[test]
    fn modules_merge_and_shards_show_both_shapes() -> Result<()> {
        let scope = Scope::new(&Device::cpu(1)?, DType::BF16, 1);
        let param =
            |name: &str, dims: &[usize]| scope.param(name, dims, Init::Ones, WeightDecay::On);
        let place = ShardSpec::new(&[8, 6], &[&[(2, 3)], &[(0, 6)]])?;
        let model = [
            param("wte", &[7, 6]),
            scope.param_at("blocks.0.fc", place, Init::Ones, WeightDecay::On),
            param("blocks.0.norm", &[6]),
            param("blocks.1.norm", &[6]),
        ];
        model[2].set_trainable(false)?;
        let summary = model.summary();
        assert_eq!((summary.numel(), summary.trainable(), summary.bytes()), (102, 96, 144));
        assert!(summary.to_string().contains("[3, 6] of [8, 6]     48  yes\n"), "{summary}");
        let shown = |depth| {
            let rows = summary.clone().depth(depth).rows;
            rows.into_iter().map(|row| (row.name, row.params, row.numel)).collect::<Vec<_>>()
        };
        let row = |name: &str, params, numel| (name.to_string(), params, numel);
        assert_eq!(shown(1), [row("wte", None, 42), row("blocks", Some(3), 60)]);
        let blocks = [row("blocks.0", Some(2), 54), row("blocks.1", Some(1), 6)];
        assert_eq!(shown(2)[1..], blocks);
        assert_eq!(shown(9).len(), 4);
        assert_eq!(["0", "999", "1,000", "1,234,567"], [0, 999, 1000, 1_234_567].map(thousands));
        Ok(())
    }
}
