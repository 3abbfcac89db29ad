//! Ferrotron
