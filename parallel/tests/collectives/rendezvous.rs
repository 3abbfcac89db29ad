//! How ranks come together over a network, and who cannot disturb them.

use ferrotron_parallel::collective::{RankConfig, Reduction, Transport, World, run_rank_process};
use ferrotron_tensor::{DType, ErrorKind, Result};
use std::io::{Read, Write};
use std::net::TcpStream;
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
        check("all_reduce", &y, |_| n)?;
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

#[test]
fn strays_neither_join_nor_disturb() {
    let config = rank_config(0, 3, TIMEOUT, Transport::Tcp);
    let rank = |rank| RankConfig { rank, ..config.clone() };
    let garbage: Vec<u8> = (0..100_000_u32).map(|i| ((i * 7919) >> 3) as u8).collect();
    scope(|scope| {
        let mut ranks = vec![scope.spawn(|| run_rank_process(&rank(0), work))];
        let mut open = Vec::new();
        // Before the others come, and again while they work.
        for other in 1..=2 {
            for text in [&garbage[..], b"GET / HTTP/1.1\r\n\r\n", b"ferrojob01", b"ferrojob99", b""]
            {
                let mut stream = stray(&config);
                // Rank 0 may have hung up already.
                let _ = stream.write_all(text);
                open.push(stream);
            }
            // Knows how to speak but not the secret.
            let wrong = RankConfig { secret: Some("open barley".into()), ..rank(other) };
            let error = run_rank_process(&wrong, work).expect_err("the secret is wrong");
            assert!(error.to_string().contains("secret"), "{error}");
            let none = RankConfig { secret: None, ..rank(other) };
            run_rank_process(&none, work).expect_err("there is no secret");
            ranks.push(scope.spawn(move || run_rank_process(&rank(other), work)));
        }
        for (rank, thread) in ranks.into_iter().enumerate() {
            thread.join().unwrap().unwrap_or_else(|error| panic!("rank {rank}: {error}"));
        }
        // Whoever said something wrong was hung up on; nobody was told anything but a random number.
        for mut stream in open {
            let mut told = Vec::new();
            let _ = stream.read_to_end(&mut told);
            assert!(told.len() <= 32, "told {told:?}");
        }
    });
}

#[test]
fn a_proof_cannot_be_reflected() {
    let config = rank_config(0, 2, TIMEOUT, Transport::Tcp);
    scope(|scope| {
        let ranks = [0, 1].map(|rank| {
            let config = RankConfig { rank, ..config.clone() };
            scope.spawn(move || {
                if rank == 1 {
                    sleep(SHORT); // after the stray
                }
                run_rank_process(&config, work)
            })
        });
        // What rank 0 would accept it never says first, so there is nothing to send back.
        let mut stream = stray(&config);
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        stream.write_all(b"ferrojob01").unwrap();
        stream.write_all(&[7; 32]).unwrap();
        let mut random = [0; 32];
        stream.read_exact(&mut random).unwrap();
        stream.write_all(&random).unwrap();
        assert_eq!(stream.read(&mut [0; 1]).unwrap_or(0), 0, "rank 0 answered a wrong proof");
        for rank in ranks {
            rank.join().unwrap().unwrap();
        }
    });
}

#[test]
fn missing_ranks_are_named() {
    let config = rank_config(0, 4, SHORT, Transport::Auto);
    let errors = scope(|scope| {
        let ranks = [0, 2].map(|rank| {
            let config = RankConfig { rank, ..config.clone() };
            scope.spawn(move || run_rank_process(&config, work).expect_err("two are missing"))
        });
        ranks.map(|rank| rank.join().unwrap().to_string())
    });
    for error in errors {
        assert!(error.contains("ranks [1, 3] of 4 did not come within 700ms"), "{error}");
    }
}

#[test]
fn a_rank_without_rank_0_gives_up() {
    let start = Instant::now();
    let error = run_rank_process(&rank_config(1, 2, SHORT, Transport::Auto), work).unwrap_err();
    assert!(error.to_string().contains("no connection to rank 0 at 127.0.0.1:"), "{error}");
    assert!(start.elapsed() < SHORT * 5, "{:?}", start.elapsed());
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
fn other_machines_need_a_secret() {
    let config = rank_config(0, 2, SHORT, Transport::Auto);
    // An address for documentation (RFC 5737): it is nobody's.
    let config = RankConfig { master: "192.0.2.1".into(), secret: None, ..config };
    let error = run_rank_process(&config, work).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("give the job a secret"), "{error}");
}
