//! Philox4x32-10, a counter-based generator, and keys that make random numbers independent of sharding. Salmon et al.,
//! "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).
//!
//! There is no generator state. A number is a pure function of
//!
//! - `seed`: the seed of the run,
//! - `step`: the training step,
//! - `site`: the position in the model, a hash of the module's global path,
//! - `index`: the element's index in the **global, unsharded** tensor.
//!
//! Every sharding, every recomputation and every device therefore draws the same numbers.

/// One Philox4x32-10 block: four 32-bit numbers from a 128-bit counter and a 64-bit key.
#[inline(always)]
pub fn philox4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let [first, second] = philox_pairs(counter, key);
    [first as u32, (first >> 32) as u32, second as u32, (second >> 32) as u32]
}

/// A block as two pairs of numbers, the first of each in the lower half. Vectors of products have 64 bits for each block, so
/// pairs need no narrowing.
#[inline(always)]
fn philox_pairs(mut counter: [u32; 4], mut key: [u32; 2]) -> [u64; 2] {
    // Multipliers and Weyl increments from section 4 of the paper and its reference implementation.
    const M0: u64 = 0xD251_1F53;
    const M1: u64 = 0xCD9E_8D57;
    const W0: u32 = 0x9E37_79B9;
    const W1: u32 = 0xBB67_AE85;
    let mut pairs = [0; 2];
    for round in 0..10 {
        if round > 0 {
            key = [key[0].wrapping_add(W0), key[1].wrapping_add(W1)];
        }
        let p0 = M0 * u64::from(counter[0]);
        let p1 = M1 * u64::from(counter[2]);
        let (first, third) = (counter[1] ^ key[0], counter[3] ^ key[1]);
        counter = [(p1 >> 32) as u32 ^ first, p1 as u32, (p0 >> 32) as u32 ^ third, p0 as u32];
        pairs = [p1.rotate_left(32) ^ u64::from(first), p0.rotate_left(32) ^ u64::from(third)];
    }
    pairs
}

/// Identifies a stream of random numbers: (seed, step, site).
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
        let counter = [site as u32, (site >> 32) as u32, 0x6B65_7930, 0]; // "key0" separates key derivation from draws
        let block = philox4x32_10(counter, [seed as u32, (seed >> 32) as u32]);
        RandomKey { key: [block[0], block[1]], step }
    }

    /// The stream of the same seed and site at another step.
    pub(crate) fn at_step(&self, step: u64) -> Self {
        RandomKey { step, ..*self }
    }

    /// The values that kernels of another device need: the Philox key, with its first word in the lower half, and the
    /// step.
    pub fn words(&self) -> (u64, u64) {
        (u64::from(self.key[0]) | u64::from(self.key[1]) << 32, self.step)
    }

    /// The block of four numbers for elements `4 * block..4 * block + 4`.
    #[inline(always)]
    pub fn block(&self, block: u64) -> [u32; 4] {
        philox4x32_10(self.counter(block), self.key)
    }

    /// A block as two pairs of numbers, the first of each in the lower half.
    #[inline(always)]
    pub(crate) fn pairs(&self, block: u64) -> [u64; 2] {
        philox_pairs(self.counter(block), self.key)
    }

    #[inline(always)]
    fn counter(&self, block: u64) -> [u32; 4] {
        [block as u32, (block >> 32) as u32, self.step as u32, (self.step >> 32) as u32]
    }

    /// The 32 random bits of global element `index`.
    #[inline(always)]
    pub fn bits(&self, index: u64) -> u32 {
        self.block(index >> 2)[(index & 3) as usize]
    }

    /// The 16 random bits of global element `index`, where that many do: two adjacent elements share 32 of them, the first
    /// has the lower half.
    #[inline(always)]
    pub fn half(&self, index: u64) -> u16 {
        (self.bits(index >> 1) >> (16 * (index & 1))) as u16
    }

    /// A uniform number in [0, 1), a multiple of 2^-32: the same in every dtype before rounding.
    #[inline(always)]
    pub fn uniform(&self, index: u64) -> f64 {
        f64::from(self.bits(index)) * (1.0 / 4_294_967_296.0)
    }

    /// A standard normal number by Box and Muller (1958). Elements 2k and 2k + 1 are the cosine and the sine of the
    /// same two uniform numbers.
    #[inline]
    pub fn normal(&self, index: u64) -> f64 {
        let block = self.block(index >> 2);
        let pair = (index & 2) as usize;
        let (cosine, sine) = box_muller(block[pair], block[pair + 1]);
        if index & 1 == 0 { cosine } else { sine }
    }
}

/// Two independent standard normals from two 32-bit numbers (Box and Muller, 1958).
///
/// It has no branches and does not call the platform's mathematical library, so loops vectorize and every machine
/// draws the same bits. Logarithm, sine and cosine are the polynomials of FreeBSD's msun (`e_log.c`, `k_sin.c`,
/// `k_cos.c`), with all digits of the source, within 1 ulp.
#[inline(always)]
pub(crate) fn box_muller(a: u32, b: u32) -> (f64, f64) {
    // u = (a + 1) / 2^32 is in (0, 1], so the logarithm is finite.
    let radius = (-2.0 * ln((f64::from(a) + 1.0) * (1.0 / 4_294_967_296.0))).sqrt();
    let (cosine, sine) = turn(b);
    (radius * cosine, radius * sine)
}

/// ln x for normal x > 0: x = 2^k (1 + f) with sqrt(1/2) < 1 + f < sqrt(2).
#[inline(always)]
#[allow(clippy::excessive_precision)]
pub(crate) fn ln(x: f64) -> f64 {
    const SQRT_HALF: u64 = 0x3FE6_A09E << 32;
    const ONE: u64 = 0x3FF0_0000 << 32;
    let bits = x.to_bits() + (ONE - SQRT_HALF);
    let k = f64::from((bits >> 52) as i32 - 0x3FF);
    let f = f64::from_bits((bits & ((1 << 52) - 1)) + SQRT_HALF) - 1.0;
    let s = f / (2.0 + f);
    let z = s * s;
    let w = z * z;
    let even = w
        * (3.999999999940941908e-01
            + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
    let odd = z
        * (6.666666666666735130e-01
            + w * (2.857142874366239149e-01
                + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)));
    let half = 0.5 * f * f;
    let low = s * (half + even + odd) + k * 1.90821492927058770002e-10;
    k * 6.93147180369123816490e-01 - ((half - low) - f)
}

/// Cosine and sine of the angle 2 pi b / 2^32.
#[inline(always)]
#[allow(clippy::excessive_precision)]
fn turn(b: u32) -> (f64, f64) {
    // The nearest quarter turn, and the remaining angle, at most pi / 4 in magnitude.
    let quarter = b.wrapping_add(1 << 29) >> 30;
    let x =
        f64::from(b.wrapping_sub(quarter << 30) as i32) * (std::f64::consts::TAU / 4_294_967_296.0);
    let z = x * x;
    let sine = x + x
        * z
        * (-1.66666666666666324348e-01
            + z * (8.33333333332248946124e-03
                + z * (-1.98412698298579493134e-04
                    + z * (2.75573137070700676789e-06
                        + z * (-2.50507602534068634195e-08 + z * 1.58969099521155010221e-10)))));
    let cosine = (1.0 - 0.5 * z)
        + z * z
            * (4.16666666666666019037e-02
                + z * (-1.38888888888741095749e-03
                    + z * (2.48015872894767294178e-05
                        + z * (-2.75573143513906633035e-07
                            + z * (2.08757232129817482790e-09 - z * 1.13596475577881948265e-11)))));
    let (c, s) = if quarter & 1 == 0 { (cosine, sine) } else { (sine, cosine) };
    let c = if (quarter + 1) & 2 == 0 { c } else { -c };
    let s = if quarter & 2 == 0 { s } else { -s };
    (c, s)
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
    fn logarithm_and_angles_are_within_two_ulp_of_the_standard_library() {
        let near = |got: f64, want: f64| (got - want).abs() <= 2.0 * f64::EPSILON * want.abs();
        for i in 0..200_000_u32 {
            let bits = if i < 1000 { i } else { i.wrapping_mul(2_654_435_761) };
            let x = (f64::from(bits) + 1.0) / 4_294_967_296.0;
            assert!(near(ln(x), x.ln()), "ln({x}): got {}, want {}", ln(x), x.ln());
            // The standard library receives a rounded angle, off by up to its own ulp.
            let angle = std::f64::consts::TAU * (f64::from(bits) / 4_294_967_296.0);
            let (c, s) = turn(bits);
            let eps = 8.0 * f64::EPSILON;
            assert!((c - angle.cos()).abs() < eps && (s - angle.sin()).abs() < eps, "{angle}");
        }
        assert_eq!((ln(1.0), turn(0), turn(1 << 30).1), (0.0, (1.0, 0.0), 1.0));
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
