//! Memory for packed panels and sums: kept by each thread, in huge pages where the system grants them, and counted.

use memmap2::MmapMut;
use std::cell::RefCell;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::{Error, Result};

/// The size of a huge page on x86-64; packed panels in such pages cost hardly any TLB misses.
const HUGE_PAGE: usize = 2 << 20;

/// Bytes of the workspaces of all threads.
static BYTES: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static KEPT: RefCell<Vec<Workspace>> = const { RefCell::new(Vec::new()) };
}

/// Bytes that the threads of this process keep for packed operands and sums of matrix products.
pub(crate) fn workspace_bytes() -> usize {
    BYTES.load(Relaxed)
}

/// Calls `body` with `bytes` of memory of arbitrary content, aligned to a page.
///
/// A product within `body` gets memory of its own, which the thread keeps too.
///
/// Errors if the system has no memory left.
pub(super) fn with_workspace<R>(bytes: usize, body: impl FnOnce(*mut u8) -> R) -> Result<R> {
    let kept = KEPT.with_borrow_mut(|kept| {
        let fits = |kept: &Workspace| kept.0.len() - HUGE_PAGE >= bytes;
        let len = |&i: &usize| kept[i].0.len();
        let best = (0..kept.len()).filter(|&i| fits(&kept[i])).min_by_key(len);
        // If none fits, the largest gives way to a larger one.
        let place = best.or_else(|| (0..kept.len()).max_by_key(len));
        place.map(|i| kept.swap_remove(i)).filter(fits)
    });
    let mut workspace = match kept {
        Some(kept) => kept,
        None => Workspace::new(bytes)?,
    };
    let start = workspace.0.as_mut_ptr();
    // Huge pages begin at multiples of their size.
    let result = body(start.wrapping_add(start.align_offset(HUGE_PAGE)));
    KEPT.with_borrow_mut(|kept| kept.push(workspace));
    Ok(result)
}

/// Memory that is counted as long as it is there; a huge page longer than needed.
struct Workspace(MmapMut);

impl Workspace {
    fn new(bytes: usize) -> Result<Workspace> {
        let refused = |why: &str| {
            Error::memory("matmul", format!("cannot map {bytes} bytes for packed operands: {why}"))
        };
        let rounded = bytes.checked_next_multiple_of(HUGE_PAGE);
        let length = rounded.and_then(|bytes| bytes.checked_add(HUGE_PAGE));
        let length = length.ok_or_else(|| refused("more than there are addresses"))?;
        let map = MmapMut::map_anon(length).map_err(|error| refused(&error.to_string()))?;
        #[cfg(target_os = "linux")]
        // Without huge pages it is only slower.
        let _ = map.advise(memmap2::Advice::HugePage);
        BYTES.fetch_add(length, Relaxed);
        Ok(Workspace(map))
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        BYTES.fetch_sub(self.0.len(), Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_no_system_has_is_an_error() {
        for bytes in [1 << 62, usize::MAX - HUGE_PAGE, usize::MAX] {
            let error = with_workspace(bytes, |_| ()).unwrap_err().to_string();
            let want = format!("matmul: cannot map {bytes} bytes for packed operands: ");
            assert!(error.starts_with(&want), "{error}");
        }
        // The thread continues.
        assert!(with_workspace(1, |memory| memory.addr().is_multiple_of(HUGE_PAGE)).unwrap());
    }

    #[test]
    fn workspaces_count_as_long_as_their_thread_lives() {
        // Far more than other tests use at the same time.
        const LARGE: usize = 1 << 30;
        std::thread::spawn(|| {
            with_workspace(LARGE, |_| ()).unwrap();
            assert!(workspace_bytes() >= LARGE);
            with_workspace(LARGE, |_| ()).unwrap();
            assert!(workspace_bytes() < 2 * LARGE, "the same memory is used again");
            for _ in 0..2 {
                with_workspace(LARGE, |_| with_workspace(LARGE, |_| ())).unwrap().unwrap();
                assert!(workspace_bytes() < 3 * LARGE, "so is that of a product within another");
            }
        })
        .join()
        .unwrap();
        assert!(workspace_bytes() < LARGE);
    }
}
