//! The algorithm of the paper of Adafactor, arXiv 1804.04235, written out for one parameter.

use ferrotron_nn::{AdafactorConfig, StepSize};

/// One parameter and what the paper keeps of it, in f64.
pub struct Reference {
    dims: Vec<usize>,
    pub w: Vec<f64>,
    rows: Vec<f64>,
    columns: Vec<f64>,
    full: Vec<f64>,
    mean: Vec<f64>,
}

impl Reference {
    pub fn new(dims: &[usize], w: Vec<f64>) -> Reference {
        let n = w.len();
        let zeros = || vec![0.0; n];
        let (rows, columns, full, mean) = (zeros(), zeros(), zeros(), zeros());
        Reference { dims: dims.to_vec(), w, rows, columns, full, mean }
    }

    /// Step `t`, from 1: algorithm 4, or 5 for vectors, of every matrix; clipping and scale are the tensor's.
    pub fn step(&mut self, t: usize, lr: f64, g: &[f64], config: &AdafactorConfig) {
        let beta2 = 1.0 - (t as f64).powf(-config.decay_rate);
        let mix = |old: f64, new: f64| beta2 * old + (1.0 - beta2) * new;
        let square = |x: f64| x * x + config.eps1;
        let mut u = vec![0.0; g.len()];
        if let [.., n, m] = self.dims[..] {
            for (k, g) in g.chunks(n * m).enumerate() {
                for i in 0..n {
                    let sum: f64 = (0..m).map(|j| square(g[i * m + j])).sum();
                    self.rows[k * n + i] = mix(self.rows[k * n + i], sum / m as f64);
                }
                for j in 0..m {
                    let sum: f64 = (0..n).map(|i| square(g[i * m + j])).sum();
                    self.columns[k * m + j] = mix(self.columns[k * m + j], sum / n as f64);
                }
                let rows = &self.rows[k * n..][..n];
                let mean = rows.iter().sum::<f64>() / n as f64;
                for i in 0..n {
                    for j in 0..m {
                        let v = rows[i] * self.columns[k * m + j] / mean;
                        u[(k * n + i) * m + j] = g[i * m + j] / v.sqrt();
                    }
                }
            }
        } else {
            for i in 0..g.len() {
                self.full[i] = mix(self.full[i], square(g[i]));
                u[i] = g[i] / self.full[i].sqrt();
            }
        }
        let alpha = match config.step_size {
            StepSize::Scheduled => lr,
            StepSize::Relative => {
                f64::min(1e-2, 1.0 / (t as f64).sqrt()) * rms(&self.w).max(config.eps2)
            }
        };
        let clip = f64::max(1.0, rms(&u) / config.clip_threshold);
        let mean_of =
            |old: f64, u: f64| config.beta1 * old + (1.0 - config.beta1) * alpha * u / clip;
        for ((w, mean), u) in self.w.iter_mut().zip(&mut self.mean).zip(u) {
            *mean = mean_of(*mean, u);
            *w -= alpha * config.weight_decay * *w + *mean;
        }
    }
}

fn rms(x: &[f64]) -> f64 {
    (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64).sqrt()
}
