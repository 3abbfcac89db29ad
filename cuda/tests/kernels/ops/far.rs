//! Operands whose samples lie farther apart than 2^31 elements: an index of 32 bits would meet other memory. What is in
//! between is never touched, so it takes no memory.

use ferrotron_cuda::arguments::Layout;
use ferrotron_cuda::attention::Pass;
use ferrotron_tensor::DType;
use ferrotron_tensor::ops::attention::AttentionMask;
use ferrotron_tensor::ops::rotary::{Direction, RotaryTable, rotary};

use super::attention::Problem;
use crate::simulator::{Sanitizer, Simulator};
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
    fn operand(&self, number: usize) -> u64 {
        self.memory[number * ROOM..].as_ptr() as u64
    }
}

pub fn copies(simulator: &Simulator) {
    let x = random(DType::BF16, &[2, 33], 1);
    let Some(far) = Far::new(&[&bytes(&x)]) else { return };
    let mut y = room(DType::BF16, x.numel());
    let layout = Layout::new(&[2, 33], &[&[APART as isize, 1], &[33, 1]]).unwrap();
    let kernel = simulator.kernel("copy", element(DType::BF16)).value(far.operand(0));
    kernel.output(&mut y).value(x.numel() as u64).value(layout).run([1, 1, 1], [32, 1, 1]);
    assert_eq!(y, bytes(&x), "copy of far samples");
}

pub fn rotations(simulator: &Simulator) {
    let dims = [2, 3, 2, 16];
    let x = random(DType::BF16, &dims, 1);
    let Some(far) = Far::new(&[&bytes(&x)]) else { return };
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

/// Forward and dq, to the bit what samples side by side give.
pub fn attentions(simulator: &Simulator) {
    let problem = Problem::separate(DType::BF16, [2, 40, 70, 2, 2, 64], AttentionMask::Causal);
    let operands: [&[u8]; 4] =
        [&problem.memory[0], &problem.memory[1], &problem.memory[2], &problem.dout];
    let Some(far) = Far::new(&operands) else { return };
    let grid = [1, 2, 2];
    let (mut out, mut lse) = (problem.room(0), problem.room(1));
    let near = problem.forward(simulator, "attention", "_64").output(&mut out).output(&mut lse);
    problem.run(near, problem.blocks(Pass::Forward), grid);
    let statistics = problem.statistics(simulator);
    let mut dq = problem.room(2);
    let name = ("attention_backward_queries", "_64");
    let near = problem.backward(simulator, name, &statistics).output(&mut dq);
    problem.run(near, problem.blocks(Pass::Queries), grid);

    let mut a = problem.a;
    for strides in [&mut a.q, &mut a.k, &mut a.v, &mut a.dout] {
        strides[0] = APART as i64;
    }
    let kernel = |name: &str, operands: usize| {
        let kernel = simulator.kernel(name, element(DType::BF16));
        (0..operands).fold(kernel, |kernel, number| kernel.value(far.operand(number)))
    };
    let (mut far_out, mut far_lse) = (problem.room(0), problem.room(1));
    let forward = kernel("attention_64", 3).output(&mut far_out).output(&mut far_lse);
    let blocks = problem.blocks(Pass::Forward);
    forward.value(a).dynamic(blocks.shared).run(grid, [blocks.threads, 1, 1]);
    assert!(far_out == out && far_lse == lse, "attention of far samples");
    let mut far_dq = problem.room(2);
    let backward = kernel("attention_backward_queries_64", 4);
    let backward = backward.input(&statistics[0]).input(&statistics[1]).output(&mut far_dq);
    let blocks = problem.blocks(Pass::Queries);
    backward.value(a).dynamic(blocks.shared).run(grid, [blocks.threads, 1, 1]);
    assert!(far_dq == dq, "dq of far samples");
}
