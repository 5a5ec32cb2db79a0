//! Cubins: where a kernel's machine code comes from without compiling it.
//!
//! This machine's cache comes first, since its cubins are of the NVRTC in use. A pack comes behind
//! it: its cubins were compiled elsewhere, maybe by another NVRTC. The maths is the same.

use super::cubin_cache::CubinCache;
use super::pack::PackStatus;

pub struct Cubins {
    pub cache: CubinCache,
    pub pack: PackStatus,
}
