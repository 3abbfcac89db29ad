//! Memory of the pretended device, which notices writes outside of it and to inputs.

use std::alloc;

const FENCE: u8 = 0xf7;

/// Memory of the pretended device: aligned as a driver's, with a fence around it. The sanitizer has a fence of its
/// own, which also notices reads.
pub struct Memory {
    base: *mut u8,
    length: usize,
    fence: usize,
    pub constant: bool,
    original: Vec<u8>,
}

impl Memory {
    pub fn new(bytes: &[u8], constant: bool, fence: usize) -> Memory {
        let mut memory = Memory {
            base: std::ptr::null_mut(),
            length: bytes.len(),
            fence,
            constant,
            original: if constant { bytes.to_vec() } else { Vec::new() },
        };
        // SAFETY: the layout is never empty, and the allocation is as long as what is written.
        unsafe {
            memory.base = alloc::alloc(memory.layout());
            assert!(!memory.base.is_null());
            memory.base.write_bytes(FENCE, memory.length + 2 * fence);
            memory.pointer().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        }
        memory
    }

    fn layout(&self) -> alloc::Layout {
        alloc::Layout::from_size_align((self.length + 2 * self.fence).max(1), 256).unwrap()
    }

    pub fn pointer(&self) -> *mut u8 {
        self.base.wrapping_add(self.fence)
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the allocation is initialised throughout.
        unsafe { std::slice::from_raw_parts(self.pointer(), self.length) }
    }

    pub fn check(&self, name: &str) {
        // SAFETY: as above.
        let all = unsafe { std::slice::from_raw_parts(self.base, self.length + 2 * self.fence) };
        let (front, back) = (&all[..self.fence], &all[self.fence + self.length..]);
        let whole = front.iter().chain(back).all(|&byte| byte == FENCE);
        assert!(whole, "{name} writes outside of its memory of {} bytes", self.length);
        assert!(!self.constant || self.bytes() == self.original, "{name} writes to its input");
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { alloc::dealloc(self.base, self.layout()) }
    }
}
