//! The evaluation of samples under a progress bar.

use ferrotron::Result;
use ferrotron::models::data::FiniteSamples;
use ferrotron::models::evaluate::{Evaluation, LocalModel, evaluate};
use ferrotron::models::stop::StopFlag;

use crate::cli::architecture::TrainedModel;
use crate::cli::job::ModelRank;
use crate::cli::loaded::Loaded;
use crate::cli::progress::CountProgress;

/// Evaluates samples on all ranks; the first one shows how many are done, if they are more than a batch.
pub fn evaluate_with_progress<M: TrainedModel>(
    loaded: &Loaded<M>,
    samples: &dyn FiniteSamples,
    micro_batch_size: usize,
    place: &ModelRank,
) -> Result<Evaluation> {
    let Loaded { model, config, scope, .. } = loaded;
    let (parts, mesh) = (std::slice::from_ref(model), &place.mesh);
    let sizes = place.batch_size(micro_batch_size)?;
    let model = LocalModel { parts, config, scope, mesh };
    let shows = mesh.rank() == 0 && samples.len() > sizes.full_batch_size() as u64;
    let mut progress = CountProgress::new("samples", samples.len());
    let done = |count| {
        if shows {
            progress.show(count);
        }
    };
    // A signal ends the process: there is nothing to save.
    let found = evaluate(&model, samples, sizes, &StopFlag::default(), done)?;
    progress.finish();
    Ok(found.expect("an evaluation that is not asked to stop has a result"))
}
