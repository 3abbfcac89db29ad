//! Small integers: every order of summation gives the same bits.

use super::*;
use crate::bf16;

/// Shapes (rows, columns, elements of the sum): whole and torn steps, registers and tiles.
const SIZES: &[(usize, usize, usize)] =
    &[(1, 1, 1), (3, 17, 5), (9, 70, 33), (64, 64, 64), (8, 80, 4), (40, 33, 37)];

fn matrix<T: Element>(rows: usize, columns: usize, seed: usize) -> Vec<T> {
    let value = |i: usize| (i * (2 * seed + 1) % 7) as f64 - 3.0;
    (0..rows * columns).map(|i| T::from_acc(T::Acc::from_f64(value(i)))).collect()
}

/// sum over p of x(i, p) y(p, j).
fn by_hand<A: Real>(
    (rows, columns, elements): (usize, usize, usize),
    x: impl Fn(usize, usize) -> A,
    y: impl Fn(usize, usize) -> A,
) -> Vec<f64> {
    let sum = |i, j| (0..elements).map(|p| x(i, p).f64() * y(p, j).f64()).sum();
    (0..rows).flat_map(|i| (0..columns).map(move |j| (i, j))).map(|(i, j)| sum(i, j)).collect()
}

/// The first `columns` of rows `row` apart.
fn rows_of<A: Real>(block: &[A], row: usize, columns: usize) -> Vec<f64> {
    block.chunks(row).flat_map(|x| x[..columns].iter().map(|x| x.f64())).collect()
}

/// Memory in which whatever is read without having been written shows.
fn room<A: Real>(elements: usize) -> Vec<A> {
    vec![A::from_f64(f64::NAN); elements]
}

fn check<T: Element>(level: Isa) {
    let blocks = SmallGemm::<T>::at(level);
    for &(rows, columns, elements) in SIZES {
        let what = format!("{level:?} {} ({rows}, {columns}, {elements})", T::DTYPE);
        let (row, deep) = (columns.next_multiple_of(PAD), elements.next_multiple_of(PAD));
        let x = matrix::<T>(rows, elements, 1);
        let y = matrix::<T>(elements, columns, 2);
        let z = matrix::<T>(columns, elements, 3);
        let (mut left, mut right, mut turned) =
            (room(rows * deep), room(elements * row), room(elements * row));
        let size = (rows, columns, blocks.steps(elements));
        // SAFETY: the vectors have just been made of these sizes.
        let (sums, from_turned) = unsafe {
            let left = blocks.pack_left(
                (x.as_ptr(), elements),
                (rows, elements),
                (left.as_mut_ptr(), deep),
            );
            blocks.pack((y.as_ptr(), columns), (elements, columns), (right.as_mut_ptr(), row));
            blocks.pack_transposed(
                (z.as_ptr(), elements),
                (columns, elements),
                (turned.as_mut_ptr(), row),
            );
            let (mut sums, mut from_turned) = (vec![T::Acc::ONE; rows * row], room(rows * row));
            let two = T::Acc::from_f64(2.0);
            blocks.product(
                size,
                (sums.as_mut_ptr(), row, Accum::Add),
                two,
                left,
                (right.as_ptr(), row),
            );
            let to = (from_turned.as_mut_ptr(), row, Accum::Replace);
            blocks.product(size, to, T::Acc::ONE, left, (turned.as_ptr(), row));
            (sums, from_turned)
        };
        let element = |m: &[T], i: usize| m[i].acc();
        let lhs = |i: usize, p: usize| element(&x, i * elements + p);
        let want = by_hand((rows, columns, elements), lhs, |p, j| element(&y, p * columns + j));
        let want: Vec<f64> = want.iter().map(|sum| 1.0 + 2.0 * sum).collect();
        assert_eq!(rows_of(&sums, row, columns), want, "{what}");
        let want = by_hand((rows, columns, elements), lhs, |p, j| element(&z, j * elements + p));
        assert_eq!(rows_of(&from_turned, row, columns), want, "{what}, transposed");
        sums_as_factors(&blocks, (rows, columns, elements), &what);
    }
}

/// Computes s y for sums s of (rows, columns), and transposed from an even row and a column on, s^T x.
fn sums_as_factors<T: Element>(
    blocks: &SmallGemm<T>,
    (rows, columns, width): (usize, usize, usize),
    what: &str,
) {
    let (row, wide) = (columns.next_multiple_of(PAD), width.next_multiple_of(PAD));
    let x = matrix::<T>(rows, width, 4);
    let y = matrix::<T>(columns, width, 5);
    let held = matrix::<T::Acc>(rows, columns, 6);
    let mut s = vec![T::Acc::ZERO; rows * row];
    for (s, held) in s.chunks_mut(row).zip(held.chunks(columns)) {
        s[..columns].copy_from_slice(held);
    }
    let (first, from) = (rows / 4 * 2, columns / 3);
    let (mut both, mut right) = (room((rows + 1) * wide), room(columns * wide));
    let mut turned = room(blocks.transposed_elements(rows, row));
    let mut forth = room(rows * wide);
    let mut back = room((columns - from) * wide);
    // SAFETY: the vectors have just been made of these sizes.
    unsafe {
        let both = blocks.pack_both((x.as_ptr(), width), (rows, width), (both.as_mut_ptr(), wide));
        blocks.pack((y.as_ptr(), width), (columns, width), (right.as_mut_ptr(), wide));
        let left = blocks.operands((s.as_mut_ptr(), row), (rows, columns));
        let transposed = blocks.transposed((s.as_ptr(), row), turned.as_mut_ptr());
        for at in (0..rows).step_by(8) {
            let to = transposed.at(0, blocks.step_of(at));
            let block = s[at * row..].as_ptr();
            blocks.transpose((block, row), (8.min(rows - at), columns), to);
        }
        let to = (forth.as_mut_ptr(), wide, Accum::Replace);
        let size = (rows, width, blocks.steps(columns));
        blocks.product(size, to, T::Acc::ONE, left, (right.as_ptr(), wide));
        let to = (back.as_mut_ptr(), wide, Accum::Replace);
        let step = blocks.step_of(first);
        let size = (columns - from, width, blocks.steps(rows) - step);
        let right = (both.right.add(step * wide), wide);
        blocks.product(size, to, T::Acc::ONE, transposed.at(from, step), right);
        // The left form of both is that of x alone.
        let mut alone = room(rows * wide);
        let alone =
            blocks.pack_left((x.as_ptr(), width), (rows, width), (alone.as_mut_ptr(), wide));
        for i in 0..rows {
            for p in 0..blocks.steps(width) {
                let [a, b] = [both.left, alone].map(|factor| factor.at(i, p).data.read().f64());
                assert_eq!(a.to_bits(), b.to_bits(), "{what}, row {i}, step {p}");
            }
        }
    }
    let want = by_hand(
        (rows, width, columns),
        |i, p| held[i * columns + p],
        |p, j| y[p * width + j].acc(),
    );
    assert_eq!(rows_of(&forth, wide, width), want, "{what}, sums on the left");
    let want = by_hand(
        (columns - from, width, rows - first),
        |i, p| held[(first + p) * columns + from + i],
        |p, j| x[(first + p) * width + j].acc(),
    );
    assert_eq!(rows_of(&back, wide, width), want, "{what}, sums transposed");
}

#[test]
fn small_blocks_are_multiplied_as_by_hand() {
    for level in Isa::available() {
        check::<f32>(level);
        check::<f64>(level);
        check::<bf16>(level);
        check::<crate::f16>(level);
    }
}

#[test]
fn rows_without_elements_are_packed_as_nothing() {
    for level in Isa::available() {
        let blocks = SmallGemm::<bf16>::at(level);
        let (from, mut to) = ([bf16::ONE; 2], [7.0; 2 * PAD]);
        // SAFETY: nothing is read, and around the place that nothing is written to is room.
        unsafe { blocks.pack_left((from.as_ptr(), 1), (2, 0), (to[PAD..].as_mut_ptr(), 0)) };
        assert_eq!(to, [7.0; 2 * PAD], "{level:?}");
    }
}

#[test]
fn rounding_keeps_the_elements() {
    let blocks = SmallGemm::<bf16>::best();
    let (rows, columns) = (19, 21);
    let from: Vec<f32> = (0..rows * 32).map(|i| (i % 256) as f32).collect();
    let mut to = vec![bf16::ZERO; rows * columns];
    // SAFETY: the vectors have just been made of these sizes.
    unsafe { blocks.round((from.as_ptr(), 32), (rows, columns), (to.as_mut_ptr(), columns)) };
    for i in 0..rows {
        for j in 0..columns {
            assert_eq!(to[i * columns + j].to_f32(), from[i * 32 + j]);
        }
    }
}
