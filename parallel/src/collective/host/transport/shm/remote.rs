//! Reading another process's memory, where the system allows it: a large piece then goes straight from the
//! sender's buffer to the receiver's.

use std::io::{Error, ErrorKind, Result};

/// Fills `into` from `address` in the memory of process `pid`.
pub fn read(pid: u32, address: u64, into: &mut [u8]) -> Result<()> {
    let mut done = 0;
    while done < into.len() {
        let rest = &mut into[done..];
        let here = libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() };
        let there = libc::iovec {
            iov_base: std::ptr::without_provenance_mut(address as usize + done),
            iov_len: rest.len(),
        };
        // SAFETY: `here` is memory that is borrowed for writing; `there` is checked by the kernel, which
        // returns an error for what is not mapped in the other process.
        let count = unsafe { libc::process_vm_readv(pid as libc::pid_t, &here, 1, &there, 1, 0) };
        match count {
            1.. => done += count as usize,
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            _ => return Err(Error::last_os_error()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn own_memory_can_be_read_and_nothing_at_null() {
        let source = [1_u8, 2, 3, 4];
        let mut into = [0; 4];
        super::read(std::process::id(), source.as_ptr() as u64, &mut into).unwrap();
        assert_eq!(into, source);
        assert!(super::read(std::process::id(), 8, &mut into).is_err());
    }
}
