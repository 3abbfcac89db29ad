//! Schedules without a flush: their order is 1F1B over all steps, and each micro-batch keeps its version of the weights.

use proptest::prelude::*;

use super::super::analysis::formula;
use super::super::{
    Instruction, PipelineConfig, PipelineSchedule, ScheduleKind, StageTimes, simulate,
    unsupported_reason, validate, weight_versions,
};
use Instruction::{Update, UseWeights};
use ScheduleKind::{PipeDream, PipeDream2Bw, PipeDreamVerticalSync};

fn config(kind: ScheduleKind, stages: usize, microbatches: usize) -> PipelineConfig {
    PipelineConfig { kind, stages, microbatches, chunks: 1 }
}

fn configs() -> impl Strategy<Value = (PipelineConfig, usize)> {
    let kinds = prop::sample::select(ScheduleKind::UNFLUSHED.to_vec());
    (kinds, 2_usize..=8, 0_usize..=6, 1_usize..=12).prop_map(|(kind, stages, more, steps)| {
        let microbatches = if kind == PipeDream2Bw { stages - 1 + more } else { 1 };
        (config(kind, stages, microbatches), steps)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { rng_seed: prop::test_runner::RngSeed::Fixed(5), ..ProptestConfig::with_cases(300) })]

    /// The peaks and the time are those of 1F1B with as many micro-batches, so there is one bubble in all steps.
    #[test]
    fn all_steps_have_one_bubble((config, steps) in configs()) {
        let schedule = PipelineSchedule::over_steps(&config, steps).unwrap();
        prop_assert_eq!(schedule.steps(), steps);
        let all = PipelineConfig { microbatches: steps * config.microbatches, ..config };
        for (rank, peak) in validate(&schedule).unwrap().into_iter().enumerate() {
            prop_assert_eq!(peak, formula::peak(&all, rank));
        }
        let timeline = simulate(&schedule, &StageTimes::default()).unwrap();
        prop_assert_eq!(timeline.total(), formula::iteration_time(&all, &StageTimes::default()));
        prop_assert_eq!(timeline.bubble(), 3.0 * (config.stages - 1) as f64);
    }

    /// No rank stores more than it has memory for.
    #[test]
    fn versions_are_bounded((config, steps) in configs()) {
        let schedule = PipelineSchedule::over_steps(&config, steps).unwrap();
        for (rank, kept) in weight_versions(&schedule).unwrap().into_iter().enumerate() {
            let most = config.kind.stashed_versions(config.stages, rank) + 1;
            prop_assert!(kept <= most, "rank {rank}: {kept} of {most}");
            prop_assert!(steps < 2 * config.stages || kept == most, "rank {rank}: {kept} of {most}");
        }
    }
}

/// The first rank of two, by hand: a micro-batch's backward has the weights of its forward, one update ago.
#[test]
fn a_backward_goes_back_to_the_weights_of_its_forward() {
    let schedule = PipelineSchedule::over_steps(&config(PipeDream, 2, 1), 3).unwrap();
    let own = |rank: usize| -> Vec<String> {
        let list = schedule.instructions(rank).iter();
        let kept = list.filter(|one| one.is_of_weights() || one.microbatch_and_chunk().is_some());
        kept.map(ToString::to_string).collect()
    };
    let want = "Forward(microbatch 0, chunk 0); Forward(microbatch 1, chunk 0); \
                Backward(microbatch 0, chunk 0); Update(step 0); Forward(microbatch 2, chunk 0); \
                UseWeights(version 0); Backward(microbatch 1, chunk 0); Update(step 1); \
                UseWeights(version 1); Backward(microbatch 2, chunk 0); Update(step 2)";
    assert_eq!(own(0).join("; "), want);
    assert!(!own(1).iter().any(|one| one.starts_with("UseWeights")));
}

/// Versions of each kind in the fourth step of four stages.
#[test]
fn stages_use_the_versions_of_the_papers() {
    let versions = |kind: ScheduleKind| -> Vec<usize> {
        (0..4).map(|stage| kind.weights_version(4, stage, 3)).collect()
    };
    assert_eq!(versions(PipeDream), [0, 1, 2, 3]);
    assert_eq!(versions(PipeDreamVerticalSync), [0; 4]);
    assert_eq!(versions(PipeDream2Bw), [2; 4]);
}

/// Changes one rank's list of a sound schedule, and returns the checker's line.
fn refused(rank: usize, change: impl Fn(&mut Vec<Instruction>)) -> String {
    let sound = PipelineSchedule::over_steps(&config(PipeDream, 2, 1), 3).unwrap();
    let mut ranks = sound.ranks().to_vec();
    change(&mut ranks[rank]);
    let schedule = PipelineSchedule::from_instructions(ranks, 3, 1);
    let error = validate(&schedule).unwrap_err().to_string();
    assert!(!error.contains('\n'), "{error}");
    error
}

/// A change of a rank's instructions.
type Change<'a> = &'a dyn Fn(&mut Vec<Instruction>);

#[test]
fn wrong_versions_are_refused() {
    let at = |list: &[Instruction], wanted: Instruction| {
        list.iter().position(|found| *found == wanted).unwrap()
    };
    let cases: [(usize, Change, &[&str]); 7] = [
        (
            0,
            &|list| drop(list.remove(at(list, UseWeights { version: 0 }))),
            &["rank 0", "Backward(microbatch 1", "forward used version 0", "would use 1"],
        ),
        (
            0,
            &|list| {
                let place = at(list, UseWeights { version: 1 });
                list[place] = UseWeights { version: 3 };
            },
            &["UseWeights(version 3)", "the newest version is 2"],
        ),
        (
            0,
            &|list| drop(list.remove(at(list, Update { step: 2 }))),
            &["ends with version 1", "newest is 2"],
        ),
        (
            1,
            &|list| drop(list.remove(at(list, Update { step: 2 }))),
            &["rank 1 ends without an update", "microbatch 2"],
        ),
        (1, &|list| list.push(Update { step: 3 }), &["Update(step 3)", "no gradient since"]),
        (
            1,
            &|list| {
                let place = at(list, Update { step: 1 });
                list[place] = Update { step: 4 };
            },
            &["Update(step 4)", "the next step is 1"],
        ),
        // Both updates of the last two micro-batches in one.
        (
            1,
            &|list| {
                list.remove(at(list, Update { step: 1 }));
                let place = at(list, Update { step: 2 });
                list[place] = Update { step: 1 };
            },
            &["rank 1 updates by microbatch 2 in step 1, rank 0 in step 2"],
        ),
    ];
    for (rank, change, parts) in cases {
        let error = refused(rank, change);
        parts.iter().for_each(|part| assert!(error.contains(part), "{part}: {error}"));
    }
}

#[test]
fn numbers_that_do_not_fit_are_refused() {
    for (kind, stages, microbatches, steps, part) in [
        (PipeDream, 1, 1, 1, "at least 2 stages; with 1 use 1f1b"),
        (PipeDream2Bw, 1, 4, 1, "at least 2 stages"),
        (PipeDream, 4, 2, 1, "after each microbatch, got 2"),
        (PipeDreamVerticalSync, 4, 8, 1, "use pipedream-2bw"),
        (PipeDream2Bw, 8, 6, 1, "at least 7 microbatches in a step for 8 stages"),
        (PipeDream, 4, 1, 0, "must be positive"),
        (PipeDream, 4, 1, 1 << 21, "more than"),
        (ScheduleKind::OneFOneB, 4, 1, 2, "empty after each step, got 2 steps"),
    ] {
        let config = config(kind, stages, microbatches);
        let error = PipelineSchedule::over_steps(&config, steps).unwrap_err().to_string();
        assert!(error.contains(part) && !error.contains('\n'), "{error}");
    }
    assert_eq!(unsupported_reason(&config(PipeDream2Bw, 8, 7)), None);
    let chunks = PipelineConfig { chunks: 2, ..config(PipeDream, 2, 1) };
    assert!(unsupported_reason(&chunks).unwrap().contains("pipedream has one chunk"));
    for kind in ScheduleKind::UNFLUSHED {
        assert_eq!(kind.to_string().parse::<ScheduleKind>().unwrap(), kind);
    }
}
