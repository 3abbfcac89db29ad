//! Types of nccl.h, whose names they keep, with the values in use.
#![allow(non_camel_case_types, non_snake_case, non_upper_case_globals)]

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr;

pub(super) type ncclComm_t = *mut c_void;

/// `ncclResult_t`; later versions may have values that are not listed here.
pub(super) type Status = c_int;
pub(super) const SUCCESS: Status = 0;
pub(super) const IN_PROGRESS: Status = 7;

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct ncclUniqueId {
    pub(super) internal: [c_char; 128],
}

#[repr(u32)]
#[derive(Debug, Clone, Copy)]
pub(super) enum ncclDataType_t {
    ncclUint8 = 1,
    ncclUint32 = 3,
    ncclInt64 = 4,
    ncclFloat16 = 6,
    ncclFloat32 = 7,
    ncclFloat64 = 8,
    ncclBfloat16 = 9,
}

#[repr(u32)]
#[derive(Debug, Clone, Copy)]
pub(super) enum ncclRedOp_t {
    ncclSum = 0,
    ncclMax = 2,
}

/// `ncclConfig_t` of version 2.30; earlier versions read a prefix of it, and later ones take the rest as undefined.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct ncclConfig_t {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cgaClusterSize: c_int,
    minCTAs: c_int,
    maxCTAs: c_int,
    netName: *const c_char,
    splitShare: c_int,
    trafficClass: c_int,
    commName: *const c_char,
    collnetEnable: c_int,
    CTAPolicy: c_int,
    shrinkShare: c_int,
    nvlsCTAs: c_int,
    nChannelsPerNetPeer: c_int,
    nvlinkCentricSched: c_int,
    graphUsageMode: c_int,
    numRmaCtx: c_int,
    maxP2pPeers: c_int,
    graphStreamOrdering: c_int,
}

impl ncclConfig_t {
    /// `NCCL_CONFIG_INITIALIZER`, for a non-blocking communicator.
    pub(super) fn non_blocking() -> ncclConfig_t {
        /// `NCCL_CONFIG_UNDEF_INT`.
        const UNDEFINED: c_int = c_int::MIN;
        ncclConfig_t {
            size: size_of::<ncclConfig_t>(),
            magic: 0xcafe_beef,
            version: 23000,
            blocking: 0,
            cgaClusterSize: UNDEFINED,
            minCTAs: UNDEFINED,
            maxCTAs: UNDEFINED,
            netName: ptr::null(),
            splitShare: UNDEFINED,
            trafficClass: UNDEFINED,
            commName: ptr::null(),
            collnetEnable: UNDEFINED,
            CTAPolicy: UNDEFINED,
            shrinkShare: UNDEFINED,
            nvlsCTAs: UNDEFINED,
            nChannelsPerNetPeer: UNDEFINED,
            nvlinkCentricSched: UNDEFINED,
            graphUsageMode: UNDEFINED,
            numRmaCtx: UNDEFINED,
            maxP2pPeers: UNDEFINED,
            graphStreamOrdering: UNDEFINED,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::headers::{claim, constant, program};

    #[test]
    fn types_are_those_of_the_header() {
        use ncclDataType_t::*;
        use ncclRedOp_t::*;
        let types =
            [ncclUint8, ncclUint32, ncclInt64, ncclFloat16, ncclFloat32, ncclFloat64, ncclBfloat16];
        let mut claims: Vec<_> =
            types.iter().map(|&one| constant(&format!("{one:?}"), one as i64)).collect();
        claims.extend([ncclSum, ncclMax].map(|one| constant(&format!("{one:?}"), one as i64)));
        claims.extend([
            constant("ncclSuccess", i64::from(SUCCESS)),
            constant("ncclInProgress", i64::from(IN_PROGRESS)),
            claim(&format!("sizeof(ncclUniqueId) == {}", size_of::<ncclUniqueId>())),
        ]);
        // What a C program would pass, byte by byte.
        let main = "ncclConfig_t config = NCCL_CONFIG_INITIALIZER; config.blocking = 0;
            for (size_t i = 0; i < sizeof config; i++) printf(\"%d \", ((unsigned char*)&config)[i]);";
        let Some(printed) = program("types_are_those_of_the_header", "nccl.h", &claims, main)
        else {
            return;
        };
        let theirs: Vec<u8> =
            printed.split_whitespace().map(|byte| byte.parse().unwrap()).collect();
        let fields = size_of::<usize>() + 18 * size_of::<c_int>() + 2 * size_of::<*const c_char>();
        assert_eq!(size_of::<ncclConfig_t>(), fields, "padding would be read as a field");
        let own = ncclConfig_t::non_blocking();
        // SAFETY: no byte of the struct is padding.
        let bytes = unsafe {
            std::slice::from_raw_parts(ptr::from_ref(&own).cast::<u8>(), size_of::<ncclConfig_t>())
        };
        // Without the size and the version, which a later header has otherwise.
        assert!(theirs.len() >= bytes.len());
        assert_eq!(theirs[8..12], bytes[8..12], "magic");
        assert_eq!(theirs[16..bytes.len()], bytes[16..]);
    }
}
