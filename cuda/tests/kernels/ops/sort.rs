use ferrotron_cuda::arguments::NO_BAD_INDEX;
use ferrotron_tensor::{DType, Tensor};

use crate::simulator::Simulator;
use crate::support::*;

pub fn check(simulator: &Simulator) {
    for (n, size) in [(1, 1), (7, 3), (256, 5), (600, 50), (300, 1), (90, 60)] {
        for index in INDICES {
            let ids = tensor(
                index,
                &[n],
                &(0..n).map(|i| ((i * i * 7 + i) % size) as f64).collect::<Vec<_>>(),
            );
            for (offset, here) in [(0, size), (size / 3, size / 2)] {
                let got = keys(simulator, &ids, offset, here);
                let local = |&id: &f64| {
                    let id = id as usize;
                    let inside = (offset..offset + here).contains(&id);
                    (if inside { id - offset } else { here }) as i64
                };
                let want: Vec<i64> = numbers(&ids).iter().map(local).collect();
                assert_eq!(got, want, "{n} ids of {size}, {here} from {offset}");
            }
        }
    }
}

/// The keys of the ids.
pub fn keys(simulator: &Simulator, ids: &Tensor, offset: usize, size: usize) -> Vec<i64> {
    let (memory, n, mut bad) = (bytes(ids), ids.numel(), [NO_BAD_INDEX]);
    let mut keys = vec![-1_i64; n];
    let kernel =
        simulator.kernel("local_ids", element(DType::I64)).input(&memory).value(index_type(ids));
    let kernel = kernel.output(&mut keys).value(n as u64).value(offset as i64).value(size as i64);
    let (global, (grid, block)) = (50_i64, elementwise(n));
    kernel.value(global).in_out(&mut bad).run(grid, block);
    let outside = |id: &f64| !(0.0..global as f64).contains(id);
    let first = numbers(ids).iter().position(outside).map_or(NO_BAD_INDEX, |at| at as u64);
    assert_eq!(bad, [first], "the first of {ids:?} outside of {global}");
    keys
}
