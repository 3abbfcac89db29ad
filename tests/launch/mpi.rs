//! MPI as the backend of collectives: the same losses as with our own transports.

use super::*;

/// Layouts of four ranks in which every kind of call occurs.
const LAYOUTS: [&str; 6] = [
    "--zero-stage 0",
    "--zero-stage 3",
    "--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 1",
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
    "--pipeline-model-parallel-size 2 --zero-stage 2 --num-layers 4 --num-virtual-stages-per-pipeline-rank 2",
    "--context-parallel-size 2 --optimizer muon --zero-stage 1",
];

#[test]
fn layouts_have_the_losses_of_our_own_transports() {
    let folder = folder_with_text();
    let path = folder.path();
    let Some(mpirun) = tool("mpirun") else { return };
    for (number, layout) in LAYOUTS.into_iter().enumerate() {
        let train = format!("{MODEL} --dtype f64 --train-iters 3 {layout}");
        let own = command(path, &format!("{train} --nproc 4 --save own{number}"));
        succeeded(finished(own));
        let save = format!("--distributed-backend mpi --save mpi{number}");
        let mpi = command(path, &format!("{train} {save}"));
        let text = succeeded(finished(behind(&mpirun, MPIRUN, path, &mpi)));
        assert_eq!(text.matches("collectives go through Open MPI").count(), 1, "{text}");
        let [own, mpi] = ["own", "mpi"].map(|backend| path.join(format!("{backend}{number}")));
        assert_eq!(metrics(&mpi).len(), 3);
        assert_same(layout, &mpi, &own, 1e-13);
    }
    // What MPI has trained is resumed by our own transports, in another layout.
    let resumed = "train --load mpi2 --save mpi2 --nproc 2 --tensor-model-parallel-size 1 \
        --sequence-parallel=false --train-iters 4";
    succeeded(finished(command(path, resumed)));
}

#[test]
fn ranks_that_mpi_has_not_started_are_refused_in_a_line() {
    let folder = folder_with_text();
    let words = format!("{MODEL} --save a --distributed-backend mpi --nproc 2");
    let output = finished(command(folder.path(), &words));
    let (_, message) = texts(&output);
    assert!(!output.status.success() && message.lines().count() == 1, "{message}");
    assert!(message.contains("leave --nproc out, and put mpirun -n N in front"), "{message}");
}
