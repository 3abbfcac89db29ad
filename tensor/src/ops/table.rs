//! The pointwise table: every elementwise function with its derivative, one row each.
//!
//! A unary row is `Name "name" saves Input|Output|Nothing: value, derivative`. The derivative may use `s`, the saved
//! input or output; `p` is the parameter of rows that take one. A binary row has the value, both partial derivatives
//! and the operands that each of them reads. Every row also has these as CUDA expressions, from which the GPU kernels
//! are generated; tests compare the two.
//!
//! A new row and a method of the same name in `methods/pointwise.rs` make a new operation. The gradient, the
//! finite-difference check and the dtype tests follow from the table.

use ferrotron_cuda::kernels::{self, BinaryRow as BinaryKernel, UnaryRow as UnaryKernel};

use std::f64::consts::LOG2_E;

use crate::Real;

/// The saved value from which a unary row's derivative is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Saves {
    /// The argument.
    Input,
    /// The value.
    Output,
    /// Neither: the derivative is constant.
    Nothing,
}

/// A comparison of two elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Comparison {
    /// a == b
    Eq,
    /// a != b
    Ne,
    /// a < b
    Lt,
    /// a <= b
    Le,
    /// a > b
    Gt,
    /// a >= b
    Ge,
}

/// The two functions of a unary row, monomorphised into kernels.
pub(crate) trait UnaryRow: 'static {
    /// Whether the derivative depends on the element. If not, it is a factor, and no kernel is compiled for it.
    const VARIES: bool;
    fn value<R: Real>(x: R, p: R) -> R;
    fn derivative<R: Real>(s: R, p: R) -> R;
}

/// The three functions of a binary row, monomorphised into kernels.
pub(crate) trait BinaryRow: 'static {
    /// Whether the derivatives by lhs and rhs depend on the elements. If not, they are factors, and no kernel is compiled.
    const VARIES: [bool; 2];
    fn value<R: Real>(a: R, b: R) -> R;
    fn d_lhs<R: Real>(a: R, b: R) -> R;
    fn d_rhs<R: Real>(a: R, b: R) -> R;
}

macro_rules! unary_table {
    ($($(#[$doc:meta])* $row:ident $name:literal saves $saves:ident: |$x:ident, $p:ident| $value:expr, |$s:ident, $q:ident| $derivative:expr,
        cuda $cuda_value:literal, $cuda_derivative:literal;)*) => {
        /// A function of one element (and, for some rows, a parameter `p`).
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Unary { $($(#[$doc])* $row),* }

        impl Unary {
            /// Every row, in table order.
            pub const ALL: &[Unary] = &[$(Unary::$row),*];

            /// The row's name, as in error messages.
            pub const fn name(self) -> &'static str {
                match self { $(Unary::$row => $name),* }
            }

            /// The kernel name of the derivative.
            pub(crate) const fn derivative_name(self) -> &'static str {
                match self { $(Unary::$row => concat!($name, "_backward")),* }
            }

            /// The saved value that the derivative needs.
            pub const fn saves(self) -> Saves {
                match self { $(Unary::$row => Saves::$saves),* }
            }

            /// Value and derivative as CUDA expressions of `x` or `s`, and `p`, in the arithmetic type `A`.
            pub const fn cuda(self) -> [&'static str; 2] {
                match self { $(Unary::$row => [$cuda_value, $cuda_derivative]),* }
            }
        }

        pub(crate) mod unary {
            use super::*;
            $(pub(crate) struct $row;
            impl UnaryRow for $row {
                const VARIES: bool = !matches!(Unary::$row.saves(), Saves::Nothing);
                #[inline(always)]
                fn value<R: Real>($x: R, $p: R) -> R { $value }
                #[inline(always)]
                fn derivative<R: Real>($s: R, $q: R) -> R { $derivative }
            })*
        }

        /// Runs a body with `$R` bound to the row's type.
        macro_rules! with_unary {
            ($op:expr, $R:ident => $body:expr) => {
                match $op { $($crate::ops::table::Unary::$row => { type $R = $crate::ops::table::unary::$row; $body })* }
            };
        }
        pub(crate) use with_unary;
    };
}

macro_rules! binary_table {
    ($($(#[$doc:meta])* $row:ident $name:literal: |$a:ident, $b:ident| $value:expr,
        lhs reads [$($lr:ident)*] |$la:ident, $lb:ident| $d_lhs:expr,
        rhs reads [$($rr:ident)*] |$ra:ident, $rb:ident| $d_rhs:expr,
        cuda $cuda_value:literal, $cuda_d_lhs:literal, $cuda_d_rhs:literal;)*) => {
        /// A function of two elements.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Binary { $($(#[$doc])* $row),* }

        impl Binary {
            /// Every row, in table order.
            pub const ALL: &[Binary] = &[$(Binary::$row),*];

            /// The row's name, as in error messages.
            pub const fn name(self) -> &'static str {
                match self { $(Binary::$row => $name),* }
            }

            /// The kernel names of the derivatives by lhs and rhs.
            pub(crate) const fn derivative_names(self) -> [&'static str; 2] {
                match self { $(Binary::$row => [concat!($name, "_d_lhs"), concat!($name, "_d_rhs")]),* }
            }

            /// The operands that the derivatives by lhs and by rhs read: `[[lhs, rhs], [lhs, rhs]]`.
            pub const fn reads(self) -> [[bool; 2]; 2] {
                #[allow(non_upper_case_globals, dead_code)]
                const a: usize = 1;
                #[allow(non_upper_case_globals, dead_code)]
                const b: usize = 2;
                match self { $(Binary::$row => {
                    let (l, r) = (0 $(+ $lr)*, 0 $(+ $rr)*);
                    [[l & 1 != 0, l & 2 != 0], [r & 1 != 0, r & 2 != 0]]
                }),* }
            }

            /// Value and derivatives by lhs and rhs as CUDA expressions of `a` and `b`, in the arithmetic type `A`.
            pub const fn cuda(self) -> [&'static str; 3] {
                match self { $(Binary::$row => [$cuda_value, $cuda_d_lhs, $cuda_d_rhs]),* }
            }
        }

        pub(crate) mod binary {
            use super::*;
            $(pub(crate) struct $row;
            impl BinaryRow for $row {
                const VARIES: [bool; 2] = {
                    let [lhs, rhs] = Binary::$row.reads();
                    [lhs[0] || lhs[1], rhs[0] || rhs[1]]
                };
                #[inline(always)]
                fn value<R: Real>($a: R, $b: R) -> R { $value }
                #[inline(always)]
                fn d_lhs<R: Real>($la: R, $lb: R) -> R { $d_lhs }
                #[inline(always)]
                fn d_rhs<R: Real>($ra: R, $rb: R) -> R { $d_rhs }
            })*
        }

        /// Runs a body with `$R` bound to the row's type.
        macro_rules! with_binary {
            ($op:expr, $R:ident => $body:expr) => {
                match $op { $($crate::ops::table::Binary::$row => { type $R = $crate::ops::table::binary::$row; $body })* }
            };
        }
        pub(crate) use with_binary;
    };
}

unary_table! {
    /// -x
    Neg "neg" saves Nothing: |x, _p| -x, |_s, _p| -R::ONE,
        cuda "-x", "-1";
    /// |x|, with derivative 0 at 0
    Abs "abs" saves Input: |x, _p| x.abs(),
        |s, _p| if s > R::ZERO { R::ONE } else if s < R::ZERO { -R::ONE } else { R::ZERO },
        cuda "real::abs(x)", "s > A(0) ? A(1) : s < A(0) ? A(-1) : A(0)";
    /// e^x
    Exp "exp" saves Output: |x, _p| x.exp(), |s, _p| s,
        cuda "real::exp(x)", "s";
    /// Natural logarithm
    Log "log" saves Input: |x, _p| x.ln(), |s, _p| R::ONE / s,
        cuda "real::ln(x)", "A(1) / s";
    /// Square root
    Sqrt "sqrt" saves Output: |x, _p| x.sqrt(), |s, _p| R::from_f64(0.5) / s,
        cuda "real::sqrt(x)", "A(0.5) / s";
    /// 1 / x
    Recip "recip" saves Output: |x, _p| R::ONE / x, |s, _p| -s * s,
        cuda "A(1) / x", "-s * s";
    /// x^2
    Square "square" saves Input: |x, _p| x * x, |s, _p| s + s,
        cuda "x * x", "s + s";
    /// x^p
    Powf "powf" saves Input: |x, p| x.powf(p), |s, p| p * s.powf(p - R::ONE),
        cuda "real::pow(x, p)", "p * real::pow(s, p - A(1))";
    /// Hyperbolic tangent
    Tanh "tanh" saves Output: |x, _p| x.tanh(), |s, _p| R::ONE - s * s,
        cuda "real::tanh(x)", "A(1) - s * s";
    /// 1 / (1 + e^-x)
    Sigmoid "sigmoid" saves Output: |x, _p| x.sigmoid(), |s, _p| s * (R::ONE - s),
        cuda "real::sigmoid(x)", "s * (A(1) - s)";
    /// max(x, 0), with derivative 0 at 0
    Relu "relu" saves Output: |x, _p| if x > R::ZERO { x } else if x <= R::ZERO { R::ZERO } else { x },
        |s, _p| if s > R::ZERO { R::ONE } else { R::ZERO },
        cuda "x > A(0) ? x : x <= A(0) ? A(0) : x", "s > A(0) ? A(1) : A(0)";
    /// x sigmoid(x): Elfwing et al., arXiv 1702.03118, equation (1)
    Silu "silu" saves Input: |x, _p| x * x.sigmoid(),
        |s, _p| { let y = s.sigmoid(); y * (R::ONE + s * (R::ONE - y)) },
        cuda "silu(x)", "silu_derivative(s)";
    /// GELU by the hyperbolic tangent: Hendrycks and Gimpel, arXiv 1606.08415, section 2
    GeluTanh "gelu_tanh" saves Input: |x, _p| gelu_tanh(x), |s, _p| gelu_tanh_derivative(s),
        cuda "gelu_tanh(x)", "gelu_tanh_derivative(s)";
    /// Exact GELU, x Phi(x): arXiv 1606.08415, section 2
    GeluErf "gelu_erf" saves Input: |x, _p| x * normal_cdf(x),
        |s, _p| normal_cdf(s) + s * (R::from_f64(-0.5) * s * s).exp() * R::from_f64(FRAC_1_SQRT_2PI),
        cuda "x * normal_cdf(x)", "normal_cdf(s) + s * real::exp(A(-0.5) * s * s) * A(0.3989422804014327)";
    /// Sine
    Sin "sin" saves Input: |x, _p| x.sin(), |s, _p| s.cos(),
        cuda "real::sin(x)", "real::cos(s)";
    /// Cosine
    Cos "cos" saves Input: |x, _p| x.cos(), |s, _p| -s.sin(),
        cuda "real::cos(x)", "-real::sin(s)";
    /// -1, 0 or 1, with derivative 0; 0 for NaN, as in PyTorch
    Sign "sign" saves Nothing: |x, _p| if x > R::ZERO { R::ONE } else if x < R::ZERO { -R::ONE } else { R::ZERO },
        |_s, _p| R::ZERO,
        cuda "x > A(0) ? A(1) : x < A(0) ? A(-1) : A(0)", "0";
    /// ln(1 + x), exact near 0
    Log1p "log1p" saves Input: |x, _p| x.ln_1p(), |s, _p| R::ONE / (R::ONE + s),
        cuda "real::log1p(x)", "A(1) / (A(1) + s)";
    /// e^x - 1, exact near 0
    Expm1 "expm1" saves Output: |x, _p| x.exp_m1(), |s, _p| s + R::ONE,
        cuda "real::expm1(x)", "s + A(1)";
    /// x + p
    AddScalar "add_scalar" saves Nothing: |x, p| x + p, |_s, _p| R::ONE,
        cuda "x + p", "1";
    /// x p
    MulScalar "mul_scalar" saves Nothing: |x, p| x * p, |_s, p| p,
        cuda "x * p", "p";
    /// x / p
    DivScalar "div_scalar" saves Nothing: |x, p| x / p, |_s, p| R::ONE / p,
        cuda "x / p", "A(1) / p";
    /// p tanh(x / p): soft cap, arXiv 2408.00118
    Softcap "softcap" saves Output: |x, p| (x / p).tanh() * p, |s, p| R::ONE - (s / p) * (s / p),
        cuda "real::tanh(x / p) * p", "A(1) - (s / p) * (s / p)";
    /// max(x, p), with derivative 1 where x >= p
    ClampMin "clamp_min" saves Input: |x, p| if x < p { p } else { x }, |s, p| if s >= p { R::ONE } else { R::ZERO },
        cuda "x < p ? p : x", "s >= p ? A(1) : A(0)";
    /// min(x, p), with derivative 1 where x <= p
    ClampMax "clamp_max" saves Input: |x, p| if x > p { p } else { x }, |s, p| if s <= p { R::ONE } else { R::ZERO },
        cuda "x > p ? p : x", "s <= p ? A(1) : A(0)";
}

binary_table! {
    /// a + b
    Add "add": |a, b| a + b, lhs reads [] |_a, _b| R::ONE, rhs reads [] |_a, _b| R::ONE,
        cuda "a + b", "1", "1";
    /// a - b
    Sub "sub": |a, b| a - b, lhs reads [] |_a, _b| R::ONE, rhs reads [] |_a, _b| -R::ONE,
        cuda "a - b", "1", "-1";
    /// a b
    Mul "mul": |a, b| a * b, lhs reads [b] |_a, b| b, rhs reads [a] |a, _b| a,
        cuda "a * b", "b", "a";
    /// a / b
    Div "div": |a, b| a / b, lhs reads [b] |_a, b| R::ONE / b, rhs reads [a b] |a, b| -a / (b * b),
        cuda "a / b", "A(1) / b", "-a / (b * b)";
    /// a^b, for a > 0
    Pow "pow": |a, b| a.powf(b), lhs reads [a b] |a, b| b * a.powf(b - R::ONE), rhs reads [a b] |a, b| a.powf(b) * a.ln(),
        cuda "real::pow(a, b)", "b * real::pow(a, b - A(1))", "real::pow(a, b) * real::ln(a)";
    /// The larger; the gradient of equal elements is shared, as in PyTorch
    Maximum "maximum": |a, b| if a > b { a } else { b },
        lhs reads [a b] |a, b| share(a > b, a == b), rhs reads [a b] |a, b| share(b > a, a == b),
        cuda "a > b ? a : b", "share(a > b, a == b)", "share(b > a, a == b)";
    /// The smaller; the gradient of equal elements is shared, as in PyTorch
    Minimum "minimum": |a, b| if a < b { a } else { b },
        lhs reads [a b] |a, b| share(a < b, a == b), rhs reads [a b] |a, b| share(b < a, a == b),
        cuda "a < b ? a : b", "share(a < b, a == b)", "share(b < a, a == b)";
}

/// 1 / sqrt(2 pi).
const FRAC_1_SQRT_2PI: f64 = 0.398_942_280_401_432_7;
/// sqrt(2 / pi), of the tanh form of GELU.
const SQRT_2_OVER_PI: f64 = 0.797_884_560_802_865_4;
/// The cubic coefficient of the tanh form of GELU.
const GELU_CUBIC: f64 = 0.044_715;

#[inline(always)]
fn gelu_tanh<R: Real>(x: R) -> R {
    // 0.5 (1 + tanh u) = 1 / (1 + e^-2u): one exponential, to base 2, instead of a hyperbolic tangent.
    x / (R::ONE + (x * gelu_exponent(x * x)).exp2())
}

#[inline(always)]
fn gelu_tanh_derivative<R: Real>(x: R) -> R {
    let square = x * x;
    let cubic = R::from_f64(6.0 * SQRT_2_OVER_PI * GELU_CUBIC);
    let du = cubic.mul_add(square, R::from_f64(2.0 * SQRT_2_OVER_PI));
    let y = R::ONE / (R::ONE + (x * gelu_exponent(square)).exp2());
    (x * y * (R::ONE - y)).mul_add(du, y)
}

/// -2u / (x ln 2) of the tanh form of GELU, from x^2.
#[inline(always)]
fn gelu_exponent<R: Real>(square: R) -> R {
    let cubic = R::from_f64(-2.0 * SQRT_2_OVER_PI * GELU_CUBIC * LOG2_E);
    cubic.mul_add(square, R::from_f64(-2.0 * SQRT_2_OVER_PI * LOG2_E))
}

#[inline(always)]
pub(crate) fn normal_cdf<R: Real>(x: R) -> R {
    R::from_f64(0.5) * (R::ONE + (x * R::from_f64(std::f64::consts::FRAC_1_SQRT_2)).erf())
}

#[inline(always)]
fn share<R: Real>(wins: bool, equal: bool) -> R {
    if wins {
        R::ONE
    } else if equal {
        R::from_f64(0.5)
    } else {
        R::ZERO
    }
}

/// The GPU kernels of the table: the CUDA expressions of all rows.
pub fn kernel_rows() -> String {
    let unary: Vec<_> = Unary::ALL
        .iter()
        .map(|op| {
            let [value, derivative] = op.cuda();
            let derivative = (op.saves() != Saves::Nothing).then_some(derivative);
            UnaryKernel { name: op.name(), value, derivative }
        })
        .collect();
    let binary: Vec<_> = Binary::ALL
        .iter()
        .map(|op| {
            let [value, lhs, rhs] = op.cuda();
            let reads = op.reads().map(|operands| operands.contains(&true));
            BinaryKernel {
                name: op.name(),
                value,
                derivatives: [reads[0].then_some(lhs), reads[1].then_some(rhs)],
            }
        })
        .collect();
    kernels::pointwise_rows(&unary, &binary)
}
