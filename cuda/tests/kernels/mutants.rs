//! Kernels with one mistake each, as people make them. The tests of the file must fail.

use ferrotron_cuda::kernels::{ElementType, KernelSource};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::simulator::{MUTANT, SANITIZE};
use ferrotron_cuda_sim::available;

/// One mistake.
struct Mutant {
    name: &'static str,
    /// The file whose tests must fail; the change is made to its text or to what it includes.
    file: &'static str,
    before: &'static str,
    after: &'static str,
}

macro_rules! mutants {
    ($($name:ident in $file:literal: $before:literal => $after:literal;)*) => {
        &[$(Mutant { name: stringify!($name), file: $file, before: $before, after: $after }),*]
    };
}

const MUTANTS: &[Mutant] = mutants! {
    // Barriers and shuffles
    half_a_warp_forgotten in "reduce": "distance = 16" => "distance = 8";
    barrier_that_some_never_reach in "softmax":
        "    __syncthreads();\n    return join_warp" => "    if (lane == 0) __syncthreads();\n    return join_warp";
    equal_elements_in_reverse in "argsort": "(j < threadIdx.x && !before" => "(j > threadIdx.x && !before";
    equal_elements_of_the_right_run_first in "argsort": "? before(element, value" => "? !before(value, element";
    first_of_repeated_indices in "index": "ADD ? sum + value : value" => "sum + value";
    nan_in_the_middle in "argsort": "if (x_nan || y_nan) return" => "if (x_nan && y_nan) return";
    matrices_not_transposed in "attention": "load_matrices_transposed(right" => "load_matrices(right";
    a_lane_of_the_row_forgotten in "attention":
        "sum += __shfl_xor_sync(0xffffffffu, sum, 2);" => "";
    sums_without_rescaling in "attention": "sum[half] *= shrink[half];" => "";
    results_without_rescaling in "attention": "result[n][2 * half + 1] *= shrink[half];" => "";
    larger_scores_not_subtracted in "attention": "if (grown) shift[half] = largest;" => "";
    largest_before_a_negative_scale in "attention": "&& cap <= 0 && scale > 0" => "&& cap <= 0";
    diagonal_masked in "attention": "position + 1 < a.keys ? position + 1" => "position < a.keys ? position";
    far_gradients_of_keys_in_32_bits in "attention_warpgroup": "dk += batch * a.dk[0]" => "dk += (int)(batch * a.dk[0])";
    far_values_in_32_bits in "attention": "v += batch * a.v[0]" => "v += (int)(batch * a.v[0])";
    products_not_waited_for in "attention_warpgroup": "    products_wait<LATER>();\n" => "";
    gradients_of_scores_not_waited_for in "attention_warpgroup": "finish<0>(dp);" => "";
    tiles_not_shown_to_products in "attention_warpgroup": "INLINE void show_tiles() { show_to_products(); }" => "INLINE void show_tiles() {}";
    tiles_shown_before_they_have_arrived in "attention_warpgroup":
        "copy_wait<0>();\n        show_tiles();\n        __syncthreads();  // the keys" => "show_tiles();\n        copy_wait<0>();\n        __syncthreads();  // the keys";
    products_that_do_not_begin in "attention_warpgroup":
        "    products_begin();\n#pragma unroll\n    for (int k = 0; k < D" => "#pragma unroll\n    for (int k = 0; k < D";
    parts_of_rows_not_exchanged in "attention_warpgroup": "? row & 7 :" => "? 0 :";
    narrow_rows_exchanged_as_wide_ones in "attention_warpgroup": ": row >> 1 & 3;" => ": row & 3;";
    swizzle_of_another_width in "attention_warpgroup": "ROW_BYTES == 128 ? 1 : 2" => "ROW_BYTES == 128 ? 1 : 3";
    groups_of_rows_too_far_apart in "attention_warpgroup": "GROUPS_APART = 8 * ROW_BYTES" => "GROUPS_APART = 16 * ROW_BYTES";
    blocks_of_columns_too_close in "attention_warpgroup": "BLOCKS_APART = ROWS * ROW_BYTES" => "BLOCKS_APART = 8 * ROW_BYTES";
    warps_that_do_not_multiply_together in "attention_warpgroup":
        "KeysOfRows own(a, batch, first + together, TOGETHER * OWN);" => "KeysOfRows own(a, batch, own_first, OWN);";
    rows_of_another_warpgroup in "attention_warpgroup": "q_tile + together * ROW_STEP<D>" => "q_tile";
    last_tile_of_keys_forgotten in "attention":
        "keys_of(a, batch, last).end}" => "keys_of(a, batch, last).end - 32}";
    window_one_key_wider in "attention": " start = position + 1 - a.window" => " start = position - a.window";
    ranges_of_another_row in "attention": "a.ranges + batch * a.ranges_row" => "a.ranges";
    end_of_the_range_seen in "attention_rows": "end = own[1];" => "end = own[1] + 1;";
    bias_of_the_first_head in "attention_bias": "head * a.bias_step[1]" => "a.bias_step[1]";
    bias_with_the_slope_of_the_cap in "attention_bias": "KEYS / 8, false>" => "KEYS / 8, true>";
    bias_of_the_last_sample_only in "attention_bias": "sum[n][e] += dp[0][n][e]" => "sum[n][e] = dp[0][n][e]";
    bias_that_hides_all in "attention_rows":
        "score > -real::infinity<A>() ? real::exp(score - lse) : A(0)" => "real::exp(score - lse)";
    samples_of_the_bias_forgotten in "attention_rows": "dbias[key] += prob" => "dbias[key] = prob";
    cap_without_its_slope in "attention": "(dp[n][e] * m - delta) * slope" => "(dp[n][e] * m - delta)";
    diagonal_of_a_tile_not_masked in "attention":
        "key < all.start || key + count > all.end" => "key < all.start";
    first_keys_of_a_window_not_masked in "attention":
        "return key < all.start ||" => "return";
    keys_at_the_diagonal_skipped in "attention": "return key < any.end &&" => "return key + count <= any.end &&";
    first_keys_of_a_window_skipped in "attention": "key + count > any.start" => "key > any.start";
    queries_at_the_diagonal_skipped in "attention": "lower.end > own_first)" => "lower.end > own_first + OWN)";
    heads_of_the_group_forgotten in "attention": "++head == last_head" => "++head <= last_head";
    keys_behind_the_diagonal_not_masked in "attention": "|| upper.end <= own_last" => "";
    minus_infinity_subtracted in "attention": "== -real::infinity<float>() ? 0.0f : lse * UNIT;" => "== -real::infinity<float>() ? lse : lse * UNIT;";
    first_tile_of_queries_forgotten in "attention": "behind / QUERIES * QUERIES" => "(behind / QUERIES + 1) * QUERIES";
    wrong_group in "attention": "head * a.groups / a.heads" => "head % a.groups";
    delta_of_another_row in "attention": "delta = row_delta[m][e / 2];" => "delta = row_delta[m][e % 2];";
    tail_of_the_head_not_zero in "attention": "&& column + right < width;" => ";";
    values_of_what_was_dropped in "attention": "s[n][e] = p * m;" => "s[n][e] = p;";
    scores_of_what_was_dropped in "attention": "(dp[n][e] * m - delta)" => "(dp[n][e] - delta)";
    lanes_of_delta_forgotten in "attention": "distance = lanes / 2;" => "distance = lanes / 4;";
    delta_behind_the_last_query in "attention": "if (query < a.queries) delta[" => "delta[";
    delta_of_another_row_of_the_group in "attention": "if (own == row + r) delta" => "if (own == row) delta";
    dropout_of_another_query in "attention_rows": "+ coordinate(2, query)" => "+ (u64)query";
    nothing_that_counts in "attention_rows": "(kept == A(0) ? A(0) : kept * out[i])" => "kept * out[i]";
    keys_of_all_queries in "attention_rows": "end = keys_of(a, batch, query).end;" => "end = a.keys;";
    // Sums and maxima
    maximum_without_rescaling in "softmax": "sum_exp *= exp_for<T>(max - largest);" => "";
    mean_of_the_wrong_sum in "norm":
        "total = CENTRED ? group_sum(total) / (A)width : A(0);" => "total = A(0);";
    nan_lost in "reduce": "max != max && widen(x) != widen(x)" => "false";
    // Indices
    wrong_row in "softmax": "y += row * width;" => "y += row * blockDim.x;";
    column_beyond_the_row in "norm": "warp > 1 || column >= width" => "warp > 1";
    gradient_before_of_the_first_row in "norm": "before ? before + row * width : dy" => "before ? before : dy";
    a_warp_forgotten in "norm": "k = 1; k < WARPS" => "k = 2; k < WARPS";
    last_row_left_out in "norm":
        "first + block_rows < rows ? first + block_rows : rows" => "first + block_rows - 1";
    blocks_in_place_of_rows in "reduce":
        "at = row / blocks, first = row % blocks * block_size;" => "at = row % blocks, first = row / blocks * block_size;";
    strides_ignored in "pointwise": "if (layout.dense) {" => "if (true) {";
    tail_forgotten in "pointwise":
        "i = packs * SIZE + thread; i < width;" => "i = packs * SIZE + thread; i + 1 < width;";
    unaligned_packs_of_a_sum in "softmax": "packs = aligned16(row) ? width" => "packs = true ? width";
    packs_loaded_but_not_used in "softmax": "k < DEPTH; k++)\n            if (i + k * threads < packs) f" => "k < 3; k++)\n            if (i + k * threads < packs) f";
    unaligned_packs in "norm": "aligned16(out) && (aligned16(rows) && ...) ? width" => "true ? width";
    held_packs_of_any_width in "norm": "if (width % SIZE == 0 && aligned16(x)" => "if (aligned16(x)";
    packs_beyond_those_held_forgotten in "norm": "i < packs; i += blockDim.x) f(HELD" => "false; i += blockDim.x) f(HELD";
    packs_of_any_width in "norm": "packs = width % SIZE == 0 && " => "packs = ";
    packs_of_any_head in "rotary": "steps % SIZE == 0 && aligned16(x)" => "aligned16(x)";
    tail_of_a_cast_forgotten in "cast": "i = packs * SIZE + first; i < n" => "i = packs * SIZE + first; i + 1 < n";
    rows_between_not_added in "norm": "row < end; row += WARPS" => "row < end; row += 2 * WARPS";
    word_before_the_run_forgotten in "zero_bitmap": "first + k < at" => "first + k + 1 < at";
    ids_of_other_shards_first in "sort": "own < size ? own : size" => "own < size ? own : -1";
    sum_of_every_position_of_an_id in "index": "if (!begins && first % CHUNK != 0) return;" => "";
    runs_added_from_every_chunk in "index": "if (second > CHUNK && keys[order[second - CHUNK - 1]] == key) return;" => "";
    samples_along_y_forgotten in "attention_bias": " + blockIdx.y / heads}" => "}";

    head_stride_for_position_stride in "rotary": "(i64)position * r.position_stride" => "(i64)position * r.head_stride";
    // Steps and losses
    columns_of_another_matrix in "adafactor": "column_factors + row / height * width" => "column_factors";
    decay_of_the_new_moment in "adamw": "w * c.keep - c.step_size" => "w - c.step_size";
    average_of_the_initial_weights in "ema": "step->update == 1 ? 0.0 : decay" => "decay";
    direction_of_the_new_momentum in "lion": "(A)beta1, one" => "(A)beta2, one";
    plain_momentum_for_nesterov in "sgd": "nesterov ? g + buffer" => "false ? g + buffer";
    update_in_spite_of_infinity in "sgd": "if (step->found_inf) return;" => "";
    update_after_a_step_that_is_lost in "outcome": "overflow || stopped" => "overflow";
    clipped_before_the_loss_scale_is_taken_out in "outcome": "real::sqrt(*sq_norm) / loss_scale" => "real::sqrt(*sq_norm)";
    rows_beyond_the_last in "outcome": "before % c.rows" => "before";
    skipped_steps_count in "outcome": "if (!overflow) now.updates++" => "now.updates++";
    first_overflow_halves in "outcome": "if (now.patience == 0) now.scale" => "now.scale";
    patience_never_back in "outcome": "now.patience = c.hysteresis;" => "";
    window_goes_on_behind_an_overflow in "outcome": "now.steady = 0;\n        if" => "if";
    loss_scale_below_the_minimum in "outcome": "real::max(loss_scale / 2, c.minimum)" => "loss_scale / 2";
    learning_rate_of_another_update in "loss_scale": "own.lr = lrs[update % next.rows];" => "";
    host_believed_where_it_does_not_know in "loss_scale": "if (next.is_known) *scale" => "*scale";
    target_of_the_whole_vocabulary in "cross_entropy":
        "const i64 local = target - targets.offset;" => "const i64 local = target;";
    // Random numbers
    local_index in "dropout": "draws.at(global_index(place, i))" => "draws.at(i)";
    boundary_moved in "dropout": "> last_dropped" => "> last_dropped * 1.01";
    wrong_multiplier in "dropout": "0xCD9E8D57u" => "0xCD9E8D75u";
    stale_block in "dropout": "if (index >> 2 != drawn)" => "if (drawn == ~0ull)";
    halves_in_reverse in "round": "index & 1 ? at(index >> 1) >> 16" => "~index & 1 ? at(index >> 1) >> 16";
    beyond_the_largest_at_random in "round": "< 0x7f7f0000u ?" => "< 0x7f800000u ?";
};

/// Missing barriers and waits: races, which are found whether results show them or not.
const RACES: &[Mutant] = mutants! {
    parts_overwritten_before_they_are_read in "norm":
        "__syncthreads();  // the parts of an earlier call have been read" => "";
    parts_of_columns_overwritten_before_they_are_read in "norm":
        "__syncthreads();  // the parts of the columns before have been read" => "";
    parts_of_columns_read_before_they_are_written in "norm":
        "__syncthreads();\n    if (warp >= 2 * PARTS)" => "if (warp >= 2 * PARTS)";
    sums_of_blocks_read_before_they_are_written in "norm": "__syncthreads();\n    A* to" => "A* to";
    parts_read_before_they_are_written in "softmax":
        "if (lane == 0) parts[warp] = x;\n    __syncthreads();" => "if (lane == 0) parts[warp] = x;";
    tile_read_before_it_is_written in "copy":
        "    __syncthreads();\n    row = (u64)blockIdx.y" => "    row = (u64)blockIdx.y";
    run_read_before_it_is_written in "argsort": "widen(x[row + own]);\n    __syncthreads();" => "widen(x[row + own]);";
    keys_not_waited_for in "attention":
        "copy_wait<0>();\n        show_tiles();\n        __syncthreads();  // the keys are there" => "__syncthreads();  // the keys are there";
    values_not_waited_for in "attention":
        "copy_wait<0>();\n            __syncthreads();  // the values are there" => "__syncthreads();  // the values are there";
    values_overwritten_before_they_are_read in "attention":
        "__syncthreads();  // the keys are there, and the values before have been read" => "";
    keys_overwritten_before_they_are_read in "attention":
        "__syncthreads();  // the values are there, and the keys have been read" => "";
    queries_held_before_they_have_arrived in "attention":
        "__syncthreads();\n        queries.hold();" => "queries.hold();";
    stage_before_not_read_by_warpgroups in "attention_warpgroup":
        "__syncthreads();  // the keys are there, and the values before have been read" => "";
    queries_of_the_stage_before_not_read_by_warpgroups in "attention_warpgroup":
        "__syncthreads();  // these queries are there, and those before have been read" => "";
    keys_of_the_stage_before_not_read in "attention":
        "__syncthreads();  // these keys and values are there, and those before have been read" => "";
    values_of_the_only_stage_not_read in "attention": "__syncthreads();  // the values have been read" => "";
    keys_held_after_queries_come in "attention": "__syncthreads();  // keys and values have been read" => "";
    queries_of_the_stage_before_not_read in "attention":
        "__syncthreads();  // these queries are there, and those before have been read" => "";
    queries_not_waited_for in "attention":
        "copy_wait<0>();\n        show_tiles();\n        __syncthreads();  // these queries" => "__syncthreads();  // these queries";
    row_read_before_its_warp_has_written_it in "attention_rows": "__syncwarp();" => "";
    counts_added_before_all_are_there in "zero_bitmap": "    __syncthreads();\n    i64 before" => "    i64 before";
    factors_read_before_they_are_written in "adafactor": "    __syncthreads();\n" => "";
    rows_overwritten_before_they_are_read in "attention_rows":
        "__syncwarp();  // the rows of the sample before have been read" => "";
    tiles_overwritten_before_they_are_read in "attention_bias": "__syncthreads();  // the tiles have been read" => "";
    lse_overwritten_before_it_is_read in "attention_rows": "__syncwarp();  // every lane has read lse" => "// every lane has read lse";
};

/// Changes that only the address sanitizer notices: they read where nothing is, and do nothing with it.
const UNSANITARY: &[Mutant] = mutants! {
    reads_behind_the_last_row in "norm":
        "sums[2 * PARTS] = {};" => "sums[2 * PARTS] = {widen(x[end * width]) * A(0)};";
    reads_before_the_first_row in "softmax": "A dot = A(0);" => "A dot = widen(y[-1]) * A(0);";
};

fn all() -> impl Iterator<Item = &'static Mutant> {
    MUTANTS.iter().chain(RACES).chain(UNSANITARY)
}

/// A text that belongs to `file`, with the mutant's change if it is made there.
pub fn apply(mutant: &str, file: &str, text: &str) -> String {
    let Mutant { file: of, before, after, .. } = all().find(|known| known.name == mutant).unwrap();
    if file == *of { text.replace(before, after) } else { text.to_string() }
}

#[test]
fn every_mutant_changes_its_file() {
    for Mutant { name, file, .. } in all() {
        let text = KernelSource::named(file).unwrap().source(ElementType::F32, "");
        assert_ne!(apply(name, file, &text), text, "{name} finds nothing to change in {file}");
    }
}

#[test]
fn every_mutant_fails() {
    if available("every_mutant_fails") && !is_child() {
        fail_all("every_mutant_fails", MUTANTS, &[], "");
    }
}

#[test]
fn every_race_of_a_mutant_is_found() {
    if available("every_race_of_a_mutant_is_found") && !is_child() {
        fail_all("every_race_of_a_mutant_is_found", RACES, &[(SANITIZE, "thread")], "race: ");
    }
}

/// All kernels run with the address sanitizer, which notices reads outside of memory too.
#[test]
fn the_address_sanitizer_has_no_complaint_but_about_mutants() {
    let test = "the_address_sanitizer_has_no_complaint_but_about_mutants";
    if !available(test) || is_child() {
        return;
    }
    let out = Command::new("g++").arg("-print-file-name=libasan.so").output().unwrap();
    let library = String::from_utf8(out.stdout).unwrap().trim().to_string();
    if !library.contains('/') {
        return println!("skipped: {test}: g++ has no libasan (apt install libasan8)");
    }
    // Kernels run on stacks of their own, which the sanitizer's fake stacks and search for leaks know nothing of.
    let options = "detect_leaks=0:detect_stack_use_after_return=0";
    let sanitized =
        [(SANITIZE, "address"), ("LD_PRELOAD", library.as_str()), ("ASAN_OPTIONS", options)];
    let program = std::env::current_exe().unwrap();
    let out = Command::new(&program)
        .args(["ops::", "--test-threads", "2"])
        .envs(sanitized)
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(out.status.success(), "{}\n{}", text(&out.stdout), text(&out.stderr));
    fail_all(test, UNSANITARY, &sanitized, "AddressSanitizer");
}

/// Whether this process is one that another test has started.
fn is_child() -> bool {
    std::env::var_os(MUTANT).is_some() || std::env::var_os(SANITIZE).is_some()
}

/// Runs the tests of each mutant's file in a process of its own, which must fail with a complaint.
fn fail_all(test: &str, mutants: &[Mutant], environment: &[(&str, &str)], complaint: &str) {
    let program = std::env::current_exe().unwrap();
    let next = AtomicUsize::new(0);
    let run = || {
        while let Some(Mutant { name, file, .. }) = mutants.get(next.fetch_add(1, Relaxed)) {
            let mut command = Command::new(&program);
            command
                .args([format!("ops::{file}").as_str(), "--exact"])
                .envs(environment.iter().copied());
            let out = command.env(MUTANT, name).output().unwrap();
            let text = [&out.stdout[..], &out.stderr]
                .map(|bytes| String::from_utf8_lossy(bytes).into_owned())
                .concat();
            assert!(text.contains("running 1 test"), "{test}: {name} ran no test:\n{text}");
            assert!(!text.contains("g++ refuses"), "{test}: {name} is no program:\n{text}");
            assert!(!out.status.success(), "{test}: {name} passes the tests of {file}");
            assert!(text.contains(complaint), "{test}: {name} fails otherwise:\n{text}");
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2).map(|_| scope.spawn(run)).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}
