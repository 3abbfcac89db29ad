//! Checkpoints: a folder per step, from which a run resumes to the last bit.
//!
//! ```text
//! <save>/latest                             "iter_0000100", replaced last
//! <save>/iter_0000100/model.safetensors     the weights, an ordinary safetensors file
//!                     optimizer.safetensors the moments, as optimizer.exp_avg.<name> and so on
//!                     config.json           {"architecture": its name, "model": its configuration, "run": what the run wants to keep,
//!                                            "saved": the time in seconds since 1970}
//!                     progress.json         TrainState
//!                     tokenizer.json        if there is a tokenizer
//!                     index.json            every file's size and CRC-32, every tensor's pieces
//! ```
//!
//! Several ranks write `model-00001-of-00004.safetensors` and so on, each what it holds; data-parallel ranks,
//! which hold the same, a share each. They need one file system that all of them see.
//!
//! `index.json` says for each global tensor which boxes of it lie in which file under which name. Who
//! loads asks for the [`ShardSpec`](ferrotron_tensor::ShardSpec)s that it holds, so what was saved in one layout
//! loads in any other. Names and dims are those of the whole model: nothing is padded, whatever divides it.
//!
//! What a program does not know is kept or refused. Unknown entries of `progress.json` are kept for the next
//! checkpoint. An unknown weight or moment is refused by name, an unknown field of `index.json` too, and a later version
//! of the format by its number.
//!
//! A checkpoint is written under a temporary name, file by file to the disk, then renamed, then named in
//! `latest`. A process killed at any time, or a full disk, leaves the previous one as it was. Numbers
//! are stored little-endian, as this program's processors have them.
//!
//! Many ranks save together ([`PendingSave`] has the protocol), in a thread of their own while training goes on
//! ([`save_async`]) or not ([`save`]):
//!
//! ```text
//!  rank 0    makes iter_0000100.tmp | writes its files                      | joins the lists, checks,
//!            |                      |                                       | renames, names it in latest
//!  the rest  |                      | write theirs, index-NNNNN.json each   |
//! ```
//!
//! A rank that fails in between ends the others' calls with its reason, and the temporary folder is removed.
//!
//! They load together, too: each byte is read once, by one of them, compared with the checksums on the way, and sent to
//! those that need it.

mod comparison;
mod folder;
mod index;
mod load;
mod load_optimizer;
mod load_training_state;
mod pending_save;
mod pretrained;
mod processor;
mod rank_files;
mod read_plan;
mod reader;
mod retention;
mod save;
mod saved_model;
mod shards;
mod share_reader;
mod shared_load;
mod single_weights;
mod slices;
mod snapshot_buffers;
mod summary;
mod weights_file;

pub use comparison::{
    Comparison, FieldDifference, TensorDifference, TensorDifferenceKind, Tolerance,
};
pub(crate) use folder::{list as list_folders, name as folder_name, step as folder_step};
pub use load::Checkpoint;
pub use pending_save::PendingSave;
pub(crate) use pending_save::lower_priority;
pub use processor::{processor_change, record_processor};
pub use retention::{Retention, RetentionPlan, clean};
pub use save::{Snapshot, allocate_buffers, save, save_async};
pub use saved_model::SavedModel;
pub use shards::{LocalShard, Moments};
pub use snapshot_buffers::SnapshotBuffers;
pub use summary::{CheckpointContents, CheckpointSummary, list};
pub use weights_file::{LoadReport, ModuleWeights};

use serde::{Deserialize, Serialize};

/// The progress of a run: all that it needs, besides tensors, to resume.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TrainState {
    /// Training steps done.
    pub step: u64,
    /// Samples consumed, which decide where in the data the run resumes.
    pub consumed_samples: u64,
    /// Steps of the optimizer, which [`save`] fills in from its state.
    #[serde(default)]
    pub optimizer_steps: u64,
    /// State of a dynamic loss scale: see [`LossScaler::state`](ferrotron_nn::LossScaler::state).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scaler: Option<(f64, u64, u64)>,
    /// Running mean of the loss and the number of losses in it, where spikes are looked for: see
    /// [`BadStepConfig`](crate::trainer::BadStepConfig).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_mean: Option<(f64, u64)>,
    /// Ten for each bad step, less one for each step that was applied since.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub bad_step_balance: u64,
    /// Samples of steps that have no part in the weights: they were skipped, or training was rewound behind them.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub skipped_samples: u64,
    /// Steps of a run that this one took over: the learning rate counts them, the optimizer does not.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub steps_before: u64,
    /// Anything else, by name.
    #[serde(flatten)]
    pub extra: serde_json::Map<String, serde_json::Value>,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// The documents beside the tensors.
const CONFIG: &str = "config.json";
const PROGRESS: &str = "progress.json";
const TOKENIZER: &str = "tokenizer.json";

/// The field of `config.json` with the time at which the save began, in seconds since 1970.
const SAVED: &str = "saved";

/// Moments are stored under this prefix and their own name, dot by dot, before the parameter's name.
const OPTIMIZER: &str = "optimizer";

fn moment_name(moment: &str, parameter: &str) -> String {
    format!("{OPTIMIZER}.{moment}.{parameter}")
}

/// Whether this is the name of a tensor of the optimizer's state.
fn is_moment(name: &str) -> bool {
    name.split('.').next() == Some(OPTIMIZER)
}

#[cfg(test)]
mod layout_tests;
#[cfg(test)]
mod pending_save_tests;
#[cfg(test)]
mod retention_tests;
#[cfg(test)]
mod shared_load_tests;
#[cfg(test)]
mod tests;
