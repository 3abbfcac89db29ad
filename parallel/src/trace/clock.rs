//! One clock for all ranks.
//!
//! A rank reads its machine's monotonic clock. Processes of one machine share it; those of different machines do
//! not. So rank 0 asks every other rank a few times what its clock says. The answer was given between question
//! and receipt, hence the difference of the two clocks lies between answer - receipt and answer - question
//! (Cristian, "Probabilistic clock synchronization", 1989), and within what all questions leave. If no difference
//! is among that, the clocks are taken for the same one; else for different ones, by the middle. Clocks drift
//! apart by some microseconds a second, so a trace over machines should be short.

use ferrotron_tensor::{Device, Result, Tensor};
use rustix::time::{ClockId, clock_gettime};

use crate::collective::Group;

/// Number of times that a rank is asked.
const QUESTIONS: usize = 16;

/// The time of this machine's clock, in nanoseconds.
pub(super) fn now() -> i64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

/// The time of this rank's clock at a moment that is the same for all ranks of `world`, which all call this.
pub(super) fn common_zero(world: &Group, device: &Device) -> Result<i64> {
    let tell = |value: i64, to| world.send(Tensor::from_slice(device, &[value], &[1])?, to)?.wait();
    let hear = |from| -> Result<i64> {
        let value = world.recv(Tensor::from_slice(device, &[0_i64], &[1])?, from)?.wait()?;
        Ok(value.to_vec::<i64>()?[0])
    };
    if world.rank() > 0 {
        for _ in 0..QUESTIONS {
            hear(0)?;
            tell(now(), 0)?;
        }
        return hear(0);
    }
    let ask = |rank| -> Result<(i64, i64)> {
        let question = now();
        tell(question, rank)?;
        let answer = hear(rank)?;
        Ok((answer - now(), answer - question))
    };
    let mut differences = vec![0];
    for rank in 1..world.size() {
        let bounds = (0..QUESTIONS).map(|_| ask(rank)).collect::<Result<Vec<_>>>()?;
        differences.push(difference(&bounds));
    }
    let zero = now();
    (1..world.size()).try_for_each(|rank| tell(zero + differences[rank], rank))?;
    Ok(zero)
}

/// The difference of two clocks that lies within all `bounds`.
fn difference(bounds: &[(i64, i64)]) -> i64 {
    let low = bounds.iter().map(|bound| bound.0).max().unwrap_or_default();
    let high = bounds.iter().map(|bound| bound.1).min().unwrap_or_default();
    if low <= 0 && 0 <= high { 0 } else { low.midpoint(high) }
}

#[cfg(test)]
mod tests {
    use super::difference;

    #[test]
    fn clocks_that_may_be_the_same_are() {
        assert_eq!(difference(&[]), 0);
        assert_eq!(difference(&[(-30, 50), (-20, 90)]), 0);
    }

    #[test]
    fn other_clocks_differ_by_the_middle_of_what_is_left() {
        // 1000 apart; question and answer take 10 + 40, 30 + 5 and 500 + 8.
        let bounds = [(1000 - 40, 1000 + 10), (1000 - 5, 1000 + 30), (1000 - 8, 1000 + 500)];
        assert_eq!(difference(&bounds), (995 + 1010) / 2);
        let negative = bounds.map(|(low, high)| (-high, -low));
        assert!((difference(&negative) + (995 + 1010) / 2).abs() <= 1);
    }
}
