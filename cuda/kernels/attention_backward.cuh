// The gradients of queries, and of keys and values, of attention.cu and attention_bias.cu. Included after
// attention_scores.cuh.

template <int D, class Drops>
INLINE void backward_queries(const T* q, const T* k, const T* v, const T* dout, const float* lse, const float* delta, T* dq, const Attention& a, Drops drops) {
    constexpr int M = MOST_ROWS, OWN = 16 * M, QUERIES = BLOCK_WARPS * OWN, KEYS = WARPGROUPS ? 64 : 32, N = KEYS / 8;
    constexpr int TILE = ROW_SIZE<D>;
    // Keys of the next tile are copied while those of this one are multiplied, values too if there is room.
    constexpr int VALUES = D == 128 && !WARPGROUPS ? 1 : 2;
    // Queries and dout stay in registers where these suffice.
    constexpr bool HELD = D == 64 && !WARPGROUPS && !BIASED && !Drops::DRAWS;
    DYNAMIC_SHARED(T, memory);
    T *q_tile = memory, *dout_tile = q_tile + QUERIES * TILE, *k_tiles = dout_tile + QUERIES * TILE, *v_tiles = k_tiles + 2 * KEYS * TILE;
    SHARED(Keys, seen_tile, QUERIES);
    const int lane = threadIdx.x & 31, warp = warp_number();
    const int first = (gridDim.x - 1 - blockIdx.x) * QUERIES, own_first = first + warp * OWN, row = own_first + lane / 4;
    const int together = warp / TOGETHER * TOGETHER * OWN;  // the first row that is multiplied with this warp's
    const i64 head = blockIdx.y, batch = blockIdx.z, group = head * a.groups / a.heads;
    q += batch * a.q[0] + head * a.q[2];
    k += batch * a.k[0] + group * a.k[2];
    v += batch * a.v[0] + group * a.v[2];
    dout += batch * a.dout[0] + head * a.dout[2];
    dq += batch * a.dq[0] + head * a.dq[2];
    const Range tile = keys_of_tile(a, batch, first, QUERIES);
    const int end = (int)tile.end, begin = (int)tile.start / KEYS * KEYS;
    const auto load_keys = [&](int key, int stage) {
        if (key < end) load_rows<D, KEYS>(k_tiles + stage * KEYS * TILE, k, a.k[1], key, a.keys, a.width);
    };
    const auto load_values = [&](int key, int stage) {
        if (key < end) load_rows<D, KEYS>(v_tiles + stage % VALUES * KEYS * TILE, v, a.v[1], key, a.keys, a.width);
    };
    load_rows<D, QUERIES>(q_tile, q, a.q[1], first, a.queries, a.width);
    load_rows<D, QUERIES>(dout_tile, dout, a.dout[1], first, a.queries, a.width);
    load_keys(begin, 0);
    load_values(begin, 0);
    copy_commit();
    if (threadIdx.x < QUERIES) seen_tile[threadIdx.x] = keys_seen(a, batch, first + threadIdx.x);
    const KeysOfRows own(a, batch, first + together, TOGETHER * OWN);
    float row_lse[M][2], row_delta[M][2];
#pragma unroll
    for (int i = 0; i < 2 * M; i++) {
        const i64 at = (batch * a.heads + head) * a.queries + (row + 8 * i < a.queries ? row + 8 * i : 0);
        row_lse[i / 2][i % 2] = subtracted(lse[at]);
        row_delta[i / 2][i % 2] = delta[at];
    }
    Rows<D, M, HELD, QUERIES> queries(q_tile + together * ROW_STEP<D>);
    Rows<D, M, HELD, QUERIES> douts(dout_tile + together * ROW_STEP<D>);
    if (HELD) {
        copy_wait<0>();
        __syncthreads();
        queries.hold();
        douts.hold();
    }
    float result[M][D / 8][4] = {};
    for (int key = begin, stage = 0; key < end; key += KEYS, stage ^= 1) {
        const bool active = uniform(own.see(key, KEYS));
        copy_wait<0>();
        show_tiles();
        __syncthreads();  // these keys and values are there, and those before have been read
        load_keys(key + KEYS, stage ^ 1);
        if (VALUES == 2) load_values(key + KEYS, stage ^ 1);
        copy_commit();
        if (VALUES == 2 && !active) continue;
        u32 kept[M];
#pragma unroll
        for (int m = 0; m < M; m++) kept[m] = drops.template rows_of_queries<N>(batch, head, row + 16 * m, key + lane % 4 * 2);
        const T* k_tile = k_tiles + stage * KEYS * TILE;
        float s[M][N][4] = {}, dp[M][N][4] = {};
        multiply_rows<D, N, M>(s, queries, k_tile);
        multiply_rows<D, N, M>(dp, douts, v_tiles + stage % VALUES * KEYS * TILE);
        finish<1>(s);
        finish<0>(dp);
        if (VALUES == 1) {
            __syncthreads();  // the values have been read
            load_values(key + KEYS, 0);
            copy_commit();
            if (!active) continue;
        }
        const bool masked = own.masked(key, KEYS);
#pragma unroll
        for (int m = 0; m < M; m++)
            score_gradients<N, true>(
                s[m], dp[m], a, masked,
                [&](int n, int e) { return seen_tile[row - first + 16 * m + e / 2 * 8].has(key + n * 8 + lane % 4 * 2 + e % 2); },
                [&](int, int e, float& lse, float& delta) {
                    lse = row_lse[m][e / 2];
                    delta = row_delta[m][e / 2];
                },
                [&](int n, int e) {
                    return bias_of(a, batch, head, row + 16 * m + e / 2 * 8, key + n * 8 + lane % 4 * 2 + e % 2);
                },
                [&](int n, int e) { return drops.factor(kept[m], 4 * n + e); });
        multiply_fragments<D, N, M>(result, dp, k_tile);
        finish<0>(result);
    }
    copy_wait<0>();
#pragma unroll
    for (int m = 0; m < M; m++)
        store_rows<D>(dq, a.dq[1], own_first + 16 * m, a.queries, a.width, result[m], (float)a.scale, (float)a.scale);
}

// dk and dv of some keys of a key-value head: sums over its query heads in order. Products are of tiles of 64 or 32 queries, by
// SUB at a time, since scores and their gradients are held beside the sums.
template <int D, class Drops>
INLINE void backward_keys(const T* q, const T* k, const T* v, const T* dout, const float* lse, const float* delta, T* dk, T* dv, const Attention& a, Drops drops) {
    // Keys and values stay in registers, where these suffice, and leave shared memory to tiles of queries.
    constexpr bool HELD = !WARPGROUPS && !BIASED && !Drops::DRAWS;
    constexpr int M = D == 64 ? MOST_ROWS : 1, OWN = 16 * M, WARPS = HELD && M == 1 ? 8 : BLOCK_WARPS, KEYS = OWN * WARPS;
    constexpr int QUERIES = HELD || WARPGROUPS ? 64 : 32, SUB = WARPGROUPS ? QUERIES : 16, N = SUB / 8, TILE = ROW_SIZE<D>;
    static_assert(!HELD || KEYS == 2 * QUERIES, "two stages of queries take the room of keys and values");
    DYNAMIC_SHARED(T, memory);
    T *k_tile = memory, *v_tile = k_tile + KEYS * TILE, *stages = HELD ? memory : v_tile + KEYS * TILE;
    struct Statistics { float lse, delta; Keys seen; };
    SHARED(Statistics, statistics_tile, 2 * QUERIES);
    const int lane = threadIdx.x & 31, warp = warp_number();
    const int first = blockIdx.x * KEYS, row = first + warp * OWN + lane / 4;
    const int together = warp / TOGETHER * TOGETHER * OWN;  // the first row that is multiplied with this warp's
    const int own_first = first + together, own_last = own_first + TOGETHER * OWN - 1;
    const i64 group = blockIdx.y, batch = blockIdx.z;
    k += batch * a.k[0] + group * a.k[2];
    v += batch * a.v[0] + group * a.v[2];
    q += batch * a.q[0];
    dout += batch * a.dout[0];
    load_rows<D, KEYS, WARPS>(k_tile, k, a.k[1], first, a.keys, a.width);
    load_rows<D, KEYS, WARPS>(v_tile, v, a.v[1], first, a.keys, a.width);
    copy_commit();
    // The first query that sees one of these keys.
    const int per_group = a.heads / a.groups, last_head = (group + 1) * per_group, behind = first - (int)(a.keys - a.queries);
    const int begin = a.causal && behind > 0 ? behind / QUERIES * QUERIES : 0;
    int head = group * per_group, query = begin - QUERIES;
    // Moves on to the next tile of queries that sees one of these keys, if there is one.
    const auto advance = [&](int& head, int& query) {
        for (query += QUERIES;; query += QUERIES) {
            if (query >= a.queries) {
                if (++head == last_head) return false;
                query = begin;
            }
            const Range tile = keys_of_tile(a, batch, query, QUERIES);
            if (tile.start < first + KEYS && tile.end > first) return true;
        }
    };
    const auto load = [&](int head, int query, int stage) {
        T* q_tile = stages + stage * 2 * QUERIES * TILE;
        load_rows<D, QUERIES, WARPS>(q_tile, q + head * a.q[2], a.q[1], query, a.queries, a.width);
        load_rows<D, QUERIES, WARPS>(q_tile + QUERIES * TILE, dout + head * a.dout[2], a.dout[1], query, a.queries, a.width);
    };
    // Some threads load an lse each and others a delta, which they put down when the queries before have been read.
    const int own_query = threadIdx.x % QUERIES;
    const bool has_lse = threadIdx.x < QUERIES;
    const auto statistic = [&](int head, int query) {
        const int own = query + own_query;
        return (has_lse ? lse : delta)[(batch * a.heads + head) * a.queries + (own < a.queries ? own : 0)];
    };
    const auto put = [&](float number, int query, int stage) {
        Statistics& to = statistics_tile[stage * QUERIES + own_query];
        if (has_lse) {
            to.lse = subtracted(number);
            to.seen = keys_seen(a, batch, query + own_query);
        } else if (threadIdx.x < 2 * QUERIES) {
            to.delta = number;
        }
    };
    float dk_sum[M][D / 8][4] = {}, dv_sum[M][D / 8][4] = {};
    Rows<D, M, HELD, KEYS> keys(k_tile + together * ROW_STEP<D>), values(v_tile + together * ROW_STEP<D>);
    if (HELD) {
        copy_wait<0>();
        __syncthreads();
        keys.hold();
        values.hold();
        __syncthreads();  // keys and values have been read
    }
    bool more = uniform(advance(head, query));  // so that stages are the same for all lanes, too
    if (more) {
        load(head, query, 0);
        put(statistic(head, query), query, 0);
    }
    copy_commit();
    for (int stage = 0; more; stage ^= 1) {
        copy_wait<0>();
        show_tiles();
        __syncthreads();  // these queries are there, and those before have been read
        int next_head = head, next_query = query;
        more = uniform(advance(next_head, next_query));
        float next = 0;
        if (more) {
            load(next_head, next_query, stage ^ 1);
            next = statistic(next_head, next_query);
        }
        copy_commit();
        const T *q_tile = stages + stage * 2 * QUERIES * TILE, *dout_tile = q_tile + QUERIES * TILE;
#pragma unroll 1
        for (int sub = 0; sub < QUERIES; sub += SUB) {
            const Statistics* of = statistics_tile + stage * QUERIES + sub;
            const Keys upper = of[0].seen, lower = of[SUB - 1].seen;
            const bool partial = lower.end == 0;  // the last may be out of bounds
            if (!uniform(upper.start <= own_last && (partial || lower.end > own_first))) continue;
            // Unless every query sees every key of this warp.
            const bool masked = uniform(partial || lower.start > own_first || upper.end <= own_last);
            u32 kept[M];
#pragma unroll
            for (int m = 0; m < M; m++) kept[m] = drops.template rows_of_keys<N>(batch, head, row + 16 * m, query + sub + lane % 4 * 2);
            float s[M][N][4] = {}, dp[M][N][4] = {};
            multiply_rows<D, N, M>(s, keys, q_tile + sub * TILE);
            multiply_rows<D, N, M>(dp, values, dout_tile + sub * TILE);
            finish<1>(s);
            finish<0>(dp);
#pragma unroll
            for (int m = 0; m < M; m++)
                score_gradients<N, true>(
                    s[m], dp[m], a, masked,
                    [&](int n, int e) { return of[n * 8 + lane % 4 * 2 + e % 2].seen.has(row + 16 * m + e / 2 * 8); },
                    [&](int n, int e, float& lse, float& delta) {
                        lse = of[n * 8 + lane % 4 * 2 + e % 2].lse;
                        delta = of[n * 8 + lane % 4 * 2 + e % 2].delta;
                    },
                    [&](int n, int e) {
                        return bias_of(a, batch, head, query + sub + n * 8 + lane % 4 * 2 + e % 2, row + 16 * m + e / 2 * 8);
                    },
                    [&](int n, int e) { return drops.factor(kept[m], 4 * n + e); });
            multiply_fragments<D, N, M>(dv_sum, s, dout_tile + sub * TILE);
            multiply_fragments<D, N, M>(dk_sum, dp, q_tile + sub * TILE);
            finish<1>(dv_sum);
            finish<0>(dk_sum);
        }
        if (more) put(next, next_query, stage ^ 1);
        head = next_head;
        query = next_query;
    }
    copy_wait<0>();
    dk += batch * a.dk[0] + group * a.dk[2];
    dv += batch * a.dv[0] + group * a.dv[2];
#pragma unroll
    for (int m = 0; m < M; m++) {
        store_rows<D>(dk, a.dk[1], first + warp * OWN + 16 * m, a.keys, a.width, dk_sum[m], (float)a.scale, (float)a.scale);
        store_rows<D>(dv, a.dv[1], first + warp * OWN + 16 * m, a.keys, a.width, dv_sum[m], 1, 1);
    }
}

#define GRADIENTS OPERANDS, const T *dout, const float *lse, const float *delta
#define BACKWARD_QUERIES(D, drops) { backward_queries<D>(q, k, v, dout, lse, delta, dq, a, drops); }
#define BACKWARD_KEYS(D, drops) { backward_keys<D>(q, k, v, dout, lse, delta, dk, dv, a, drops); }
