//! Muon: momentum whose singular values are brought near 1 by a Newton-Schulz iteration. Jordan et al., "Muon: An
//! optimizer for hidden layers in neural networks", 2024; for scale Liu et al., "Muon is scalable for LLM training",
//! arXiv 2502.16982.
//!
//! For the gradient g of a hidden matrix of R rows and C columns:
//!
//! ```text
//! m = momentum m + (1 - momentum) g
//! u = m, or in Nesterov's form momentum m + (1 - momentum) g
//! X = u / (||u||_F + 1e-7), then for each (a, b, c): A = X X^T, X = a X + (b A + c A^2) X
//! w = w (1 - lr weight_decay) - lr scale X
//! ```
//!
//! X X^T is taken of the transpose if there are more rows than columns. Queries, keys and values are matrices of
//! their own, and so are gate and up. If a matrix is sharded over ranks, each rank gathers the whole u, computes the
//! whole X and takes its own shard of it, so a layout does not change the result.

use ferrotron_tensor::ops::adamw::AdamW;
use ferrotron_tensor::ops::matmul::matmul;
use ferrotron_tensor::ops::sq_norm::add_sq_norm;
use ferrotron_tensor::{DType, Error, Result, Tensor};

pub use ferrotron_tensor::ops::sgd::Nesterov;

use super::check::{fractions, non_negative};
use super::rule::{UpdateRule, UpdateStep};
use super::shard_unit::ShardUnit;
use super::state::StateSpec;

/// Hyperparameters of Muon. Embeddings, the output head, norms and biases are updated by AdamW.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MuonConfig {
    /// Decay of the momentum.
    pub momentum: f64,
    /// The form of the momentum.
    pub nesterov: Nesterov,
    /// Coefficients of the Newton-Schulz iteration.
    pub coefficients: NewtonSchulz,
    /// Number of its steps.
    pub steps: usize,
    /// Factor of an update by the shape of its matrix.
    pub scale: MuonScale,
    /// Another factor of an update. With [`MuonScale::Spectral`], 0.2 gives updates the RMS of AdamW's, so that they
    /// can share its learning rate.
    pub extra_scale: f64,
    /// Decoupled decay per unit of learning rate, of both optimizers.
    pub weight_decay: f64,
    /// Decay of AdamW's running mean of gradients.
    pub adam_beta1: f64,
    /// Decay of AdamW's running mean of squared gradients.
    pub adam_beta2: f64,
    /// Added to AdamW's denominator.
    pub adam_eps: f64,
}

/// Coefficients of the Newton-Schulz iteration, named as in Megatron-LM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NewtonSchulz {
    /// Jordan's (3.4445, -4.7750, 2.0315) in every step, also those of `torch.optim.Muon`: singular values end between
    /// 0.5 and 1.5 or so.
    Simple,
    /// Others in each of five steps, after which they begin anew: closer to 1.
    #[default]
    Quintic,
}

impl NewtonSchulz {
    /// The coefficients (a, b, c) of a step, counted from 0.
    pub fn coefficients(self, step: usize) -> [f64; 3] {
        // KellerJordan/Muon, and Megatron-LM's emerging_optimizers.
        const QUINTIC: [[f64; 3]; 5] = [
            [4.0848, -6.8946, 2.9270],
            [3.9505, -6.3029, 2.6377],
            [3.7418, -5.5913, 2.3037],
            [2.8769, -3.1427, 1.2046],
            [2.8366, -3.0525, 1.2012],
        ];
        match self {
            NewtonSchulz::Simple => [3.4445, -4.7750, 2.0315],
            NewtonSchulz::Quintic => QUINTIC[step % QUINTIC.len()],
        }
    }
}

/// The factor of an update by the shape of its matrix, named as in Megatron-LM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MuonScale {
    /// sqrt(max(1, rows / columns)), as Jordan's and `torch.optim.Muon`.
    ShapeScaling,
    /// sqrt(max(rows, columns)).
    #[default]
    Spectral,
    /// sqrt(rows / columns).
    UnitRmsNorm,
}

impl MuonScale {
    /// The factor for a matrix.
    pub fn factor(self, rows: usize, columns: usize) -> f64 {
        let (rows, columns) = (rows as f64, columns as f64);
        match self {
            MuonScale::ShapeScaling => (rows / columns).max(1.0).sqrt(),
            MuonScale::Spectral => rows.max(columns).sqrt(),
            MuonScale::UnitRmsNorm => (rows / columns).sqrt(),
        }
    }
}

impl Default for MuonConfig {
    /// Megatron-LM's defaults, and AdamW as in [`OptimizerConfig::ADAMW`](super::OptimizerConfig::ADAMW).
    fn default() -> MuonConfig {
        MuonConfig {
            momentum: 0.9,
            nesterov: Nesterov::Off,
            coefficients: NewtonSchulz::Quintic,
            steps: 5,
            scale: MuonScale::Spectral,
            extra_scale: 1.0,
            weight_decay: 0.1,
            adam_beta1: 0.9,
            adam_beta2: 0.95,
            adam_eps: 1e-8,
        }
    }
}

impl UpdateRule for MuonConfig {
    fn name(&self) -> &'static str {
        "muon"
    }

    fn validate(&self) -> Result<()> {
        fractions(&[("the momentum of Muon", self.momentum)])?;
        non_negative(&[("the extra scale factor of Muon", self.extra_scale)])?;
        match self.steps {
            1..=100 => Ok(()),
            steps => {
                let message = format!("Newton-Schulz takes 1 to 100 steps, got {steps}");
                Err(Error::config("optimizer", message))
            }
        }
    }

    fn shard_unit(&self) -> ShardUnit {
        ShardUnit::HiddenMatrices
    }

    fn fallback(&self) -> Option<Box<dyn UpdateRule>> {
        let MuonConfig { adam_beta1: beta1, adam_beta2: beta2, .. } = *self;
        let (eps, weight_decay) = (self.adam_eps, self.weight_decay);
        Some(Box::new(AdamW { beta1, beta2, eps, weight_decay }))
    }

    fn states(&self, _dims: &[usize]) -> Vec<StateSpec> {
        vec![StateSpec::per_element("momentum_buffer")]
    }

    fn update(
        &self,
        weights: &mut Tensor,
        gradient: &Tensor,
        states: &mut [&mut Tensor],
        step: &UpdateStep,
    ) -> Result<()> {
        let (block, lr) = (step.block()?, step.lr()?);
        let &[rows, columns] = block.global_dims() else {
            let message = format!("'{}' of {:?} is no matrix", block.name(), block.global_dims());
            return Err(Error::config("muon", message));
        };
        let new = gradient.mul_scalar(1.0 - self.momentum)?;
        let momentum = states[0].mul_scalar(self.momentum)?.add(&new)?;
        states[0].copy_from(&momentum)?;
        let direction = match self.nesterov {
            Nesterov::Off => momentum,
            Nesterov::On => momentum.mul_scalar(self.momentum)?.add(&new)?,
        };
        let own = step.on_whole_matrix(&direction, |whole| self.orthogonalize(whole))?;
        let factor = lr * self.scale.factor(rows, columns) * self.extra_scale;
        let update = own.mul_scalar(factor)?;
        let keep = 1.0 - lr * step.weight_decay(self.weight_decay);
        let updated = weights.mul_scalar(keep)?.sub(&update)?;
        weights.copy_from(&updated)
    }
}

impl MuonConfig {
    /// Brings the singular values of a matrix near 1.
    fn orthogonalize(&self, matrix: &Tensor) -> Result<Tensor> {
        let (rows, columns) = (matrix.dims()[0], matrix.dims()[1]);
        let matrix = matrix.contiguous()?;
        let mut norm = Tensor::zeros(matrix.device(), DType::F64, &[1])?;
        add_sq_norm(&mut norm, &matrix.reshape(&[rows * columns])?)?;
        let divisor = norm.sqrt()?.add_scalar(1e-7)?.cast(matrix.dtype())?;
        let mut x = matrix.div(&divisor)?;
        let is_tall = rows > columns;
        if is_tall {
            x = x.transpose(0, 1)?.contiguous()?;
        }
        for step in 0..self.steps {
            let [a, b, c] = self.coefficients.coefficients(step);
            let gram = matmul(&x, &x.transpose(0, 1)?)?;
            let cubic = gram.mul_scalar(b)?.add(&matmul(&gram, &gram)?.mul_scalar(c)?)?;
            x = x.mul_scalar(a)?.add(&matmul(&cubic, &x)?)?;
        }
        if is_tall { x.transpose(0, 1)?.contiguous() } else { Ok(x) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrotron_tensor::{Device, RandomKey};

    /// The singular values of X are the roots of the eigenvalues of X X^T, and iterations on unit vectors bound those.
    /// The product with any vector keeps its length within the band.
    #[test]
    fn lengths_of_products_are_in_the_band() {
        let device = Device::cpu(1).unwrap();
        let key = RandomKey::new(1, 0, "muon");
        for (rows, columns) in [(6, 6), (5, 40), (40, 5)] {
            let values: Vec<f64> =
                (0..rows * columns).map(|i| key.uniform(i as u64) - 0.5).collect();
            let matrix = Tensor::from_slice(&device, &values, &[rows, columns]).unwrap();
            for (coefficients, band) in
                [(NewtonSchulz::Simple, 0.3..1.3), (NewtonSchulz::Quintic, 0.5..1.3)]
            {
                let config = MuonConfig { coefficients, ..MuonConfig::default() };
                let x = config.orthogonalize(&matrix).unwrap();
                let x = if rows > columns { x.transpose(0, 1).unwrap() } else { x };
                let gram = matmul(&x, &x.transpose(0, 1).unwrap()).unwrap();
                let side = rows.min(columns);
                let gram = gram.contiguous().unwrap().to_f64().unwrap();
                let trace: f64 = (0..side).map(|i| gram[i * side + i]).sum();
                let rms = (trace / side as f64).sqrt();
                assert!(band.contains(&rms), "{coefficients:?} {rows} x {columns}: {rms}");
            }
        }
    }
}
