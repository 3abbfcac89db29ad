//! Ranks meet over a network, and strangers cannot disturb them.

use ferrotron_parallel::collective::{RankConfig, Reduction, Transport, World, run_rank_process};
use ferrotron_tensor::{DType, ErrorKind, Result};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Barrier;
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use crate::values::{check, make};
use crate::worlds::{TIMEOUT, all, rank_config};

const SHORT: Duration = Duration::from_millis(700);

/// A few all-reduces.
fn work(world: World) -> Result<()> {
    let group = world.group("all", &all(&world))?;
    let n = world.size() as f64;
    for _ in 0..20 {
        let y = group.all_reduce(make(DType::F32, &[5000], |_| 1.0)?, Reduction::Sum)?.wait()?;
        check("all_reduce", &y, 5000, |_| n)?;
        sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// A connection to rank 0, as soon as it listens.
fn stray(config: &RankConfig) -> TcpStream {
    let start = Instant::now();
    loop {
        match TcpStream::connect((config.master.as_str(), config.port)) {
            Ok(stream) => return stream,
            Err(error) => assert!(start.elapsed() < TIMEOUT, "{error}"),
        }
        sleep(Duration::from_millis(5));
    }
}

/// Whether the other end has hung up, having said nothing.
fn is_hung_up(mut stream: &TcpStream) -> bool {
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    match stream.read(&mut [0]) {
        Ok(read) => read == 0,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

#[test]
fn strays_neither_join_nor_disturb() {
    let config = rank_config(0, 3, TIMEOUT, Transport::Tcp);
    let rank = |rank| RankConfig { rank, ..config.clone() };
    let garbage: Vec<u8> = (0..100_000_u32).map(|i| ((i * 7919) >> 3) as u8).collect();
    scope(|scope| {
        let mut ranks = vec![scope.spawn(|| run_rank_process(&rank(0), work))];
        let mut open = Vec::new();
        // Rank 0 waits for others all the while.
        for other in 1..=2 {
            for text in [&garbage[..], b"GET / HTTP/1.1\r\n\r\n", b"ferrojob99"] {
                let mut stream = stray(&config);
                // Rank 0 may have hung up already.
                let _ = stream.write_all(text);
                assert!(is_hung_up(&stream), "{:?}...", &text[..10]);
            }
            // These are waited for.
            for text in [&b"ferrojob03"[..], b""] {
                let mut stream = stray(&config);
                stream.write_all(text).unwrap();
                open.push(stream);
            }
            // Knows how to speak but not the secret, and is told so at once.
            let wrong = RankConfig { secret: Some("open barley".into()), ..rank(other) };
            let none = RankConfig { secret: None, ..rank(other) };
            for stranger in [wrong, none] {
                let start = Instant::now();
                let error = run_rank_process(&stranger, work).expect_err("the secret is wrong");
                assert!(error.to_string().contains("refuses this rank's proof"), "{error}");
                assert!(start.elapsed() < TIMEOUT / 2, "{:?}", start.elapsed());
            }
            ranks.push(scope.spawn(move || run_rank_process(&rank(other), work)));
        }
        for (rank, thread) in ranks.into_iter().enumerate() {
            thread.join().unwrap().unwrap_or_else(|error| panic!("rank {rank}: {error}"));
        }
    });
}

/// Whether rank 0 can be reached by its port at each of two addresses of this machine.
fn listens_at(config: &RankConfig) -> [bool; 2] {
    drop(stray(config));
    ["127.0.0.1", "127.0.0.2"].map(|host| TcpStream::connect((host, config.port)).is_ok())
}

#[test]
fn only_a_job_with_a_secret_and_a_name_listens_beyond_its_address() {
    let secret = Some("open sesame");
    // 127.1 is no address, to `IpAddr`, but a name that the system knows as 127.0.0.1.
    for (master, secret, everywhere) in [
        ("127.1", secret, true),
        ("127.1", None, false),
        ("127.1", Some(""), false),
        ("127.0.0.1", secret, false),
        ("localhost", secret, false),
    ] {
        let config = rank_config(0, 2, TIMEOUT, Transport::Tcp);
        let secret = secret.map(str::to_string);
        let config = RankConfig { master: master.to_string(), secret, ..config };
        scope(|scope| {
            let ranks = [0, 1].map(|rank| {
                let config = RankConfig { rank, ..config.clone() };
                scope.spawn(move || {
                    if rank == 1 {
                        assert_eq!(listens_at(&config), [true, everywhere], "{config:?}");
                    }
                    run_rank_process(&config, work)
                })
            });
            for rank in ranks {
                rank.join().unwrap().unwrap();
            }
        });
    }
}

#[test]
fn ranks_may_know_the_machine_of_rank_0_by_different_addresses() {
    let config = rank_config(0, 4, TIMEOUT, Transport::Tcp);
    scope(|scope| {
        let ranks =
            [(0, "127.1"), (1, "127.1"), (2, "127.2"), (3, "127.3")].map(|(rank, master)| {
                let config = RankConfig { rank, master: master.to_string(), ..config.clone() };
                scope.spawn(move || run_rank_process(&config, work))
            });
        for rank in ranks {
            rank.join().unwrap().unwrap();
        }
    });
}

#[test]
fn one_rank_without_shared_memory_is_enough_for_tcp() {
    let config = rank_config(0, 3, TIMEOUT, Transport::Auto);
    scope(|scope| {
        let ranks = [0, 1, 2].map(|rank| {
            let transport = if rank == 1 { Transport::Tcp } else { Transport::Auto };
            let config = RankConfig { rank, transport, ..config.clone() };
            scope.spawn(move || run_rank_process(&config, work))
        });
        for rank in ranks {
            rank.join().unwrap().unwrap();
        }
    });
}

#[test]
fn no_timeout_is_too_long() {
    let config = rank_config(0, 2, Duration::MAX, Transport::Auto);
    scope(|scope| {
        let ranks = [0, 1].map(|rank| {
            let config = RankConfig { rank, ..config.clone() };
            scope.spawn(move || run_rank_process(&config, work))
        });
        for rank in ranks {
            rank.join().unwrap().unwrap();
        }
    });
}

#[test]
fn impostors_of_the_same_job_are_refused() {
    let config = rank_config(0, 2, TIMEOUT, Transport::Tcp);
    scope(|scope| {
        let first = scope.spawn(|| run_rank_process(&config, work));
        let refused = |rank, size| {
            let other = RankConfig { rank, size, ..config.clone() };
            run_rank_process(&other, work).expect_err("there is no place").to_string()
        };
        let error = refused(1, 5);
        assert!(error.contains("rank 1 believes in 5 ranks, rank 0 in 2"), "{error}");
        let error = refused(2, 2);
        assert!(error.contains("there is no rank 2 of 2"), "{error}");
        run_rank_process(&RankConfig { rank: 1, ..config.clone() }, work).unwrap();
        first.join().unwrap().unwrap();
    });
}

#[test]
fn a_rank_of_another_job_is_refused_at_once_and_disturbs_nobody() {
    let job = |id: Option<&str>| Some(id?.to_string());
    let config = rank_config(0, 2, TIMEOUT, Transport::Tcp);
    let config = RankConfig { job_id: job(Some("Slurm 12.0")), ..config };
    scope(|scope| {
        let first = scope.spawn(|| run_rank_process(&config, work));
        for (id, named) in
            [(Some("Slurm 13.0"), "belongs to job 'Slurm 13.0'"), (None, "a job without an id")]
        {
            let start = Instant::now();
            // Also for a rank of it that rank 0 still waits for.
            let other = RankConfig { rank: 1, job_id: job(id), ..config.clone() };
            let error = run_rank_process(&other, work).expect_err("another job").to_string();
            let port = format!("at 127.0.0.1:{}", config.port);
            for part in [named, "that of job 'Slurm 12.0'", "--rendezvous-port", &port] {
                assert!(error.contains(part), "no '{part}' in '{error}'");
            }
            assert!(start.elapsed() < TIMEOUT / 2, "{:?}", start.elapsed());
        }
        run_rank_process(&RankConfig { rank: 1, ..config.clone() }, work).unwrap();
        first.join().unwrap().unwrap();
    });
}

#[test]
fn a_rank_that_comes_to_a_complete_job_is_refused() {
    let config = rank_config(0, 2, TIMEOUT, Transport::Tcp);
    let (met, done) = (Barrier::new(3), Barrier::new(3));
    scope(|scope| {
        let ranks = [0, 1].map(|rank| {
            let config = RankConfig { rank, ..config.clone() };
            let (met, done) = (&met, &done);
            scope.spawn(move || {
                run_rank_process(&config, |world| {
                    met.wait();
                    done.wait();
                    work(world)
                })
            })
        });
        met.wait();
        let late = RankConfig { rank: 1, ..config.clone() };
        let error = run_rank_process(&late, work).expect_err("the job is complete").to_string();
        done.wait();
        assert!(
            error.contains("has all its ranks") && error.contains("--rendezvous-port"),
            "{error}"
        );
        ranks.into_iter().for_each(|rank| rank.join().unwrap().unwrap());
    });
}

#[test]
fn a_port_that_is_taken_is_named_with_the_remedy() {
    let config = rank_config(0, 2, TIMEOUT, Transport::Tcp);
    let _other = std::net::TcpListener::bind(("127.0.0.1", config.port)).unwrap();
    let error = run_rank_process(&config, work).unwrap_err().to_string();
    let port = format!("cannot listen at 127.0.0.1:{}", config.port);
    for part in [&port, "probably another job", "another --rendezvous-port"] {
        assert!(error.contains(part), "no '{part}' in '{error}'");
    }
}

#[test]
fn other_machines_need_a_secret() {
    let config = rank_config(0, 2, SHORT, Transport::Auto);
    for secret in [None, Some(String::new())] {
        // An address for documentation (RFC 5737), which no machine has.
        let config = RankConfig { master: "192.0.2.1".into(), secret, ..config.clone() };
        let error = run_rank_process(&config, work).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config);
        assert!(error.to_string().contains("give the job a secret"), "{error}");
    }
}
