//! Sliding windows in `config.json`: the blocks that have one are listed by `layer_types`, or follow from the family.

use serde_json::Value;

use crate::model::config::GptConfig;
use crate::model::window_pattern::WindowPattern;

/// Blocks with the window, and without, in `layer_types`.
const KINDS: [&str; 2] = ["sliding_attention", "full_attention"];

/// The window, and the blocks that have it: those of `layer_types`, or else those for which `default` is true.
pub(super) fn read_windows(
    config: &Value,
    layers: usize,
    window: Option<usize>,
    default: impl Fn(usize) -> bool,
) -> Result<(Option<usize>, Option<WindowPattern>), String> {
    let windows: Vec<bool> = match &config["layer_types"] {
        Value::Array(types) => {
            let window = |kind: &Value| match kind.as_str() {
                Some(word) if word == KINDS[0] => Ok(true),
                Some(word) if word == KINDS[1] => Ok(false),
                _ => Err(format!("has layer type {kind}: supported are {}", KINDS.join(", "))),
            };
            types.iter().map(window).collect::<Result<_, _>>()?
        }
        _ => (0..layers).map(default).collect(),
    };
    if windows.len() != layers {
        return Err(format!("has {} layer_types for {layers} blocks", windows.len()));
    }
    match window {
        Some(window) if windows.contains(&true) => {
            Ok((Some(window), WindowPattern::from_blocks(&windows)))
        }
        _ => Ok((None, None)),
    }
}

/// `layer_types` of a model.
pub(super) fn layer_types(config: &GptConfig) -> Value {
    let kind = |block: usize| KINDS[usize::from(config.block_attention(block).window.is_none())];
    (0..config.num_layers).map(kind).collect()
}
