//! Transports: channels between two ranks over threads, shared memory and TCP.

pub(super) mod channel;
pub(super) mod connect;
pub(super) mod header;
pub(super) mod local;
pub(super) mod peer_channels;
pub(super) mod piece;
pub(super) mod seal;
pub(super) mod shm;
pub(super) mod tcp;
