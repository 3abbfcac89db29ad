// Dropout: y = x scale if the element's random bits exceed `last_dropped`, else 0. It is its own gradient.

#include "philox.cuh"

KERNEL(256, dropout)(const T* x, T* y, u64 n, u64 key, const Step* step, u32 last_dropped, double scale, Place place) {
    Draws draws(key, step->number);
    map_rows(
        y, n, (u32)thread_number(), (u32)thread_count(),
        [&](u64 i, T x) {
            const bool kept = draws.at(global_index(place, i)) > last_dropped;
            return rounded<T>(kept ? widen(x) * (A)scale : A(0));
        },
        x);
}
