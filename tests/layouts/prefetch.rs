//! Samples that are read ahead: the same steps in every layout, and nothing left to read when a step begins.

use ferrotron::models::batch_size::{BatchSize, BatchSizeConfig};
use ferrotron::models::data::{Batch, Prefetch, Samples};
use ferrotron::models::gpt::{Gpt, GptConfig};
use ferrotron::models::trainer::{Trainer, TrainerConfig};
use ferrotron::nn::{Axis, Scope, Sharding};
use ferrotron::parallel::collective::{WorldConfig, run_threads};
use ferrotron::parallel::mesh::Mesh;
use ferrotron::tensor::{DType, Device, Result};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::grid_model::GridConfig;
use super::layout::{GLOBAL_BATCH, Layout, SEQ_LENGTH};
use super::train::{STEPS, schedule};

/// Samples that take a while to read; for each batch, its first sample and whether the thread that reads ahead has read it.
#[derive(Clone)]
struct SlowSamples(GptConfig, Arc<Mutex<Vec<(u64, bool)>>>);

impl SlowSamples {
    fn read(&self) -> Vec<(u64, bool)> {
        self.1.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Samples for SlowSamples {
    fn batch(&self, first_sample: u64, micro_batch: usize) -> Result<Batch> {
        std::thread::sleep(Duration::from_millis(2));
        let batch = GridConfig::batch(&self.0, first_sample, micro_batch);
        let is_ahead = std::thread::current().name() == Some("data");
        self.1.lock().unwrap_or_else(PoisonError::into_inner).push((first_sample, is_ahead));
        batch
    }

    fn seq_length(&self) -> usize {
        SEQ_LENGTH
    }
}

/// Loss and gradient norm of each step of each rank.
fn steps(model: &GptConfig, layout: &Layout, ahead: bool) -> Vec<Vec<(f64, f64)>> {
    let per_step = GLOBAL_BATCH / (layout.micro * layout.dp);
    let config = WorldConfig { timeout: Duration::from_secs(60) };
    let ranks = run_threads(layout.ranks(), &config, |world| {
        let mesh = Mesh::new(&world, layout.mesh(), layout.sequence())?;
        let batch_size = BatchSize::new(BatchSizeConfig {
            micro_batch_size: layout.micro,
            data_parallel_size: layout.dp,
            global_batch_size: Some(GLOBAL_BATCH),
            ..BatchSizeConfig::default()
        })?;
        let parallel = layout.parallel();
        let config = TrainerConfig { parallel, ..TrainerConfig::new(7, schedule()?, batch_size) };
        let scope = Scope::new(&Device::cpu(1)?, DType::F64, 1234);
        let mut trainer = Trainer::<Gpt>::on_mesh(&scope, &mesh, model, config)?;
        let slow = SlowSamples(model.clone(), Arc::default());
        let read_ahead = Prefetch::new(Arc::new(slow.clone()))?;
        let samples: &dyn Samples = if ahead { &read_ahead } else { &slow };
        let mut found = Vec::new();
        for step in 0..STEPS {
            let report = trainer.step(samples)?;
            found.push((report.loss, report.grad_norm));
            // The batches of the next step are read although nobody asks for them yet.
            let want = per_step * (step + 1 + usize::from(ahead));
            for _ in 0..6000 {
                if slow.read().len() == want {
                    break;
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            let read = slow.read();
            assert_eq!(read.len(), want, "{layout}, behind step {step}");
            // A step that finds its batches read has nothing to wait for: those of the first alone are read by itself.
            let by_itself = if ahead { per_step } else { want };
            assert!(read[by_itself..].iter().all(|&(_, ahead)| ahead), "{layout}: {read:?}");
            assert!(read[..by_itself].iter().all(|&(_, ahead)| !ahead), "{layout}: {read:?}");
        }
        // The samples of this rank alone, in their order.
        let own = |step: usize| {
            batch_size.batches((step * GLOBAL_BATCH) as u64, mesh.axis(Axis::Data).rank())
        };
        let own = (0..STEPS + usize::from(ahead)).flat_map(own).map(|(first, _)| first);
        assert!(slow.read().iter().map(|&(first, _)| first).eq(own), "{layout}: {:?}", slow.read());
        Ok(found)
    });
    ranks.into_iter().collect::<Result<_>>().unwrap()
}

#[test]
fn steps_find_their_samples_read_in_every_layout() {
    let model = super::gpt2();
    let serial = Layout { micro: 3, ..Layout::SERIAL };
    for layout in [
        serial,
        Layout { dp: 2, sharding: Sharding::Weights, ..serial },
        Layout { tp: 2, sp: true, ..serial },
        Layout { pp: 2, ..serial },
        Layout { cp: 2, ..serial },
        Layout { tp: 2, dp: 2, pp: 2, sharding: Sharding::Optimizer, ..serial },
    ] {
        let want = steps(&model, &layout, false);
        assert_eq!(want[0].len(), STEPS);
        assert_eq!(steps(&model, &layout, true), want, "{layout}");
    }
}
