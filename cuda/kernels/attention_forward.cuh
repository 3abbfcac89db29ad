// The forward pass of attention.cu and attention_bias.cu. Included after attention_scores.cuh.

// What is subtracted from scores follows the largest one at this distance, in units of UNIT: exponentials are at most 256
// (FlashAttention-4, 2025, rescales as rarely).
constexpr float SLACK = BIASED ? 5.5f : 8.0f;

// The online softmax of 16 rows, of which a thread has two: lane / 4 and 8 more.
struct Softmax {
    // What is subtracted from scores, and the sum of exponentials, of this thread alone.
    float shift[2] = {-real::infinity<float>(), -real::infinity<float>()}, sum[2] = {0, 0};

    // Turns scores, which `scale` is yet to multiply, into exponentials. Rescales the sums and `result` where the largest score
    // has grown by more than SLACK, which it does in few tiles. A row's numbers do not depend on other rows.
    template <int N, int R> INLINE void add(float (*s)[4], float scale, float (*result)[4]) {
        float shrink[2], used[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float largest = -real::infinity<float>();
#pragma unroll
            for (int n = 0; n < N; n++) largest = ::fmaxf(largest, ::fmaxf(s[n][2 * half], s[n][2 * half + 1]));
            // The four lanes of a row.
            largest = ::fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
            largest = ::fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2)) * scale;
            const bool grown = largest - shift[half] > SLACK;
            shrink[half] = grown ? exponential(shift[half] - largest) : 1.0f;
            if (grown) shift[half] = largest;
            // A row without visible keys so far must not subtract infinities.
            used[half] = shift[half] == -real::infinity<float>() ? 0.0f : shift[half];
        }
        if (shrink[0] != 1 || shrink[1] != 1) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                sum[half] *= shrink[half];
#pragma unroll
                for (int n = 0; n < R; n++) {
                    result[n][2 * half] *= shrink[half];
                    result[n][2 * half + 1] *= shrink[half];
                }
            }
        }
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                s[n][e] = exponential(s[n][e] * scale - used[e / 2]);
                sum[e / 2] += s[n][e];
            }
    }
};

template <int D, class Drops>
INLINE void forward(const T* q, const T* k, const T* v, T* out, float* lse, const Attention& a, Drops drops) {
    // A bias or dropout takes the registers of more rows.
    constexpr int M = BIASED || Drops::DRAWS ? 1 : MOST_ROWS, OWN = 16 * M, QUERIES = BLOCK_WARPS * OWN, KEYS = 64, N = KEYS / 8;
    // Warpgroups have room for the tiles of two iterations.
    constexpr bool TWO_STAGES = WARPGROUPS;
    constexpr int STAGES = TWO_STAGES ? 2 : 1, TILE = KEYS * ROW_SIZE<D>;
    constexpr bool HELD = D == 64 && M == MOST_ROWS && !WARPGROUPS;
    DYNAMIC_SHARED(T, memory);
    T *q_tile = memory, *k_tiles = q_tile + QUERIES * ROW_SIZE<D>, *v_tiles = k_tiles + STAGES * TILE;
    SHARED(Keys, seen_tile, QUERIES);
    const int lane = threadIdx.x & 31, warp = warp_number();
    // The last queries see the most keys, so their blocks start first.
    const int first = (gridDim.x - 1 - blockIdx.x) * QUERIES, own_first = first + warp * OWN, row = own_first + lane / 4;
    const int together = warp / TOGETHER * TOGETHER * OWN;  // the first row that is multiplied with this warp's
    const i64 head = blockIdx.y, batch = blockIdx.z, group = head * a.groups / a.heads;
    q += batch * a.q[0] + head * a.q[2];
    k += batch * a.k[0] + group * a.k[2];
    v += batch * a.v[0] + group * a.v[2];
    out += batch * a.out[0] + head * a.out[2];

    const Range tile = keys_of_tile(a, batch, first, QUERIES);
    const int end = (int)tile.end, begin = (int)tile.start / KEYS * KEYS;
    const KeysOfRows own(a, batch, first + together, TOGETHER * OWN);
    if (threadIdx.x < QUERIES) seen_tile[threadIdx.x] = keys_seen(a, batch, first + threadIdx.x);
    const float scale = (float)a.scale * UNIT, cap = (float)a.softcap * UNIT;
    // Whether scores are scaled where their exponentials are computed: that must keep their order, and nothing may be between.
    const bool late = !BIASED && cap <= 0 && scale > 0;
    Softmax softmax[M];
    float result[M][D / 8][4] = {};
    const auto load_keys = [&](int key, int stage) {
        if (key < end) load_rows<D, KEYS>(k_tiles + stage * TILE, k, a.k[1], key, a.keys, a.width);
    };
    const auto load_values = [&](int key, int stage) {
        if (key < end) load_rows<D, KEYS>(v_tiles + stage * TILE, v, a.v[1], key, a.keys, a.width);
    };
    load_rows<D, QUERIES>(q_tile, q, a.q[1], first, a.queries, a.width);
    load_keys(begin, 0);
    if (TWO_STAGES) load_values(begin, 0);
    copy_commit();
    Rows<D, M, HELD, QUERIES> queries(q_tile + together * ROW_STEP<D>);
    if (HELD) {
        copy_wait<0>();
        __syncthreads();
        queries.hold();
    }
    for (int key = begin, stage = 0; key < end; key += KEYS, stage ^= STAGES - 1) {
        const bool active = uniform(own.see(key, KEYS));
        copy_wait<0>();
        show_tiles();
        __syncthreads();  // the keys are there, and the values before have been read
        // The next tiles are loaded while these are multiplied; or values while scores are computed, and the next keys while
        // values are summed.
        if (TWO_STAGES) load_keys(key + KEYS, stage ^ 1);
        load_values(TWO_STAGES ? key + KEYS : key, TWO_STAGES ? stage ^ 1 : 0);
        copy_commit();
        if (TWO_STAGES && !active) continue;
        u32 kept[M];
#pragma unroll
        for (int m = 0; m < M; m++)
            kept[m] = active ? drops.template rows_of_queries<N>(batch, head, row + 16 * m, key + lane % 4 * 2) : 0;
        float s[M][N][4] = {};
        multiply_rows<D, N, M>(s, queries, k_tiles + stage * TILE);
        finish<0>(s);
        if (!TWO_STAGES) {
            copy_wait<0>();
            __syncthreads();  // the values are there, and the keys have been read
            load_keys(key + KEYS, 0);
            copy_commit();
            if (!active) continue;
        }

        if (!late) {
#pragma unroll
            for (int i = 0; i < M * N * 4; i++) {
                float& score = s[i / 4 / N][i / 4 % N][i % 4];
                score = cap > 0 ? soft_cap(score * scale, cap) : score * scale;
            }
        }
        if (own.masked(key, KEYS)) {
#pragma unroll
            for (int m = 0; m < M; m++) {
                const Keys* rows = seen_tile + warp * OWN + 16 * m + lane / 4;
                const Keys seen[2] = {rows[0], rows[8]};
#pragma unroll
                for (int n = 0; n < N; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++)
                        if (!seen[e / 2].has(key + n * 8 + lane % 4 * 2 + e % 2)) s[m][n][e] = -real::infinity<float>();
            }
        }
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    // Only of a key that is seen.
                    if (BIASED && s[m][n][e] > -real::infinity<float>())
                        s[m][n][e] += bias_of(a, batch, head, row + 16 * m + e / 2 * 8, key + n * 8 + lane % 4 * 2 + e % 2);
            softmax[m].template add<N, D / 8>(s[m], late ? scale : 1.0f, result[m]);
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) s[m][n][e] *= drops.factor(kept[m], 4 * n + e);
        }
        multiply_fragments<D, N, M>(result, s, v_tiles + stage * TILE);
        finish<0>(result);
    }
    copy_wait<0>();
#pragma unroll
    for (int m = 0; m < M; m++) {
        float factor[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = softmax[m].sum[half];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            factor[half] = sum > 0 ? 1 / sum : 0.0f;
            const i64 at = row + 16 * m + half * 8;
            // ln sum_j e^(s_j) = shift + ln sum; minus infinity if no key is visible.
            if (lane % 4 == 0 && at < a.queries)
                lse[(batch * a.heads + head) * a.queries + at] =
                    sum > 0 ? softmax[m].shift[half] * (BIASED ? 1.0f : 0.6931471805599453f) + real::ln(sum) : -real::infinity<float>();
        }
        store_rows<D>(out, a.out[1], own_first + 16 * m, a.queries, a.width, result[m], factor[0], factor[1]);
    }
}

#define OPERANDS const T *q, const T *k, const T *v
#define DROPPING u64 key, const Step *step, u32 last_dropped, double scale, Place place
#define DROPS DropSome(key, step, last_dropped, scale, place)
#define FORWARD(D, drops) { forward<D>(q, k, v, out, lse, a, drops); }
