//! The check for races finds planted ones, has no complaint about the same kernels without them, and none about ours.

use ferrotron_cuda::kernels::{ElementType, KernelSource};
use ferrotron_cuda_sim::available;

use crate::ops::check_all;
use crate::simulator::{Sanitizer, Simulator};

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

#[test]
fn planted_races_are_found_and_nothing_else() {
    if !available("planted_races_are_found_and_nothing_else") {
        return;
    }
    let run = |simulator: &Simulator, &(name, blocks, threads, _): &(&str, usize, usize, bool)| {
        let x: Vec<f32> = (0..128).map(|i| i as f32).collect();
        let mut y = vec![1.0_f32; 128];
        let launch = simulator.kernel(name, ElementType::F32).input(&x).in_out(&mut y);
        launch.try_run([blocks, 1, 1], [threads, 1, 1])
    };
    let (right, wrong) = (planted!(true), planted!(false));
    let simulators = [
        Simulator::with(&right, Sanitizer::Thread),
        Simulator::with(&wrong, Sanitizer::Thread),
        Simulator::with(&wrong, Sanitizer::Off),
    ];
    for race in RACES {
        let [right, found, shown] = simulators.each_ref().map(|simulator| run(simulator, race));
        assert_eq!(right, Ok(()), "{race:?}");
        let found = found.expect_err(race.0);
        assert!(found.starts_with("race: "), "{race:?}: {found}");
        assert_eq!(shown.is_err(), race.3, "{race:?}: {shown:?}");
    }
    simulators.iter().for_each(Simulator::assert_all_launched);
}

#[test]
fn no_kernel_has_a_race() {
    if available("no_kernel_has_a_race") {
        check_all(Sanitizer::Thread);
    }
}
