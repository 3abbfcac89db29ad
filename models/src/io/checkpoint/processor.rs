//! The processor that computed a run, in the extra entries of its progress. Another one gives other bits.

use ferrotron_tensor::gemm::instruction_sets;
use ferrotron_tensor::{DType, Device};
use serde_json::{Map, Value, json};

const KEY: &str = "processor";

/// Records the processor of `device` in the extra entries of a [`TrainState`](super::TrainState): the instruction sets of
/// matrix products on a CPU, the architecture of a GPU.
pub fn record_processor(progress: &mut Map<String, Value>, device: &Device) {
    progress.insert(KEY.to_string(), processor(device));
}

/// Describes in one line how the processor of `device` differs from the recorded one, for weights of `dtype`. Returns
/// `None` if the bits of both are the same, or nothing is recorded.
pub fn processor_change(
    progress: &Map<String, Value>,
    device: &Device,
    dtype: DType,
) -> Option<String> {
    let (before, now) = (progress.get(KEY)?, processor(device));
    let (was, is) = (words(before, dtype)?, words(&now, dtype)?);
    (was != is).then(|| {
        format!("the run was computed by {was} so far, and is by {is} now: the last bits of its numbers will differ")
    })
}

fn processor(device: &Device) -> Value {
    match device.gpu() {
        Some(gpu) => json!({ "gpu": gpu.context().architecture().to_string() }),
        None => {
            let sets = instruction_sets();
            json!({ "f32": sets.f32, "bf16": sets.bf16 })
        }
    }
}

/// The part of an entry that decides the bits of a run with weights of `dtype`.
fn words(processor: &Value, dtype: DType) -> Option<String> {
    let name = |key: &str| processor.get(key).and_then(Value::as_str);
    if let Some(gpu) = name("gpu") {
        return Some(format!("a GPU of {gpu}"));
    }
    let (wide, narrow) = (name("f32")?, name("bf16")?);
    Some(match dtype == DType::BF16 && narrow != wide {
        true => format!("{wide} and {narrow}"),
        false => wide.to_string(),
    })
}
