//! Processes that do not belong to a simulated job, and connect to its ranks all the same.

use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{sleep, timeout};

use super::faults::Stranger;
use super::host::Host;
use crate::collective::host::rendezvous::Encryption;
use crate::collective::host::rendezvous::auth::Secret;
use crate::collective::host::rendezvous::connect::Connector;
use crate::collective::host::rendezvous::frame::{Introduction, Purpose};
use crate::collective::host::rendezvous::network::Network;
use crate::collective::tree;

/// Time for which a stranger waits for an answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// Connects to a rank.
pub async fn visit(host: Host, rank: usize, kind: Stranger) {
    let Some(address) = host.address_of(rank) else { return };
    let child = tree::children(rank, usize::MAX).start;
    let introduced = async |secret: &str, job_id: &str, incarnation, purpose| {
        let secret = Secret::new(Some(secret), Encryption::BetweenHosts);
        let connector = Connector { network: Network::Simulated(host.clone()), secret };
        let job_id = Some(job_id.to_string());
        let introduction = Introduction { job_id, rank: child, incarnation, purpose };
        let _ = timeout(PATIENCE, connector.connect_once(address, &introduction)).await;
    };
    let join = Purpose::Join { size: 16, port: 1 };
    match kind {
        Stranger::Silent => {
            let mut connections = Vec::new();
            for _ in 0..200 {
                connections.push(timeout(PATIENCE, host.connect(address)).await);
            }
            sleep(PATIENCE).await;
        }
        Stranger::Noise | Stranger::Version => {
            if let Ok(Ok(mut connection)) = timeout(PATIENCE, host.connect(address)).await {
                let noise = host.random::<300>();
                let is_noise = matches!(kind, Stranger::Noise);
                let bytes = if is_noise { &noise[..] } else { b"ferrojob99" };
                let _ = connection.write_all(bytes).await;
                let _ = timeout(PATIENCE, connection.read_to_end(&mut Vec::new())).await;
            }
        }
        Stranger::Secret => introduced("barley", "A", None, join).await,
        Stranger::OtherJob => introduced("sesame", "B", None, join).await,
        Stranger::Earlier => {
            introduced("sesame", "A", Some(1), Purpose::Child).await;
            introduced("sesame", "A", Some(1), Purpose::Pipe { group: 5000 }).await;
        }
    }
}
