//! Cubins: where a kernel's machine code comes from without compiling it.
//!
//! The pack comes first: its cubins are in memory. Those of this machine's cache have the NVRTC in
//! use in their keys, and a process that a pack serves does not look for an NVRTC. The cubins may
//! be of different NVRTCs. The maths is the same.

use super::cubin_cache::CubinCache;
use super::pack::PackStatus;

pub struct Cubins {
    pub cache: CubinCache,
    pub pack: PackStatus,
}
