// The maximum of a row and the sum of e^(x - maximum), in one pass over memory: a pack with a larger maximum rescales
// the earlier sum.

struct Statistics {
    A max, sum_exp;
    INLINE Statistics() : max(-real::infinity<A>()), sum_exp(0) {}
    template <int N> INLINE void add(const Pack<T, N>& pack) {
        A largest = max;
#pragma unroll
        for (int j = 0; j < N; j++) largest = real::larger(largest, widen(pack.at[j]));
        if (largest > max) {
            sum_exp *= exp_for<T>(max - largest);
            max = largest;
        }
        // While all elements are minus infinity, their differences are NaN: the maximum is not subtracted.
        const A shift = max == -real::infinity<A>() ? A(0) : max;
#pragma unroll
        for (int j = 0; j < N; j++) sum_exp += exp_for<T>(widen(pack.at[j]) - shift);
    }
    // Combines the statistics of all threads of a group.
    INLINE Statistics joined() const {
        Statistics all;
        all.max = group_max(max);
        all.sum_exp = group_sum(max == -real::infinity<A>() ? sum_exp : sum_exp * real::exp(max - all.max));
        return all;
    }
    INLINE A log_sum_exp() const { return max + real::ln(sum_exp); }
};
