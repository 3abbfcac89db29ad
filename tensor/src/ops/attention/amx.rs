//! Attention in bf16 on AMX: panels of 32 queries by panels of 32 keys, multiplied in tile registers.
//!
//! Scores go from tile registers through L1; probabilities and their gradients are rounded straight into the tiles of the
//! next product. Products of two to eight steps use the tile unit for a third of their time. Forward's exponentials take
//! as long as its products, backward's a third of that. A store to a line that is not in L1 costs the most, so operands
//! that are read once leave L1 first. Masks are exact: a panel pair that no query sees is left out, and what a query does
//! not see is 0 within one.
//!
//! The bits of a query's result do not depend on other queries: its row of scores is a function of its row and the key
//! alone, panels of keys begin at multiples of 32, and adding the zeros of unseen keys changes no bit.

mod backward;
mod forward;
mod panels;
mod softmax;
mod vectors;

pub(super) use backward::{one_head, workspace_floats};
pub(super) use forward::run;
