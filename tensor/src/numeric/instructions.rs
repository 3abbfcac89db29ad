//! Counts the instructions that a closure executes: how fast code is, without a clock.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

static COUNT: AtomicU64 = AtomicU64::new(0);

extern "C" fn count(_signal: libc::c_int) {
    COUNT.fetch_add(1, Relaxed);
}

/// The number of instructions that `f` executes on this thread, system calls counted as one, and a few around it. Each of
/// them raises a signal, so `f` should be short.
pub(crate) fn instructions(f: impl FnOnce()) -> u64 {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    COUNT.store(0, Relaxed);
    // SAFETY: the handler only adds to an atomic number. The trap flag makes the processor raise the signal after each
    // instruction of this thread, and not within the handler; `f` does not change it.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let mut before: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = count as extern "C" fn(libc::c_int) as usize;
        action.sa_flags = libc::SA_RESTART;
        assert_eq!(libc::sigaction(libc::SIGTRAP, &action, &mut before), 0);
        std::arch::asm!("pushfq", "or qword ptr [rsp], 0x100", "popfq");
        f();
        std::arch::asm!("pushfq", "and qword ptr [rsp], ~0x100", "popfq");
        assert_eq!(libc::sigaction(libc::SIGTRAP, &before, std::ptr::null_mut()), 0);
    }
    COUNT.load(Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_are_counted() {
        let nops = |n: u64| {
            instructions(|| {
                for _ in 0..n {
                    // SAFETY: they do nothing.
                    unsafe { std::arch::asm!("nop", "nop", "nop", options(nomem, nostack)) };
                }
            })
        };
        let each = (nops(1000) - nops(200)) as f64 / 800.0;
        assert!((3.0..8.0).contains(&each), "{each} for three, and those of a loop");
    }
}
