// Dropout: y = x scale if the element's random bits exceed `last_dropped`, else 0. It is its own gradient.

#include "philox.cuh"

KERNEL(256, dropout)(const T* x, T* y, u64 n, u64 key, const Step* step, u32 last_dropped, double scale, Place place) {
    Draws draws(key, step->number);
    const u64 quads = (n + 3) / 4;
    for (u64 quad = thread_number(); quad < quads; quad += thread_count()) {
#pragma unroll
        for (u64 i = 4 * quad; i < 4 * quad + 4; i++) {
            if (i >= n) break;
            bool kept = draws.at(global_index(place, i)) > last_dropped;
            y[i] = rounded<T>(kept ? widen(x[i]) * (A)scale : A(0));
        }
    }
}
