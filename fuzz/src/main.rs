//! libFuzzer over the target that `FERROTRON_FUZZ_TARGET` names. Its seeds are first written to the folder
//! `FERROTRON_FUZZ_SEEDS`. `scripts/fuzz` builds and runs this program.

#![no_main]

// No library has the program's command line: its files are compiled into this program too.
#[path = "../../src/cli/mod.rs"]
#[allow(dead_code, unexpected_cfgs, unused_imports)]
mod cli;
mod options;

use ferrotron_fuzz::{TARGETS, Target};
use std::path::Path;
use std::sync::OnceLock;

static TARGET: OnceLock<&Target> = OnceLock::new();

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set: run scripts/fuzz"))
}

fn start() {
    let name = variable("FERROTRON_FUZZ_TARGET");
    let mut all = TARGETS.iter().chain([&options::TARGET]);
    let target = all.find(|target| target.name == name);
    let target =
        TARGET.get_or_init(|| target.unwrap_or_else(|| panic!("no target is named {name}")));
    for (number, seed) in (target.seeds)().iter().enumerate() {
        let path = Path::new(&variable("FERROTRON_FUZZ_SEEDS")).join(format!("seed-{number}"));
        std::fs::write(path, seed).expect("a seed can be written");
    }
}

libfuzzer_sys::fuzz_target!(init: start(), |bytes: &[u8]| {
    (TARGET.get().expect("the target is chosen").read)(bytes);
});
