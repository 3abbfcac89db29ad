//! Faults end on every rank, in time, with an error that names the rank and the call.

use ferrotron_autograd::SharedFlatBuffer;
use ferrotron_parallel::collective::{Call, Group, Memory, Op, Reduction, World};
use ferrotron_tensor::{Category, DType, Device, ErrorKind, FlatBuffer, Result};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::values::make;
use crate::worlds::{Backend, TIMEOUT, all};

/// Long enough for calls to meet on a busy machine, short enough to wait for.
pub const SHORT: Duration = Duration::from_millis(800);

/// Long enough that a test which waits for it fails.
pub const LONG: Duration = TIMEOUT;

/// One all-reduce, from the same place for everybody.
pub fn reduce(group: &Group, dtype: DType, len: usize) -> Result<()> {
    group.all_reduce(make(dtype, &[len], |_| 1.0)?, Reduction::Sum)?.wait().map(drop)
}

/// Calls until the first error, which must come soon, and calls again. The reason must be the same, and the error must
/// say which call it was.
pub fn until_error(mut f: impl FnMut() -> Result<()>) -> Result<()> {
    let start = Instant::now();
    let error = loop {
        if let Err(error) = f() {
            break error;
        }
        assert!(start.elapsed() < LONG, "nobody has noticed");
    };
    assert_eq!(error.kind(), ErrorKind::Communication);
    let again = f().expect_err("later calls fail too");
    let (again, text) = (again.to_string(), error.to_string());
    let reason = &text[..text.rfind("; rank ").unwrap_or(text.len())];
    assert!(again.starts_with(reason), "first '{text}', then '{again}'");
    Err(error)
}

/// Every rank's error holds all of `words`.
pub fn check(errors: &[String], words: &[&str]) {
    for (rank, error) in errors.iter().enumerate() {
        for word in words {
            assert!(error.contains(word), "rank {rank} does not say '{word}': {error}");
        }
    }
}

/// Ranks call what `odd` says on rank 2 and an all-reduce of 1000 f32 elsewhere, after one good call.
fn one_differs(backend: Backend, odd: impl Fn(&Group) -> Result<()> + Sync) -> Vec<String> {
    backend.errors(4, LONG, |world| {
        let group = world.group("dp", &all(&world))?;
        reduce(&group, DType::F32, 10)?;
        let mut first = true;
        until_error(|| {
            if std::mem::take(&mut first) && world.rank() == 2 {
                odd(&group)
            } else {
                reduce(&group, DType::F32, 1000)
            }
        })
    })
}

pub fn a_different_operation_is_named(backend: Backend) {
    let errors = one_differs(backend, |group| {
        group.reduce_scatter(make(DType::F32, &[1000], |_| 1.0)?, Reduction::Sum)?.wait().map(drop)
    });
    check(
        &errors,
        &["rank 2", "group dp", "call 2", "all_reduce of 1000", "reduce_scatter of 1000"],
    );
}

pub fn a_different_dtype_is_named(backend: Backend) {
    let errors = one_differs(backend, |group| reduce(group, DType::F64, 1000));
    check(&errors, &["rank 2", "group dp", "call 2", "1000 x f32", "1000 x f64", "faults.rs"]);
}

pub fn a_different_length_is_named(backend: Backend) {
    let errors = one_differs(backend, |group| reduce(group, DType::F32, 999));
    check(&errors, &["rank 2", "group dp", "call 2", "1000 x f32", "999 x f32"]);
}

pub fn swapped_calls_are_named(backend: Backend) {
    let errors = backend.errors(2, LONG, |world| {
        let group = world.group("tp", &all(&world))?;
        let x = || make(DType::F32, &[64], |_| 1.0);
        let mut round = 0;
        until_error(|| {
            round += 1;
            // The same but for the line that they are called from.
            let x = x()?;
            if (round + world.rank()).is_multiple_of(2) {
                let work = group.all_reduce(x, Reduction::Sum)?;
                work.wait().map(drop)
            } else {
                group.all_reduce(x, Reduction::Sum)?.wait().map(drop)
            }
        })
    });
    check(
        &errors,
        &["group tp", "call 1", "all_reduce of 64 x f32 at", "rank 0 calls", "rank 1 calls"],
    );
}

pub fn swapped_groups_are_named(backend: Backend) {
    let errors = backend.errors(2, SHORT, |world| {
        let (a, b) = (world.group("a", &[0, 1])?, world.group("b", &[0, 1])?);
        // Each rank waits in one group for what the other will do later: a deadlock.
        let group = if world.rank() == 0 { a } else { b };
        until_error(|| reduce(&group, DType::F32, 5))
    });
    check(&errors, &["did not enter call 1 of group", "called nothing in this group"]);
}

pub fn a_late_rank_is_named(backend: Backend) {
    let start = Instant::now();
    let errors = backend.errors(4, SHORT, |world| {
        let group = world.group("dp", &all(&world))?;
        reduce(&group, DType::F32, 10)?;
        reduce(&group, DType::F32, 11)?;
        if world.rank() == 3 {
            std::thread::sleep(SHORT * 2);
        }
        until_error(|| reduce(&group, DType::F32, 1024))
    });
    assert!(start.elapsed() >= SHORT);
    check(
        &errors,
        &[
            "all_reduce: rank 3 did not enter call 3 of group dp (all_reduce of 1024 x f32 at",
            "faults.rs:",
            "within 800ms",
            "its last was all_reduce of 11 x f32",
            "(call 2)",
        ],
    );
}

pub fn a_missing_message_is_named(backend: Backend) {
    let errors = backend.errors(3, SHORT, |world| {
        let group = world.group("pp", &all(&world))?;
        if world.rank() == 1 {
            return until_error(|| {
                group.recv(make(DType::BF16, &[6], |_| 0.0)?, 2)?.wait().map(drop)
            });
        }
        // The others wait elsewhere.
        let pair = world.group("pair", &[0, 2])?;
        if world.rank() == 0 {
            std::thread::sleep(SHORT / 2);
        }
        until_error(|| reduce(&pair, DType::F32, 5))
    });
    // Ranks 0 and 2 continue until rank 1 gives up.
    check(&errors, &["recv: rank 2 did not enter the send of message 1 of group pp", "6 x bf16"]);
}

pub fn a_message_of_another_kind_is_named(backend: Backend) {
    for (dtype, len) in [(DType::F32, 7), (DType::BF16, 6)] {
        let errors = backend.errors(2, LONG, |world| {
            let group = world.group("pp", &[0, 1])?;
            until_error(|| {
                if world.rank() == 0 {
                    return group.send(make(dtype, &[len], |_| 0.0)?, 1)?.wait();
                }
                group.recv(make(DType::F32, &[6], |_| 0.0)?, 0)?.wait().map(drop)
            })
        });
        // A sender need not wait for its receiver, so it is the receiver that finds out.
        let sent = format!("rank 0 calls send of {len} x {dtype} at");
        check(&errors, &["recv: ", &sent, "rank 1 calls recv of 6 x f32 at", "message 1", "pp"]);
    }
}

pub fn scattered_parts_have_the_dtype_of_the_whole(backend: Backend) {
    backend.run(2, |world| {
        let group = world.group("dp", &all(&world))?;
        let whole = make(DType::F32, &[4], |_| 1.0)?;
        let part = make(DType::U32, &[2], |_| 0.0)?;
        let error = group.scatter(Some(whole), part, 4, world.rank()).err().expect("refused");
        assert_eq!(error.kind(), ErrorKind::DType);
        assert!(error.to_string().contains("parts of f32 cannot be u32"), "{error}");
        Ok(())
    });
}

pub fn a_rank_without_the_group_is_named(backend: Backend) {
    let errors = backend.errors(3, SHORT, |world| {
        if world.rank() == 2 {
            let other = world.group("other", &[2, 0]);
            return until_error(|| {
                other.as_ref().map_err(clone).and_then(|g| reduce(g, DType::F32, 5))
            });
        }
        let group = world.group("cp", &all(&world));
        until_error(|| group.as_ref().map_err(clone).and_then(|g| reduce(g, DType::F32, 5)))
    });
    check(&errors, &["rank", "group"]);
    assert!(errors.iter().any(|e| e.contains("has not made")), "{errors:?}");
}

fn clone(error: &ferrotron_tensor::Error) -> ferrotron_tensor::Error {
    ferrotron_tensor::Error::communication("", error.to_string())
}

pub fn a_panic_ends_all(backend: Backend) {
    let errors = backend.errors(3, LONG, |world: World| {
        let group = world.group("dp", &all(&world))?;
        reduce(&group, DType::F32, 10)?;
        assert!(world.rank() != 1, "the weather is bad");
        until_error(|| reduce(&group, DType::F32, 10))
    });
    check(&errors, &["rank 1", "panicked", "the weather is bad"]);
}

/// A call that can only end when the failure of the rank that made it is told.
pub fn a_failure_with_a_call_under_way_ends_all(backend: Backend) {
    for panics in [true, false] {
        let start = Instant::now();
        let errors = backend.errors(2, LONG, |world: World| {
            let group = world.group("pp", &[0, 1])?;
            let other = 1 - world.rank();
            group.barrier().wait()?; // rank 0 is in a call from here on
            let recv = || group.recv(make(DType::F32, &[3], |_| 0.0)?, other);
            if world.rank() == 1 {
                let _under_way = recv()?;
                assert!(!panics, "the weather is bad");
                return Err(ferrotron_tensor::Error::io("data", "the weather is bad"));
            }
            until_error(|| recv()?.wait().map(drop))
        });
        assert!(start.elapsed() < LONG / 2, "nobody was told for {:?}", start.elapsed());
        check(
            &errors[..1],
            &["rank 1", "the weather is bad", "; rank 0 was in ", " of group pp ("],
        );
    }
}

pub fn a_call_that_panics_is_named(backend: Backend) {
    let errors = backend.errors(2, LONG, |world| {
        let group = world.group("dp", &all(&world))?;
        let bare = Mutex::new(None);
        let group = group.map_collectives(&|collective| {
            *bare.lock().unwrap() = Some(collective.clone());
            collective
        });
        if world.rank() == 1 {
            return until_error(|| group.barrier().wait());
        }
        let bare = bare.lock().unwrap().take().expect("a group of two");
        let site = std::panic::Location::caller();
        // Rows of nothing: what a group never asks for.
        let call = Call { op: Op::Barrier, dtype: DType::U8, len: 0, unit: 0, site };
        until_error(|| bare.start(call, Memory::default()).wait().map(drop))
    });
    check(&errors, &["barrier: panicked: ", "zero; rank 0 was in call 1 of group dp (barrier of"]);
}

pub fn an_error_ends_all(backend: Backend) {
    let errors = backend.errors(3, LONG, |world| {
        let group = world.group("dp", &all(&world))?;
        reduce(&group, DType::F32, 10)?;
        if world.rank() == 1 {
            return Err(ferrotron_tensor::Error::io("data", "no such file"));
        }
        until_error(|| reduce(&group, DType::F32, 10))
    });
    check(&errors, &["no such file"]);
    assert!(errors[0].contains("rank 1 ended with an error"), "{}", errors[0]);
}

pub fn a_rank_that_leaves_early_is_named(backend: Backend) {
    let results = backend.try_run(3, LONG, |world| {
        let group = world.group("dp", &all(&world))?;
        reduce(&group, DType::F32, 10)?;
        if world.rank() == 1 {
            return Ok(());
        }
        until_error(|| reduce(&group, DType::F32, 10))
    });
    assert!(results[1].is_ok());
    for rank in [0, 2] {
        let error = results[rank].as_ref().expect_err("rank 1 has left").to_string();
        for word in ["rank 1 has left", "call 2 of group dp"] {
            assert!(error.contains(word), "rank {rank} does not say '{word}': {error}");
        }
    }
}

pub fn a_tensor_that_holds_a_flat_is_named(backend: Backend) {
    let errors = backend.errors(2, LONG, |world| {
        let group = world.group("dp", &all(&world))?;
        let ranges = [("tok_emb.weight".to_string(), vec![8])];
        let flat = FlatBuffer::new(&Device::cpu(1)?, DType::F32, Category::Gradients, &ranges)?;
        let flat = SharedFlatBuffer::new(flat);
        group.all_reduce_flat(&flat, Reduction::Sum).wait()?;
        let _held = (world.rank() == 0).then(|| flat.lock().unwrap().tensor(0));
        until_error(|| group.all_reduce_flat(&flat, Reduction::Sum).wait())
    });
    check(&errors, &["all_reduce", "tok_emb.weight", "rank 0 was in call 2 of group dp"]);
}

pub fn impossible_groups_and_roots_are_refused(backend: Backend) {
    backend.run(2, |world| {
        for (ranks, word) in [
            (vec![0, 1, 2], "only 2 ranks"),
            (vec![world.rank(), world.rank()], "occurs twice"),
            (vec![1 - world.rank()], "is not among them"),
        ] {
            let error = world.group("odd", &ranks).expect_err(word);
            assert_eq!(error.kind(), ErrorKind::Config);
            assert!(error.to_string().contains(word), "{error}");
        }
        Ok(())
    });
    let errors = backend.errors(2, LONG, |world| {
        let group = world.group("all", &all(&world))?;
        until_error(|| group.broadcast(make(DType::F32, &[3], |_| 1.0)?, 2)?.wait().map(drop))
    });
    check(&errors, &["broadcast", "rank 2 is not among the group's 2"]);
}
