//! The corpus that the program carries: its own documentation and the text of its library.

/// Everything that is read when `--data` is not given.
pub fn text() -> String {
    [
        include_str!("../../README.md"),
        include_str!("../../ARCHITECTURE.md"),
        include_str!("../../CONTRIBUTING.md"),
        include_str!("../../models/src/gpt.rs"),
    ]
    .concat()
}
