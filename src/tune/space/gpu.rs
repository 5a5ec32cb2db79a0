//! Constraints that every GPU family has.

use super::Constraint;
use crate::kernel::geometry;

pub const SHARED_MEMORY: Constraint = Constraint {
    name: "shared_memory",
    reason: "the tiles of a block must fit its shared memory, and those of ctas_per_sm blocks (with 1 KB each that CUDA takes) the SM's",
    holds: |p, c, d| {
        geometry::kernels(p, c).iter().all(|kernel| {
            let (bytes, ctas) = (kernel.smem_bytes, if kernel.is_main { c.get("ctas_per_sm").max(1) } else { 1 });
            bytes <= d.smem_per_block && (bytes + 1024) * ctas <= d.smem_per_sm
        })
    },
};

pub const GRID: Constraint = Constraint {
    name: "grid",
    reason: "a grid holds 2^31 - 1 blocks in x (CUDA programming guide, technical specifications)",
    holds: |p, c, _| geometry::grids_fit(p, c),
};
