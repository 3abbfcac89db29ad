//! Tests of generated schedules: the checker's proof, the papers' bubbles and peaks, and test cases of Megatron-LM
//! and DeepSpeed.

use proptest::prelude::*;

use super::super::analysis::formula;
use super::super::{
    Direction, Instruction, Message, PeakActivations, PipelineConfig, PipelineSchedule,
    ScheduleKind, StageTimes, simulate, validate,
};

fn config(kind: ScheduleKind, stages: usize, microbatches: usize, chunks: usize) -> PipelineConfig {
    PipelineConfig { kind, stages, microbatches, chunks }
}

/// Checks a schedule and compares peaks, total time and bubble with the formulas.
fn keeps_its_promises(config: &PipelineConfig, times: &StageTimes) {
    let schedule = PipelineSchedule::new(config).unwrap();
    let peaks = validate(&schedule).unwrap_or_else(|error| panic!("{config:?}: {error}"));
    for (rank, peak) in peaks.iter().enumerate() {
        assert_eq!(*peak, formula::peak(config, rank), "{config:?}, rank {rank}");
    }
    let timeline = simulate(&schedule, times).unwrap();
    let (total, want) = (timeline.total(), formula::iteration_time(config, times));
    // Every end time is a sum of at most this many durations.
    let operations = 3 * (config.stages + config.microbatches) * config.stages * config.chunks;
    let tolerance = operations as f64 * f64::EPSILON * want;
    assert!((total - want).abs() <= tolerance, "{config:?}, {times:?}: total {total}, want {want}");
    let (bubble, want) = (timeline.bubble(), formula::bubble(config, times));
    assert!(
        (bubble - want).abs() <= tolerance,
        "{config:?}, {times:?}: bubble {bubble}, want {want}"
    );
}

/// Random stages, micro-batches and chunks that the kind accepts.
fn configs() -> impl Strategy<Value = PipelineConfig> {
    let kinds = prop::sample::select(ScheduleKind::FLUSHED.to_vec());
    (kinds, 1_usize..=8, 1_usize..=24, 2_usize..=5).prop_map(|(kind, stages, count, chunks)| {
        match kind {
            ScheduleKind::Interleaved => {
                let stages = stages.max(2);
                config(kind, stages, stages * count.div_ceil(4), chunks)
            }
            _ => config(kind, stages, count, 1),
        }
    })
}

/// Random durations for which all formulas hold: the weight part is not longer than the others.
fn times() -> impl Strategy<Value = StageTimes> {
    (0.1_f64..3.0, 0.1_f64..3.0, 0.0_f64..=1.0).prop_map(|(forward, backward_input, share)| {
        StageTimes {
            forward,
            backward_input,
            backward_weight: share * forward.min(backward_input),
            communication: 0.0,
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { rng_seed: prop::test_runner::RngSeed::Fixed(3), ..ProptestConfig::with_cases(400) })]

    #[test]
    fn the_checker_passes_and_times_and_peaks_are_those_of_the_papers(
        config in configs(), times in times(),
    ) {
        keeps_its_promises(&config, &times);
    }

    /// Messages from one rank to another need no label, whichever way they go: with two stages both have an edge each way.
    #[test]
    fn two_ranks_list_all_their_messages_in_one_order(config in configs()) {
        let schedule = PipelineSchedule::new(&config).unwrap();
        for (from, to) in (0..config.stages).flat_map(|a| (0..config.stages).map(move |b| (a, b))) {
            let sends = schedule.instructions(from).iter().flat_map(Instruction::sends);
            let sent = sends.filter(|sent| sent.peer == to);
            let sent: Vec<_> = sent.filter_map(|sent| schedule.at_receiver(from, sent)).collect();
            let receives = schedule.instructions(to).iter().flat_map(Instruction::receives);
            let received: Vec<_> = receives.filter(|one| one.peer == from).copied().collect();
            assert_eq!(sent, received, "{config:?}, from {from} to {to}");
        }
    }

    #[test]
    fn unsplit_schedules_keep_their_bubble_for_any_times(
        config in configs(), forward in 0.0_f64..9.0, backward in 0.1_f64..9.0,
    ) {
        prop_assume!(!config.kind.splits_backward());
        let times = StageTimes { forward, backward_input: backward, backward_weight: 0.0, communication: 0.0 };
        keeps_its_promises(&config, &times);
    }

    /// All stages work at once. m forwards of v chunks and the way through the other stages take no longer than that,
    /// where the micro-batches fill groups of one for each rank.
    #[test]
    fn forwards_alone_fill_the_pipeline_and_keep_nothing(
        stages in 1_usize..=8, microbatches in 1_usize..=24, chunks in 1_usize..=4,
    ) {
        let schedule = PipelineSchedule::forward_only(stages, microbatches, chunks).unwrap();
        prop_assert!(schedule.is_forward_only());
        prop_assert_eq!(validate(&schedule).unwrap(), vec![PeakActivations::default(); stages]);
        let total = simulate(&schedule, &StageTimes::default()).unwrap().total() * chunks as f64;
        let most = if chunks == 1 { microbatches } else { microbatches.next_multiple_of(stages) * chunks };
        let (forwards, way) = (microbatches * chunks, stages - 1);
        prop_assert!((total.round() - total).abs() < 1e-9, "{total}");
        prop_assert!(total.round() as usize >= forwards + way, "{total}");
        prop_assert!(total.round() as usize <= most + way, "{total}");
    }

    #[test]
    fn zb_h1_is_never_slower_than_1f1b(
        stages in 1_usize..=8, microbatches in 1_usize..=24,
        forward in 0.0_f64..3.0, input in 0.1_f64..3.0, weight in 0.0_f64..3.0,
    ) {
        let times = StageTimes { forward, backward_input: input, backward_weight: weight, communication: 0.0 };
        let zb_h1 = config(ScheduleKind::ZbH1, stages, microbatches, 1);
        let total = simulate(&PipelineSchedule::new(&zb_h1).unwrap(), &times).unwrap().total();
        let one_f_one_b = PipelineConfig { kind: ScheduleKind::OneFOneB, ..zb_h1 };
        let least = formula::iteration_time(&zb_h1, &times);
        let most = formula::iteration_time(&one_f_one_b, &times);
        prop_assert!(total <= most * (1.0 + 1e-12), "{zb_h1:?}, {times:?}: {total} > {most}");
        prop_assert!(total >= least * (1.0 - 1e-12), "{zb_h1:?}, {times:?}: {total} < {least}");
    }
}

/// The papers' example, by hand: 4 stages, 8 micro-batches, t_f = t_b = t_w = 1.
#[test]
fn bubbles_of_four_stages_and_eight_microbatches() {
    use ScheduleKind::{GPipe, Interleaved, Naive, OneFOneB, ZbH1};
    let cases = [
        (Naive, 1, 72.0, [1, 1, 1, 1]),
        (GPipe, 1, 9.0, [8, 8, 8, 8]),
        (OneFOneB, 1, 9.0, [4, 3, 2, 1]),
        (Interleaved, 2, 4.5, [11, 9, 7, 5]),
        (ZbH1, 1, 3.0, [4, 4, 4, 4]),
    ];
    for (kind, chunks, bubble, peaks) in cases {
        let schedule = PipelineSchedule::new(&config(kind, 4, 8, chunks)).unwrap();
        let timeline = simulate(&schedule, &StageTimes::default()).unwrap();
        assert_eq!((timeline.ideal(), timeline.bubble()), (24.0, bubble), "{kind}");
        let got: Vec<usize> = validate(&schedule).unwrap().iter().map(|peak| peak.total).collect();
        assert_eq!(got, peaks, "{kind}");
    }
    // Table 2 of arXiv:2401.10241: rank i of p holds p - i activations and i weight parts, besides the one that runs.
    let schedule = PipelineSchedule::new(&config(ZbH1, 4, 8, 1)).unwrap();
    let peaks = validate(&schedule).unwrap();
    let want = [(4, 1), (3, 2), (2, 3), (1, 4)];
    let want =
        want.map(|(activations, deferred)| PeakActivations { activations, deferred, total: 4 });
    assert_eq!(peaks, want);
}

/// The first rank of figure 4 of arXiv:2104.04473, which numbers micro-batches from 1.
#[test]
fn the_interleaved_order_is_that_of_the_paper() {
    let schedule = PipelineSchedule::new(&config(ScheduleKind::Interleaved, 4, 8, 2)).unwrap();
    let order = |rank: usize| -> Vec<String> {
        let computations = schedule.instructions(rank).iter().filter_map(|instruction| {
            let (letter, microbatch, chunk) = super::super::analysis::text::parts(instruction)?;
            Some(format!("{letter}{}{}", microbatch + 1, ["", "'"][chunk]))
        });
        computations.collect()
    };
    let first = "F1 F2 F3 F4 F1' F2' F3' F4' F5 F6 F7 B1' F8 B2' F5' B3' F6' B4' F7' B1 F8' B2 \
                 B3 B4 B5' B6' B7' B8' B5 B6 B7 B8";
    assert_eq!(order(0).join(" "), first);
    assert!(
        order(3).join(" ").starts_with("F1 F2 F3 F4 F1' B1' F2' B2' F3' B3' F4' B4' F5 B1 F6 B2")
    );
}

/// Megatron-LM's table of pipeline sizes, micro-batches and chunks (test_schedules.py), with groups of as many
/// micro-batches as stages. On every rank each forward has a later backward, and no prefix has more backwards than
/// forwards.
#[test]
fn every_forward_has_a_later_backward() {
    for stages in [1, 2, 4, 8] {
        for microbatches in [8, 32] {
            for chunks in [1, 2, 4, 8] {
                let kind =
                    if chunks == 1 { ScheduleKind::OneFOneB } else { ScheduleKind::Interleaved };
                if stages == 1 && chunks > 1 {
                    continue; // refused
                }
                let schedule =
                    PipelineSchedule::new(&config(kind, stages, microbatches, chunks)).unwrap();
                validate(&schedule).unwrap();
                for rank in 0..stages {
                    let mut open = std::collections::HashSet::new();
                    let mut computations = 0;
                    for instruction in schedule.instructions(rank) {
                        match *instruction {
                            Instruction::Forward { microbatch, chunk } => {
                                assert!(open.insert((microbatch, chunk)));
                            }
                            Instruction::Backward { microbatch, chunk } => {
                                assert!(open.remove(&(microbatch, chunk)));
                            }
                            _ => continue,
                        }
                        computations += 1;
                    }
                    assert!(open.is_empty());
                    assert_eq!(computations, 2 * microbatches * chunks);
                }
            }
        }
    }
}

/// DeepSpeed's cases for 1F1B (test_pipe_schedule.py): 2 (m + p - 1) steps of equal length. No gradient leaves the
/// first stage and no activation the last, and max(2, min(p - rank, m)) buffers suffice.
#[test]
fn one_f_one_b_has_the_steps_and_buffers_of_deepspeed() {
    let times = StageTimes { backward_weight: 0.0, ..StageTimes::default() };
    for stages in 1..=8 {
        for microbatches in 1..=16 {
            let config = config(ScheduleKind::OneFOneB, stages, microbatches, 1);
            let schedule = PipelineSchedule::new(&config).unwrap();
            let steps = simulate(&schedule, &times).unwrap().total();
            assert_eq!(steps, (2 * (microbatches + stages - 1)) as f64, "{config:?}");
            for (rank, peak) in validate(&schedule).unwrap().iter().enumerate() {
                let instructions = schedule.instructions(rank).iter();
                let sends = |direction| {
                    let sends = instructions.clone().flat_map(|instruction| instruction.sends());
                    sends.filter(|message| message.direction == direction).count()
                };
                let backward = if rank == 0 { 0 } else { microbatches };
                let forward = if rank + 1 == stages { 0 } else { microbatches };
                assert_eq!(sends(Direction::Backward), backward, "{config:?}, rank {rank}");
                assert_eq!(sends(Direction::Forward), forward, "{config:?}, rank {rank}");
                assert!(peak.total <= (stages - rank).min(microbatches).max(2));
            }
        }
    }
}

/// Communication delays only the consumers of a tensor: a chain of 2 p - 1 computations waits 2 (p - 1) times.
#[test]
fn communication_takes_time_and_no_rank() {
    let config = config(ScheduleKind::Naive, 3, 2, 1);
    let times = StageTimes { communication: 0.25, ..StageTimes::default() };
    let timeline = simulate(&PipelineSchedule::new(&config).unwrap(), &times).unwrap();
    assert_eq!(timeline.total(), 2.0 * 3.0 * 3.0 + 2.0 * 4.0 * 0.25);
    assert_eq!(timeline.ideal(), 6.0);

    // A receive that was moved earlier does not delay computations before its consumer: without another message
    // between, each computation starts at once or when its tensor arrives.
    let config =
        PipelineConfig { kind: ScheduleKind::Interleaved, microbatches: 9, chunks: 4, ..config };
    let times = StageTimes { communication: 1.0, ..times };
    let schedule = PipelineSchedule::new(&config).unwrap();
    let timeline = simulate(&schedule, &times).unwrap();
    let ends: std::collections::HashMap<_, _> = (0..3)
        .flat_map(|rank| timeline.computations(rank).map(move |span| (rank, span)))
        .filter_map(|(rank, span)| {
            Some(((rank, schedule.produced(rank, &span.instruction)?), span.end))
        })
        .collect();
    for rank in 0..3 {
        let mut free = 0.0;
        for span in timeline.computations(rank) {
            let made = schedule.consumed(rank, &span.instruction).map(|message| {
                // The sender's name for the message: its chunk differs on the wrap-around link.
                let stage = schedule.virtual_stage(rank, message.chunk);
                let from = match message.direction {
                    Direction::Forward => stage - 1,
                    Direction::Backward => stage + 1,
                };
                let sender = Message { chunk: from / 3, peer: rank, ..message };
                ends[&(from % 3, sender)] + times.communication
            });
            assert_eq!(
                span.start,
                made.unwrap_or(0.0).max(free),
                "rank {rank}, {}",
                span.instruction
            );
            free = span.end;
        }
    }
}
