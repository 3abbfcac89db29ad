// Casts to every other type. Floats round to nearest even, and conversions to and from 16 bits go through f32. Float
// to integer truncates towards zero and saturates, NaN becomes 0. Integer to integer wraps.

constexpr bool FLOATING = A(0.5) != A(0);

template <class I> INLINE I truncated(double x, double low, double beyond, I smallest, I largest) {
    if (x != x) return 0;
    if (x <= low) return smallest;
    return x >= beyond ? largest : (I)x;
}

INLINE void convert(A x, double& y) { y = (double)x; }
INLINE void convert(A x, float& y) { y = (float)x; }
INLINE void convert(A x, bf16& y) { narrow((float)x, y); }
INLINE void convert(A x, f16& y) { narrow((float)x, y); }
INLINE void convert(A x, u8& y) { y = FLOATING ? truncated<u8>((double)x, 0, 256, 0, 255) : (u8)x; }
INLINE void convert(A x, u32& y) { y = FLOATING ? truncated<u32>((double)x, 0, 4294967296.0, 0, 0xffffffffu) : (u32)x; }
INLINE void convert(A x, i64& y) {
    const i64 largest = 0x7fffffffffffffffll;
    y = FLOATING ? truncated<i64>((double)x, -9223372036854775808.0, 9223372036854775808.0, -largest - 1, largest) : (i64)x;
}

// By 16 bytes of the wider type. Unrolled, so that several loads of the narrower one are in flight.
template <class To> INLINE void cast(const T* x, To* y, u64 n) {
    constexpr int SIZE = 16 / (sizeof(T) > sizeof(To) ? sizeof(T) : sizeof(To));
    const u64 first = thread_number(), step = thread_count();
    const u64 packs = aligned16(x) && aligned16(y) ? n / SIZE : 0;
#pragma unroll 4
    for (u64 i = first; i < packs; i += step) {
        const Pack<T, SIZE> from = reinterpret_cast<const Pack<T, SIZE>*>(x)[i];
        Pack<To, SIZE> to;
#pragma unroll
        for (int j = 0; j < SIZE; j++) convert(widen(from.at[j]), to.at[j]);
        reinterpret_cast<Pack<To, SIZE>*>(y)[i] = to;
    }
    for (u64 i = packs * SIZE + first; i < n; i += step) convert(widen(x[i]), y[i]);
}

KERNEL(256, cast_to_f64)(const T* x, double* y, u64 n) { cast(x, y, n); }
KERNEL(256, cast_to_f32)(const T* x, float* y, u64 n) { cast(x, y, n); }
KERNEL(256, cast_to_bf16)(const T* x, bf16* y, u64 n) { cast(x, y, n); }
KERNEL(256, cast_to_f16)(const T* x, f16* y, u64 n) { cast(x, y, n); }
KERNEL(256, cast_to_u8)(const T* x, u8* y, u64 n) { cast(x, y, n); }
KERNEL(256, cast_to_u32)(const T* x, u32* y, u64 n) { cast(x, y, n); }
KERNEL(256, cast_to_i64)(const T* x, i64* y, u64 n) { cast(x, y, n); }
