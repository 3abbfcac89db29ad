//! Numbers by which two trainers are compared.

use ferrotron_models::trainer::{Model, Trainer};
use ferrotron_tensor::Result;

/// Every number that this rank keeps, weights first, also of what another one would save.
pub fn numbers<M: Model>(trainer: &Trainer<M>) -> Result<Vec<f64>> {
    let mut all = Vec::new();
    for param in trainer.buffers().params() {
        all.extend(param.leaf().value()?.to_f64()?);
    }
    trainer.optimizer().visit(|_, _, _, value| {
        all.extend(value.to_f64()?);
        Ok(())
    })?;
    Ok(all)
}
