//! The known good configs of sm80's fp32 kernels: of tiles that take twice the shared memory, whose operands are split in registers.

use crate::config::{Config, Family};
use crate::problem::{Causal, Problem};

/// Most demanding first, as `sm80::heuristic` takes them; the last one fits any head dim on any device. V is cut into slices of so
/// many columns.
pub fn known_forward(problem: &Problem, slice: u32) -> Vec<Config> {
    let config = |block_m, block_n, num_warps, num_stages, ctas_per_sm| {
        let tile = [("block_m", block_m), ("block_n", block_n), ("block_dim_v", slice), ("num_warps", num_warps)];
        let longest_first = u32::from(problem.causal != Causal::None);
        let order = [("longest_first", longest_first), ("recompute_offsets", 1), ("q_in_regs", 0)];
        let flow = [("num_stages", num_stages), ("lazy_log2", 8), ("ctas_per_sm", ctas_per_sm)];
        Config::new(Family::Sm80, tile.into_iter().chain(order).chain(flow))
    };
    let first = match problem.head_dim.max(problem.head_dim_v) {
        ..=64 => vec![config(64, 32, 4, 2, 3), config(64, 32, 4, 1, 2)],
        65..=128 => vec![config(64, 16, 4, 2, 2), config(64, 16, 4, 2, 1)],
        129..=256 => vec![config(64, 16, 4, 1, 2)],
        _ => Vec::new(),
    };
    let others = [config(64, 16, 4, 1, 1), config(32, 16, 2, 1, 1), config(16, 16, 1, 1, 1)];
    first.into_iter().chain(others).collect()
}

pub fn known_backward(problem: &Problem) -> Vec<Config> {
    // As for 16 bits: few, long tiles, or tiles that wait for one another.
    let few_tiles = problem.causal != Causal::None && problem.group_size() > 1;
    let longest_first = u32::from(few_tiles || problem.deterministic);
    let config = |block_m, block_n, num_warps, num_stages, [sdp, dkv, dq]: [u32; 3]| {
        let tile = [("block_m", block_m), ("block_n", block_n), ("num_warps", num_warps), ("num_stages", num_stages)];
        let warps = [("sdp_warps_m", sdp), ("dkv_warps_n", dkv), ("dq_warps_m", dq), ("ctas_per_sm", 1)];
        let order = [("longest_first", longest_first), ("recompute_offsets", 1)];
        Config::new(Family::Sm80, tile.into_iter().chain(warps).chain(order))
    };
    let first = match problem.head_dim.max(problem.head_dim_v) {
        ..=64 => vec![config(64, 64, 8, 2, [4, 2, 2]), config(32, 64, 8, 2, [2, 2, 2])],
        65..=128 => {
            vec![config(32, 64, 8, 2, [2, 2, 2]), config(32, 64, 8, 1, [2, 2, 2]), config(32, 32, 4, 1, [2, 2, 2])]
        }
        _ => Vec::new(),
    };
    let others = [config(32, 32, 8, 1, [2, 1, 1]), config(16, 16, 8, 1, [1, 1, 1]), config(16, 16, 8, 0, [1, 1, 1])];
    first.into_iter().chain(others).collect()
}
