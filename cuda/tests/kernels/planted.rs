//! Planted races and costly accesses are found, and nothing in the right variants of the same kernels.

use ferrotron_cuda::kernels::{ElementType, KernelSource};
use ferrotron_cuda_sim::available;

use crate::simulator::{Costs, Sanitizer, Simulator};

macro_rules! planted {
    ($right:literal) => {
        KernelSource {
            name: concat!("planted_", $right),
            text: concat!("constexpr bool RIGHT = ", $right, ";\n", include_str!("planted.cu")),
            types: &[ElementType::F32],
            options: &[],
        }
    };
}

/// A planted race: the kernel, blocks, threads of a block, and whether two orders of threads show it, too.
const RACES: &[(&str, usize, usize, bool)] = &[
    ("no_barrier", 1, 64, true),
    ("overwritten_in_a_loop", 1, 64, true),
    ("shuffle_for_a_warp_barrier", 1, 32, false),
    ("warp_barrier_for_a_barrier", 1, 64, true),
    ("same_element_of_two_blocks", 2, 32, false),
    ("element_of_another_block", 2, 32, false),
    ("same_flag_of_many_lanes", 1, 32, false),
    ("minimum_without_atomics", 1, 64, false),
    ("copy_read_too_early", 1, 32, true),
    ("copy_of_another_lane", 1, 32, true),
    ("copy_over_what_is_read", 1, 32, false),
    ("matrices_without_a_barrier", 1, 32, false),
];

fn run(simulator: &Simulator, (name, blocks, threads): (&str, usize, usize)) -> Result<(), String> {
    let x: Vec<f32> = (0..1024).map(|i| i as f32).collect();
    let mut y = vec![1.0_f32; 128];
    let launch = simulator.kernel(name, ElementType::F32).input(&x).in_out(&mut y);
    launch.try_run([blocks, 1, 1], [threads, 1, 1])
}

#[test]
fn planted_races_are_found_and_nothing_else() {
    if !available("planted_races_are_found_and_nothing_else") {
        return;
    }
    let (right, wrong) = (planted!(true), planted!(false));
    let simulators = [
        Simulator::with(&right, Sanitizer::Thread),
        Simulator::with(&wrong, Sanitizer::Thread),
        Simulator::with(&wrong, Sanitizer::Off),
    ];
    for &(name, blocks, threads, by_orders) in RACES {
        let [right, found, shown] =
            simulators.each_ref().map(|simulator| run(simulator, (name, blocks, threads)));
        assert_eq!(right, Ok(()), "{name}");
        let found = found.expect_err(name);
        assert!(found.starts_with("race: "), "{name}: {found}");
        assert_eq!(shown.is_err(), by_orders, "{name}: {shown:?}");
    }
}

/// Accesses that cost too much: the kernel, and what its right and its wrong variant count for loads, stores and wavefronts.
type Planted = (&'static str, [[u64; 2]; 3], [[u64; 2]; 3]);
const COSTS: &[Planted] = &[
    ("strided_loads", [[4, 4], [4, 4], [0, 0]], [[32, 4], [4, 4], [0, 0]]),
    ("scattered_stores", [[16, 16], [16, 16], [0, 0]], [[16, 16], [64, 16], [0, 0]]),
    ("conflict_of_32_ways", [[128, 128], [4, 4], [33, 33]], [[128, 128], [4, 4], [64, 33]]),
    ("conflict_of_4_ways", [[4, 4], [4, 4], [2, 2]], [[4, 4], [4, 4], [8, 2]]),
    ("conflict_of_vectors", [[16, 16], [16, 16], [8, 8]], [[16, 16], [16, 16], [64, 8]]),
    ("conflict_of_matrices", [[128, 128], [4, 4], [36, 36]], [[128, 128], [4, 4], [64, 36]]),
];

#[test]
fn planted_costs_are_found_and_nothing_else() {
    if !available("planted_costs_are_found_and_nothing_else") {
        return;
    }
    let simulators =
        [planted!(true), planted!(false)].map(|file| Simulator::with(&file, Sanitizer::Thread));
    let counted = |simulator: &Simulator, name: &str| {
        run(simulator, (name, 1, 32)).unwrap();
        let Costs { load_sectors, store_sectors, wavefronts } =
            simulator.costs()[&format!("{name}_f32")];
        [load_sectors, store_sectors, wavefronts]
    };
    for (name, right, wrong) in COSTS {
        let found = simulators.each_ref().map(|simulator| counted(simulator, name));
        assert_eq!(found, [*right, *wrong], "{name}: loads, stores and wavefronts");
    }
}
