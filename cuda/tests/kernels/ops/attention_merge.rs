//! The joining of blocks of keys, of which both files of attention have a kernel.

use ferrotron_tensor::DType;
use ferrotron_tensor::ops::attention::merge_attention;

use crate::simulator::Simulator;
use crate::support::*;

/// Joins blocks of keys: some queries have seen none before, some see none of the block.
pub fn merges(simulator: &Simulator, dtype: DType) {
    let acc = dtype.accumulator();
    for ([batch, queries, rows, heads, width], first) in
        [([1, 1, 1, 1, 1], 0), ([2, 7, 4, 3, 40], 2), ([1, 9, 9, 2, 33], 0)]
    {
        let block = random(dtype, &[batch, rows, heads, width], 1);
        let unseen = |n: usize, every: usize| -> Vec<f64> {
            let list = values(n, 2).into_iter().enumerate();
            list.map(|(i, x)| if i % every == 0 { f64::NEG_INFINITY } else { x }).collect()
        };
        let block_lse = tensor(acc, &[batch, heads, rows], &unseen(batch * heads * rows, 5));
        let lses = unseen(batch * heads * queries, 3);
        // What was never written may be anything.
        let outs =
            values(batch * queries * heads * width, 3).into_iter().enumerate().map(|(i, x)| {
                let (head, query) = (i / width % heads, i / width / heads % queries);
                let at = (i / width / heads / queries * heads + head) * queries + query;
                if lses[at] == f64::NEG_INFINITY { f64::NAN } else { x }
            });
        let outs: Vec<f64> = outs.collect();
        let mut want = tensor(acc, &[batch, queries, heads, width], &outs);
        let mut want_lse = tensor(acc, &[batch, heads, queries], &lses);
        let (mut out, mut lse) = (bytes(&want), bytes(&want_lse));
        let (block_in, block_lse_in) = (bytes(&block), bytes(&block_lse));
        let kernel = simulator.kernel("attention_merge", element(dtype)).in_out(&mut out);
        let kernel = kernel.in_out(&mut lse).input(&block_in).input(&block_lse_in);
        let sizes = [batch, queries, rows, heads, width, first];
        let kernel = sizes.iter().fold(kernel, |kernel, &size| kernel.value(size as u64));
        kernel.run([(batch * rows * heads).div_ceil(8), 1, 1], [256, 1, 1]);
        merge_attention((&mut want, &mut want_lse), first, (&block, &block_lse)).unwrap();
        // A few roundings of numbers up to 2, and exponentials of differences up to 4.
        let (eps, what) =
            (8.0 * acc.epsilon(), format!("merge of {rows} into {queries} from {first}"));
        assert_close(&what, &read(acc, want.dims(), &out), &want, eps, 2.0 * eps);
        assert_close(&what, &read(acc, want_lse.dims(), &lse), &want_lse, eps, 2.0 * eps);
    }
}
