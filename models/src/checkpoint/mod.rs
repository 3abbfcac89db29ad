//! Checkpoints: a folder per step, from which a run goes on to the last bit.
//!
//! ```text
//! <save>/latest                             "iter_0000100", replaced last
//! <save>/iter_0000100/model.safetensors     the weights, an ordinary safetensors file
//!                     optimizer.safetensors the moments, as optimizer.exp_avg.<name> and so on
//!                     config.json           {"model": GptConfig, "run": whatever the run wants to keep}
//!                     progress.json         Progress
//!                     tokenizer.json        if there is a tokenizer
//!                     index.json            every file's size and CRC-32, every tensor's pieces
//! ```
//!
//! Several ranks write `model-00001-of-00004.safetensors` and so on, each what it holds.
//!
//! `index.json` says for each global tensor which boxes of it lie in which file under which name. Who
//! loads asks for the [`Place`](ferrotron_tensor::Place)s that it holds, so what was saved in one layout
//! loads in any other.
//!
//! A checkpoint is written under a temporary name, file by file to the disk, then renamed, then named in
//! `latest`. A process killed at any time, or a full disk, leaves the previous one as it was. Numbers
//! are stored little-endian, as this program's processors have them.

mod folder;
mod index;
mod load;
mod save;
mod slices;

pub use load::Checkpoint;
pub use save::{Held, Moments, Snapshot, retain, save};

use serde::{Deserialize, Serialize};

/// How far a run has come: what it needs, besides tensors, to go on.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// Training steps done.
    pub step: u64,
    /// Samples consumed, which decide where in the data the run goes on.
    pub consumed_samples: u64,
    /// Steps of the optimizer, which [`save`] fills in from its state.
    #[serde(default)]
    pub optimizer_steps: u64,
    /// Anything else, by name.
    #[serde(flatten)]
    pub extra: serde_json::Map<String, serde_json::Value>,
}

/// Moments are stored under this prefix and their own name, dot by dot, before the parameter's name.
const OPTIMIZER: &str = "optimizer";

fn moment_name(moment: &str, parameter: &str) -> String {
    format!("{OPTIMIZER}.{moment}.{parameter}")
}

#[cfg(test)]
mod layout_tests;
#[cfg(test)]
mod tests;
