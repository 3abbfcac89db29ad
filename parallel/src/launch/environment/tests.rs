//! Rank and job of a process, under every launcher.

use super::*;

fn read(variables: &str) -> Result<Option<RankEnvironment>> {
    let pair = |word: &str| {
        let (name, value) = word.split_once('=').unwrap();
        (name.to_string(), value.to_string())
    };
    RankEnvironment::from_variables(&variables.split_whitespace().map(pair).collect())
}

/// rank/size, local rank/local size, address, port to meet at if it does not follow from the job's id, the id.
fn text(found: &RankEnvironment) -> String {
    let RankEnvironment { rank, world_size, local_rank, local_size, master_addr, .. } = found;
    let local = local_size.map_or("?".to_string(), |size| size.to_string());
    let port = match (found.rendezvous_port(None), found.master_port) {
        (Ok(port), Some(_)) => format!(":{port}"),
        (Ok(_), None) => String::new(),
        (Err(_), _) => " no port".to_string(),
    };
    let job = found.job_id.as_ref().map_or(String::new(), |job| format!(" [{job}]"));
    format!("{rank}/{world_size} {local_rank}/{local} {master_addr}{port}{job}")
}

#[test]
fn ranks_of_every_launcher() {
    for (variables, want) in [
        (
            "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=node7 MASTER_PORT=29500",
            "5/8 1/4 node7:29501",
        ),
        // torchrun with an agent, and with two, whose restarts are their own.
        (
            "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_PORT=4000 GROUP_WORLD_SIZE=1 \
             TORCHELASTIC_RUN_ID=5f-6 TORCHELASTIC_RESTART_COUNT=3",
            "1/2 1/2 127.0.0.1:4001 [torchrun 5f-6 restart 3]",
        ),
        (
            "RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=a MASTER_PORT=4000 \
             GROUP_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=none TORCHELASTIC_RESTART_COUNT=3",
            "1/2 0/1 a:4001 [torchrun none]",
        ),
        // `launch`, and by hand with a secret.
        (
            "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_PORT=4000 FERROTRON_JOB_SECRET=sesame",
            "1/2 1/2 127.0.0.1:4001 [of secret 1f518e2d]",
        ),
        (
            "RANK=0 WORLD_SIZE=2 MASTER_ADDR=a FERROTRON_JOB_SECRET=sesame",
            "0/2 0/? a [of secret 1f518e2d]",
        ),
        // On one machine, what torchrun calls it does not matter.
        (
            "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=box.lan MASTER_PORT=4000",
            "1/2 1/2 127.0.0.1:4001",
        ),
        ("RANK=0 WORLD_SIZE=1", "0/1 0/1 127.0.0.1 no port"),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1", "0/2 0/? 10.0.0.1 no port"),
        // mpirun on one machine, and on two.
        (
            "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=3 \
             OMPI_COMM_WORLD_LOCAL_SIZE=4 PMIX_RANK=3 PMIX_NAMESPACE=prterun-vm-12922@1",
            "3/4 3/4 127.0.0.1 [Open MPI prterun-vm-12922@1]",
        ),
        (
            "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 \
             OMPI_COMM_WORLD_LOCAL_SIZE=2 MASTER_ADDR=node1 MASTER_PORT=7000",
            "3/4 1/2 node1:7001",
        ),
        // mpirun in a job of Slurm: the tasks that start the ranks have numbers of their own.
        (
            "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 \
             OMPI_COMM_WORLD_LOCAL_SIZE=2 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[1-2] \
             SLURM_JOB_ID=12 OMPI_MCA_ess_base_jobid=1586954241",
            "3/4 1/2 n1 [Open MPI 1586954241]",
        ),
        ("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2", "1/2 1/2 127.0.0.1 no port"),
        (
            "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 I_MPI_HYDRA_UUID=5857-de48",
            "1/2 1/2 127.0.0.1 [MPI 5857-de48]",
        ),
        (
            "PMI_RANK=6 PMI_SIZE=8 PALS_LOCAL_RANKID=2 PALS_APID=a6-7 MASTER_ADDR=x1000",
            "6/8 2/? x1000 [MPI a6-7]",
        ),
        ("PMIX_RANK=1 PMI_SIZE=2 MASTER_ADDR=a", "1/2 0/? a no port"),
        // srun over four nodes, on one, and with its pmix plugin.
        (
            "SLURM_PROCID=5 SLURM_NTASKS=7 SLURM_LOCALID=1 SLURM_NODEID=2 \
             SLURM_STEP_TASKS_PER_NODE=2(x3),1 SLURM_STEP_NODELIST=node[01-04,7] \
             SLURM_JOB_ID=1234 SLURM_STEP_ID=0",
            "5/7 1/2 node01 [Slurm 1234.0]",
        ),
        (
            "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1 SLURM_NODEID=0 \
             SLURM_STEP_TASKS_PER_NODE=2 SLURM_STEP_NODELIST=node3 SLURM_JOB_ID=1236 SLURM_STEP_ID=2 \
             SLURM_ARRAY_JOB_ID=1234 SLURM_ARRAY_TASK_ID=7",
            "1/2 1/2 127.0.0.1 [Slurm 1236.2 (1234_7)]",
        ),
        (
            "PMIX_RANK=1 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_STEP_NODELIST=a,b \
             PMIX_NAMESPACE=slurm.pmix.12.0",
            "1/2 0/? a [MPI slurm.pmix.12.0]",
        ),
        // A script that says some of it in torchrun's names and lets srun count.
        (
            "WORLD_SIZE=4 MASTER_ADDR=head MASTER_PORT=1234 SLURM_PROCID=3 SLURM_NTASKS=4 SLURM_LOCALID=1",
            "3/4 1/? head:1235",
        ),
        // RANK goes before SLURM_PROCID, as in Megatron-LM.
        (
            "RANK=2 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=head \
             SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_ID=0",
            "2/4 0/2 head no port",
        ),
        // One task in an interactive step of an allocation for four.
        ("SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_STEP_NUM_TASKS=1", "0/1 0/1 127.0.0.1 no port"),
    ] {
        let found = read(variables).unwrap_or_else(|error| panic!("{variables}: {error}"));
        assert_eq!(found.map(|found| text(&found)).as_deref(), Some(want), "{variables}");
    }
}

#[test]
fn a_process_that_nobody_has_started_as_a_rank() {
    for variables in [
        "",
        "WORLD_SIZE=1",
        "RANK= WORLD_SIZE=",
        "MASTER_ADDR=a MASTER_PORT=1",
        "SLURM_NTASKS=4 SLURM_JOB_NODELIST=n[1-2]",
        // The batch script itself.
        "SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_JOB_NODELIST=gnode[10,20]",
    ] {
        assert_eq!(read(variables).unwrap(), None, "{variables}");
    }
}

#[test]
fn what_is_missing_or_contradicts_itself_is_named() {
    for (variables, named) in [
        ("WORLD_SIZE=4", &["WORLD_SIZE is 4", "set RANK"][..]),
        ("RANK=1", &["RANK is 1", "set WORLD_SIZE"]),
        ("PMIX_RANK=1", &["PMIX_RANK is 1", "set WORLD_SIZE"]),
        ("RANK=4 WORLD_SIZE=4", &["RANK is 4", "WORLD_SIZE is 4"]),
        ("RANK=-1 WORLD_SIZE=4", &["RANK '-1'"]),
        ("RANK=0 WORLD_SIZE=four", &["WORLD_SIZE 'four'"]),
        ("RANK=0 WORLD_SIZE=0", &["RANK is 0", "WORLD_SIZE is 0"]),
        ("RANK=0 WORLD_SIZE=2", &["set MASTER_ADDR"]),
        (
            "RANK=0 WORLD_SIZE=2 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2",
            &["LOCAL_RANK is 2", "LOCAL_WORLD_SIZE is 2"],
        ),
        (
            "RANK=0 WORLD_SIZE=2 LOCAL_RANK=2 LOCAL_WORLD_SIZE=4",
            &["LOCAL_WORLD_SIZE is 4", "WORLD_SIZE is 2"],
        ),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=http", &["MASTER_PORT 'http'"]),
        (
            "WORLD_SIZE=8 MASTER_ADDR=a SLURM_PROCID=1 SLURM_NTASKS=4 SLURM_STEP_ID=0",
            &["WORLD_SIZE is 8", "SLURM_NTASKS", "SLURM_PROCID", "is 4"],
        ),
        ("SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_NODELIST=n[", &["SLURM_STEP_NODELIST 'n['"]),
        ("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2", &["set MASTER_ADDR"]),
    ] {
        let error = read(variables).unwrap_err().to_string();
        assert!(!error.contains('\n'), "{error}");
        for part in named {
            assert!(error.contains(part), "{variables}: {part} is missing in: {error}");
        }
    }
}

#[test]
fn the_port_is_the_one_asked_for_or_behind_torchruns() {
    let last = read("RANK=0 WORLD_SIZE=1 MASTER_PORT=65535").unwrap().unwrap();
    assert_eq!(last.rendezvous_port(Some(77)).unwrap(), 77);
    let error = last.rendezvous_port(None).unwrap_err().to_string();
    assert!(error.contains("65535") && error.contains("--rendezvous-port"), "{error}");
    let error = last.rendezvous_port(Some(0)).unwrap_err().to_string();
    assert!(error.contains("got 0"), "{error}");
}

/// The system may give the port after one that was free to any connection before rank 0 listens there.
#[test]
fn ranks_of_one_machine_meet_at_no_port_of_connections() {
    let port = |master: u16, node: usize| {
        let one = "RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=a TORCHELASTIC_RUN_ID=5f";
        let variables = format!("{one} LOCAL_WORLD_SIZE={node} MASTER_PORT={master}");
        read(&variables).unwrap().unwrap().rendezvous_port(None).unwrap()
    };
    let first = first_connection_port();
    assert_eq!(port(4000, 2), 4001);
    assert_eq!(port(first - 2, 2), first - 1);
    assert_eq!(port(first - 1, 2), job_id::port(&format!("torchrun 5f {}", first - 1)));
    assert_eq!(port(65_535, 2), job_id::port("torchrun 5f 65535"));
    // Ranks of other machines may have another range.
    assert_eq!(port(first, 1), first + 1);
}

#[test]
fn a_job_without_a_port_has_one_of_its_id_or_is_told_the_remedies() {
    let port = |variables: &str| read(variables).unwrap().unwrap().rendezvous_port(None);
    let task = "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_NODELIST=a,b SLURM_STEP_ID=0";
    assert_eq!(port(&format!("{task} SLURM_JOB_ID=1234")).unwrap(), 22_371);
    assert_ne!(port(&format!("{task} SLURM_JOB_ID=1235")).unwrap(), 22_371);
    let error = port("RANK=1 WORLD_SIZE=2 MASTER_ADDR=a").unwrap_err().to_string();
    for remedy in ["--rendezvous-port", "MASTER_PORT", "FERROTRON_JOB_SECRET"] {
        assert!(error.contains(remedy), "{error}");
    }
    assert!(!error.contains('\n'), "{error}");
}
