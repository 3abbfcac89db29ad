//! The microkernel of few rows: columns are read from memory once, where they lie, and their elements are used at once.
//!
//! The steps of a column lie together, as those of the weight (N, K) of a linear layer do. Square blocks are transposed
//! in registers, so that a register holds one step of as many columns, and go into the sums without being stored. Every
//! element is the same chain of multiply-adds as in [`super::kernel::tile`].

use super::isa::vector::Vector;
use super::kernel::{Compute, MicroTile, Multiply, StoredColumns};
use super::pack::square;
use crate::numeric::prefetch::{self, LINE};
use crate::{Element, Real};

/// Rows up to which the memory's rate limits a product, not the processor's.
pub(super) const FEW: usize = 8;

/// Bytes of each column that are fetched ahead: a register's columns, 16 of f32 in AVX-512, then have 8 KiB on their way.
const AHEAD: usize = 512;

/// to = round(\[c +\] alpha * a b \[+ bias\]) for `R` rows and as many columns as `tile.last_lanes` says, at most one
/// register; `columns`, of type `S`, take the place of `tile.b`.
///
/// # Safety
/// The pointers of `tile` but `b` hold what its documentation says, for `R` rows and one vector of columns. `columns`
/// hold `depth` steps each, and the processor has the instruction set.
#[inline(always)]
pub(super) unsafe fn stream<V, M, S, const R: usize>(
    tile: &MicroTile<V::Scalar>,
    columns: &StoredColumns,
) where
    V: Vector<Scalar: Compute>,
    M: Multiply<V>,
    S: Element<Acc = V::Scalar>,
{
    let MicroTile { depth, a_row, a_step, last_lanes: lanes, .. } = *tile;
    let (from, next, stride) = (columns.data.cast::<S>(), columns.next.cast::<S>(), columns.stride);
    let mut a = tile.a;
    // SAFETY: as promised by the caller.
    unsafe {
        let mut sums = [[V::splat(V::Scalar::ZERO)]; R];
        for step in (0..depth).step_by(V::LANES) {
            let steps = V::LANES.min(depth - step);
            let ahead = step + AHEAD / size_of::<S>();
            fetch::<V, S>(
                if ahead < depth {
                    from.wrapping_add(ahead)
                } else {
                    next.wrapping_add(ahead - depth)
                },
                stride,
            );
            let (data, strides) = (from.add(step), [a_row, a_step]);
            a = if (lanes, steps) == (V::LANES, V::LANES) {
                let mut block = V::transposed(data, stride);
                add_steps::<V, M, R>(&mut sums, block.as_mut(), a, strides)
            } else {
                let mut block = square::<V, S>(data, stride, lanes, steps);
                add_steps::<V, M, R>(&mut sums, &block.as_mut()[..steps], a, strides)
            };
        }
        V::Scalar::put(tile, sums.into_iter());
    }
}

/// Adds the products of some steps of the rows, from `a` on, and the steps of the columns; returns the address of the next
/// step.
///
/// # Safety
/// The rows hold the steps, and the processor has the instruction set.
#[inline(always)]
unsafe fn add_steps<V: Vector, M: Multiply<V>, const R: usize>(
    sums: &mut [[V; 1]; R],
    columns: &[V],
    mut a: *const V::Scalar,
    [row, step]: [isize; 2],
) -> *const V::Scalar {
    for &column in columns {
        for (i, [sum]) in sums.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            unsafe {
                let factor = V::splat(a.offset(i as isize * row).read_unaligned());
                *sum = M::multiply_add(factor, column, *sum);
            }
        }
        a = a.wrapping_offset(step);
    }
    a
}

/// Fetches a block of each of a register's columns, once a line.
#[inline(always)]
fn fetch<V: Vector, S>(from: *const S, stride: isize) {
    if from.addr() % LINE < V::LANES * size_of::<S>() {
        (0..V::LANES).for_each(|i| prefetch::to_l1(from.wrapping_offset(i as isize * stride)));
    }
}

#[cfg(test)]
mod tests {
    use super::FEW;
    use crate::DType;
    use crate::gemm::blocking::GemmShape;
    use crate::gemm::isa::Isa;
    use crate::gemm::kernel_table::{KernelTable, pair_kernels};
    use crate::gemm::packed_operand::Access;
    use crate::gemm::problem::Operand;

    /// The access to a weight (n, k) as a linear layer stores it, in a product of so many rows.
    fn access(isa: Isa, dtype: DType, rows: usize) -> Access {
        let (n, k) = (2304, 768);
        let pairs = if dtype == DType::BF16 { pair_kernels(isa) } else { None };
        let (kernels, per_step) = match pairs {
            Some(pairs) => (pairs, 2),
            None => (f32::kernels(isa), 1),
        };
        let operand = Operand {
            data: std::ptr::null(),
            dtype,
            lanes: n,
            lane_stride: k as isize,
            step_stride: per_step as isize,
            elements: k,
            per_step,
        };
        let size = GemmShape {
            rows,
            columns: n,
            k: k / per_step,
            threads: 1,
            bytes: 4,
            lanes: kernels.lanes,
            mr: kernels.tiles.len(),
            vectors: kernels.vectors(),
        };
        Access::for_columns(&operand, &size, kernels)
    }

    #[test]
    fn few_rows_read_the_weight_of_a_linear_layer_where_it_lies() {
        for isa in Isa::available() {
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                for rows in 1..=FEW {
                    assert_eq!(
                        access(isa, dtype, rows),
                        Access::Streamed,
                        "{isa:?} {dtype} {rows}"
                    );
                }
                assert_eq!(access(isa, dtype, FEW + 1), Access::PackedShared, "{isa:?} {dtype}");
            }
        }
    }
}
