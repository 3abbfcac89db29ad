//! Numbers by which two trainers are compared.

use ferrotron_models::gpt::Gpt;
use ferrotron_models::trainer::Trainer;
use ferrotron_tensor::Result;

/// Every number that this rank keeps, weights first, also of what another one would save.
pub fn numbers(trainer: &Trainer<Gpt>) -> Result<Vec<f64>> {
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
