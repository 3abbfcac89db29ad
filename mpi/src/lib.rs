//! MPI as a backend of collectives: an MPI library carries out the calls between processors.
//!
//! Ranks meet as they do without it, and their control connections stay: they know when a rank is gone, and compare their
//! options. `with_mpi` then gives each group of a mesh a communicator of its own.
//!
//! ```text
//!  Group --call--> thread: one task a group, MPI_I... --> MPI_Test until it ends --> Work
//!                     |  timeout, a rank that is gone: the line, then MPI_Abort
//! ```
//!
//! One thread of each rank makes all calls of the library, so it needs no more than `MPI_THREAD_FUNNELED`.
//!
//! Differences from the host's backend: the order in which numbers are added is the library's, so sums have other last
//! bits; the largest of numbers may pass a NaN over; ranks that call different things hang until the timeout; and since MPI
//! cannot end one call, a call that fails ends the process.
//!
//! The feature `mpi` needs the library, its headers and libclang (Debian: `libopenmpi-dev`, `libclang-dev`).

#[cfg(feature = "mpi")]
mod calls;
#[cfg(feature = "mpi")]
mod collective;
#[cfg(feature = "mpi")]
mod numbers;
#[cfg(feature = "mpi")]
mod progress;

#[cfg(feature = "mpi")]
pub use collective::{library_version, with_mpi};
