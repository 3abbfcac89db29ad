//! Tests of every backend of collectives, written once and run for each.

mod blocking;
#[path = "../common/mod.rs"]
mod common;
mod control_plane;
mod faults;
mod flight;
mod many_ranks;
mod nccl;
mod operations;
mod rendezvous;
mod roots;
mod sums;
mod traffic;
mod turns;
mod values;
mod worlds;

/// Tests of the functions in a module; each takes the backend.
macro_rules! cases {
    ($module:ident: $($case:ident),* $(,)?) => { $(
        #[test]
        fn $case() {
            if BACKEND.available(concat!(module_path!(), "::", stringify!($case))) {
                crate::$module::$case(BACKEND);
            }
        }
    )* };
}

/// Every case for every backend: `cargo test --test collectives threads::` runs those of one.
macro_rules! for_every_backend {
    ($($module:ident $backend:expr;)*) => { $(
        mod $module {
            use crate::worlds::Backend;
            const BACKEND: Backend = $backend;

            cases!(operations:
                all_reduce_gives_every_rank_the_reduction,
                reduce_scatter_gives_every_rank_its_part,
                all_gather_gives_every_rank_all_parts,
                rooted_operations_move_what_they_name,
                all_to_all_sends_part_i_to_rank_i,
                messages_pass_between_two_ranks_and_round_a_ring,
                a_barrier_waits_for_the_last,
                large_buffers_go_through_small_pipes,
                flats_are_reduced_where_they_lie,
            );
            cases!(sums:
                floats_sum_to_the_same_bits_everywhere_and_again,
                wide_floats_are_added_round_the_ring,
                narrow_floats_are_rounded_once,
                max_keeps_nan,
            );
            cases!(flight:
                groups_do_not_wait_for_one_another,
                many_calls_are_in_flight_on_two_groups,
                subgroups_work_side_by_side,
                work_that_nobody_waits_for_is_done,
                groups_of_one_name_are_told_apart,
            );
            cases!(blocking:
                blocking_calls_give_the_results_of_queued_ones,
                blocking_calls_come_after_those_in_the_queue,
                names_of_a_group_share_a_queue_and_count_apart,
                faults_end_blocking_calls,
                a_rank_that_leaves_blocking_calls_is_named,
            );
            cases!(turns: a_huge_call_does_not_keep_another_group_waiting,);
            cases!(traffic: bytes_are_those_of_the_algorithm, bytes_are_counted_by_operation,);
            cases!(faults:
                a_different_operation_is_named,
                a_different_dtype_is_named,
                a_different_length_is_named,
                swapped_calls_are_named,
                a_message_of_another_kind_is_named,
                scattered_parts_have_the_dtype_of_the_whole,
                a_panic_ends_all,
                an_error_ends_all,
                a_failure_with_a_call_under_way_ends_all,
                a_call_that_panics_is_named,
                a_rank_that_leaves_early_is_named,
                a_tensor_that_holds_a_flat_is_named,
                impossible_groups_and_roots_are_refused,
            );
            cases!(many_ranks:
                every_operation_of_many_ranks,
                sums_of_many_ranks_have_the_same_bits,
                a_barrier_of_many_ranks_waits_for_the_last,
                a_different_call_among_many_is_named,
            );
            cases!(roots:
                another_root_of_a_broadcast_is_named,
                another_root_of_a_reduce_is_named,
                another_root_of_a_gather_is_named,
                another_root_of_a_scatter_is_named,
                a_broadcast_against_a_send_is_named,
            );
        }
    )* };
}

for_every_backend! {
    threads Backend::Threads;
    tcp Backend::Tcp;
    shared_memory Backend::SharedMemory;
}

/// Ranks that others wait for in vain. Processes do so in simulated time (`simulation/cases.rs` of the rendezvous).
mod waiting_threads {
    use crate::worlds::Backend;
    const BACKEND: Backend = Backend::Threads;

    cases!(faults:
        swapped_groups_are_named,
        a_late_rank_is_named,
        a_missing_message_is_named,
        a_rank_without_the_group_is_named,
    );
}

/// Sealed pieces go through TCP as all others do: the cases that are the same from there on are not tried again.
mod sealed_tcp {
    use crate::worlds::Backend;
    const BACKEND: Backend = Backend::SealedTcp;

    cases!(operations:
        all_reduce_gives_every_rank_the_reduction,
        reduce_scatter_gives_every_rank_its_part,
        all_gather_gives_every_rank_all_parts,
        rooted_operations_move_what_they_name,
        all_to_all_sends_part_i_to_rank_i,
        messages_pass_between_two_ranks_and_round_a_ring,
        flats_are_reduced_where_they_lie,
    );
    cases!(sums: narrow_floats_are_rounded_once,);
    cases!(flight: groups_do_not_wait_for_one_another, work_that_nobody_waits_for_is_done,);
    cases!(faults: a_rank_that_leaves_early_is_named,);
}

/// Tensors of a GPU go through memory of the host: what is the same from there on is not tried again.
mod one_gpu {
    use crate::worlds::Backend;
    const BACKEND: Backend = Backend::OneGpu;

    cases!(operations:
        all_reduce_gives_every_rank_the_reduction,
        reduce_scatter_gives_every_rank_its_part,
        all_gather_gives_every_rank_all_parts,
        rooted_operations_move_what_they_name,
        all_to_all_sends_part_i_to_rank_i,
        messages_pass_between_two_ranks_and_round_a_ring,
        flats_are_reduced_where_they_lie,
    );
    cases!(sums: narrow_floats_are_rounded_once,);
    cases!(flight: groups_do_not_wait_for_one_another, work_that_nobody_waits_for_is_done,);
    cases!(faults: a_failure_with_a_call_under_way_ends_all,);
}

/// Each on a GPU of its own, without threads or memory in common.
mod gpus {
    use crate::worlds::Backend;
    const BACKEND: Backend = Backend::Gpus;

    cases!(operations:
        all_reduce_gives_every_rank_the_reduction,
        flats_are_reduced_where_they_lie,
    );
    cases!(faults: a_failure_with_a_call_under_way_ends_all,);
}
