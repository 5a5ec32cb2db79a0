//! Arithmetic that both passes of the sm90 family share: the shape of a consumer warpgroup, its
//! registers, and parts of the cost.

use crate::family::spec::WarpgroupRegisters;
use crate::problem::{Features, Problem};

/// Rows of a consumer warpgroup: of queries forward, and of keys backward except in the middle
/// kernel. The M of `wgmma`.
pub const WARPGROUP_ROWS: u32 = 64;
/// Room for barriers behind the tiles.
pub const BARRIER_BYTES: u32 = 1024;

/// The most blocks of a forward tile that lie before a warpgroup's window: the last warpgroup's
/// rows begin so many blocks behind the first one's. A block mask hides none at a tile's end.
pub fn hidden_blocks(block_m: u32, block_n: u32, problem: &Problem) -> u32 {
    let hides = problem.left_shift().is_some() && problem.features.block_mask.is_none();
    if hides { (block_m - WARPGROUP_ROWS).div_ceil(block_n) } else { 0 }
}

/// How a kernel with so many consumer warpgroups shares out the launch's registers: in steps of 8,
/// and at most 240 where a product must not be serialised. The producer gets the rest of an SM's
/// 65536 (168, 128 and 96 a thread with 2, 3 and 4 consumers).
pub fn registers(consumers: u32) -> WarpgroupRegisters {
    let (producer, consumer) = match consumers {
        ..=1 => (56, 240),
        2 => (24, 240),
        3 => (32, 160),
        _ => (32, 112),
    };
    WarpgroupRegisters::alike(producer, consumer)
}

/// The same for CTAs that share an SM: two or three with one consumer warpgroup each (128 and 80 a
/// thread), or two with two (80).
pub fn registers_of_sharing(ctas: u32, consumers: u32) -> WarpgroupRegisters {
    let (producer, consumer) = match (ctas, consumers) {
        (2, ..=1) => (40, 216),
        (2, _) => (32, 104),
        _ => (24, 136),
    };
    WarpgroupRegisters::alike(producer, consumer)
}

/// The same for a producer of keys in pages, and for one that converts keys of 8 bits in pages in
/// shared memory. The addresses of its copies take more registers, and its loop must not spill:
/// beside two consumers it hardly keeps up with them.
pub fn registers_of_pages(consumers: u32) -> WarpgroupRegisters {
    match consumers {
        ..=1 => registers(consumers),
        2 => WarpgroupRegisters::alike(56, 224),
        3 => WarpgroupRegisters::alike(56, 152),
        _ => WarpgroupRegisters::alike(64, 104),
    }
}

/// The same for a producer that converts keys of 8 bits without pages in shared memory: as many as
/// two consumers do not need (docs/tuning/eight-bits.md).
pub fn registers_of_conversion_in_place(consumers: u32, head_dim_v: i64, keys_per_scale: i64) -> WarpgroupRegisters {
    match (consumers, head_dim_v, keys_per_scale) {
        (2, ..=128, _) => WarpgroupRegisters::alike(88, 208),
        (2, _, 1) => WarpgroupRegisters::alike(72, 216),
        _ => registers_of_pages(consumers),
    }
}

/// The same for a producer that converts keys of 8 bits, with eight accesses of 16 bytes in flight.
/// Beside two consumers that multiply by scales of keys it has four, since these take more.
pub fn registers_of_eight_bits(consumers: u32, keys_per_scale: i64) -> WarpgroupRegisters {
    let (producer, consumer) = match consumers {
        ..=1 => (104, 240),
        2 if keys_per_scale == 1 => (72, 216),
        2 => (88, 208),
        3 => (80, 144),
        _ => (64, 104),
    };
    WarpgroupRegisters::alike(producer, consumer)
}

/// The length that whole blocks cover over the length itself.
pub fn padded(length: i64, block: f64) -> f64 {
    let length = (length as f64).max(1.0);
    (length / block).ceil() * block / length
}

/// Whether a pass's tiles are not all equally long, so that a CTA that is done takes the next one.
pub fn tiles_differ(problem: &Problem) -> bool {
    let Features { varlen, block_mask, .. } = problem.features;
    problem.right_shift().is_some() || problem.left_shift().is_some() || varlen.is_some() || block_mask.is_some()
}

/// The time of all waves of tiles, the last of them partly empty, over that of full waves alone.
pub fn last_wave(tiles: f64, sm_count: u32, tiles_differ: bool) -> f64 {
    let waves = (tiles / f64::from(sm_count)).max(1e-3);
    // Tiles of every length, as causal ones are, fill the gaps of the last wave.
    if tiles_differ { 1.0 + 0.25 / waves } else { waves.ceil() / waves }
}
