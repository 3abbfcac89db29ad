//! A note to those whose kernels were compiled without optimisation, as cargo does by default.

use std::io::Write;
use std::sync::Once;

/// Lines for the `Cargo.toml` of a program that make its development build fast.
const PROFILE: &str = "\
# Tensors need optimised kernels, in development builds too.
[profile.dev.package.\"*\"]
opt-level = 3
";

/// The note about kernels that were compiled at an opt-level, if it is zero.
fn note(opt_level: &str) -> Option<String> {
    (opt_level == "0").then(|| {
        format!(
            "ferrotron was compiled without optimisation and is many times slower than it could be; in Cargo.toml:\n{PROFILE}"
        )
    })
}

/// Prints the note on stderr, once in a process.
pub(super) fn warn() {
    static ONCE: Once = Once::new();
    if let Some(note) = note(env!("FERROTRON_OPT_LEVEL")) {
        // stderr may have no reader.
        ONCE.call_once(|| drop(std::io::stderr().write_all(note.as_bytes())));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_kernels_without_optimisation_are_noted() {
        assert!(note("0").unwrap().ends_with("[profile.dev.package.\"*\"]\nopt-level = 3\n"));
        for level in ["1", "2", "3", "s", "z"] {
            assert_eq!(note(level), None);
        }
    }
}
