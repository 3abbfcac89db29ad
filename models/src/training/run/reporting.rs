//! Reports of a run on the first rank: lines of metrics, and the loss curve. None can end the run.

use crate::training::trainer::Model;

use super::{Metrics, Run};

#[cfg(not(feature = "plot"))]
use crate::training::loss_curve::LossCurve;
#[cfg(feature = "plot")]
use crate::training::plot::plot;

impl<M: Model> Run<'_, M> {
    /// Writes and shows what is new, on the rank that does.
    pub(super) fn tell(&mut self, metrics: &[Metrics]) {
        for metrics in metrics {
            self.log(metrics);
            if self.first {
                self.observer.step(metrics);
            }
        }
    }

    /// Writes the line of a step, on the rank that does.
    pub(super) fn log(&mut self, metrics: &Metrics) {
        let Some(log) = &mut self.log else { return };
        if let Err(error) = log.write(metrics)
            && !std::mem::replace(&mut self.unlogged, true)
        {
            let message =
                format!("{error}; training goes on, and the lines of such steps are lost");
            self.observer.warning(&message);
        }
    }

    /// Draws the loss curve, on the rank that does.
    pub(super) fn draw(&mut self) {
        let Some(log) = &self.log else { return };
        if let Err(error) = plot(&log.curve, &self.config.folder.join("loss.svg")) {
            self.observer.warning(&error.to_string());
        }
    }
}

/// Draws nothing, for want of the feature `plot`.
#[cfg(not(feature = "plot"))]
fn plot(_: &LossCurve, _: &std::path::Path) -> ferrotron_tensor::Result<()> {
    Ok(())
}
