//! Operands and results whose samples lie farther apart than 2^31 elements: an index of 32 bits would meet other memory.
//! Addresses in between are never touched, so they take no memory.

use ferrotron_cuda::arguments::Layout;
use ferrotron_cuda::attention::{Blocks, Pass};
use ferrotron_tensor::DType;
use ferrotron_tensor::ops::attention::AttentionMask;
use ferrotron_tensor::ops::rotary::{Direction, RotaryTable, rotary};

use super::attention::Problem;
use crate::simulator::{Launch, Sanitizer, Simulator};
use crate::support::*;

/// Elements of 16 bits between two samples.
const APART: usize = (1 << 31) + 64;

/// Bytes between operands.
const ROOM: usize = 1 << 20;

/// Two samples of each operand.
struct Far {
    memory: Vec<u8>,
}

impl Far {
    /// The operands, each of two samples; none under the address sanitizer, which keeps account of every byte in between.
    fn new(operands: &[&[u8]]) -> Option<Far> {
        if Sanitizer::from_environment() == Sanitizer::Address {
            return None;
        }
        let mut memory = vec![0; 2 * APART + operands.len() * ROOM];
        for (number, operand) in operands.iter().enumerate() {
            let half = operand.len() / 2;
            assert!(half <= ROOM);
            for (sample, part) in operand.chunks(half).enumerate() {
                let at = number * ROOM + sample * 2 * APART;
                memory[at..at + half].copy_from_slice(part);
            }
        }
        Some(Far { memory })
    }

    /// The address of an operand, as an argument.
    fn operand(&mut self, number: usize) -> u64 {
        self.memory[number * ROOM..].as_mut_ptr() as u64
    }

    /// The bytes of an operand, its samples side by side.
    fn result(&self, number: usize, len: usize) -> Vec<u8> {
        let sample = |sample: usize| &self.memory[number * ROOM + sample * 2 * APART..][..len / 2];
        [sample(0), sample(1)].concat()
    }
}

pub fn copies(simulator: &Simulator) {
    let x = random(DType::BF16, &[2, 33], 1);
    let Some(mut far) = Far::new(&[&bytes(&x)]) else { return };
    let mut y = room(DType::BF16, x.numel());
    let layout = Layout::new(&[2, 33], &[&[APART as isize, 1], &[33, 1]]).unwrap();
    let kernel = simulator.kernel("copy", element(DType::BF16)).value(far.operand(0));
    kernel.output(&mut y).value(x.numel() as u64).value(layout).run([1, 1, 1], [32, 1, 1]);
    assert_eq!(y, bytes(&x), "copy of far samples");
}

pub fn rotations(simulator: &Simulator) {
    let dims = [2, 3, 2, 16];
    let x = random(DType::BF16, &dims, 1);
    let Some(mut far) = Far::new(&[&bytes(&x)]) else { return };
    let table = RotaryTable::new(&device(), DType::BF16, 0..3, 16, 10_000.0).unwrap();
    let [cos, sin] = table.tensors().map(bytes);
    let mut y = room(DType::BF16, x.numel());
    let kernel = simulator.kernel("rotary", element(DType::BF16)).value(far.operand(0));
    let kernel = kernel.input(&cos).input(&sin).output(&mut y);
    let sizes = [2_u64, 3, 2, 2, 16, 8];
    let kernel = sizes.into_iter().fold(kernel, |kernel, size| kernel.value(size));
    let strides = [APART as i64, 32, 16];
    let kernel = strides.into_iter().fold(kernel, |kernel, stride| kernel.value(stride));
    kernel.value(1_i32).run([1, 1, 1], [64, 1, 1]);
    let want = rotary(&x, &table, 2, Direction::Forward).unwrap();
    let eps = DType::BF16.epsilon();
    assert_close("rotary of far samples", &read(DType::BF16, &dims, &y), &want, eps, eps);
}

/// Runs each pass of the kernels with these blocks: far operands and results have the bits of those side by side.
pub fn attentions(simulator: &Simulator, blocks_of: impl Fn(Pass) -> Blocks) {
    let problem = Problem::separate(DType::BF16, [2, 40, 70, 2, 2, 64], AttentionMask::Causal);
    let [q, k, v] = problem.memory.each_ref().map(Vec::as_slice);
    let mut results = [0, 2, 3, 4].map(|which| problem.room(which)); // out, dq, dk, dv
    let [out, dq, dk, dv] = &results;
    let operands: [&[u8]; 8] = [q, k, v, &problem.dout, out, dq, dk, dv];
    let Some(mut far) = Far::new(&operands) else { return };
    let statistics = problem.statistics(simulator);
    let mut lse = problem.room(1);
    let grid = |pass| {
        let lanes = if pass == Pass::Keys { 70_usize } else { 40 };
        [lanes.div_ceil(blocks_of(pass).rows), 2, 2]
    };

    let [out, dq, dk, dv] = &mut results;
    let near = problem.forward(simulator, "attention", "_64").output(out).output(&mut lse);
    problem.run(near, blocks_of(Pass::Forward), grid(Pass::Forward));
    let near = |name| problem.backward(simulator, (name, "_64"), &statistics);
    let queries = near("attention_backward_queries").output(dq);
    problem.run(queries, blocks_of(Pass::Queries), grid(Pass::Queries));
    let keys = near("attention_backward_keys").output(dk).output(dv);
    problem.run(keys, blocks_of(Pass::Keys), grid(Pass::Keys));

    let mut a = problem.a;
    for strides in
        [&mut a.q, &mut a.k, &mut a.v, &mut a.dout, &mut a.out, &mut a.dq, &mut a.dk, &mut a.dv]
    {
        strides[0] = APART as i64;
    }
    let mut far_lse = problem.room(1);
    let [q, k, v, dout, out, dq, dk, dv] = std::array::from_fn(|number| far.operand(number));
    let kernel = |name: &str| {
        simulator.kernel(&format!("{name}_64"), element(DType::BF16)).value(q).value(k).value(v)
    };
    let backward = |name| kernel(name).value(dout).input(&statistics[0]).input(&statistics[1]);
    let run = |launch: Launch<'_>, pass| {
        let blocks = blocks_of(pass);
        launch.value(a).dynamic(blocks.shared).run(grid(pass), [blocks.threads, 1, 1]);
    };
    run(kernel("attention").value(out).output(&mut far_lse), Pass::Forward);
    run(backward("attention_backward_queries").value(dq), Pass::Queries);
    run(backward("attention_backward_keys").value(dk).value(dv), Pass::Keys);
    assert!(far_lse == lse, "lse of far samples");
    for (name, (number, near)) in ["out", "dq", "dk", "dv"].iter().zip((4..).zip(&results)) {
        assert!(far.result(number, near.len()) == *near, "{name} of far samples");
    }
}
