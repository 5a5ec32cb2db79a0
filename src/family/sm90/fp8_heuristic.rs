//! The config that the sm90 forward pass for e4m3 begins with: a tile by head dim and features, and
//! what follows from it.

use super::forward_heuristic::rows_by_preference;
use super::fp8_geometry::Fp8Knobs;
use super::warpgroup::tiles_differ;
use crate::device::Device;
use crate::family::limits::divides_scale_blocks;
use crate::family::space::Space;
use crate::problem::{Features, Problem};

/// Whether the kernel may split the keys at all.
pub fn may_split(problem: &Problem) -> bool {
    problem.features.block_mask.is_none()
}

/// The fastest (block_m, block_n) on an H200 for problems of many tiles
/// (docs/tuning/eight-bits.md).
pub fn tile_of_full_device(problem: &Problem) -> (u32, u32) {
    let modifies = problem.features.modifies_scores();
    match problem.head_dim.max(problem.head_dim_v) {
        ..=64 if modifies => (192, 96),
        // Larger blocks cost more at a tile's beginning, and less from then on.
        ..=64 if problem.seqlen_k >= 4096 => (192, 160),
        ..=64 => (192, 128),
        65..=128 if modifies => (128, 128),
        65..=128 => (192, 96),
        129..=192 => (128, 128),
        _ if modifies => (128, 64),
        _ => (128, 128),
    }
}

/// The tile of `tile_of_full_device`. A tile has fewer rows if there would be too few tiles for all
/// SMs, and fewer keys and stages if it would not fit.
pub fn heuristic(problem: &Problem, device: &Device) -> Option<Fp8Knobs> {
    let (rows, _) = tile_of_full_device(problem);
    rows_by_preference(problem, device, rows).find_map(|block_m| of_rows(problem, device, block_m))
}

/// The heuristic's config with so many rows.
pub fn of_rows(problem: &Problem, device: &Device, block_m: u32) -> Option<Fp8Knobs> {
    let (rows, keys) = tile_of_full_device(problem);
    // Two consumer warpgroups have registers for more keys than three.
    let is_lower = block_m < rows && problem.head_dim_v <= 128 && !problem.features.modifies_scores();
    let most_keys = match problem.head_dim_v {
        _ if !is_lower => keys,
        ..=64 => 192,
        _ => 224,
    };
    of_tile(problem, device, block_m, most_keys)
}

/// Configs among which the model of time chooses: tiles up to head dim 64, and past it one that
/// reads V^T. Features take registers, so problems with any keep to the heuristic's config.
pub fn alternatives(problem: &Problem, device: &Device) -> Vec<Fp8Knobs> {
    let is_plain = Features { eight_bits: None, ..problem.features } == Features::NONE;
    match problem.head_dim.max(problem.head_dim_v) {
        _ if !is_plain => Vec::new(),
        ..=64 => tiles_of_narrow_heads(problem, device),
        _ => heuristic(problem, device)
            .and_then(|config| reading_transposed_v(config, problem, device))
            .into_iter()
            .collect(),
    }
}

/// The config whose transposing kernel writes V^T first. The room of V's slots goes to others: from
/// head dim 129 to 160 a second tile of Q was faster on an H200 than third stages of K and V^T, and
/// past it was not. Up to 128 there is room for both.
fn reading_transposed_v(config: Fp8Knobs, problem: &Problem, device: &Device) -> Option<Fp8Knobs> {
    let [k_stages, vt_stages, q_stages] = match problem.head_dim.max(problem.head_dim_v) {
        ..=128 => [3, 3, 2],
        129..=160 => [2, 2, 2],
        _ => [3, 3, 1],
    };
    let config = stored_by_tma(Fp8Knobs { k_stages, v_stages: 0, vt_stages, q_stages, ..config }, problem, device);
    config.fits(problem, device).then_some(config)
}

/// 256 x 64 has the shortest ends, and 192 x 160 the fastest blocks (docs/tuning/eight-bits.md).
/// Under a causal mask the latter keeps a word of a tile's output on the stack.
fn tiles_of_narrow_heads(problem: &Problem, device: &Device) -> Vec<Fp8Knobs> {
    let tiles = [(192, 160), (192, 128), (256, 64)];
    let mut configs: Vec<_> =
        tiles.into_iter().filter_map(|(block_m, most_keys)| of_tile(problem, device, block_m, most_keys)).collect();
    configs.dedup();
    configs
}

/// The config with so many rows, as many keys up to `most_keys` as fit, and then stages.
fn of_tile(problem: &Problem, device: &Device, block_m: u32, most_keys: u32) -> Option<Fp8Knobs> {
    let divides = |block_n: i64| {
        let features = &problem.features;
        divides_scale_blocks(problem, block_n as u32)
            && features.block_mask.is_none_or(|mask| mask.block_k % block_n == 0)
            // Boxes of a page have as many keys as divide the page and the block.
            && features.paged.is_none_or(|page_size| page_size % block_n == 0 || block_n == 64)
    };
    let config = |block_n: u32, [k_stages, v_stages, vt_stages, q_stages]: [u32; 4]| Fp8Knobs {
        block_m,
        block_n,
        k_stages,
        v_stages,
        vt_stages,
        q_stages,
        tma_store: 0,
        group_mb: if tiles_differ(problem) { 32 } else { 1 },
        num_splits: 1,
    };
    const STAGES: [[u32; 4]; 6] = [[3, 2, 3, 2], [3, 2, 2, 2], [2, 2, 2, 2], [2, 2, 2, 1], [2, 1, 2, 2], [2, 1, 2, 1]];
    let keys = [224, 192, 160, 128, 96, 64].into_iter().filter(|keys| *keys <= most_keys && divides((*keys).into()));
    let configs = keys.flat_map(|keys| STAGES.map(|stages| config(keys, stages)));
    let config = configs.into_iter().find(|config| config.fits(problem, device))?;
    Some(stored_by_tma(config, problem, device))
}

/// The config with a slot of O's own if shared memory has room for it, and else without. At a
/// tile's end TMA then stores O, while the consumer goes on (docs/tuning/eight-bits.md).
pub fn stored_by_tma(config: Fp8Knobs, problem: &Problem, device: &Device) -> Fp8Knobs {
    let [from_registers, by_tma] = [0, 1].map(|tma_store| Fp8Knobs { tma_store, ..config });
    if by_tma.fits(problem, device) { by_tma } else { from_registers }
}
