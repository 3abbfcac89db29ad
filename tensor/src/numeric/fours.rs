//! Additions and maxima of four numbers at a time, in the registers that every x86-64 processor has.

/// Implements `Real::add_fours` and `Real::max_fours` by registers of 128 bits.
#[cfg(target_arch = "x86_64")]
macro_rules! by_registers {
    ($registers:ty, $add:path, $max:path) => {
        #[inline(always)]
        fn add_fours(a: [Self; 4], b: [Self; 4]) -> [Self; 4] {
            let (a, b): ($registers, $registers) = (bytemuck::cast(a), bytemuck::cast(b));
            // SAFETY: every x86-64 processor has SSE2.
            let joined: $registers = std::array::from_fn(|i| unsafe { $add(a[i], b[i]) });
            bytemuck::cast(joined)
        }
        // Like Real::max, the instruction returns b if either is NaN or both are zero.
        #[inline(always)]
        fn max_fours(a: [Self; 4], b: [Self; 4]) -> [Self; 4] {
            let (a, b): ($registers, $registers) = (bytemuck::cast(a), bytemuck::cast(b));
            // SAFETY: every x86-64 processor has SSE2.
            let joined: $registers = std::array::from_fn(|i| unsafe { $max(a[i], b[i]) });
            bytemuck::cast(joined)
        }
    };
}
/// Other processors join lanes as `Real` does by itself.
#[cfg(not(target_arch = "x86_64"))]
macro_rules! by_registers {
    ($($any:tt)*) => {};
}
pub(crate) use by_registers;
