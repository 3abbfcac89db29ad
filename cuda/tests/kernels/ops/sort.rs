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
                let got = order(simulator, &ids, offset, here);
                let list = numbers(&ids);
                let local = |&at: &u32| {
                    let id = list[at as usize] as usize;
                    if (offset..offset + here).contains(&id) { id - offset } else { here }
                };
                let mut want: Vec<u32> = (0..n as u32).collect();
                want.sort_by_key(local); // stable
                assert_eq!(got, want, "{n} ids of {size}, {here} from {offset}");
            }
        }
    }
}

/// The sorted positions of the ids.
pub fn order(simulator: &Simulator, ids: &Tensor, offset: usize, size: usize) -> Vec<u32> {
    let (memory, n, mut bad) = (bytes(ids), ids.numel(), [NO_BAD_INDEX]);
    let mut order = vec![0_u32; n];
    let kernel =
        simulator.kernel("sort_ids", element(DType::U32)).input(&memory).value(index_type(ids));
    let kernel = kernel.output(&mut order).value(n as u64).value(offset as i64).value(size as i64);
    let global = 50_i64;
    kernel.value(global).in_out(&mut bad).run([n.div_ceil(256), 1, 1], [256, 1, 1]);
    let outside = |id: &f64| !(0.0..global as f64).contains(id);
    let first = numbers(ids).iter().position(outside).map_or(NO_BAD_INDEX, |at| at as u64);
    assert_eq!(bad, [first], "the first of {ids:?} outside of {global}");
    order
}
