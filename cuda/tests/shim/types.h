// Conversions of the types that the prelude declares, which hardware does on a GPU. Follows the prelude.
#pragma once

// To nearest, of two the even one.
inline float widen(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
inline void narrow(float x, bf16& y) {
    unsigned bits = __float_as_uint(x);
    y.bits = x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline float widen(f16 x) {
    _Float16 y;
    memcpy(&y, &x.bits, 2);
    return (float)y;
}
inline void narrow(float x, f16& y) {
    _Float16 narrow = (_Float16)x;
    memcpy(&y.bits, &narrow, 2);
}
