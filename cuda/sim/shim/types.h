// Conversions of the types that the prelude declares, which hardware does on a GPU. Follows the prelude.
#pragma once

// To nearest, of two the even one.
inline float widen(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
inline void narrow(float x, bf16& y) {
    unsigned bits = __float_as_uint(x);
    y.bits = x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline float widen(f16 x) {
    // Scaling by 2^112 moves the exponent's bias from 15 to 127, subnormal numbers included.
    const unsigned magnitude = (x.bits & 0x7fffu) << 13, sign = (x.bits & 0x8000u) << 16;
    const float scaled = __uint_as_float(magnitude) * __uint_as_float((127u + 112) << 23);
    const bool finite = (x.bits & 0x7c00) != 0x7c00;
    return __uint_as_float((finite ? __float_as_uint(scaled) : magnitude | 0x7f800000u) | sign);
}
inline void narrow(float x, f16& y) {
    _Float16 narrow = (_Float16)x;
    memcpy(&y.bits, &narrow, 2);
}
