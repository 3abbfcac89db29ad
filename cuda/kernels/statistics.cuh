// The maximum of a row and the sum of e^(x - maximum), in one pass over memory: a larger maximum rescales the earlier
// sum.

struct Statistics {
    A max, sum_exp;
    INLINE Statistics() : max(-real::infinity<A>()), sum_exp(0) {}
    INLINE void add(A x) {
        if (x > max) {
            sum_exp *= real::exp(max - x);
            max = x;
        }
        // While all elements are minus infinity, their differences are NaN: the maximum is not subtracted.
        sum_exp += real::exp(max == -real::infinity<A>() ? x : x - max);
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
