//! The trace of several processes.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::{MODEL, command, finished, folder_with_text, succeeded};

/// Beginning and end of an event, in microseconds.
type Time = (f64, f64);

fn read(path: &Path) -> Vec<Value> {
    let trace: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    trace["traceEvents"].as_array().unwrap().clone()
}

fn time(event: &Value) -> Time {
    let begin = event["ts"].as_f64().unwrap();
    (begin, begin + event["dur"].as_f64().unwrap())
}

/// Both ends are read from one clock and written with three digits behind the point.
const ROUNDING: f64 = 0.002;

fn within(inner: Time, outer: Time) -> bool {
    outer.0 - ROUNDING <= inner.0 && inner.1 <= outer.1 + ROUNDING
}

fn apart(a: Time, b: Time) -> bool {
    a.1 <= b.0 + ROUNDING || b.1 <= a.0 + ROUNDING
}

/// Asserts that the trace at `path` has `steps` of 4 ranks, tensor 2 x pipeline 2 with `instructions` computations a
/// step. It has one clock, nested events, and calls one after another, reached by their arrows.
pub fn check(path: &Path, steps: &[u64], instructions: usize) {
    let events = read(path);
    let of = |phase: &str| -> Vec<&Value> { events.iter().filter(|e| e["ph"] == phase).collect() };
    let complete = of("X");
    let ranks: BTreeSet<u64> = complete.iter().map(|e| e["pid"].as_u64().unwrap()).collect();
    assert_eq!(ranks, BTreeSet::from([0, 1, 2, 3]));
    let name = |e: &&&Value| e["name"] == "process_name" && e["pid"] == 3;
    assert_eq!(of("M").iter().find(name).unwrap()["args"]["name"], "rank 3, tp 1, pp 1");

    for rank in ranks {
        let category = |category: &str| -> Vec<&Value> {
            let wanted = |e: &&&Value| e["pid"] == rank && e["cat"] == category;
            complete.iter().filter(wanted).copied().collect()
        };
        let traced = category("step");
        let numbers: Vec<u64> =
            traced.iter().map(|e| e["args"]["step"].as_u64().unwrap()).collect();
        assert_eq!(numbers, steps, "rank {rank}");
        let computations =
            category("instruction").iter().filter(|e| !e["args"]["chunk"].is_null()).count();
        assert_eq!(computations, steps.len() * instructions, "rank {rank}");
        for kind in ["module", "forward", "backward", "optimizer", "wait", "collective"] {
            assert!(!category(kind).is_empty(), "rank {rank} has no {kind}");
        }
        for kind in ["module", "forward", "backward", "optimizer"] {
            for event in category(kind) {
                let inside = traced.iter().any(|step| within(time(event), time(step)));
                assert!(inside, "rank {rank}: {event} is in no step");
            }
        }
        for event in category("collective") {
            let text = |name: &str| event["args"][name].as_str().unwrap_or_default().to_string();
            assert!(text("site").contains(".rs:") && !text("group").is_empty(), "{event}");
            assert!(
                event["args"]["queued"].as_f64().unwrap() <= time(event).0 + ROUNDING,
                "{event}"
            );
        }
    }

    let mut tracks: BTreeMap<(u64, u64), Vec<Time>> = BTreeMap::new();
    for event in &complete {
        let track = (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap());
        tracks.entry(track).or_default().push(time(event));
    }
    for ((rank, track), mut times) in tracks {
        times.sort_by(|a, b| a.0.total_cmp(&b.0).then(b.1.total_cmp(&a.1)));
        // The events that enclose the present one. Calls of one group enclose nothing.
        let mut open: Vec<Time> = Vec::new();
        for now in times {
            while open.last().is_some_and(|last| apart(*last, now)) {
                open.pop();
            }
            let nested = open.last().is_none_or(|last| track == 0 && within(now, *last));
            assert!(nested, "rank {rank}, track {track}: {now:?} crosses {:?}", open.last());
            open.push(now);
        }
    }

    let ends = |phase: &str| -> BTreeSet<u64> {
        of(phase).iter().map(|e| e["id"].as_u64().unwrap()).collect()
    };
    assert_eq!(ends("s"), ends("f"));
    assert_eq!(ends("s").len(), complete.iter().filter(|e| e["cat"] == "collective").count());

    // An all-gather of two ranks cannot be over on one before it has begun on the other: one clock for all.
    let calls = |rank: u64| -> Vec<Time> {
        let wanted = |e: &&&Value| e["pid"] == rank && e["args"]["group"] == "tp";
        complete.iter().filter(wanted).map(|e| time(e)).collect()
    };
    let (first, second) = (calls(0), calls(1));
    assert_eq!(first.len(), second.len());
    for (a, b) in first.iter().zip(&second) {
        assert!(!(a.1 + ROUNDING < b.0 || b.1 + ROUNDING < a.0), "{a:?} and {b:?} are one call");
    }
}

#[test]
fn the_slowest_rank_of_each_phase_is_in_the_metrics() {
    let folder = folder_with_text();
    let path = folder.path();
    let words = format!("{MODEL} --save run --train-iters 6 --nproc 2 --log-straggler");
    succeeded(finished(command(path, &format!("{words} --log-interval 3"))));
    let text = std::fs::read_to_string(path.join("run/metrics.jsonl")).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 6);
    for (line, step) in lines.iter().zip(1..) {
        for phase in ["compute", "communication", "data"] {
            let found = &line["stragglers"][phase];
            assert_eq!(found.is_object(), step % 3 == 0, "step {step}: {line}");
            if found.is_object() {
                assert!(found["rank"].as_u64().unwrap() < 2, "{found}");
                let [ms, mean] = ["ms", "mean_ms"].map(|name| found[name].as_f64().unwrap());
                assert!(0.0 <= mean && mean <= ms && ms < 60e3, "{found}");
            }
        }
    }
}
