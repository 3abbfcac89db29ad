//! Tests of schedules as a whole: what the checker refuses, and what the generators promise.

mod generated;
mod refused;
