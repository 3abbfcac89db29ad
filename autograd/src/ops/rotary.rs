//! Gradient of the rotary embedding: the inverse rotation. It saves only the table.

use ferrotron_tensor::ops::rotary::{Direction, RotaryTable, rotary};
use ferrotron_tensor::{Result, Tensor};

use crate::{Backward, Cotangents, InputGrads, Saved, Var, forward_span};

struct RotaryBackward {
    /// Cosines and sines.
    table: [Saved; 2],
    heads: usize,
}

impl Backward for RotaryBackward {
    fn name(&self) -> &'static str {
        "rotary"
    }

    fn saved(&self) -> Vec<Tensor> {
        self.table.iter().filter_map(Saved::resident_tensor).collect()
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        let [cos, sin] = self.table;
        let table = RotaryTable::from_tensors(cos.value()?, sin.value()?)?;
        dx.accumulate(0, rotary(&dy.single()?, &table, self.heads, Direction::Backward)?)
    }
}

impl Var {
    /// Rotates the first `heads` heads of (B, T, H, D) by their positions and leaves the others unchanged. Su et al.,
    /// arXiv 2104.09864, in the rotate-half convention of Hugging Face.
    pub fn rotary(&self, table: &RotaryTable, heads: usize) -> Result<Var> {
        let _span = forward_span("rotary");
        let value = rotary(self.value(), table, heads, Direction::Forward)?;
        Var::record(&[self], value, || RotaryBackward {
            table: table.tensors().map(Saved::statistic),
            heads,
        })
    }
}
