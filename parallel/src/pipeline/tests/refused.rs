//! Schedules with one defect each, and the checker's messages.

use super::super::{
    Direction, Instruction, Message, PipelineConfig, PipelineSchedule, ScheduleKind, StageTimes,
    simulate, unsupported_reason, validate,
};
use Instruction::{Backward, BackwardInput, BackwardWeight, Exchange, Forward, Receive, Send};

fn message(direction: Direction, microbatch: usize, peer: usize) -> Message {
    Message { direction, microbatch, chunk: 0, peer }
}

fn output(microbatch: usize, peer: usize) -> Message {
    message(Direction::Forward, microbatch, peer)
}

fn gradient(microbatch: usize, peer: usize) -> Message {
    message(Direction::Backward, microbatch, peer)
}

fn forward(microbatch: usize) -> Instruction {
    Forward { microbatch, chunk: 0 }
}

fn backward(microbatch: usize) -> Instruction {
    Backward { microbatch, chunk: 0 }
}

/// 1F1B of two micro-batches on two ranks, by hand.
fn sound() -> [Vec<Instruction>; 2] {
    [
        vec![
            forward(0),
            Send(output(0, 1)),
            forward(1),
            Exchange { sends: vec![output(1, 1)], receives: vec![gradient(0, 1)] },
            backward(0),
            Receive(gradient(1, 1)),
            backward(1),
        ],
        vec![
            Receive(output(0, 0)),
            forward(0),
            backward(0),
            Exchange { sends: vec![gradient(0, 0)], receives: vec![output(1, 0)] },
            forward(1),
            backward(1),
            Send(gradient(1, 0)),
        ],
    ]
}

/// The checker's message after a change to the valid schedule.
#[track_caller]
fn refused(change: impl FnOnce(&mut [Vec<Instruction>; 2]), named: &[&str]) {
    let mut lists = sound();
    change(&mut lists);
    let schedule = PipelineSchedule::from_instructions(lists.to_vec(), 2, 1);
    let error = validate(&schedule).expect_err("the checker must refuse this").to_string();
    for name in named {
        assert!(error.contains(name), "does not name {name}: {error}");
    }
    assert!(!error.contains('\n'), "{error}");
    assert!(simulate(&schedule, &StageTimes::default()).is_err());
}

#[test]
fn the_sound_schedule_is_the_generated_one() {
    let [first, second] = sound();
    let by_hand = PipelineSchedule::from_instructions(vec![first, second], 2, 1);
    let peaks = validate(&by_hand).unwrap();
    assert_eq!(peaks.iter().map(|peak| peak.activations).collect::<Vec<_>>(), [2, 1]);
    let config =
        PipelineConfig { kind: ScheduleKind::OneFOneB, stages: 2, microbatches: 2, chunks: 1 };
    assert_eq!(PipelineSchedule::new(&config).unwrap(), by_hand);
}

#[test]
fn a_deadlock_names_every_rank_that_waits() {
    // Both ranks send first and receive afterwards: the classic deadlock that an exchange avoids.
    let unfused = |lists: &mut [Vec<Instruction>; 2]| {
        lists[0].splice(3..4, [Send(output(1, 1)), Receive(gradient(0, 1))]);
        lists[1].splice(3..4, [Send(gradient(0, 0)), Receive(output(1, 0))]);
    };
    refused(
        unfused,
        &[
            "deadlock",
            "rank 0, instruction 3, SendForward(microbatch 1, chunk 0, peer 1)",
            "rank 1, instruction 3, SendBackward(microbatch 0, chunk 0, peer 0)",
        ],
    );
    // It suffices if one side receives first.
    let mut lists = sound();
    unfused(&mut lists);
    lists[1].swap(3, 4);
    validate(&PipelineSchedule::from_instructions(lists.to_vec(), 2, 1)).unwrap();
}

#[test]
fn a_forgotten_microbatch_is_missed() {
    refused(
        |lists| {
            lists[0].truncate(5);
            lists[1].truncate(6);
        },
        &["rank 0 ends after 5", "without the backward of microbatch 1, chunk 0"],
    );
    refused(
        |lists| {
            lists[0] = vec![forward(0), Send(output(0, 1)), Receive(gradient(0, 1)), backward(0)];
            lists[1] = vec![Receive(output(0, 0)), forward(0), backward(0), Send(gradient(0, 0))];
        },
        &["without the forward of microbatch 1"],
    );
    refused(
        |lists| {
            lists[1].pop();
        },
        &["rank 1 ends", "sending the gradient of the input of microbatch 1"],
    );
    refused(
        |lists| {
            lists[0].remove(1);
        },
        &["rank 0 ends", "sending the output of microbatch 0"],
    );
}

#[test]
fn backwards_are_missed_unless_there_is_none() {
    let schedule = PipelineSchedule::forward_only(2, 3, 1).unwrap();
    assert!(!PipelineSchedule::from_instructions(sound().to_vec(), 2, 1).is_forward_only());
    let mut lists = schedule.ranks().to_vec();
    lists[1].push(backward(0));
    let error =
        validate(&PipelineSchedule::from_instructions(lists, 3, 1)).unwrap_err().to_string();
    assert!(error.contains("rank 0 ends") && error.contains("without the backward"), "{error}");
    for sizes in [[0, 1, 1], [1, 0, 1], [1, 1, 0], [1 << 11, 1 << 11, 2]] {
        let [stages, microbatches, chunks] = sizes;
        let error = PipelineSchedule::forward_only(stages, microbatches, chunks).unwrap_err();
        assert!(error.to_string().contains("microbatches"), "{error}");
    }
}

#[test]
fn swapped_messages_are_found() {
    // The receiver expects the gradients in the other order. Its backwards are swapped too, so that its own list is
    // valid.
    let swap = |lists: &mut [Vec<Instruction>; 2]| {
        lists[0][3] = Exchange { sends: vec![output(1, 1)], receives: vec![gradient(1, 1)] };
        lists[0][4] = backward(1);
        lists[0][5] = Receive(gradient(0, 1));
        lists[0][6] = backward(0);
    };
    refused(
        swap,
        &["rank 0, instruction 3", "ReceiveBackward(microbatch 1", "rank 1", "instruction 3"],
    );
    // As an exchange they could complete in any order, but a channel delivers in the order of sending.
    let (both, swapped) = (vec![output(0, 1), output(1, 1)], vec![output(1, 0), output(0, 0)]);
    refused(
        |lists| {
            lists[0].splice(
                0..4,
                [
                    forward(0),
                    forward(1),
                    Exchange { sends: both, receives: Vec::new() },
                    Receive(gradient(0, 1)),
                ],
            );
            lists[1] = vec![
                Exchange { sends: Vec::new(), receives: swapped },
                forward(0),
                backward(0),
                Send(gradient(0, 0)),
                forward(1),
                backward(1),
                Send(gradient(1, 0)),
            ];
        },
        &["rank 1, instruction 0", "next message of rank 0 is another one", "instruction 2"],
    );
    // A receive for another micro-batch leaves a forward without its input.
    refused(
        |lists| lists[1][0] = Receive(output(1, 0)),
        &["rank 1, instruction 1, Forward(microbatch 0, chunk 0)", "not been received"],
    );
}

#[test]
fn order_within_a_rank_is_checked() {
    refused(
        |lists| lists[1].swap(1, 2),
        &["rank 1, instruction 1, Backward(microbatch 0", "forward has not run"],
    );
    refused(
        |lists| lists[0].swap(3, 4),
        &["rank 0, instruction 3, Backward(microbatch 0", "gradient", "not been received"],
    );
    refused(|lists| lists[0].insert(1, forward(0)), &["instruction 1", "second forward"]);
    refused(|lists| lists[1].insert(3, backward(0)), &["instruction 3", "second backward"]);
    refused(|lists| lists[0].swap(0, 1), &["instruction 0", "SendForward", "not been computed"]);
    refused(|lists| lists[0].insert(2, Send(output(0, 1))), &["instruction 2", "second send"]);
    refused(|lists| lists[1].insert(1, Receive(output(0, 0))), &["1", "second receive"]);
}

#[test]
fn the_parts_of_a_backward_come_once_each_and_in_order() {
    let input = BackwardInput { microbatch: 1, chunk: 0 };
    let weight = BackwardWeight { microbatch: 1, chunk: 0 };
    let split = |parts: Vec<Instruction>| {
        move |lists: &mut [Vec<Instruction>; 2]| {
            lists[0].splice(6..7, parts);
        }
    };
    refused(split(vec![weight.clone(), input.clone()]), &["instruction 6", "input part"]);
    refused(split(vec![input.clone()]), &["without the weight part", "microbatch 1"]);
    refused(
        split(vec![input.clone(), weight.clone(), weight.clone()]),
        &["instruction 8", "already"],
    );
    refused(split(vec![backward(1), weight]), &["instruction 7", "already"]);
    refused(split(vec![input, backward(1)]), &["instruction 7", "second backward"]);
}

#[test]
fn numbers_out_of_range_and_foreign_ranks_are_refused() {
    refused(|lists| lists[0].push(forward(2)), &["2 microbatches"]);
    refused(|lists| lists[0][0] = Forward { microbatch: 0, chunk: usize::MAX }, &["1 chunks"]);
    refused(|lists| lists[0][1] = Send(output(0, 7)), &["instruction 1", "rank 1"]);
    refused(|lists| lists[1].push(Send(output(1, 0))), &["no neighbour"]);
    refused(|lists| lists[0].push(Send(gradient(1, 1))), &["no neighbour"]);
    for (ranks, microbatches, chunks) in [(0, 1, 1), (1, 0, 1), (1, 1, 0)] {
        let empty =
            PipelineSchedule::from_instructions(vec![Vec::new(); ranks], microbatches, chunks);
        assert!(validate(&empty).unwrap_err().to_string().contains("positive"));
    }
}

#[test]
fn combinations_without_sense_are_refused_in_one_place() {
    use ScheduleKind::{GPipe, Interleaved, Naive, OneFOneB, ZbH1};
    let cases: &[(ScheduleKind, usize, usize, usize, Option<&str>)] = &[
        (Naive, 1, 1, 1, None),
        (GPipe, 1, 5, 1, None),
        (OneFOneB, 8, 3, 1, None),
        (ZbH1, 8, 3, 1, None),
        (Interleaved, 2, 4, 3, None),
        (OneFOneB, 0, 1, 1, Some("positive, got 0, 1 and 1")),
        (OneFOneB, 1, 0, 1, Some("positive, got 1, 0 and 1")),
        (Interleaved, 2, 2, 0, Some("positive, got 2, 2 and 0")),
        (Naive, 4, 8, 2, Some("2 chunks need the interleaved schedule; naive")),
        (ZbH1, 4, 8, 2, Some("zb-h1 has one chunk")),
        (Interleaved, 4, 8, 1, Some("at least 2 chunks")),
        (Interleaved, 1, 8, 2, Some("at least 2 stages")),
        // A case of Megatron-LM's tests.
        (Interleaved, 4, 7, 2, Some("7 microbatches and 4 stages")),
        (GPipe, 1 << 20, 1 << 20, 1, Some("more than")),
        (GPipe, usize::MAX, usize::MAX, 1, Some("more than")),
    ];
    for &(kind, stages, microbatches, chunks, want) in cases {
        let config = PipelineConfig { kind, stages, microbatches, chunks };
        let got = unsupported_reason(&config);
        match want {
            None => assert_eq!(got, None, "{config:?}"),
            Some(want) => {
                let why = got.unwrap_or_else(|| panic!("{config:?} is not refused"));
                assert!(why.contains(want) && !why.contains('\n'), "{config:?}: {why}");
                assert!(PipelineSchedule::new(&config).unwrap_err().to_string().contains(want));
            }
        }
    }
    assert!("1f2b".parse::<ScheduleKind>().unwrap_err().to_string().contains("zb-h1"));
    for kind in ScheduleKind::FLUSHED {
        assert_eq!(kind.to_string().parse::<ScheduleKind>().unwrap(), kind);
    }
}

#[test]
fn times_must_make_sense() {
    let [first, second] = sound();
    let schedule = PipelineSchedule::from_instructions(vec![first, second], 2, 1);
    let zero =
        StageTimes { forward: 0.0, backward_input: 0.0, backward_weight: 0.0, communication: 1.0 };
    let refused = [
        zero,
        StageTimes { forward: -1.0, ..StageTimes::default() },
        StageTimes { backward_weight: f64::NAN, ..StageTimes::default() },
        StageTimes { communication: f64::INFINITY, ..StageTimes::default() },
    ];
    for times in refused {
        assert!(
            simulate(&schedule, &times).unwrap_err().to_string().contains("negative"),
            "{times:?}"
        );
    }
}
