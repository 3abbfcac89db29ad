//! The blocks that have the sliding window, as Megatron-LM's `--window-attn-skip-freq` names them.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The blocks that have the sliding window; the others see all earlier keys.
///
/// ```
/// use ferrotron_models::gpt::WindowPattern;
/// let gemma: WindowPattern = "2".parse()?;
/// assert_eq!([0, 1, 2, 3].map(|block| gemma.has_window(block)), [true, false, true, false]);
/// let listed: WindowPattern = "0,1,1".parse()?;
/// assert_eq!([0, 1, 2].map(|block| listed.has_window(block)), [false, true, true]);
/// # Ok::<(), String>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum WindowPattern {
    /// All but every block of this number: 2 in Gemma 2, whose blocks alternate.
    SkipEvery(usize),
    /// 1 for each block with the window, 0 for each without.
    Blocks(Vec<u8>),
}

impl WindowPattern {
    /// The pattern of blocks of which `windows` says whether they have the window: as a number if one says it, `None`
    /// if all have it.
    pub fn from_blocks(windows: &[bool]) -> Option<WindowPattern> {
        let first = windows.iter().position(|&window| !window)?;
        let every = WindowPattern::SkipEvery(first + 1);
        let same = |(block, &window): (usize, &bool)| every.has_window(block) == window;
        Some(match windows.iter().enumerate().all(same) {
            true => every,
            false => WindowPattern::Blocks(windows.iter().map(|&window| window.into()).collect()),
        })
    }

    /// Whether block `block`, counted from 0, has the window.
    pub fn has_window(&self, block: usize) -> bool {
        match self {
            WindowPattern::SkipEvery(number) => !(block + 1).is_multiple_of((*number).max(1)),
            WindowPattern::Blocks(windows) => windows.get(block).is_some_and(|&window| window != 0),
        }
    }

    /// The reason why a model of `layers` blocks cannot have this pattern, if it cannot.
    pub(crate) fn unsupported_reason(&self, layers: usize) -> Option<String> {
        match self {
            WindowPattern::SkipEvery(0) => {
                Some("window-attn-skip-freq must be positive, got 0; omit it instead".into())
            }
            WindowPattern::Blocks(windows) if windows.len() != layers => Some(format!(
                "window-attn-skip-freq lists {} blocks, num-layers is {layers}: list every block",
                windows.len()
            )),
            WindowPattern::Blocks(windows) if windows.iter().any(|&window| window > 1) => Some(
                format!("window-attn-skip-freq {self} must be a list of 1 (window) and 0 (none)"),
            ),
            _ => None,
        }
    }
}

impl fmt::Display for WindowPattern {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            WindowPattern::SkipEvery(number) => write!(f, "{number}"),
            WindowPattern::Blocks(windows) => {
                let words: Vec<String> = windows.iter().map(u8::to_string).collect();
                write!(f, "[{}]", words.join(","))
            }
        }
    }
}

impl FromStr for WindowPattern {
    type Err = String;

    fn from_str(text: &str) -> Result<WindowPattern, String> {
        let list = text.trim().trim_start_matches('[').trim_end_matches(']');
        let wanted = || format!("'{text}' must be a number N, or a list such as 1,1,0");
        if list == text.trim() && !list.contains(',') {
            return list.parse().map(WindowPattern::SkipEvery).map_err(|_| wanted());
        }
        let windows = list.split(',').map(|word| match word.trim() {
            "1" => Ok(1),
            "0" => Ok(0),
            _ => Err(wanted()),
        });
        windows.collect::<Result<_, _>>().map(WindowPattern::Blocks)
    }
}
