//! Layers, losses, optimizers and learning-rate schedules of Ferrotron.

pub mod schedule;
