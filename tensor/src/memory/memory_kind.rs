//! The two kinds of memory of a device.

/// A kind of memory of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MemoryKind {
    /// The device's own memory.
    #[default]
    Device,
    /// Offload memory. On a CPU device it is file-backed: accessed like any memory, and cached in RAM by the
    /// operating system. On a GPU it is pinned host memory.
    Host,
}
