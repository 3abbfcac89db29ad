// What the passes of attention.cu and attention_bias.cu make of scores: masks, exponentials and gradients. A constant BIASED
// tells whether a bias is added to the scores: registers are too scarce for a choice at run time. Included after
// attention_tiles.cuh.

// Exponentials are powers of two, so scores are multiplied by log2 e with their scale. Biased scores are not: the product
// of a finite bias below -2.4e38 would be minus infinity, and hide a key that others of its kind may leave as the largest.
constexpr float UNIT = BIASED ? 1.0f : LOG2E;
INLINE float exponential(float x) { return fast_exp2(BIASED ? x * LOG2E : x); }

// A range of keys in 32 bits, of which a comparison is one instruction.
struct Keys {
    int start, end;
    INLINE bool has(int key) const { return start <= key && key < end; }
};
INLINE Keys keys_seen(const Attention& a, i64 batch, i64 query) {
    const Range seen = keys_of(a, batch, query);
    return {(int)seen.start, (int)seen.end};
}

// The keys that one of some adjacent queries sees, and those that every one does.
struct KeysOfRows {
    Keys any, all;
    INLINE KeysOfRows(const Attention& a, i64 batch, int first, int count) {
        const Keys upper = keys_seen(a, batch, first), lower = keys_seen(a, batch, first + count - 1);
        any = {upper.start, first < a.queries ? (int)keys_of_tile(a, batch, first, count).end : 0};
        all = {lower.start, first + count > a.queries ? 0 : upper.end};
    }
    // Whether one of them sees one of `count` keys, and whether one does not see all.
    INLINE bool see(int key, int count) const { return key < any.end && key + count > any.start; }
    INLINE bool masked(int key, int count) const { return key < all.start || key + count > all.end; }
};

// An lse as scores are measured. A query that sees no key has one of minus infinity, which must not be subtracted: its scores
// are minus infinity, too.
INLINE float subtracted(float lse) { return lse == -real::infinity<float>() ? 0.0f : lse * UNIT; }

// Computes p and ds from scores and dp, in place; ds without the slope of the soft cap unless SLOPES. `seen` tells whether
// element e of column tile n is visible, all are unless `masked`; `of` gives its lse, as `subtracted`, and delta, `bias` its
// bias, `factor` its dropout factor.
template <int N, bool SLOPES, bool CAPPED, class Seen, class Statistics, class Bias, class Factor>
INLINE void score_gradients(float (*s)[4], float (*dp)[4], const Attention& a, bool masked, Seen seen, Statistics of, Bias bias, Factor factor) {
    const float scale = (float)a.scale * UNIT, cap = (float)a.softcap * UNIT;
    constexpr bool AT_ONCE = !CAPPED && !BIASED;  // scaled and subtracted from in one instruction
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float lse, delta;
            of(n, e, lse, delta);
            s[n][e] = CAPPED ? soft_cap(s[n][e] * scale, cap) : s[n][e] * scale - (AT_ONCE ? lse : 0.0f);
        }
    if (masked) {
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (!seen(n, e)) s[n][e] = -real::infinity<float>();
    }
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float lse, delta, slope = 1, score = s[n][e];
            of(n, e, lse, delta);
            const bool visible = score > -real::infinity<float>();
            if (CAPPED && SLOPES) slope = visible ? soft_cap_slope(score, cap) : 0.0f;
            if (BIASED && visible) score += bias(n, e);
            const float p = exponential(AT_ONCE ? score : score - lse), m = factor(n, e);
            s[n][e] = p * m;
            dp[n][e] = p * (dp[n][e] * m - delta) * slope;
        }
}

// With one branch for the cap, not one for each score.
template <int N, bool SLOPES, class... Functions>
INLINE void score_gradients(float (*s)[4], float (*dp)[4], const Attention& a, bool masked, Functions... functions) {
    if (a.softcap > 0)
        score_gradients<N, SLOPES, true>(s, dp, a, masked, functions...);
    else
        score_gradients<N, SLOPES, false>(s, dp, a, masked, functions...);
}
