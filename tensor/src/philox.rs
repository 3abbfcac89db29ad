//! Philox4x32-10, the counter-based generator of Salmon et al., "Parallel Random Numbers: As Easy
//! as 1, 2, 3" (SC 2011), and the keys that make randomness independent of the layout.
//!
//! There is no generator state. A number is a pure function of
//!
//! - `seed`: the run's,
//! - `step`: the training step,
//! - `site`: the place in the model, a hash of the module's global path,
//! - `index`: the element's index in the **global, unsharded** tensor.
//!
//! So every sharding, every recomputation and every device draws the same numbers.

/// One Philox4x32-10 block: four 32-bit numbers from a 128-bit counter and a 64-bit key.
#[inline(always)]
pub fn philox4x32_10(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    // Multipliers and Weyl increments of the paper, section 4 and its reference implementation.
    const M0: u64 = 0xD251_1F53;
    const M1: u64 = 0xCD9E_8D57;
    const W0: u32 = 0x9E37_79B9;
    const W1: u32 = 0xBB67_AE85;
    for round in 0..10 {
        if round > 0 {
            key = [key[0].wrapping_add(W0), key[1].wrapping_add(W1)];
        }
        let p0 = M0 * u64::from(counter[0]);
        let p1 = M1 * u64::from(counter[2]);
        counter = [
            (p1 >> 32) as u32 ^ counter[1] ^ key[0],
            p1 as u32,
            (p0 >> 32) as u32 ^ counter[3] ^ key[1],
            p0 as u32,
        ];
    }
    counter
}

/// The coordinates of a stream of random numbers: (seed, step, site).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RandomKey {
    /// The Philox key: a hash of seed and site.
    key: [u32; 2],
    /// The upper half of the counter: the step.
    step: u64,
}

impl RandomKey {
    /// The stream of `site` (a module's global path) at `step` of the run seeded with `seed`.
    ///
    /// ```
    /// use ferrotron_tensor::RandomKey;
    /// let key = RandomKey::new(1234, 7, "blocks.3.dropout");
    /// assert_eq!(key.bits(42), RandomKey::new(1234, 7, "blocks.3.dropout").bits(42));
    /// assert_ne!(key.bits(42), RandomKey::new(1234, 8, "blocks.3.dropout").bits(42));
    /// ```
    pub fn new(seed: u64, step: u64, site: &str) -> Self {
        let site = fnv1a(site.as_bytes());
        let counter = [site as u32, (site >> 32) as u32, 0x6B65_7930, 0]; // "key0" keeps it apart from draws
        let block = philox4x32_10(counter, [seed as u32, (seed >> 32) as u32]);
        RandomKey { key: [block[0], block[1]], step }
    }

    /// The block of four numbers for elements `4 * block .. 4 * block + 4`.
    #[inline(always)]
    pub fn block(&self, block: u64) -> [u32; 4] {
        philox4x32_10(
            [block as u32, (block >> 32) as u32, self.step as u32, (self.step >> 32) as u32],
            self.key,
        )
    }

    /// The 32 random bits of global element `index`.
    #[inline(always)]
    pub fn bits(&self, index: u64) -> u32 {
        self.block(index >> 2)[(index & 3) as usize]
    }

    /// Uniform on [0, 1): a multiple of 2^-32, the same value in every dtype before rounding.
    #[inline(always)]
    pub fn uniform(&self, index: u64) -> f64 {
        f64::from(self.bits(index)) * (1.0 / 4_294_967_296.0)
    }

    /// Standard normal by Box and Muller (1958): elements 2k and 2k + 1 share two uniforms and take
    /// the cosine and the sine.
    #[inline]
    pub fn normal(&self, index: u64) -> f64 {
        let block = self.block(index >> 2);
        let pair = (index & 2) as usize;
        let scale = 1.0 / 4_294_967_296.0;
        let u = (f64::from(block[pair]) + 1.0) * scale; // (0, 1]: the logarithm stays finite
        let angle = std::f64::consts::TAU * f64::from(block[pair + 1]) * scale;
        let radius = (-2.0 * u.ln()).sqrt();
        if index & 1 == 0 { radius * angle.cos() } else { radius * angle.sin() }
    }
}

/// FNV-1a, 64 bits (Fowler, Noll, Vo): a stable hash of module paths.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xCBF2_9CE4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_known_answers_of_its_authors() {
        // kat_vectors of the Random123 distribution, philox4x32 with 10 rounds.
        assert_eq!(
            philox4x32_10([0; 4], [0; 2]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
        assert_eq!(
            philox4x32_10([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox4x32_10(
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0]
            ),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn normals_have_mean_zero_and_variance_one() {
        let key = RandomKey::new(1, 0, "test");
        let n = 100_000;
        let (sum, squares) =
            (0..n).map(|i| key.normal(i)).fold((0.0, 0.0), |(s, q), x| (s + x, q + x * x));
        // Standard errors: 1/sqrt(n) and sqrt(2/n); five of them.
        assert!((sum / n as f64).abs() < 5.0 / (n as f64).sqrt());
        assert!((squares / n as f64 - 1.0).abs() < 5.0 * (2.0 / n as f64).sqrt());
    }
}
