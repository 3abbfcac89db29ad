//! Rounding at random.

use ferrotron_cuda::arguments::Step;
use ferrotron_tensor::ops::round::{Stochastic, round};
use ferrotron_tensor::{DType, Element, RandomKey, bf16, f16};

use crate::simulator::Simulator;
use crate::support::*;

pub fn check(simulator: &Simulator) {
    check_type::<bf16>(simulator);
    check_type::<f16>(simulator);
}

fn check_type<T: Element<Acc = f32>>(simulator: &Simulator) {
    let key = RandomKey::new(3, 9, "round");
    let (words, step) = draws(&key);
    for place in places() {
        let n: usize = place.dims().iter().product();
        // Of all sizes, subnormal to infinite, and of both signs; some are storable.
        let sources = values(n, 1).into_iter().enumerate().map(|(i, x)| match i % 37 {
            0 => 0.0,
            1 => f32::INFINITY,
            2 => f32::NAN,
            3 => -65_519.0,
            4 => 3.39e38,
            5 => -3.4e38,
            _ => (x * 1.003 * 2.0_f64.powi(i as i32 % 60 - 40)) as f32,
        });
        let source: Vec<f32> = sources.collect();
        let mut out = vec![T::from_acc(0.0); n];
        let (grid, block) = elementwise(n);
        let kernel =
            simulator.kernel("round_stochastic", element(T::DTYPE)).input(&source).output(&mut out);
        let kernel = kernel.value(n as u64).value(words).input(std::slice::from_ref(&step));
        kernel.value(device_place(&place)).run(grid, block);
        // Where the step has changed nothing, the target stays.
        let (mut kept, none) = (out.clone(), Step { found_inf: 1, number: 77, ..step });
        let kernel = simulator.kernel("round_stochastic", element(T::DTYPE)).input(&source);
        let kernel = kernel
            .in_out(&mut kept)
            .value(n as u64)
            .value(words)
            .input(std::slice::from_ref(&none));
        kernel.value(device_place(&place)).run(grid, block);
        assert_eq!(bytemuck::cast_slice::<T, u8>(&kept), bytemuck::cast_slice::<T, u8>(&out));
        let mut want = tensor_of(&vec![T::from_acc(0.0); n]);
        round(
            &mut want,
            &tensor_of(&source),
            Some(Stochastic { key: &key, place: &place, step: None }),
        )
        .unwrap();
        assert_same(&format!("round of {place:?}"), &tensor_of(&out), &want);
        assert!(
            T::DTYPE != DType::BF16
                || n < 100
                || out != source.iter().map(|&x| T::from_acc(x)).collect::<Vec<_>>()
        );
    }
}
