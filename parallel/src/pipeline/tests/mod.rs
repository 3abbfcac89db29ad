//! Tests of whole schedules: rejections by the checker, and properties of generated schedules.

mod generated;
mod refused;
mod unflushed;
