// Adafactor over contiguous matrices (Shazeer and Stern, arXiv 1804.04235, algorithms 4 and 5), with the formulas of
// tensor/src/ops/optim/adafactor.rs. Sums are in f64, in an order that depends on the shape only. If a gradient is not
// finite, nothing changes.

// Sums of squares of each row: one group of threads per row.
KERNEL(512, adafactor_row_sums)(const T* grads, double* sums, u64 rows, u64 width) {
    const u64 row = group_row();
    if (row >= rows) return;
    double sum = 0;
    for_row(grads + row * width, width, threadIdx.x, blockDim.x, [&](u64, T g) { sum += (double)widen(g) * (double)widen(g); });
    sum = group_sum(sum);
    if (threadIdx.x == 0) sums[row] = sum;
}

// Sums of squares of each column: one block per 32 columns of a matrix, with rows distributed along y. `blocks` is
// the number of blocks per matrix.
KERNEL(512, adafactor_column_sums)(const T* grads, double* sums, u64 height, u64 width, u64 blocks) {
    SHARED(double, parts, 512);
    const u64 matrix = blockIdx.x / blocks, column = blockIdx.x % blocks * 32 + threadIdx.x;
    double sum = 0;
    if (column < width) {
        const T* own = grads + matrix * height * width + column;
        for (u64 row = threadIdx.y; row < height; row += blockDim.y) {
            const double g = (double)widen(own[row * width]);
            sum += g * g;
        }
    }
    parts[threadIdx.y * 32 + threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || column >= width) return;
    for (u32 k = 1; k < blockDim.y; k++) sum += parts[k * 32 + threadIdx.x];
    sums[matrix * width + column] = sum;
}

// The update of a running mean of squares: beta2 = 1 - update^-rate.
struct Mixed {
    double beta2, scale, eps1;
    INLINE Mixed(const Step* step, double rate, double eps1)
        : beta2(1 - real::pow((double)step->update, -rate)), scale(step->grad_scale * step->grad_scale), eps1(eps1) {}
    INLINE A operator()(A mean, double square) const {
        return (A)(beta2 * (double)mean + (1 - beta2) * (square + eps1));
    }
};

// Updates means with sums over the squares of `count` gradients each.
KERNEL(256, adafactor_means)(const Step* step, A* means, const double* sums, u64 n, u64 count, double rate, double eps1) {
    if (step->found_inf) return;
    const Mixed mixed(step, rate, eps1);
    for (u64 i = thread_number(); i < n; i += thread_count()) {
        means[i] = mixed(means[i], mixed.scale * sums[i] / (double)count);
    }
}

// Updates elementwise means with the squares of gradients.
KERNEL(256, adafactor_mean_squares)(const Step* step, A* means, const T* grads, u64 n, double rate, double eps1) {
    if (step->found_inf) return;
    const Mixed mixed(step, rate, eps1);
    for (u64 i = thread_number(); i < n; i += thread_count()) {
        const double g = (double)widen(grads[i]);
        means[i] = mixed(means[i], mixed.scale * g * g);
    }
}

// Row factors: sqrt(mean / row), where mean is over each matrix' `count` numbers of `others`. One group of threads
// per matrix.
KERNEL(512, adafactor_row_factors)(const A* rows, const A* others, A* factors, u64 matrices, u64 height, u64 count) {
    const u64 matrix = group_row();
    if (matrix >= matrices) return;
    double sum = 0;
    for (u64 i = threadIdx.x; i < count; i += blockDim.x) sum += (double)others[matrix * count + i];
    const double mean = group_sum(sum) / (double)count;
    for (u64 i = matrix * height + threadIdx.x; i < (matrix + 1) * height; i += blockDim.x) {
        factors[i] = (A)real::sqrt(mean / (double)rows[i]);
    }
}

// Factors of columns, or of the elements of a vector.
KERNEL(256, adafactor_inverse_roots)(const A* x, A* y, u64 n) {
    for (u64 i = thread_number(); i < n; i += thread_count()) y[i] = (A)(1 / real::sqrt((double)x[i]));
}

// Sums of squares of the unclipped update, per row.
KERNEL(512, adafactor_update_sums)
(const Step* step, const T* grads, const A* row_factors, const A* column_factors, double* sums, u64 rows, u64 height, u64 width) {
    const u64 row = group_row();
    if (row >= rows) return;
    const A* columns = column_factors + row / height * width;
    double sum = 0;
    for_row(grads + row * width, width, threadIdx.x, blockDim.x, [&](u64 j, T g) {
        const double u = (double)widen(g) * (double)columns[j];
        sum += u * u;
    });
    sum = group_sum(sum);
    const double scale = (double)row_factors[row] * step->grad_scale;
    if (threadIdx.x == 0) sums[row] = scale * scale * sum;
}

// As `arguments::Adafactor` on the host.
struct Adafactor {
    double eps2, clip_threshold, beta1, weight_decay;
    u64 numel;  // of the whole parameter
};

// One group of threads per row. `weight_sum` (null unless steps are relative) and `update_sum` are sums of squares
// over the whole parameter. A non-null `mean` is the running mean of updates.
template <class W, class G>
INLINE void step_rows(const Step* step, W* weights, const G* grads, const A* row_factors, const A* column_factors, A* mean,
                      const double* weight_sum, const double* update_sum, u64 rows, u64 height, u64 width, const Adafactor& c) {
    const u64 row = group_row();
    if (step->found_inf || row >= rows) return;
    const double numel = c.numel > 0 ? (double)c.numel : 1.0;
    double alpha = step->lr;
    if (weight_sum) alpha *= real::max(real::sqrt(*weight_sum / numel), c.eps2);
    const double size = alpha / real::max(real::sqrt(*update_sum / numel) / c.clip_threshold, 1.0);
    const A keep = (A)(1 - alpha * c.weight_decay), factor = (A)((double)row_factors[row] * (size * step->grad_scale));
    const A beta1 = (A)c.beta1, rest = (A)(1 - c.beta1);
    const A* columns = column_factors + row / height * width;
    for (u64 j = threadIdx.x; j < width; j += blockDim.x) {
        const u64 i = row * width + j;
        A update = widen(grads[i]) * columns[j] * factor;
        if (mean) {
            update = mean[i] * beta1 + update * rest;
            mean[i] = update;
        }
        weights[i] = rounded<W>(widen(weights[i]) * keep - update);
    }
}

// Weights and gradients in the element type.
KERNEL(512, adafactor)
(const Step* step, T* weights, const T* grads, const A* row_factors, const A* column_factors, A* mean, const double* weight_sum,
 const double* update_sum, u64 rows, u64 height, u64 width, Adafactor c) {
    step_rows(step, weights, grads, row_factors, column_factors, mean, weight_sum, update_sum, rows, height, width, c);
}

// Gradients in A.
KERNEL(512, adafactor_wide)
(const Step* step, T* weights, const A* grads, const A* row_factors, const A* column_factors, A* mean, const double* weight_sum,
 const double* update_sum, u64 rows, u64 height, u64 width, Adafactor c) {
    step_rows(step, weights, grads, row_factors, column_factors, mean, weight_sum, update_sum, rows, height, width, c);
}

// Weights in A.
KERNEL(512, adafactor_master)
(const Step* step, A* weights, const T* grads, const A* row_factors, const A* column_factors, A* mean, const double* weight_sum,
 const double* update_sum, u64 rows, u64 height, u64 width, Adafactor c) {
    step_rows(step, weights, grads, row_factors, column_factors, mean, weight_sum, update_sum, rows, height, width, c);
}
