//! Products against a naive one in f64, and the promise that bits depend on k alone.

use super::isa::Isa;
use super::{Accum, MatMut, MatRef, gemm_at};
use crate::{Element, Real, Scalar, ThreadTeam, bf16, f16};

/// A small seeded generator (Knuth's MMIX constants); the tests need no better numbers.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 >> 33
    }
    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
    fn fill<T: Element>(&mut self, len: usize) -> Vec<T> {
        let uniform = |bits: u64| bits as f64 / (1_u64 << 30) as f64 - 1.0;
        (0..len).map(|_| T::from_acc(T::Acc::from_f64(uniform(self.next())))).collect()
    }
}

/// The layout of a matrix in memory.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Layout {
    Rows,
    Columns,
    /// Rows with a gap between them.
    Padded,
    /// Neither stride is 1.
    General,
    /// Rows from last to first.
    Backward,
}

const LAYOUTS: [Layout; 5] =
    [Layout::Rows, Layout::Columns, Layout::Padded, Layout::General, Layout::Backward];

/// Elements before and behind each matrix: more than a register, so that nothing is written there unseen.
const MARGIN: usize = 64;

impl Layout {
    /// Row stride, column stride, offset of element (0, 0) and length of the memory.
    fn place(self, rows: usize, cols: usize) -> (isize, isize, usize, usize) {
        let (r, c) = (rows as isize, cols as isize);
        let (row, col, start, len) = match self {
            Layout::Rows => (c, 1, 0, rows * cols),
            Layout::Columns => (1, r, 0, rows * cols),
            Layout::Padded => (c + 3, 1, 0, rows * (cols + 3)),
            Layout::General => (3 * c + 2, 3, 0, rows * (3 * cols + 2)),
            Layout::Backward => (-c, 1, rows.saturating_sub(1) * cols, rows * cols),
        };
        (row, col, MARGIN + start, MARGIN + len + MARGIN)
    }
}

struct Matrix<T> {
    data: Vec<T>,
    rows: usize,
    cols: usize,
    layout: Layout,
}

impl<T: Element> Matrix<T> {
    fn new(rows: usize, cols: usize, layout: Layout, numbers: &mut Numbers) -> Self {
        Matrix { data: numbers.fill(layout.place(rows, cols).3), rows, cols, layout }
    }
    fn index(&self, i: usize, j: usize) -> usize {
        let (row, col, start, _) = self.layout.place(self.rows, self.cols);
        (start as isize + i as isize * row + j as isize * col) as usize
    }
    fn at(&self, i: usize, j: usize) -> T {
        self.data[self.index(i, j)]
    }
    fn view(&self) -> MatRef<T> {
        let (row_stride, col_stride, start, _) = self.layout.place(self.rows, self.cols);
        let data = self.data.as_ptr().wrapping_add(start);
        MatRef { data, rows: self.rows, cols: self.cols, row_stride, col_stride }
    }
    fn view_mut(&mut self) -> MatMut<T> {
        let (row_stride, col_stride, start, _) = self.layout.place(self.rows, self.cols);
        let data = self.data.as_mut_ptr().wrapping_add(start);
        MatMut { data, rows: self.rows, cols: self.cols, row_stride, col_stride }
    }
    fn values(&self) -> Vec<f64> {
        let indices = (0..self.rows).flat_map(|i| (0..self.cols).map(move |j| (i, j)));
        indices.map(|(i, j)| self.at(i, j).acc().f64()).collect()
    }
}

/// The product of two dense row-major matrices.
fn naive_product([m, k, n]: [usize; 3], lhs: &[f64], rhs: &[f64]) -> Vec<f64> {
    let mut product = vec![0.0; m * n];
    for i in 0..m {
        for p in 0..k {
            for j in 0..n {
                product[i * n + j] += lhs[i * k + p] * rhs[p * n + j];
            }
        }
    }
    product
}

#[derive(Debug, Clone, Copy)]
struct Case {
    level: Isa,
    dims: [usize; 3],
    layouts: [Layout; 3],
    accum: Accum,
    alpha: f64,
    bias: bool,
    seed: u64,
}

impl Case {
    fn new(level: Isa, m: usize, k: usize, n: usize) -> Case {
        let (dims, layouts) = ([m, k, n], [Layout::Rows; 3]);
        Case { level, dims, layouts, accum: Accum::Replace, alpha: 1.0, bias: false, seed: 7 }
    }

    /// Computes the case, compares it with a naive product, and that nothing else was written.
    fn check<L, R, D>(self)
    where
        L: Element,
        R: Element<Acc = L::Acc>,
        D: Element<Acc = L::Acc>,
    {
        let [m, k, n] = self.dims;
        let mut numbers = Numbers(self.seed);
        let lhs = Matrix::<L>::new(m, k, self.layouts[0], &mut numbers);
        let rhs = Matrix::<R>::new(k, n, self.layouts[1], &mut numbers);
        let mut dst = Matrix::<D>::new(m, n, self.layouts[2], &mut numbers);
        let bias = self.bias.then(|| numbers.fill::<D>(n));
        if self.accum == Accum::Replace {
            // What is overwritten must not be read: a NaN would show.
            let nan = D::from_acc(D::Acc::from_f64(f64::NAN));
            (0..m).for_each(|i| {
                (0..n).for_each(|j| {
                    let index = dst.index(i, j);
                    dst.data[index] = nan;
                })
            });
        }
        let before = dst.data.clone();
        let alpha = L::Acc::from_f64(self.alpha);
        // SAFETY: the matrices own their memory and do not overlap; the level is available.
        unsafe {
            let (team, to) = (ThreadTeam::alone(), dst.view_mut());
            let (lhs, rhs, bias) = (lhs.view(), rhs.view(), bias.as_deref());
            gemm_at(self.level, team, to, self.accum, alpha, lhs, rhs, bias).unwrap();
        }
        let eps = L::Acc::DTYPE.epsilon();
        let products = naive_product(self.dims, &lhs.values(), &rhs.values());
        let mut written = vec![false; before.len()];
        for i in 0..m {
            for j in 0..n {
                let index = dst.index(i, j);
                written[index] = true;
                let mut want = products[i * n + j];
                want *= alpha.f64();
                if self.accum == Accum::Add {
                    want += before[index].acc().f64();
                }
                want += bias.as_ref().map_or(0.0, |bias| bias[j].acc().f64());
                let got = dst.data[index].acc().f64();
                let rounding = D::DTYPE.epsilon() * want.abs();
                let tolerance = 8.0 * eps * (k as f64 + 2.0) + rounding;
                assert!(
                    (got - want).abs() <= tolerance,
                    "{self:?} {} x {} -> {}: ({i}, {j}) got {got}, want {want}",
                    L::DTYPE,
                    R::DTYPE,
                    D::DTYPE
                );
            }
        }
        for (index, old) in before.iter().enumerate() {
            let same = written[index] || dst.data[index] == *old;
            assert!(same, "{self:?}: wrote beside the destination, at {index}");
        }
    }
}

#[test]
fn every_layout_matches_the_naive_product() {
    for level in Isa::available() {
        for lhs in LAYOUTS {
            for rhs in LAYOUTS {
                for dst in LAYOUTS {
                    for accum in [Accum::Replace, Accum::Add] {
                        let layouts = [lhs, rhs, dst];
                        let case =
                            Case { layouts, accum, bias: true, ..Case::new(level, 21, 19, 53) };
                        case.check::<f32, f32, f32>();
                        case.check::<f64, f64, f64>();
                        case.check::<bf16, bf16, f32>();
                        Case { dims: [20, 22, 50], ..case }.check::<bf16, bf16, bf16>();
                        Case { dims: [20, 64, 100], ..case }.check::<bf16, bf16, bf16>();
                        Case { dims: [150, 70, 300], alpha: -0.5, ..case }.check::<f32, f32, f32>();
                    }
                }
            }
        }
    }
}

#[test]
fn ragged_sizes_match_the_naive_product() {
    let mut numbers = Numbers(3);
    for level in Isa::available() {
        for seed in 0..300 {
            let dims = std::array::from_fn(|_| 1 + numbers.below(70));
            let layouts = std::array::from_fn(|_| LAYOUTS[numbers.below(LAYOUTS.len())]);
            let accum = if numbers.below(2) == 0 { Accum::Replace } else { Accum::Add };
            let (bias, alpha) = (numbers.below(2) == 0, [1.0, -0.75][numbers.below(2)]);
            let case = Case { level, dims, layouts, accum, alpha, bias, seed };
            case.check::<f32, f32, f32>();
            case.check::<f64, f64, f64>();
            case.check::<bf16, bf16, bf16>();
        }
    }
}

#[test]
fn sizes_around_block_edges_match_the_naive_product() {
    for level in Isa::available() {
        for (m, k, n) in [
            (1, 511, 1),
            (1, 512, 49),
            (3, 513, 97),
            (129, 1023, 193),
            (127, 1024, 191),
            (128, 1025, 192),
            (65, 1100, 17),
            (9, 2100, 200),
            (1, 1, 2100),
            (2100, 3, 1),
            (2050, 5, 40),
            (40, 5, 2100),
            (1, 1500, 800),
            (800, 1500, 1),
            (17, 300, 2049),
            (33, 2047, 50),
            (40, 2100, 60),
            (513, 40, 300),
            (300, 40, 2100),
        ] {
            for layouts in [
                [Layout::Rows, Layout::Rows, Layout::Rows],
                [Layout::Rows, Layout::Columns, Layout::Rows],
                [Layout::Columns, Layout::Rows, Layout::Rows],
                [Layout::Columns, Layout::Columns, Layout::Columns],
            ] {
                let case = Case { layouts, bias: true, ..Case::new(level, m, k, n) };
                case.check::<f32, f32, f32>();
                Case { accum: Accum::Add, ..case }.check::<f64, f64, f64>();
                case.check::<bf16, bf16, bf16>();
                Case { accum: Accum::Add, ..case }.check::<bf16, f32, f16>();
                Case { accum: Accum::Add, ..case }.check::<bf16, bf16, f32>();
            }
        }
    }
}

#[test]
fn every_mix_of_types_matches_the_naive_product() {
    fn outputs<L: Element<Acc = f32>, R: Element<Acc = f32>>(case: Case) {
        case.check::<L, R, f32>();
        case.check::<L, R, bf16>();
        case.check::<L, R, f16>();
    }
    fn operands<L: Element<Acc = f32>>(case: Case) {
        outputs::<L, f32>(case);
        outputs::<L, bf16>(case);
        outputs::<L, f16>(case);
    }
    for level in Isa::available() {
        // Products of 5 rows stream columns whose steps lie together.
        for (m, accum) in
            [(37, Accum::Replace), (37, Accum::Add), (5, Accum::Replace), (5, Accum::Add)]
        {
            let other = if accum == Accum::Add { Layout::Columns } else { Layout::Rows };
            for layouts in [[other; 3], [Layout::Rows, Layout::Columns, Layout::Rows]] {
                let case = Case { accum, layouts, bias: true, ..Case::new(level, m, 90, 61) };
                operands::<f32>(case);
                operands::<bf16>(case);
                operands::<f16>(case);
            }
        }
    }
}

#[test]
fn empty_products_write_zeros_and_bias() {
    for accum in [Accum::Replace, Accum::Add] {
        for (m, k, n) in [(0, 3, 4), (4, 0, 5), (4, 3, 0), (0, 0, 0)] {
            let case = Case { accum, bias: true, ..Case::new(Isa::best(), m, k, n) };
            case.check::<f32, f32, f32>();
            case.check::<bf16, bf16, bf16>();
        }
    }
}

#[test]
fn half_precision_results_are_rounded_once() {
    // 1 + 2^-9 (k times) would stay 1 if the sum were kept in bf16.
    let k = 3000;
    let (ones, mut dst) = (vec![bf16::from_f32(0.0078125); k], [bf16::ONE]);
    let (lhs, rhs) =
        (MatRef::row_major(ones.as_ptr(), 1, k), MatRef::row_major(ones.as_ptr(), k, 1));
    // SAFETY: the vectors own their memory.
    unsafe {
        let (team, to) = (ThreadTeam::alone(), MatMut::row_major(dst.as_mut_ptr(), 1, 1));
        super::gemm(team, to, Accum::Add, 1.0, lhs, rhs, None).unwrap();
    };
    assert_eq!(dst[0], bf16::from_f32(1.0 + 3000.0 / 16384.0));
}

/// A product, or the part of one that some rows or columns make.
#[derive(Clone, Copy)]
struct Part<'a, T, D> {
    lhs: MatRef<T>,
    rhs: MatRef<T>,
    held: &'a [D],
    bias: &'a [D],
    accum: Accum,
}

/// The bits of [held +] 0.3 * lhs * rhs + bias, every row holding the same before, computed by a
/// team of `threads`.
fn bits<T: Element, D: Element<Acc = T::Acc>>(
    level: Isa,
    threads: usize,
    layout: Layout,
    part: Part<T, D>,
) -> Vec<f64> {
    let (m, n) = (part.lhs.rows, part.rhs.cols);
    let mut dst = Matrix::<D>::new(m, n, layout, &mut Numbers(11));
    for i in 0..m {
        for j in 0..n {
            let index = dst.index(i, j);
            dst.data[index] = part.held[j];
        }
    }
    let team = ThreadTeam::new(threads).unwrap();
    let (view, alpha) = (dst.view_mut(), T::Acc::from_f64(0.3));
    let (lhs, rhs) = (part.lhs, part.rhs);
    // SAFETY: the matrices own their memory and do not overlap; the level is available.
    unsafe { gemm_at(level, &team, view, part.accum, alpha, lhs, rhs, Some(part.bias)) }.unwrap();
    dst.values()
}

fn check_bits<T: Element, D: Element<Acc = T::Acc>>(level: Isa, accum: Accum) {
    for (m, k, n) in [(70, 90, 110), (300, 600, 500), (70, 1088, 110), (45, 2300, 210)] {
        let mut numbers = Numbers(5);
        let lhs = Matrix::<T>::new(m, k, Layout::Rows, &mut numbers);
        let rhs = Matrix::<T>::new(k, n, Layout::Columns, &mut numbers);
        let (held, bias) = (numbers.fill::<D>(n), numbers.fill::<D>(n));
        let all = Part { lhs: lhs.view(), rhs: rhs.view(), held: &held, bias: &bias, accum };
        let whole = bits(level, 1, Layout::Rows, all);
        for threads in [2, 3] {
            let same = bits(level, threads, Layout::Rows, all) == whole;
            assert!(same, "{level:?} ({m}, {k}, {n}): {threads} threads differ from 1");
        }
        for layout in LAYOUTS {
            let same = bits(level, 1, layout, all) == whole;
            assert!(same, "{level:?} ({m}, {k}, {n}): written as {layout:?} differs");
        }
        for (first, rows) in [(3, 14), (0, 1), (44, 1), (8, 30), (2, 5), (6, 8)] {
            let data = all.lhs.data.wrapping_add(first * k);
            let part = Part { lhs: MatRef { data, rows, ..all.lhs }, ..all };
            let same = bits(level, 2, Layout::Rows, part) == whole[first * n..(first + rows) * n];
            assert!(same, "{level:?} ({m}, {k}, {n}): {rows} rows from {first} differ");
        }
        for (first, cols) in [(5, 1), (10, 7), (20, 48), (55, 50)] {
            let data = all.rhs.data.wrapping_add(first * k);
            let (range, rhs) = (first..first + cols, MatRef { data, cols, ..all.rhs });
            let part = Part { rhs, held: &held[range.clone()], bias: &bias[range.clone()], ..all };
            let got = bits(level, 2, Layout::Rows, part);
            let want = whole.chunks(n).flat_map(|row| &row[range.clone()]);
            let same = got.iter().eq(want);
            assert!(same, "{level:?} ({m}, {k}, {n}): {cols} columns from {first} differ");
        }
    }
}

#[test]
fn bits_depend_on_k_alone() {
    for level in Isa::available() {
        check_bits::<f32, f32>(level, Accum::Add);
        check_bits::<f64, f64>(level, Accum::Add);
        check_bits::<bf16, f32>(level, Accum::Add);
        check_bits::<f16, f32>(level, Accum::Add);
        check_bits::<bf16, bf16>(level, Accum::Add);
        check_bits::<bf16, bf16>(level, Accum::Replace);
        check_bits::<f32, f16>(level, Accum::Replace);
    }
}
