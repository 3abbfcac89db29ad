//! The corpus that the program carries: its own documentation.

/// Everything that is read when `--data` is not given.
///
/// These pages and no others: a page more would be other data, with which every loss that the documentation
/// prints (README, `docs/loss.svg`) would have to be measured again.
pub fn text() -> String {
    [
        include_str!("../../README.md"),
        include_str!("../../ARCHITECTURE.md"),
        include_str!("../../CONTRIBUTING.md"),
        include_str!("../../docs/custom-op.md"),
        include_str!("../../docs/data.md"),
        include_str!("../../docs/memory.md"),
        include_str!("../../docs/numerics.md"),
        include_str!("../../docs/parallelism.md"),
        include_str!("../../docs/command-line.md"),
    ]
    .concat()
}
