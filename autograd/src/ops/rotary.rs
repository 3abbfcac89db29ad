//! Gradient of the rotary embedding: the inverse rotation. It saves only a handle of the table, which layers share.

use ferrotron_tensor::Result;
use ferrotron_tensor::ops::rotary::{Direction, RotaryTable, rotary};

use crate::{Backward, Cotangents, InputGrads, Var, forward_span};

struct RotaryBackward {
    table: RotaryTable,
    heads: usize,
}

impl Backward for RotaryBackward {
    fn name(&self) -> &'static str {
        "rotary"
    }

    fn backward(self: Box<Self>, dy: Cotangents, dx: &mut InputGrads) -> Result<()> {
        dx.accumulate(0, rotary(&dy.single()?, &self.table, self.heads, Direction::Backward)?)
    }
}

impl Var {
    /// Rotates the first `heads` heads of (B, T, H, D) by their positions and leaves the others unchanged. Su et al.,
    /// arXiv 2104.09864, in the rotate-half convention of Hugging Face. Backward needs the table and keeps a handle of it.
    pub fn rotary(&self, table: &RotaryTable, heads: usize) -> Result<Var> {
        let _span = forward_span("rotary");
        let value = rotary(self.value(), table, heads, Direction::Forward)?;
        Var::record(&[self], value, || RotaryBackward { table: table.clone(), heads })
    }
}
