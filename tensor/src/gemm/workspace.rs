//! Memory for packed panels: kept by each thread, in huge pages where the system grants them.

use memmap2::MmapMut;
use std::cell::Cell;

/// The size of a huge page on x86-64; packed panels in such pages cost hardly any TLB misses.
const HUGE_PAGE: usize = 2 << 20;

thread_local! {
    static KEPT: Cell<Option<MmapMut>> = const { Cell::new(None) };
}

/// Calls `body` with `bytes` of memory of arbitrary content, aligned to a page.
///
/// The memory is taken out of the thread's slot meanwhile, so a product that the thread steals
/// while it waits for this one gets its own.
pub(super) fn with_workspace<R>(bytes: usize, body: impl FnOnce(*mut u8) -> R) -> R {
    let kept = KEPT.take().filter(|map| map.len() >= bytes + HUGE_PAGE);
    let mut map = kept.unwrap_or_else(|| map_memory(bytes));
    let start = map.as_mut_ptr();
    // Huge pages begin at multiples of their size.
    let result = body(start.wrapping_add(start.align_offset(HUGE_PAGE)));
    KEPT.set(Some(map));
    result
}

fn map_memory(bytes: usize) -> MmapMut {
    let length = bytes.next_multiple_of(HUGE_PAGE) + HUGE_PAGE;
    let map = MmapMut::map_anon(length)
        .unwrap_or_else(|error| panic!("gemm: no {length} bytes of memory for panels: {error}"));
    #[cfg(target_os = "linux")]
    // Without huge pages it is only slower.
    let _ = map.advise(memmap2::Advice::HugePage);
    map
}
