//! Gradient of the rotary embedding: the rotation back. Nothing is kept but the table.

use ferrotron_tensor::ops::rotary::{Direction, RotaryTable, rotary};
use ferrotron_tensor::{Result, Tensor};

use crate::{Grads, Var};

impl Var {
    /// Turns the first `heads` heads of (B, T, H, D) by their positions and leaves the others:
    /// Su et al., arXiv 2104.09864, in the half-rotation convention of Hugging Face.
    pub fn rotary(&self, table: &RotaryTable, heads: usize) -> Result<Var> {
        Var::record(&[self], rotary(self.value(), table, heads, Direction::Forward)?, || {
            let table = table.clone();
            move |dy: Tensor, dx: &mut Grads| {
                dx.give(0, rotary(&dy, &table, heads, Direction::Backward)?)
            }
        })
    }
}
