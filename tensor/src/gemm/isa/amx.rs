//! AMX: products of bf16 pairs in tile registers of 16 rows by 16 words.
//!
//! Eight registers hold 32 x 32 sums, two tiles of rows and two of columns, and the operands of one step.
//! [`product`] computes products of any size, [`stream`] those of few rows, and [`block`] the small ones
//! of fused kernels. Operands are packed into whole tiles, but for the columns that [`stream`] loads from where they lie.
//!
//! Instructions, encodings and the rules of their configuration: Intel, "Architecture Instruction Set Extensions
//! Programming Reference", chapter 3. The operating system saves tile registers only of a process that has asked
//! for them: Linux, Documentation/arch/x86/xstate.rst.

pub(crate) mod block;
mod blocking;
pub(in crate::gemm) mod config;
#[cfg(test)]
pub(in crate::gemm) mod emulator;
mod microkernel;
mod pack;
mod piece;
pub(in crate::gemm) mod product;
mod stream;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod trace_tests;

use std::arch::x86_64::__cpuid_count;
use std::sync::OnceLock;

/// The system's answer to the request for tile registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::gemm) enum Permission {
    Granted,
    /// The processor does not have the instructions.
    Absent,
    /// The processor has them, and the system's error number is why this process may not use them.
    Refused(i32),
}

/// Asks for tile registers, once for the process.
pub(in crate::gemm) fn permission() -> Permission {
    static PERMISSION: OnceLock<Permission> = OnceLock::new();
    *PERMISSION.get_or_init(|| {
        #[cfg(test)]
        if tests::is_traced() {
            return Permission::Absent; // so that every instruction traps
        }
        Permission::from_system(__cpuid_count(7, 0).edx, request_tile_data)
    })
}

/// Asks Linux for tile registers.
fn request_tile_data() -> std::io::Result<()> {
    const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_ulong = 18;
    // SAFETY: this call takes two numbers and touches no memory.
    let answer =
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) };
    if answer == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

impl Permission {
    /// The permission of a process on a processor with `features` (CPUID, leaf 7, EDX), which asks by `request`.
    fn from_system(features: u32, request: impl FnOnce() -> std::io::Result<()>) -> Permission {
        const AMX_BF16: u32 = 1 << 22;
        const AMX_TILE: u32 = 1 << 24;
        if features & AMX_BF16 == 0 || features & AMX_TILE == 0 {
            return Permission::Absent;
        }
        match request() {
            Ok(()) => Permission::Granted,
            Err(error) => Permission::Refused(error.raw_os_error().unwrap_or(0)),
        }
    }

    /// The sentence for a user whose processor has AMX and cannot use it.
    pub(in crate::gemm) fn refusal(self) -> Option<String> {
        let Permission::Refused(number) = self else { return None };
        let error = std::io::Error::from_raw_os_error(number);
        Some(format!(
            "this processor has AMX, but Linux refuses it to this process ({error}): Linux 5.16 or later grants it, \
             unless a container's seccomp profile denies arch_prctl; products of bf16 are slower and have other bits"
        ))
    }
}
