//! Blocks of a pool: they do not overlap, are used again, and reserved memory is bounded.

use super::*;

fn blocks() -> BlockAllocator {
    BlockAllocator::new(Backing::Memory)
}

#[test]
fn freed_blocks_are_used_again_and_neighbours_join() {
    let mut blocks = blocks();
    let sizes = [3 << 20, 5 << 20, 1000, 4 << 20];
    let taken: Vec<MemoryBlock> =
        sizes.iter().map(|&bytes| blocks.take(bytes, Lifetime::Short).unwrap()).collect();
    let reserved = blocks.reserved();
    taken.into_iter().for_each(|block| blocks.give_back(block));
    let whole = blocks.take(12 << 20, Lifetime::Short).unwrap();
    assert_eq!(blocks.reserved(), reserved, "all neighbours join, the small one too");
    blocks.give_back(whole);
    let small = blocks.take(1000, Lifetime::Short).unwrap();
    let pointer = blocks.pointer(small);
    blocks.give_back(small);
    let again = blocks.take(990, Lifetime::Short).unwrap();
    assert_eq!(blocks.pointer(again), pointer, "equal bins give back the block freed last");
}

#[test]
fn scattered_memory_goes_back_to_the_system() {
    let mut blocks = blocks();
    let mut taken: Vec<MemoryBlock> =
        (0..64).map(|_| blocks.take(2 << 20, Lifetime::Short).unwrap()).collect();
    for &block in &taken {
        // SAFETY: 2 MiB that only this test uses.
        unsafe { blocks.pointer(block).write_bytes(7, 2 << 20) };
    }
    // Every other block: half of the memory is free, but no larger block fits.
    for at in (0..32).rev() {
        blocks.give_back(taken.remove(2 * at));
    }
    let large = blocks.take(60 << 20, Lifetime::Short).unwrap();
    assert!(blocks.reserved() <= blocks.peak + slack(blocks.peak), "{}", blocks.reserved());
    // Memory from the system is zero.
    // SAFETY: 60 MiB that only this test uses.
    let bytes = unsafe { std::slice::from_raw_parts(blocks.pointer(large), 60 << 20) };
    assert!(bytes.iter().all(|&byte| byte == 0));
    for &block in &taken {
        // SAFETY: as above.
        let bytes = unsafe { std::slice::from_raw_parts(blocks.pointer(block), 2 << 20) };
        assert!(bytes.iter().all(|&byte| byte == 7), "memory in use was given away");
    }
}

/// Random requests and frees: blocks in use never overlap, and reserved memory stays within its bound.
#[test]
fn blocks_do_not_overlap_and_reserved_memory_is_bounded() {
    let key = crate::RandomKey::new(1, 0, "pool");
    let mut blocks = BlockAllocator::new(Backing::Addresses);
    let mut taken: Vec<MemoryBlock> = Vec::new();
    for i in 0..20_000 {
        let draw = |what: u64| key.uniform(4 * i + what);
        if taken.len() > 100 || (draw(0) < 0.45 && !taken.is_empty()) {
            let at = (draw(1) * taken.len() as f64) as usize;
            blocks.give_back(taken.swap_remove(at));
        } else {
            let bytes = (16.0 + 10.0 * draw(2)).exp2() as usize; // 64 KiB to 64 MiB
            taken.push(blocks.take(bytes, Lifetime::Short).unwrap());
        }
        let reserved = blocks.reserved();
        // Each end of a free range may leave a partial page.
        let edges = 2 * PAGE * (taken.len() + 1);
        assert!(reserved <= blocks.peak + slack(blocks.peak) + edges, "step {i}: {reserved}");
        if i % 100 == 0 {
            let mut ranges: Vec<(usize, usize, usize)> =
                taken.iter().map(|block| (block.arena, block.offset, block.size)).collect();
            ranges.sort_unstable();
            let apart = |pair: &[(usize, usize, usize)]| {
                pair[0].0 != pair[1].0 || pair[0].1 + pair[0].2 <= pair[1].1
            };
            assert!(ranges.windows(2).all(apart), "step {i}");
        }
    }
}

#[test]
fn files_are_few_and_hardly_larger_than_what_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let mut blocks = BlockAllocator::new(Backing::Files(folder.path().to_path_buf()));
    let live: usize = (0..32).map(|_| blocks.take(9 << 20, Lifetime::Short).unwrap().size).sum();
    assert!(4 * blocks.reserved() <= 5 * live, "{} of {live}", blocks.reserved());
    assert!(blocks.arenas.len() < 24, "{} files", blocks.arenas.len());
}

#[test]
fn sizes_beyond_any_memory_are_errors() {
    for bytes in [usize::MAX, isize::MAX as usize, isize::MAX as usize + 1] {
        assert!(blocks().take(bytes, Lifetime::Short).is_err(), "{bytes}");
    }
}

#[test]
fn rounding_wastes_little() {
    for bytes in (1..4 << 20).step_by(17) {
        let size = rounded(bytes);
        assert!(size >= bytes && size.is_multiple_of(ALIGNMENT));
        assert!(size < bytes + (bytes / 256).max(ALIGNMENT), "{bytes} takes {size}");
    }
}

#[test]
fn blocks_in_use_for_longer_lie_behind_the_others() {
    let mut blocks = blocks();
    let (bytes, whole) = (2 << 20, 16 << 20);
    let block = blocks.take(whole, Lifetime::Short).unwrap();
    let start = block.offset;
    blocks.give_back(block);
    for at in 1..=2 {
        let long = blocks.take(bytes, Lifetime::Long).unwrap();
        assert_eq!(long.offset, start + whole - at * bytes);
    }
    assert_eq!(blocks.take(bytes, Lifetime::Short).unwrap().offset, start);
    assert_eq!(blocks.reserved(), whole);
}
