// Elementwise comparisons with broadcasting: 1 if true, else 0. Comparisons with NaN are false, except UNEQUAL.

enum Comparison { EQUAL, UNEQUAL, LESS, LESS_OR_EQUAL, GREATER, GREATER_OR_EQUAL };

KERNEL(256, compare)(const T* a, const T* b, u8* y, u64 n, int comparison, Layout layout) {
    for (u64 i = thread_number(); i < n; i += thread_count()) {
        i64 at[2] = {(i64)i, (i64)i};
        if (!layout.dense) locate<2>(layout, i, at);
        const A x = widen(a[at[0]]), z = widen(b[at[1]]);
        switch (comparison) {
            case EQUAL: y[i] = x == z; break;
            case UNEQUAL: y[i] = x != z; break;
            case LESS: y[i] = x < z; break;
            case LESS_OR_EQUAL: y[i] = x <= z; break;
            case GREATER: y[i] = x > z; break;
            default: y[i] = x >= z;
        }
    }
}
