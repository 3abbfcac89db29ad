use ferrotron_tensor::DType;
use ferrotron_tensor::ops::zero_bitmap::compress;

use crate::simulator::Simulator;
use crate::support::*;

/// One dtype of each size.
const SIZES: [DType; 4] = [DType::U8, DType::BF16, DType::U32, DType::I64];

pub fn check(simulator: &Simulator) {
    for dtype in SIZES {
        for n in [1, 64, 65, 777, 4096, 4097, 20_000] {
            for zeros_in_ten in [5, 8, 10] {
                let value = |i: usize| if i * 7 % 10 < zeros_in_ten { 0 } else { 1 + i % 100 };
                let x: Vec<f64> = (0..n).map(|i| value(i) as f64).collect();
                check_vector(simulator, dtype, &x);
            }
        }
    }
}

fn check_vector(simulator: &Simulator, dtype: DType, values: &[f64]) {
    let (n, x) = (values.len(), tensor(dtype, &[values.len()], values));
    let what = format!("{dtype}, {n} elements");
    let kernel = |name: &str| simulator.kernel(name, element(dtype));
    let (words, chunks) = (n.div_ceil(64), n.div_ceil(4096));
    let head = n.div_ceil(8).next_multiple_of(64);
    let (grid, block) = elementwise(n);
    let source = bytes(&x);
    let (mut mask, mut counts) = (vec![0_u64; head / 8], vec![0_i64; chunks]);
    let mut starts = vec![0_i64; chunks + 1];
    let masked = kernel("zero_mask").input(&source).output(&mut mask);
    masked.value(n as u64).value((head / 8) as u64).run(grid, block);
    let counted = kernel("zero_counts").input(&mask).output(&mut counts);
    counted.value(words as u64).value(chunks as u64).run([chunks.div_ceil(4), 1, 1], [32, 4, 1]);
    let summed = kernel("zero_starts").input(&counts).output(&mut starts);
    summed.value(chunks as u64).run([1; 3], [32, 1, 1]);
    let kept = values.iter().filter(|x| **x != 0.0).count();
    assert_eq!(starts[chunks], kept as i64, "{what}");
    let mut packed = vec![0_u8; head + kept * dtype.size()];
    let packing = kernel("zero_pack").input(&source).input(&mask).input(&starts);
    packing.output(&mut packed).value(n as u64).value(head as u64).run(grid, block);
    if let Some(want) = compress(&x).unwrap() {
        assert!(packed == bytes(&want), "{what}");
    }
    let mut y = room(dtype, n);
    let expanding = kernel("zero_expand").input(&packed).input(&starts).output(&mut y);
    let expanding = expanding.value(n as u64).value(head as u64).value(kept as i64);
    expanding.run(grid, block);
    assert_same(&what, &read(dtype, &[n], &y), &x);
}
