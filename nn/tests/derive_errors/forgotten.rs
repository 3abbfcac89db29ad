//! A field that holds a parameter, and whose type is no module. It is a tuple because messages about it contain no
//! places in this file besides the field, and so hardly depend on the compiler's version.

use ferrotron::{Module, Param};

#[derive(Module)]
struct Model {
    width: usize,
    scaled: (Param, f64),
}

fn main() {}
