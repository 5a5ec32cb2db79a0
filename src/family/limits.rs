//! Constraints and budgets that GPU families have in common.

use super::knob::Constraint;
use super::space::Space;
use crate::device::Device;
use crate::problem::Problem;

/// Shared memory of an SM that CUDA takes for each CTA (CUDA Programming Guide, "Compute
/// Capabilities").
pub const RESERVED_BYTES: u32 = 1024;

pub const fn shared_memory<K: Space>() -> Constraint<K> {
    Constraint {
        name: "shared_memory",
        reason: "the tiles of a CTA must fit its shared memory, and those of ctas_per_sm CTAs (with 1 KB each that CUDA takes) the SM's",
        holds: |p, k, d| {
            k.kernels(p).iter().all(|kernel| {
                let (bytes, ctas) = (kernel.smem_bytes, kernel.ctas_per_sm);
                bytes <= d.smem_per_block && (bytes + RESERVED_BYTES) * ctas <= d.smem_per_sm
            })
        },
    }
}

/// `holds` asks `divides_mask_blocks` of its tile.
pub const fn mask_blocks<K>(holds: fn(&Problem, &K, &Device) -> bool) -> Constraint<K> {
    Constraint {
        name: "mask_blocks",
        reason: "a tile lies within one row of the block mask's blocks, each of which is whole tiles",
        holds,
    }
}

/// Whether the block mask's blocks are whole tiles, if there is one.
pub fn divides_mask_blocks(problem: &Problem, block_m: u32, block_n: u32) -> bool {
    let divides = |size: i64, tile: u32| size % i64::from(tile) == 0;
    problem.features.block_mask.is_none_or(|mask| divides(mask.block_q, block_m) && divides(mask.block_k, block_n))
}

/// Whether a block of so many keys has one scale, where blocks of keys have theirs.
pub fn divides_scale_blocks(problem: &Problem, block_n: u32) -> bool {
    let keys_per_scale = problem.features.eight_bits.map_or(0, |eight| eight.keys_per_scale);
    keys_per_scale <= 1 || keys_per_scale % i64::from(block_n) == 0
}

pub const fn grid<K: Space>() -> Constraint<K> {
    Constraint {
        name: "grid",
        reason: "a grid holds 2^31 - 1 CTAs in x (CUDA programming guide, technical specifications)",
        holds: |p, k, _| k.kernels(p).iter().all(|kernel| kernel.fits_grid(p)),
    }
}

pub const fn threads<K: Space>() -> Constraint<K> {
    Constraint {
        name: "threads",
        reason: "the CTAs that share an SM must fit its threads",
        holds: |p, k, d| k.kernels(p).iter().all(|kernel| kernel.threads * kernel.ctas_per_sm <= d.threads_per_sm),
    }
}

/// Registers of a thread: its share of the SM's, at most the 255 that an instruction can name.
pub fn register_budget(num_warps: u32, ctas_per_sm: u32, device: &Device) -> u32 {
    let threads = num_warps * 32 * ctas_per_sm;
    (device.registers_per_sm / threads.max(1) / 8 * 8).min(255)
}
