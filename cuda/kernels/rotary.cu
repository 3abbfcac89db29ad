// Rotary position embedding (Su et al., 2021), rotate-half. With h = R/2, i < h and the angle of the position and i:
// y[i] = x[i] cos - x[i+h] sin, y[i+h] = x[i+h] cos + x[i] sin. The gradient is the inverse rotation, sign = -1.
//
// x is (B, T, H, D) with a dense last dim, y is contiguous; heads from `heads` on, and elements from R on, are
// copied.

KERNEL(256, rotary)
(const T* x, const A* cos, const A* sin, T* y, u64 batch, u64 positions, u64 all, u64 heads, u64 width, u64 half, i64 batch_stride,
 i64 position_stride, i64 head_stride, int sign) {
    const u64 per_head = width - half, n = batch * positions * all * per_head;
    for (u64 index = thread_number(); index < n; index += thread_count()) {
        const u64 i = index % per_head, row = index / per_head;
        const u64 head = row % all, position = row / all % positions, sample = row / all / positions;
        const T* from = x + (i64)sample * batch_stride + (i64)position * position_stride + (i64)head * head_stride;
        T* to = y + row * width;
        if (i >= half) {
            to[i + half] = from[i + half];
        } else if (head >= heads) {
            to[i] = from[i];
            to[i + half] = from[i + half];
        } else {
            const A a = widen(from[i]), b = widen(from[i + half]);
            const A c = cos[position * half + i], s = (A)sign * sin[position * half + i];
            to[i] = rounded<T>(a * c - b * s);
            to[i + half] = rounded<T>(b * c + a * s);
        }
    }
}
