//! The library that lets writes of checkpoints fail in a process that loads it first (`write_faults.c`).

use std::path::{Path, PathBuf};
use std::process::Command;

/// ENOSPC of Linux.
pub const NO_SPACE: i32 = 28;
/// EIO of Linux.
pub const INPUT_OUTPUT: i32 = 5;

/// Compiles the library into `folder`; `None` without a C compiler.
pub fn compile(folder: &Path) -> Option<PathBuf> {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/chaos/write_faults.c");
    let library = folder.join("write_faults.so");
    let mut command = Command::new("cc");
    command.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).args([source, "-ldl"]);
    let compiled = command.status().is_ok_and(|status| status.success());
    if !compiled {
        println!("skipped: faults of the disk, because there is no C compiler 'cc'");
    }
    compiled.then_some(library)
}

/// Lets the checkpoint files of `command` fail with `error` after so many bytes.
pub fn inject(command: &mut Command, library: &Path, bytes: f64, error: i32) {
    command.env("LD_PRELOAD", library);
    command.env("FAULT_BYTES", format!("{bytes:.0}"));
    command.env("FAULT_ERRNO", error.to_string());
}
