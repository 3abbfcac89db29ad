//! Attention in bf16 on AMX: panels of 32 queries by panels of 32 keys, multiplied in tile registers.
//!
//! The products of a panel pair take 16 cycles a tile, the exponentials of its 32 x 32 scores several times that, so the
//! vector code decides the speed ([`vectors`]). Scores go from tile registers through 4 KiB of L1; probabilities and
//! their gradients are rounded straight into the tiles of the next product. Masks are exact: a panel pair that no query
//! sees is left out, and what a query does not see is 0 within one.
//!
//! The bits of a query's result do not depend on other queries: its row of scores is a function of its row and the key
//! alone, panels of keys begin at multiples of 32, and adding the zeros of unseen keys changes no bit.

mod backward;
mod forward;
mod panels;
mod vectors;

pub(super) use backward::{one_head, workspace_floats};
pub(super) use forward::run;
