//! Sums of 16-bit numbers over so many ranks that they travel in f32. A rank holds few of these at a time, however long the
//! buffer is.

use bytemuck::cast_slice_mut;
use ferrotron_tensor::DType;
use std::ops::Range;

use crate::collective::host::algorithms::combine::kernels;
use crate::collective::host::algorithms::rooted;
use crate::collective::host::runtime::routed::{self, send_route_headers};
use crate::collective::host::transport::header::Header;
use crate::collective::host::transport::peer_channels::{PeerChannels, clip};
use crate::collective::host::transport::piece::ChannelResult;
use crate::collective::narrow_sums::{round, widen_add};
use crate::collective::routes::Route;
use crate::collective::{Call, Op, Reduction};

/// Sums that a rank holds in f32 at most: 16 MiB. In tests so few that small buffers are cut.
pub const HELD: usize = if cfg!(test) { 50_000 } else { 4 << 20 };

/// An all-reduce or a reduce-scatter to `parts`, which are ranges of `bytes`. Every sum is rounded once, at the end.
///
/// It is carried out for some elements of each part at a time. So an element is added in the order of its part, and has the
/// bits of a call of f32 that is rounded.
pub async fn reduce(
    links: &mut PeerChannels,
    call: &Call,
    header: &Header,
    route: Route,
    parts: &[Range<usize>],
    bytes: &mut [u8],
    wide: &mut Vec<f32>,
) -> ChannelResult<()> {
    send_route_headers(links, header, route).await?;
    let kernels = kernels(DType::F32, Reduction::Sum);
    let longest = parts.iter().map(Range::len).max().unwrap_or(0);
    let share = 2 * (HELD / parts.len()).max(1); // bytes of each part
    for start in (0..longest).step_by(share) {
        let places: Vec<_> = parts.iter().map(|part| clip(part, start, share)).collect();
        // The same elements in f32, one part behind the other.
        let mut end = 0;
        let ends = places.iter().map(|place| {
            let begin = end;
            end += 2 * place.len();
            begin..end
        });
        let compact: Vec<Range<usize>> = ends.collect();
        widen(call.dtype, wide, places.iter().map(|place| &bytes[place.clone()]));
        routed::reduce(links, call.op, route, &compact, cast_slice_mut(wide), &kernels).await?;
        links.wait_sends().await?; // what was lent is about to change
        for (rank, (place, sums)) in places.into_iter().zip(compact).enumerate() {
            if rank == links.rank || matches!(call.op, Op::AllReduce(_)) {
                round(call.dtype, &mut bytes[place], &wide[sums.start / 4..sums.end / 4]);
            }
        }
    }
    Ok(())
}

/// A reduction to `root`, behind its headers. The bytes of the others stay as they are.
pub async fn reduce_to_root(
    links: &mut PeerChannels,
    root: usize,
    dtype: DType,
    bytes: &mut [u8],
    wide: &mut Vec<f32>,
) -> ChannelResult<()> {
    let kernels = kernels(DType::F32, Reduction::Sum);
    for bytes in bytes.chunks_mut(2 * HELD) {
        widen(dtype, wide, std::iter::once(&*bytes));
        rooted::reduce(links, root, cast_slice_mut(wide), &kernels).await?;
        links.wait_sends().await?; // what was lent is about to change
        if links.rank == root {
            round(dtype, bytes, wide);
        }
    }
    Ok(())
}

/// Fills `wide` with numbers of 16 bits.
fn widen<'a>(dtype: DType, wide: &mut Vec<f32>, parts: impl Iterator<Item = &'a [u8]>) {
    wide.clear();
    for part in parts {
        let begin = wide.len();
        wide.resize(begin + part.len() / 2, -0.0); // what a sum begins with so that -0 stays -0
        widen_add(dtype, &mut wide[begin..], part);
    }
}
