// Uniform and normal numbers of an element's key and global index, computed in f64 with the same operations as
// tensor/src/numeric/philox.rs. This file is compiled without fused multiply-add, so both give the same bits.

#include "philox.cuh"

KERNEL(256, uniform)(T* y, u64 n, u64 key, const Step* step, double low, double width, Place place) {
    Draws draws(key, step->number);
    for (u64 i = thread_number(); i < n; i += thread_count()) {
        double u = draws.at(global_index(place, i)) * (1.0 / 4294967296.0);
        y[i] = rounded<T>((A)(low + width * u));
    }
}

// ln x for normal x > 0: x = 2^k (1 + f) with sqrt(1/2) < 1 + f < sqrt(2), the polynomial of FreeBSD's e_log.c.
INLINE double polynomial_ln(double x) {
    const i64 sqrt_half = 0x3FE6A09Ell << 32, one = 0x3FF00000ll << 32;
    const i64 bits = __double_as_longlong(x) + (one - sqrt_half);
    const double k = (double)(int)((bits >> 52) - 0x3FF);
    const double f = __longlong_as_double((bits & 0xFFFFFFFFFFFFFll) + sqrt_half) - 1.0;
    const double s = f / (2.0 + f), z = s * s, w = z * z;
    const double even = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
    const double odd = z * (6.666666666666735130e-01 +
                            w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860510658591e-01)));
    const double half = 0.5 * f * f;
    const double low = s * (half + even + odd) + k * 1.90821492927058770002e-10;
    return k * 6.93147180369123816490e-01 - ((half - low) - f);
}

// Cosine or sine of the angle 2 pi b / 2^32, by the polynomials of FreeBSD's k_cos.c and k_sin.c.
INLINE double polynomial_turn(u32 b, bool want_sine) {
    const u32 quarter = (b + (1u << 29)) >> 30;
    const double x = (double)(int)(b - (quarter << 30)) * (6.283185307179586 / 4294967296.0);
    const double z = x * x;
    const double sine =
        x + x * z *
                (-1.66666666666666324348e-01 +
                 z * (8.33333333332248946124e-03 +
                      z * (-1.98412698298579493134e-04 +
                           z * (2.75573137070700676789e-06 +
                                z * (-2.50507602534068634195e-08 + z * 1.58969099521155010221e-10)))));
    const double cosine =
        (1.0 - 0.5 * z) +
        z * z *
            (4.16666666666666019037e-02 +
             z * (-1.38888888888741095749e-03 +
                  z * (2.48015872894767294178e-05 +
                       z * (-2.75573143513906633035e-07 + z * (2.08757232129817482790e-09 - z * 1.13596475577881948265e-11)))));
    if (want_sine) {
        const double s = quarter & 1 ? cosine : sine;
        return quarter & 2 ? -s : s;
    }
    const double c = quarter & 1 ? sine : cosine;
    return (quarter + 1) & 2 ? -c : c;
}

// Box and Muller (1958): elements 2k and 2k + 1 are the cosine and the sine of the same two uniform numbers.
KERNEL(256, normal)(T* y, u64 n, u64 key, const Step* step, double mean, double std, Place place) {
    Draws draws(key, step->number);
    for (u64 i = thread_number(); i < n; i += thread_count()) {
        const u64 index = global_index(place, i);
        const u32 a = draws.at(index & ~1ull), b = draws.at(index | 1);
        const double radius = real::sqrt(-2.0 * polynomial_ln((a + 1.0) * (1.0 / 4294967296.0)));
        y[i] = rounded<T>((A)(mean + std * (radius * polynomial_turn(b, index & 1))));
    }
}
