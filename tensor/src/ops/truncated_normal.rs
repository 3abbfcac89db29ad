//! Truncated normal numbers: a normal distribution of mean 0, conditional on an interval.
//!
//! By inversion of the distribution function Phi, as `torch.nn.init.trunc_normal_`: with u uniform on [0, 1),
//! x = std Phi^-1(Phi(low / std) + u (Phi(high / std) - Phi(low / std))), clamped to [low, high]. One uniform number
//! makes one element, so shards draw slices of the same global tensor. Phi^-1 is algorithm AS 241 (Wichura, "The
//! Percentage Points of the Normal Distribution", Applied Statistics 37, 1988), accurate to about 1 part in 1e16.
//!
//! Computed in f64 by the host, then rounded to the dtype: on a GPU the values are uploaded.

use super::random::for_stretches;
use super::rows::for_rows;
use super::table::normal_cdf;
use crate::numeric::philox::ln;
use crate::{
    DType, Device, Element, Error, RandomKey, Real, Result, ShardSpec, Tensor, dispatch_float,
};

/// Numbers of mean 0 and deviation `std` before the truncation to \[low, high\]: the shard `place` of the tensor
/// identified by `key`. Bounds are values, not multiples of `std`. Rounding to a narrow dtype may pass a bound.
///
/// ```
/// use ferrotron_tensor::{DType, Device, ShardSpec, RandomKey, ops::truncated_normal::truncated_normal};
/// let key = RandomKey::new(1234, 0, "wte.weight");
/// let place = ShardSpec::unsharded(&[1000]);
/// let values = truncated_normal(&Device::cpu(1)?, DType::F64, &place, &key, 0.02, (-0.04, 0.04))?.to_f64()?;
/// assert!(values.iter().all(|x| x.abs() <= 0.04));
/// # Ok::<(), ferrotron_tensor::Error>(())
/// ```
///
/// # Errors
///
/// Errors unless `std` is positive, `low < high`, all are finite, and the interval has a probability above 0.
pub fn truncated_normal(
    device: &Device,
    dtype: DType,
    place: &ShardSpec,
    key: &RandomKey,
    std: f64,
    (low, high): (f64, f64),
) -> Result<Tensor> {
    let (from, to) = (normal_cdf(low / std), normal_cdf(high / std));
    if !(std > 0.0 && std.is_finite() && low.is_finite() && high.is_finite() && from < to) {
        let message = format!("no distribution has std {std} between {low} and {high}");
        return Err(Error::value("truncated_normal", message));
    }
    let value = |index| {
        let z = quantile(from + key.uniform(index) * (to - from));
        (std * z).clamp(low, high)
    };
    dispatch_float!("truncated_normal", dtype, T => generate::<T>(device, place, value))
}

fn generate<T: Element>(
    device: &Device,
    place: &ShardSpec,
    value: impl Fn(u64) -> f64 + Send + Sync,
) -> Result<Tensor> {
    let on_gpu = device.gpu().is_some();
    let host = if on_gpu && !device.is_fake() { Device::cpu(1)? } else { device.clone() };
    let mut out = Tensor::empty(&host, T::DTYPE, place.dims())?;
    if on_gpu && device.is_fake() {
        return Ok(out);
    }
    let (width, work) = (place.dims().last().copied().unwrap_or(1), 20 * out.numel());
    for_rows(&host, (out.as_mut_slice::<T>()?, width), work, |first_row, out| {
        for_stretches(place, first_row, out.len() / width, |global, range| {
            for (i, out) in out[range].iter_mut().enumerate() {
                *out = T::from_acc(Real::from_f64(value(global + i as u64)));
            }
        });
    });
    if on_gpu { Tensor::from_slice(device, out.as_slice::<T>()?, place.dims()) } else { Ok(out) }
}

/// The z for which a standard normal number is below z with probability `p`: routine PPND16 of AS 241.
#[allow(clippy::excessive_precision)]
fn quantile(p: f64) -> f64 {
    let ratio = |numerator: [f64; 8], denominator: [f64; 8], x: f64| {
        let polynomial = |terms: [f64; 8]| terms.iter().rev().fold(0.0, |sum, term| sum * x + term);
        polynomial(numerator) / polynomial(denominator)
    };
    let q = p - 0.5;
    if q.abs() <= 0.425 {
        let numerator = [
            3.3871328727963666080e0,
            1.3314166789178437745e2,
            1.9715909503065514427e3,
            1.3731693765509461125e4,
            4.5921953931549871457e4,
            6.7265770927008700853e4,
            3.3430575583588128105e4,
            2.5090809287301226727e3,
        ];
        let denominator = [
            1.0,
            4.2313330701600911252e1,
            6.8718700749205790830e2,
            5.3941960214247511077e3,
            2.1213794301586595867e4,
            3.9307895800092710610e4,
            2.8729085735721942674e4,
            5.2264952788528545610e3,
        ];
        return q * ratio(numerator, denominator, 0.180625 - q * q);
    }
    let tail = p.min(1.0 - p);
    if tail <= 0.0 {
        return f64::INFINITY.copysign(q);
    }
    let r = (-ln(tail)).sqrt();
    let z = if r <= 5.0 {
        let numerator = [
            1.42343711074968357734e0,
            4.63033784615654529590e0,
            5.76949722146069140550e0,
            3.64784832476320460504e0,
            1.27045825245236838258e0,
            2.41780725177450611770e-1,
            2.27238449892691845833e-2,
            7.74545014278341407640e-4,
        ];
        let denominator = [
            1.0,
            2.05319162663775882187e0,
            1.67638483018380384940e0,
            6.89767334985100004550e-1,
            1.48103976427480074590e-1,
            1.51986665636164571966e-2,
            5.47593808499534494600e-4,
            1.05075007164441684324e-9,
        ];
        ratio(numerator, denominator, r - 1.6)
    } else {
        let numerator = [
            6.65790464350110377720e0,
            5.46378491116411436990e0,
            1.78482653991729133580e0,
            2.96560571828504891230e-1,
            2.65321895265761230930e-2,
            1.24266094738807843860e-3,
            2.71155556874348757815e-5,
            2.01033439929228813265e-7,
        ];
        let denominator = [
            1.0,
            5.99832206555887937690e-1,
            1.36929880922735805310e-1,
            1.48753612908506148525e-2,
            7.86869131145613259100e-4,
            1.84631831751005468180e-5,
            1.42151175831644588870e-7,
            2.04426310338993978564e-15,
        ];
        ratio(numerator, denominator, r - 5.0)
    };
    z.copysign(q)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::testing::*;

    /// Values of Python's `statistics.NormalDist().inv_cdf`.
    const QUANTILES: [(f64, f64); 14] = [
        (0.5, 0.0),
        (0.075, -1.4395314709384557),
        (0.0750001, -1.4395307645017297),
        (0.1, -1.2815515655446008),
        (0.3, -0.5244005127080407),
        (0.925, 1.439531470938456),
        (0.97, 1.8807936081512504),
        (0.999, 3.090232306167813),
        (0.001, -3.090232306167813),
        (1e-09, -5.9978070150076865),
        (1e-11, -6.706023155495136),
        (1e-12, -7.034483825301132),
        (1e-100, -21.27345356096532),
        (0.02275013194817921, -2.0),
    ];

    #[test]
    fn quantiles_are_those_of_the_standard_normal() {
        for (p, want) in QUANTILES {
            let got = quantile(p);
            assert!((got - want).abs() <= 4.0 * f64::EPSILON * want.abs(), "{p}: {got} for {want}");
        }
        assert_eq!([quantile(0.0), quantile(1.0)], [f64::NEG_INFINITY, f64::INFINITY]);
    }

    #[test]
    fn a_part_has_the_bits_of_the_whole_on_any_number_of_threads() {
        let key = RandomKey::new(7, 3, "weight");
        assert_same_bits("truncated_normal", |device| {
            let draw = |place: &ShardSpec| {
                truncated_normal(device, DType::F32, place, &key, 0.02, (-0.01, 0.04))
            };
            let whole = draw(&ShardSpec::unsharded(&[300, 77]))?;
            let part = draw(&ShardSpec::new(&[300, 77], &[&[(10, 280)], &[(5, 3), (9, 60)]])?)?;
            let rows = whole.narrow(0, 10, 280)?;
            assert_eq!(bits(&part.narrow(1, 0, 3)?), bits(&rows.narrow(1, 5, 3)?));
            assert_eq!(bits(&part.narrow(1, 3, 60)?), bits(&rows.narrow(1, 9, 60)?));
            Ok(vec![whole, part])
        });
    }

    /// Checks the moments of a normal of deviation 1 between -1 and 2. The mean is (f(-1) - f(2)) / Z and the variance
    /// 1 + (-f(-1) - 2 f(2)) / Z - mean^2, with the density f and Z = Phi(2) - Phi(-1).
    #[test]
    fn values_have_the_moments_of_the_truncated_distribution() {
        let device = Device::cpu(1).unwrap();
        let (key, n) = (RandomKey::new(7, 3, "weight"), 200_000);
        let place = ShardSpec::unsharded(&[n]);
        let got = truncated_normal(&device, DType::F64, &place, &key, 3.0, (-3.0, 6.0)).unwrap();
        let got: Vec<f64> = got.to_f64().unwrap().iter().map(|x| x / 3.0).collect();
        assert!(got.iter().all(|x| (-1.0..=2.0).contains(x)));
        let density = |x: f64| (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt();
        let probability = normal_cdf(2.0) - normal_cdf(-1.0);
        let mean = (density(-1.0) - density(2.0)) / probability;
        let variance = 1.0 + (-density(-1.0) - 2.0 * density(2.0)) / probability - mean * mean;
        let n = n as f64;
        let found = got.iter().sum::<f64>() / n;
        let spread = got.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
        assert!((found - mean).abs() <= 5.0 * (variance / n).sqrt(), "{found} for {mean}");
        assert!((spread - variance).abs() <= 5.0 * variance / n.sqrt(), "{spread} for {variance}");
    }

    #[test]
    fn errors_name_the_values() {
        let device = Device::cpu(1).unwrap();
        let (place, key) = (ShardSpec::unsharded(&[2]), RandomKey::new(0, 0, ""));
        for (std, bounds, shown) in [
            (0.0, (-1.0, 1.0), "std 0 between -1 and 1"),
            (1.0, (1.0, 1.0), "std 1 between 1 and 1"),
            (0.01, (1.0, 2.0), "std 0.01 between 1 and 2"),
            (f64::NAN, (1.0, 2.0), "std NaN between 1 and 2"),
        ] {
            let got = truncated_normal(&device, DType::F32, &place, &key, std, bounds);
            assert_eq!(message(got), format!("truncated_normal: no distribution has {shown}"));
        }
    }
}
