//! NumPy's `RandomState`, as far as Megatron-LM uses it: the Mersenne Twister of an integer seed, and `shuffle`.
//!
//! M. Matsumoto and T. Nishimura, "Mersenne Twister", ACM TOMACS 8 (1998), with `init_genrand` of 2002. `shuffle` draws
//! as NumPy's legacy generator does: bits under the smallest mask that holds the bound, anew until they are within it.

const N: usize = 624;
const M: usize = 397;

/// The generator's state.
pub struct RandomState {
    words: [u32; N],
    /// Words of the state that are used up.
    used: usize,
}

impl RandomState {
    /// `numpy.random.RandomState(seed)`.
    pub fn new(seed: u32) -> RandomState {
        let mut words = [seed; N];
        for i in 1..N {
            let before = words[i - 1];
            words[i] = (before ^ before >> 30).wrapping_mul(1_812_433_253).wrapping_add(i as u32);
        }
        RandomState { words, used: N }
    }

    fn next_u32(&mut self) -> u32 {
        if self.used == N {
            for i in 0..N {
                let y = self.words[i] & 0x8000_0000 | self.words[(i + 1) % N] & 0x7FFF_FFFF;
                let twist = if y & 1 == 1 { 0x9908_B0DF } else { 0 };
                self.words[i] = self.words[(i + M) % N] ^ y >> 1 ^ twist;
            }
            self.used = 0;
        }
        let mut y = self.words[self.used];
        self.used += 1;
        y ^= y >> 11;
        y ^= y << 7 & 0x9D2C_5680;
        y ^= y << 15 & 0xEFC6_0000;
        y ^ y >> 18
    }

    /// A number of `0..=most`.
    fn below_or_equal(&mut self, most: u32) -> u32 {
        let mask = u32::MAX.checked_shr(most.leading_zeros()).unwrap_or(0);
        loop {
            let value = self.next_u32() & mask;
            if value <= most {
                return value;
            }
        }
    }

    /// `shuffle(values)`, of fewer than 2^32 values.
    pub fn shuffle<T>(&mut self, values: &mut [T]) {
        for i in (1..values.len()).rev() {
            let j = self.below_or_equal(i as u32) as usize;
            values.swap(i, j);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shuffles_are_those_of_numpy() {
        let mut random = RandomState::new(1234);
        let mut values: Vec<u32> = (0..8).collect();
        random.shuffle(&mut values);
        assert_eq!(values, [2, 1, 6, 0, 4, 5, 3, 7]);
        let mut values: Vec<u32> = (0..10).collect();
        random.shuffle(&mut values);
        assert_eq!(values, [8, 5, 6, 0, 4, 3, 2, 9, 7, 1]);
    }

    #[test]
    fn the_generator_is_the_published_one() {
        // The ten thousandth number of seed 5489, as the C++ standard states it for `std::mt19937`.
        let mut random = RandomState::new(5489);
        let numbers: Vec<u32> = (0..10_000).map(|_| random.next_u32()).collect();
        assert_eq!(numbers[9_999], 4_123_659_995);
    }
}
