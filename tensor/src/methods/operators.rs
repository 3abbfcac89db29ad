//! The operators `+`, `-`, `*`, `/` and unary `-`, between two arrays and between an array and a number.
//!
//! An operator returns a `Result`, as every operation does: `(&x + &y)?`.

/// Implements the operators for a type.
#[doc(hidden)]
#[macro_export]
macro_rules! operators {
    ($Array:ident) => {
        $crate::operators!(@binary $Array Add add, |x, p| x.add_scalar(p), |p, x| x.add_scalar(p));
        $crate::operators!(@binary $Array Sub sub, |x, p| x.add_scalar(-p), |p, x| x.neg()?.add_scalar(p));
        $crate::operators!(@binary $Array Mul mul, |x, p| x.mul_scalar(p), |p, x| x.mul_scalar(p));
        $crate::operators!(@binary $Array Div div, |x, p| x.div_scalar(p), |p, x| x.recip()?.mul_scalar(p));
        $crate::operators!(@negate $Array [&$Array] [$Array]);
    };
    (@binary $Array:ident $Op:ident $method:ident, |$x:ident, $p:ident| $by:expr, |$q:ident, $y:ident| $of:expr) => {
        $crate::operators!(@pairs $Array $Op $method [&$Array, &$Array] [$Array, &$Array] [&$Array, $Array] [$Array, $Array]);
        $crate::operators!(@scalar $Array $Op $method [&$Array] [$Array], |$x, $p| $by, |$q, $y| $of);
    };
    (@pairs $Array:ident $Op:ident $method:ident $([$Lhs:ty, $Rhs:ty])*) => { $(
        impl std::ops::$Op<$Rhs> for $Lhs {
            type Output = $crate::Result<$Array>;

            fn $method(self, rhs: $Rhs) -> $crate::Result<$Array> {
                $Array::$method(&self, &rhs)
            }
        }
    )* };
    (@scalar $Array:ident $Op:ident $method:ident [$A:ty] [$B:ty], $($rest:tt)*) => {
        $crate::operators!(@scalar_one $Array $Op $method [$A], $($rest)*);
        $crate::operators!(@scalar_one $Array $Op $method [$B], $($rest)*);
    };
    (@scalar_one $Array:ident $Op:ident $method:ident [$Operand:ty], |$x:ident, $p:ident| $by:expr, |$q:ident, $y:ident| $of:expr) => {
        impl std::ops::$Op<f64> for $Operand {
            type Output = $crate::Result<$Array>;

            fn $method(self, $p: f64) -> $crate::Result<$Array> {
                let $x = self;
                $by
            }
        }

        impl std::ops::$Op<$Operand> for f64 {
            type Output = $crate::Result<$Array>;

            fn $method(self, $y: $Operand) -> $crate::Result<$Array> {
                let $q = self;
                $of
            }
        }
    };
    (@negate $Array:ident $([$Operand:ty])*) => { $(
        impl std::ops::Neg for $Operand {
            type Output = $crate::Result<$Array>;

            fn neg(self) -> $crate::Result<$Array> {
                $Array::neg(&self)
            }
        }
    )* };
}
