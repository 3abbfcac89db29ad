//! Every operation in groups of all and of some ranks, against what it is defined to give. Starts itself under `mpirun`.

use ferrotron_nn::Axis;
use ferrotron_parallel::collective::{Group, Reduction, run_rank_process};
use ferrotron_parallel::launch::RankEnvironment;
use ferrotron_parallel::mesh::{Mesh, ParallelDims};
use ferrotron_parallel::tensor_parallel::SequenceParallel;
use ferrotron_tensor::{DType, Device, Error, Result, Tensor};
use std::process::Command;
use std::time::Duration;

const RANKS: usize = 4;
const TIMEOUT: Duration = Duration::from_secs(60);
const CASES: [&str; 3] = ["every call", "a rank leaves", "a rank is late"];

fn main() {
    if std::env::var_os("OMPI_COMM_WORLD_SIZE").is_some() {
        if let Err(error) = rank() {
            eprintln!("{error}");
            std::process::exit(1);
        }
        return;
    }
    for case in CASES {
        println!("test {case} ...");
        let output = Command::new("mpirun")
            .args(["--allow-run-as-root", "--oversubscribe", "-n", "4"])
            .arg(std::env::current_exe().expect("this program"))
            .env("CASE", case)
            .output()
            .expect("mpirun, of openmpi-bin");
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.success(), case == CASES[0], "{told}");
        let words: &[&str] = match case {
            "a rank leaves" => &["rank 3 leaves"],
            "a rank is late" => {
                &["did not end within 2s; MPI cannot end one call, so the job ends"]
            }
            _ => &[],
        };
        for word in words {
            assert!(told.contains(word), "{told}");
        }
    }
    println!("{} passed", CASES.len());
}

fn rank() -> Result<()> {
    let found = RankEnvironment::from_variables(&std::env::vars().collect())?;
    let own = found.ok_or_else(|| Error::config("test", "no rank"))?;
    let config = own.rank_config(None, TIMEOUT)?;
    let case = std::env::var("CASE").expect("a case");
    run_rank_process(&config, |world| {
        let layout = ParallelDims::new(RANKS, 2, 1, 1)?; // tp 2, dp 2
        let mesh = Mesh::new(&world, layout, SequenceParallel::Off)?;
        let timeout = if case == "a rank is late" { Duration::from_secs(2) } else { TIMEOUT };
        let mesh = ferrotron_mpi::with_mpi(&mesh, timeout)?;
        match (case.as_str(), mesh.rank()) {
            ("a rank leaves", 3) => return Err(Error::value("test", "rank 3 leaves")),
            ("a rank is late", 3) => std::thread::sleep(TIMEOUT),
            ("every call", _) => return every_call(&mesh),
            _ => {}
        }
        all_reduce(mesh.world(), DType::F32, 8)
    })
}

fn every_call(mesh: &Mesh) -> Result<()> {
    let again = ferrotron_mpi::with_mpi(mesh, TIMEOUT).unwrap_err().to_string();
    assert!(again.contains("has initialised MPI before"), "{again}");
    let refused = mesh.world().broadcast(numbers(DType::F32, 2, 0)?, RANKS)?.wait();
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("rank 4 is not among the group's 4"), "{refused}");
    for group in [mesh.world(), mesh.axis(Axis::Tensor), mesh.axis(Axis::Data)] {
        for dtype in DType::ALL {
            for rows in [1, 7, 300_000] {
                all_reduce(group, dtype, rows)?;
                parts(group, dtype, rows)?;
                roots(group, dtype, rows)?;
            }
        }
        messages(group)?;
        group.barrier().wait()?;
    }
    apart(mesh)
}

/// A tensor of `rows` rows of two, with numbers below 8 that follow from `seed`.
fn numbers(dtype: DType, rows: usize, seed: usize) -> Result<Tensor> {
    let values: Vec<f64> = (0..2 * rows).map(|i| ((i * 5 + seed * 3) % 8) as f64).collect();
    Tensor::from_slice(&Device::cpu(1)?, &values, &[rows, 2])?.cast(dtype)
}

fn values(tensor: &Tensor) -> Result<Vec<f64>> {
    tensor.cast(DType::F64)?.to_vec::<f64>()
}

fn expect(what: &str, found: &Tensor, want: &[f64]) -> Result<()> {
    assert_eq!(values(found)?, want, "{what} of {found:?}");
    Ok(())
}

fn all(group: &Group, dtype: DType, rows: usize) -> Result<Vec<Vec<f64>>> {
    (0..group.size()).map(|rank| values(&numbers(dtype, rows, rank)?)).collect()
}

fn reduced(all: &[Vec<f64>], reduction: Reduction) -> Vec<f64> {
    let of = |i: usize| all.iter().map(move |own| own[i]);
    let one = |i| match reduction {
        Reduction::Sum => of(i).sum::<f64>(),
        Reduction::Max => of(i).fold(0.0, f64::max),
    };
    (0..all[0].len()).map(one).collect()
}

fn all_reduce(group: &Group, dtype: DType, rows: usize) -> Result<()> {
    for reduction in [Reduction::Sum, Reduction::Max] {
        let want = reduced(&all(group, dtype, rows)?, reduction);
        let own = numbers(dtype, rows, group.rank())?;
        expect("all_reduce", &group.all_reduce(own.copy()?, reduction)?.wait()?, &want)?;
        let part = group.local_range(rows);
        let found = group.reduce_scatter(own.copy()?, reduction)?.wait()?;
        expect("reduce_scatter", &found, &want[2 * part.start..2 * part.end])?;
        let root = group.size() - 1;
        let found = group.reduce(own, root, reduction)?.wait()?;
        if group.rank() == root {
            expect("reduce", &found, &want)?;
        }
    }
    Ok(())
}

fn parts(group: &Group, dtype: DType, rows: usize) -> Result<()> {
    let whole = numbers(dtype, rows, 9)?;
    let own = group.local_range(rows);
    let part = whole.narrow(0, own.start, own.len())?.copy()?;
    expect("all_gather", &group.all_gather(part.copy()?, rows)?.wait()?, &values(&whole)?)?;
    for root in 0..group.size() {
        let found = group.gather(part.copy()?, rows, root)?.wait()?;
        assert_eq!(found.is_some(), group.rank() == root);
        if let Some(found) = found {
            expect("gather", &found, &values(&whole)?)?;
        }
        let given = (group.rank() == root).then(|| whole.copy()).transpose()?;
        let place = Tensor::zeros(&Device::cpu(1)?, dtype, part.dims())?;
        expect("scatter", &group.scatter(given, place, rows, root)?.wait()?, &values(&part)?)?;
    }
    let found = group.all_to_all(numbers(dtype, rows, group.rank())?)?.wait()?;
    let want: Vec<f64> = all(group, dtype, rows)?
        .iter()
        .flat_map(|all| all[2 * own.start..2 * own.end].to_vec())
        .collect();
    expect("all_to_all", &found, &want)
}

fn roots(group: &Group, dtype: DType, rows: usize) -> Result<()> {
    for root in 0..group.size() {
        let found = group.broadcast(numbers(dtype, rows, group.rank())?, root)?.wait()?;
        expect("broadcast", &found, &values(&numbers(dtype, rows, root)?)?)?;
    }
    Ok(())
}

fn messages(group: &Group) -> Result<()> {
    let (rank, size) = (group.rank(), group.size());
    let (to, from) = ((rank + 1) % size, (rank + size - 1) % size);
    let found = group.send_recv(numbers(DType::F32, 9, rank)?, to, from)?.wait()?;
    expect("send_recv", &found, &values(&numbers(DType::F32, 9, from)?)?)?;
    // Two messages in a row keep their order.
    match rank {
        0 => {
            for seed in [1, 2] {
                group.send(numbers(DType::F64, 5, seed)?, size - 1)?.wait()?;
            }
        }
        last if last == size - 1 => {
            for seed in [1, 2] {
                let place = Tensor::zeros(&Device::cpu(1)?, DType::F64, &[5, 2])?;
                let found = group.recv(place, 0)?.wait()?;
                expect("recv", &found, &values(&numbers(DType::F64, 5, seed)?)?)?;
            }
        }
        _ => {}
    }
    Ok(())
}

/// A call that waits for another rank does not hold up another group of the same ranks.
fn apart(mesh: &Mesh) -> Result<()> {
    let call = |group: &Group| group.barrier(); // ranks compare the places of their calls
    let (first, then) = (mesh.dp_cp(), mesh.axis(Axis::Data));
    let waits = (mesh.axis(Axis::Data).rank() == 0).then(|| call(first));
    call(then).wait()?;
    waits.unwrap_or_else(|| call(first)).wait()
}
