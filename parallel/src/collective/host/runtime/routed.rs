//! Headers and reductions along the route of a call.

use std::ops::Range;

use crate::collective::Op;
use crate::collective::host::algorithms::combine::ReduceKernels;
use crate::collective::host::algorithms::{pairwise, ring, tree};
use crate::collective::host::transport::header::Header;
use crate::collective::host::transport::peer_channels::PeerChannels;
use crate::collective::host::transport::piece::ChannelResult;
use crate::collective::routes::Route;

/// An all-reduce or a reduce-scatter to `parts`, which are ranges of `bytes`, behind its headers.
pub async fn reduce(
    links: &mut PeerChannels,
    op: Op,
    route: Route,
    parts: &[Range<usize>],
    bytes: &mut [u8],
    kernels: &ReduceKernels,
) -> ChannelResult<()> {
    let (n, gathers) = (links.size(), matches!(op, Op::AllReduce(_)));
    match (route, gathers) {
        (Route::Direct, _) => {
            pairwise::reduce_scatter_small(links, parts, bytes, kernels).await?;
            if gathers { pairwise::all_gather_small(links, parts, bytes).await } else { Ok(()) }
        }
        (Route::Tree, true) => tree::all_reduce(links, bytes, kernels).await,
        (Route::Tree, false) => {
            let own = parts[links.rank].clone();
            tree::reduce_scatter(links, &own, bytes, kernels).await
        }
        (Route::Ring, true) => ring::ring(links, parts, ring::all_reduce(n), bytes, kernels).await,
        (Route::Ring, false) => {
            ring::ring(links, parts, ring::reduce_scatter(n), bytes, kernels).await
        }
    }
}

/// Sends and expects headers where data will go, and round the ring: one of the ranks that call something else hears
/// from one that does not.
pub async fn send_route_headers(
    links: &mut PeerChannels,
    header: &Header,
    route: Route,
) -> ChannelResult<()> {
    let (next, previous) = ([links.after(1)], [links.before(1)]);
    match route {
        Route::Direct => {
            let others = links.others();
            links.send_headers(header, &others, &others).await
        }
        Route::Tree => {
            let (parent, children) = tree::neighbours(links);
            let both = || children.clone().chain(parent);
            links.send_headers(header, &joined(next, both()), &joined(previous, both())).await?;
            links.flush(); // to the next in the ring no data will follow
            Ok(())
        }
        Route::Ring => links.send_headers(header, &next, &previous).await,
    }
}

/// A rank and others, each once.
pub fn joined(one: [usize; 1], others: impl IntoIterator<Item = usize>) -> Vec<usize> {
    let mut ranks = one.to_vec();
    ranks.extend(others.into_iter().filter(|other| one[0] != *other));
    ranks
}
