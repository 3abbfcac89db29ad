//! Calls of different groups take turns.

use ferrotron_autograd::SharedFlatBuffer;
use ferrotron_parallel::collective::Reduction;
use ferrotron_tensor::{Category, DType, Device, FlatBuffer};
use std::time::Instant;

use crate::worlds::Backend;

/// 128 MiB: some tens of milliseconds.
const LEN: usize = 32 << 20;

pub fn a_huge_call_does_not_keep_another_group_waiting(backend: Backend) {
    backend.run(2, |world| {
        let (huge, small) = (world.group("huge", &[0, 1])?, world.group("small", &[0, 1])?);
        let ranges = [("buffer".to_string(), vec![LEN])];
        let flat = FlatBuffer::new(&Device::cpu(1)?, DType::F32, Category::Gradients, &ranges)?;
        let flat = SharedFlatBuffer::new(flat);
        huge.all_gather_flat(&flat).wait()?; // every page has been touched
        small.barrier().wait()?;

        let work = huge.all_reduce_flat(&flat, Reduction::Sum);
        let (huge_ended, small_ended) = std::thread::scope(|scope| {
            let huge_ended = scope.spawn(move || work.wait().map(|()| Instant::now()));
            let small_ended =
                (0..3).try_for_each(|_| small.barrier().wait()).map(|()| Instant::now());
            (huge_ended.join().expect("no panic"), small_ended)
        });
        let (huge_ended, small_ended) = (huge_ended?, small_ended?);
        assert!(
            small_ended < huge_ended,
            "rank {}: barriers of another group ended {:?} after the all-reduce",
            world.rank(),
            small_ended - huge_ended
        );
        Ok(())
    });
}
