//! The ceilings of this machine: how fast its processor or GPU multiplies, and how fast its memory is read and written.
//!
//! A ceiling is the best of some short rounds, since other programs only slow one down. In a round all threads of the
//! device work at the same time, and the speed of each is taken over its own time. On a GPU a round is a product of large
//! matrices, or a copy. The matrices are of random normal numbers: constants flip fewer bits, so a GPU multiplies them at
//! less power and higher clocks than any real ones.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use crate::gemm::peak::multiply_registers;
use crate::numeric::disjoint::Disjoint;
use crate::numeric::simd::vectorized;
use crate::ops::matmul::{Accum, matmul_into};
use crate::ops::random::normal;
use crate::{DType, Device, Error, RandomKey, Real, Result, ShardSpec, Tensor};

/// Bytes that are read or written in a round, at least and at most: four times those of the last cache.
const BYTES: [usize; 2] = [256 << 20, 1 << 30];
const ROUNDS: usize = 5;
/// Rows and columns of the largest matrices that a GPU multiplies.
const LARGEST_PRODUCT: usize = 8192;
/// Seconds of a call on a GPU beside which the launch and the resolution of the clock do not count.
const LONG_ENOUGH: f64 = 1e-3;
/// Seconds of a round of multiplications, at least.
const SECONDS: f64 = 5e-3;
const LANES: usize = 64;
/// Share of a second-level cache that is used, and its bytes where Linux states none.
const CACHE_SHARE: f64 = 0.5;
const CACHE: usize = 512 << 10;

/// The largest rates that all threads of a device reach together, per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ceilings {
    /// Floating-point operations on registers, in f32.
    pub f32: f64,
    /// The same in f64.
    pub f64: f64,
    /// The same as products of two bf16 matrices compute them.
    pub bf16: f64,
    /// The same of f16 matrices: in f32 on processors.
    pub f16: f64,
    /// Bytes read from memory.
    pub read: f64,
    /// Bytes read and written where each element is read, changed and written.
    pub update: f64,
    /// The same where the bytes stay in the second-level caches.
    pub cache: f64,
}

impl Ceilings {
    /// Measures them on the threads of `device`, in a second or two, with 256 MiB of memory, or up to 1 GiB where caches
    /// are large. On a GPU products are of random matrices of up to 8192 by 8192 and up to 1 GiB is copied, in 2 GiB of
    /// memory; all three rates of bytes are those of the copy.
    ///
    /// Errors if the device is fake, or there is no memory.
    ///
    /// ```no_run
    /// use ferrotron_tensor::{Device, ceilings::Ceilings};
    /// let ceilings = Ceilings::measure(&Device::cpu(2)?)?;
    /// println!("{:.0} GFLOP/s, {:.1} GB/s", ceilings.f32 / 1e9, ceilings.read / 1e9);
    /// # Ok::<(), ferrotron_tensor::Error>(())
    /// ```
    pub fn measure(device: &Device) -> Result<Ceilings> {
        if device.is_fake() {
            let message = format!("are measured, and the device is {device:?}");
            return Err(Error::device("ceilings", message));
        }
        if device.is_gpu() {
            return Ceilings::measure_gpu(device);
        }
        let products = |dtype| {
            let mut times = 1000;
            let seconds = |times| {
                let started = Instant::now();
                multiply_registers(dtype, times);
                started.elapsed().as_secs_f64()
            };
            while seconds(times) < SECONDS {
                times *= 2;
            }
            best(device, ROUNDS, &|_| multiply_registers(dtype, times))
        };
        let [f32, f64, bf16] = [DType::F32, DType::F64, DType::BF16].map(products);
        let (bytes, mut memory) = (memory_bytes(), Vec::<f32>::new());
        memory.try_reserve_exact(bytes / 4).map_err(|error| {
            Error::memory("ceilings", format!("{bytes} bytes to read and write: {error}"))
        })?;
        memory.resize(bytes / 4, 1.0);
        let own = memory.len() / device.threads();
        let memory = Disjoint::new(&mut memory);
        // SAFETY: each thread has its number and a part of its own.
        let part = |thread: usize| unsafe { memory.part(thread * own, own) };
        let read = best(device, ROUNDS, &|thread| {
            black_box(sum(part(thread)));
            4 * own
        });
        let update = best(device, ROUNDS, &|thread| {
            scale(part(thread), black_box(1.0));
            2 * 4 * own
        });
        let cached = (CACHE_SHARE * Ceilings::cache_bytes() as f64 / 4.0) as usize;
        let cache = best(device, ROUNDS, &|thread| {
            let part = &mut part(thread)[..cached.min(own)];
            let passes = (BYTES[0] / (4 * part.len())).max(1);
            for _ in 0..passes {
                scale(part, black_box(1.0));
            }
            2 * 4 * part.len() * passes
        });
        Ok(Ceilings { f32, f64, bf16, f16: f32, read, update, cache })
    }

    fn measure_gpu(device: &Device) -> Result<Ceilings> {
        let best = |work: f64, f: &mut dyn FnMut() -> Result<()>| -> Result<f64> {
            f()?; // compiles the kernel, and chooses among those of a library
            let mut rates = (0..ROUNDS).map(|_| {
                let before = device.moment()?;
                f()?;
                Ok(work / device.moment()?.seconds_since(&before)?.max(1e-9))
            });
            rates.try_fold(0.0_f64, |best, rate: Result<f64>| Ok(best.max(rate?)))
        };
        // Larger and larger, until a call is long enough for its time to count.
        let grown = |least: usize, most: usize, of_size: &dyn Fn(usize) -> Result<(f64, f64)>| {
            let mut size = least;
            loop {
                let (work, rate) = of_size(size)?;
                if size >= most || work / rate > LONG_ENOUGH {
                    return Result::Ok(rate);
                }
                size *= 2;
            }
        };
        let products = |dtype: DType| {
            grown(256, LARGEST_PRODUCT, &|size| {
                let [a, b] = ["left", "right"].map(|side| {
                    let key = RandomKey::new(0, 0, side);
                    normal(device, dtype, &ShardSpec::unsharded(&[size; 2]), &key, 0.0, 1.0)
                });
                let (a, b, mut out) = (a?, b?, Tensor::empty(device, dtype, &[size, size])?);
                let work = 2.0 * (size as f64).powi(3);
                let rate = best(work, &mut || matmul_into(&mut out, Accum::Replace, &a, &b))?;
                Ok((work, rate))
            })
        };
        let dtypes = [DType::F32, DType::F64, DType::BF16, DType::F16];
        let [f32, f64, bf16, f16] = dtypes.map(products);
        let copy = grown(1 << 20, BYTES[1], &|bytes| {
            let spec = ShardSpec::unsharded(&[bytes / DType::F32.size()]);
            let x = normal(device, DType::F32, &spec, &RandomKey::new(0, 0, "copied"), 0.0, 1.0)?;
            let mut y = Tensor::empty(device, DType::F32, x.dims())?;
            let work = 2.0 * bytes as f64;
            Ok((work, best(work, &mut || y.copy_from(&x))?))
        })?;
        let [read, update, cache] = [copy; 3];
        Ok(Ceilings { f32: f32?, f64: f64?, bf16: bf16?, f16: f16?, read, update, cache })
    }

    /// The higher rate of two measurements, of each kind: other programs only make one lower.
    ///
    /// ```
    /// use ferrotron_tensor::ceilings::Ceilings;
    /// let one = Ceilings { f32: 2e9, f64: 1e9, bf16: 4e9, f16: 2e9, read: 1e9, update: 1.5e9, cache: 9e9 };
    /// let other = Ceilings { f32: 1e9, read: 2e9, ..one };
    /// assert_eq!(one.max(&other), Ceilings { read: 2e9, ..one });
    /// ```
    pub fn max(&self, other: &Ceilings) -> Ceilings {
        Ceilings {
            f32: self.f32.max(other.f32),
            f64: self.f64.max(other.f64),
            bf16: self.bf16.max(other.bf16),
            f16: self.f16.max(other.f16),
            read: self.read.max(other.read),
            update: self.update.max(other.update),
            cache: self.cache.max(other.cache),
        }
    }

    /// Bytes of the second-level cache of a core; half a MiB where Linux states none.
    pub fn cache_bytes() -> usize {
        let stated = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cache/index2/size").ok();
        let kibibytes =
            stated.and_then(|text| text.trim().strip_suffix('K')?.parse::<usize>().ok());
        kibibytes.filter(|size| *size > 0).map_or(CACHE, |size| size << 10)
    }

    /// Floating-point operations per second on operands of `dtype`.
    pub fn products(&self, dtype: DType) -> f64 {
        match dtype {
            DType::F64 => self.f64,
            DType::BF16 => self.bf16,
            DType::F16 => self.f16,
            _ => self.f32,
        }
    }

    /// The seconds below which so much work cannot be done from memory: products of operands of `dtype`, and bytes that
    /// are read and written.
    ///
    /// ```
    /// use ferrotron_tensor::{DType, ceilings::Ceilings};
    /// let [f32, f64, bf16, f16] = [2e9, 1e9, 4e9, 2e9];
    /// let ceilings = Ceilings { f32, f64, bf16, f16, read: 1e9, update: 1.5e9, cache: 9e9 };
    /// assert_eq!(ceilings.least_seconds(DType::BF16, 8e9, 1e9, 0.0), 2.0); // products decide
    /// assert_eq!(ceilings.least_seconds(DType::F32, 0.0, 3e9, 0.0), 3.0);
    /// assert_eq!(ceilings.least_seconds(DType::F32, 0.0, 3e9, 3e9), 4.0);
    /// ```
    pub fn least_seconds(&self, dtype: DType, flops: f64, read: f64, written: f64) -> f64 {
        let memory = (read / self.read).max((read + written) / self.update);
        memory.max(flops / self.products(dtype))
    }
}

/// Bytes that no cache holds for long, by the sizes of the last ones that Linux states: each die or socket may have its
/// own.
fn memory_bytes() -> usize {
    let of =
        |cpu: &Path, fact: &str| std::fs::read_to_string(cpu.join("cache/index3").join(fact)).ok();
    let caches: BTreeMap<String, usize> = (0..)
        .map(|cpu| PathBuf::from(format!("/sys/devices/system/cpu/cpu{cpu}")))
        .take_while(|cpu| cpu.exists())
        .filter_map(|cpu| {
            let kibibytes = of(&cpu, "size")?.trim().strip_suffix('K')?.parse().ok()?;
            Some((of(&cpu, "shared_cpu_list")?, kibibytes))
        })
        .collect();
    caches.values().sum::<usize>().saturating_mul(4 << 10).clamp(BYTES[0], BYTES[1])
}

/// The best of so many rounds: what all threads do per second, `work` being what the thread of that number has done.
fn best(device: &Device, rounds: usize, work: &(dyn Fn(usize) -> usize + Sync)) -> f64 {
    let round = |_| {
        let total = Mutex::new(0.0);
        device.team().on_each_thread(&|thread| {
            let started = Instant::now();
            let done = work(thread) as f64;
            let speed = done / started.elapsed().as_secs_f64().max(1e-9);
            *total.lock().unwrap_or_else(PoisonError::into_inner) += speed;
        });
        total.into_inner().unwrap_or_else(PoisonError::into_inner)
    };
    (0..rounds).map(round).fold(0.0, f64::max)
}

vectorized! {
    fn sum<A: Real>(x: &[A]) -> A {
        let mut lanes = [A::ZERO; LANES];
        for chunk in x.chunks_exact(LANES) {
            for (lane, &x) in lanes.iter_mut().zip(chunk) {
                *lane += x;
            }
        }
        lanes.into_iter().sum()
    }

    fn scale<A: Real>(x: &mut [A], factor: A) {
        for x in x {
            *x *= factor;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_ceiling_is_a_speed_and_fake_devices_are_refused() {
        let Ceilings { f32, f64, bf16, f16, read, update, cache } =
            Ceilings::measure(&Device::cpu(2).unwrap()).unwrap();
        for speed in [f32, f64, bf16, f16, read, update, cache] {
            assert!(speed.is_finite() && speed > 1e6, "{speed}");
        }
        let error = Ceilings::measure(&Device::fake(1).unwrap()).unwrap_err().to_string();
        assert!(error.contains("are measured, and the device is fake"), "{error}");
    }

    #[test]
    fn every_thread_works_once_in_a_round() {
        let seen = Mutex::new(Vec::new());
        let device = Device::cpu(3).unwrap();
        best(&device, 2, &|thread| {
            seen.lock().unwrap().push(thread);
            1
        });
        let mut seen = seen.into_inner().unwrap();
        seen.sort_unstable();
        assert_eq!(seen, [0, 0, 1, 1, 2, 2]);
    }
}
