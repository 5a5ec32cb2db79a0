//! Constraints and budgets that GPU families have in common.

use super::Constraint;
use crate::config::Config;
use crate::device::Device;
use crate::family::geometry;

/// Shared memory of an SM that CUDA takes for each block of threads (CUDA Programming Guide, "Compute Capabilities").
pub const RESERVED_BYTES: u32 = 1024;

pub const SHARED_MEMORY: Constraint = Constraint {
    name: "shared_memory",
    reason: "the tiles of a block must fit its shared memory, and those of ctas_per_sm blocks (with 1 KB each that CUDA takes) the SM's",
    holds: |p, c, d| {
        geometry::kernels(p, c).iter().all(|kernel| {
            let (bytes, ctas) = (kernel.smem_bytes, if kernel.is_main { c.get("ctas_per_sm").max(1) } else { 1 });
            bytes <= d.smem_per_block && (bytes + RESERVED_BYTES) * ctas <= d.smem_per_sm
        })
    },
};

pub const MASK_BLOCKS: Constraint = Constraint {
    name: "mask_blocks",
    reason: "a tile lies within one row of the block mask's blocks, each of which is whole tiles",
    holds: |p, c, _| {
        let divides = |size: i64, tile| size % i64::from(c.get(tile)) == 0;
        p.features.block_mask.is_none_or(|mask| divides(mask.block_q, "block_m") && divides(mask.block_k, "block_n"))
    },
};

pub const GRID: Constraint = Constraint {
    name: "grid",
    reason: "a grid holds 2^31 - 1 blocks in x (CUDA programming guide, technical specifications)",
    holds: |p, c, _| geometry::grids_fit(p, c),
};

pub const THREADS: Constraint = Constraint {
    name: "threads",
    reason: "the blocks that share an SM must fit its threads",
    holds: |_, c, d| c.get("num_warps") * 32 * c.get("ctas_per_sm") <= d.threads_per_sm,
};

/// Registers of a thread: its share of the SM's, at most the 255 that an instruction can name.
pub fn register_budget(config: &Config, device: &Device) -> u32 {
    let threads = config.get("num_warps") * 32 * config.get("ctas_per_sm");
    (device.registers_per_sm / threads.max(1) / 8 * 8).min(255)
}
