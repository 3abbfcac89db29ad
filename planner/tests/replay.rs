//! Replays of schedules with known durations: bubbles, sums of the parts, overlap.

use ferrotron_parallel::pipeline::{
    PipelineConfig, PipelineSchedule, ScheduleKind, StageTimes, formula,
};
use ferrotron_planner::cluster::{AttentionKernels, OptimizerPasses, Software};
use ferrotron_planner::program::Program;
use ferrotron_planner::simulate::{Replay, simulate};
use ferrotron_planner::stage_time::StageTime;
use ferrotron_planner::steps::{Block, GroupFacts, MessageCost, Part, Step, Traffic};

const SOFTWARE: Software = Software {
    attention: AttentionKernels::Fused,
    overlap_grad_reduce: true,
    overlap_messages: true,
    scatter_gather: true,
    optimizer: OptimizerPasses::Fused,
    sequence_first: false,
    copies_gradients: false,
};

fn schedules() -> impl Iterator<Item = PipelineConfig> {
    let sizes = [(1, 3, 1), (2, 4, 1), (4, 8, 1), (4, 8, 3), (3, 6, 2), (8, 16, 2)];
    sizes.into_iter().flat_map(|(stages, microbatches, chunks)| {
        let fits = move |kind: &ScheduleKind| (*kind == ScheduleKind::Interleaved) == (chunks > 1);
        ScheduleKind::FLUSHED.into_iter().filter(fits).map(move |kind| PipelineConfig {
            kind,
            stages,
            microbatches,
            chunks,
        })
    })
}

fn replayed(config: &PipelineConfig, times: [f64; 4], marks: bool) -> Replay {
    let schedule = PipelineSchedule::new(config).unwrap();
    let programs: Vec<Program> =
        (0..config.stages).map(|stage| Program::uniform(&schedule, stage, times)).collect();
    let programs: Vec<&Program> = programs.iter().collect();
    simulate(&schedule, &programs, SOFTWARE, None, marks).unwrap()
}

#[test]
fn the_bubble_is_that_of_the_papers() {
    let times =
        StageTimes { forward: 3.0, backward_input: 4.0, backward_weight: 2.0, communication: 0.0 };
    for config in schedules() {
        let each = [3.0, 6.0, 4.0, 2.0].map(|seconds| seconds / config.chunks as f64);
        let found = replayed(&config, each, false);
        let want = formula::iteration_time(&config, &times);
        assert!((found.seconds / want - 1.0).abs() < 1e-12, "{config:?}: {} {want}", found.seconds);
        let bubble: f64 = found.stages.iter().map(|stage| stage.bubble).sum();
        let want = formula::bubble(&config, &times) * config.stages as f64;
        assert!((bubble - want).abs() < 1e-9, "{config:?}: {bubble} {want}");
    }
}

#[test]
fn steps_without_a_flush_have_one_bubble() {
    for kind in ScheduleKind::UNFLUSHED {
        let microbatches = if kind == ScheduleKind::PipeDream2Bw { 5 } else { 1 };
        let config = PipelineConfig { kind, stages: 4, microbatches, chunks: 1 };
        let schedule = PipelineSchedule::over_steps(&config, 6).unwrap();
        let programs: Vec<Program> =
            (0..4).map(|stage| Program::uniform(&schedule, stage, [3.0, 6.0, 0.0, 0.0])).collect();
        let programs: Vec<&Program> = programs.iter().collect();
        let found = simulate(&schedule, &programs, SOFTWARE, None, false).unwrap();
        assert_eq!(found.seconds, 9.0 * (6 * microbatches + 3) as f64, "{kind}");
    }
}

#[test]
fn the_parts_add_up_and_the_instructions_are_the_executors() {
    for config in schedules() {
        let found = replayed(&config, [0.3, 0.7, 0.4, 0.2], true);
        let schedule = PipelineSchedule::new(&config).unwrap();
        for (stage, time) in found.stages.iter().enumerate() {
            assert!((time.total() / found.seconds - 1.0).abs() < 1e-12, "{config:?}: {time:?}");
            let replayed = found.timeline.ranks[stage].iter().map(|span| &span.instruction);
            assert!(replayed.eq(schedule.instructions(stage)), "{config:?}");
        }
        let instructions = found.marks.iter().filter(|mark| mark.category == "instruction");
        assert_eq!(instructions.count(), schedule.ranks().iter().flatten().count());
    }
}

/// One rank with one group, whose calls take 3 s beside kernels of 2 s, and a share of their multiprocessors.
fn overlapped(software: Software, taken_by_calls: f64) -> StageTime {
    let config =
        PipelineConfig { kind: ScheduleKind::OneFOneB, stages: 1, microbatches: 1, chunks: 1 };
    let schedule = PipelineSchedule::new(&config).unwrap();
    let start =
        |number| Step::Start { group: 0, number, seconds: 3.0, operation: "all_reduce", bytes: 1 };
    let kernels = Step::Compute(2.0, Part::Products);
    let waits = [0, 1].map(|number| Step::Wait { group: 0, number });
    let steps = [vec![start(0), kernels.clone(), start(1), kernels], waits.to_vec()].concat();
    let group = GroupFacts {
        name: "dp-cp".to_string(),
        traffic: Traffic::Data,
        leaves_node: true,
        stages: 1,
    };
    let mut program = Program::uniform(&schedule, 0, [0.0; 4]);
    program.behind = Block { steps, launches: Vec::new() };
    program.groups = vec![group];
    program.taken_by_calls = taken_by_calls;
    let replay = simulate(&schedule, &[&program], software, None, false).unwrap();
    assert_eq!(replay.seconds, replay.stages[0].total());
    replay.stages[0].clone()
}

#[test]
fn calls_run_beside_kernels_and_one_after_another() {
    let time = overlapped(SOFTWARE, 0.0);
    assert_eq!((time.exposed[Traffic::Data as usize], time.hidden(Traffic::Data)), (2.0, 4.0));
    // Kernels of 2 s take 2.5 beside calls that take a fifth of the multiprocessors.
    let time = overlapped(SOFTWARE, 0.2);
    assert_eq!((time.computing[0], time.exposed[Traffic::Data as usize]), (5.0, 1.0));
    let time = overlapped(Software { overlap_grad_reduce: false, ..SOFTWARE }, 0.2);
    assert_eq!((time.exposed[Traffic::Data as usize], time.hidden(Traffic::Data)), (6.0, 0.0));
}

#[test]
fn a_sender_waits_for_messages_that_are_not_overlapped() {
    let config =
        PipelineConfig { kind: ScheduleKind::OneFOneB, stages: 2, microbatches: 4, chunks: 1 };
    let schedule = PipelineSchedule::new(&config).unwrap();
    let program = |stage| {
        let mut program = Program::uniform(&schedule, stage, [3.0, 6.0, 0.0, 0.0]);
        program.messages = [MessageCost { seconds: 0.5, ..MessageCost::default() }; 2];
        program
    };
    let programs = [program(0), program(1)];
    let exposed = |overlap_messages| {
        let software = Software { overlap_messages, ..SOFTWARE };
        let found =
            simulate(&schedule, &[&programs[0], &programs[1]], software, None, false).unwrap();
        assert!((found.stages[0].total() / found.seconds - 1.0).abs() < 1e-12);
        [0, 1].map(|stage: usize| found.stages[stage].exposed[Traffic::Pipeline as usize])
    };
    // The first stage sends four activations, the second four gradients, and each waits for what it needs.
    let (beside, alone) = (exposed(true), exposed(false));
    assert!(alone[0] >= 4.0 * 0.5 && alone[1] >= 4.0 * 0.5, "{alone:?}");
    assert!(beside[0] < alone[0] && beside[1] < alone[1], "{beside:?} {alone:?}");
}

#[test]
fn a_missing_computation_is_an_error() {
    let config =
        PipelineConfig { kind: ScheduleKind::OneFOneB, stages: 1, microbatches: 2, chunks: 1 };
    let schedule = PipelineSchedule::new(&config).unwrap();
    let error = simulate(&schedule, &[&Program::default()], SOFTWARE, None, false).unwrap_err();
    assert!(error.to_string().contains("was not recorded"), "{error}");
}
