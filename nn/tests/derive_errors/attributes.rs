//! Attributes that do not exist, or in the wrong place.

use ferrotron::{Module, RmsNorm};

#[derive(Module)]
struct Unknown {
    #[module(ignore)]
    norm: RmsNorm,
}

#[derive(Module)]
#[module(skip)]
struct Misplaced {
    norm: RmsNorm,
}

#[derive(Module)]
union Either {
    small: u32,
    large: u64,
}

fn main() {}
