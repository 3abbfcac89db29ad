use ferrotron_tensor::DType;

use super::attention::{biased, compare};
use crate::simulator::Simulator;

pub fn check(simulator: &Simulator) {
    for (dtype, sizes) in [
        (DType::BF16, [2, 70, 90, 4, 2, 64]),
        (DType::F16, [2, 40, 131, 2, 1, 96]),
        (DType::BF16, [1, 65, 65, 2, 2, 40]),
    ] {
        for problem in biased(dtype, sizes) {
            compare(simulator, &problem);
        }
    }
}
