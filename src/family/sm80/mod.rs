//! The sm80 family's space: `mma.sync` kernels, one warp per 16-row slab. Constraints stand here with their reason and
//! once more as static asserts in `templates/sm80_forward.cu.tera` and `sm80_backward.cu.tera`.

mod fp32;

use super::limits::{GRID, MASK_BLOCKS, SHARED_MEMORY, THREADS, register_budget};
use super::{Constraint, Knob};
use crate::config::{Config, Family};
use crate::device::{Arch, Device};
use crate::problem::{Causal, Dtype, Features, Layout, Pass, Problem, Window};

const FORWARD: &[Knob] = &[
    Knob { name: "block_m", meaning: "query rows of a tile", values: &[16, 32, 64, 128, 192] },
    Knob { name: "block_n", meaning: "keys of a block", values: &[16, 32, 48, 64, 80, 96, 128] },
    Knob { name: "block_dim_v", meaning: "columns of V per block of threads, 0 for all", values: &[0, 128, 256] },
    Knob { name: "num_warps", meaning: "warps of a block of threads", values: &[1, 2, 4, 8] },
    Knob { name: "num_stages", meaning: "K and V blocks in flight", values: &[1, 2, 3] },
    Knob { name: "q_in_regs", meaning: "1: Q fragments stay in registers", values: &[0, 1] },
    Knob { name: "lazy_log2", meaning: "powers of two a row may outgrow its reference", values: &[0, 8] },
    Knob { name: "longest_first", meaning: "1: longest rows of all heads first", values: &[0, 1] },
    Knob { name: "recompute_offsets", meaning: "1: load offsets are computed at each load, 0: kept", values: &[0, 1] },
    Knob { name: "ctas_per_sm", meaning: "blocks of threads that share an SM's registers", values: &[1, 2, 3, 4] },
];

const BACKWARD: &[Knob] = &[
    Knob { name: "block_m", meaning: "query rows of a block", values: &[16, 32, 64, 128] },
    Knob { name: "block_n", meaning: "keys of a tile", values: &[16, 32, 64, 96, 128] },
    Knob { name: "num_warps", meaning: "warps of a block of threads", values: &[4, 8] },
    Knob {
        name: "num_stages",
        meaning: "Q and dO blocks in flight, 0: by turns in one place, as K and V",
        values: &[0, 1, 2],
    },
    Knob { name: "sdp_warps_m", meaning: "warps along the rows of S and dP", values: &[1, 2, 4, 8] },
    Knob { name: "dkv_warps_n", meaning: "warps along the keys of dK and dV", values: &[1, 2, 4, 8] },
    Knob { name: "dq_warps_m", meaning: "warps along the rows of dQ", values: &[1, 2, 4, 8] },
    Knob { name: "longest_first", meaning: "1: keys that most rows see of all heads first", values: &[0, 1] },
    Knob { name: "recompute_offsets", meaning: "1: load offsets are computed at each load, 0: kept", values: &[0, 1] },
    Knob { name: "ctas_per_sm", meaning: "blocks of threads that share an SM's registers", values: &[1, 2] },
];

pub fn knobs(pass: Pass) -> &'static [Knob] {
    match pass {
        Pass::Forward => FORWARD,
        Pass::Backward => BACKWARD,
    }
}

pub fn constraints(pass: Pass) -> &'static [Constraint] {
    match pass {
        Pass::Forward => FORWARD_CONSTRAINTS,
        Pass::Backward => BACKWARD_CONSTRAINTS,
    }
}

const FORWARD_CONSTRAINTS: &[Constraint] = &[
    Constraint {
        name: "whole_slabs",
        reason: "a warp owns whole 16-row tiles of the query block, one to three of them",
        holds: |_, c, _| {
            let slab = 16 * c.get("num_warps");
            c.get("block_m") % slab == 0 && c.get("block_m") / slab <= 3
        },
    },
    Constraint {
        name: "slices_of_v",
        reason: "V is sliced only where all its columns, in fp32, exceed a thread's registers: past 256",
        holds: |p, c, _| (c.get("block_dim_v") > 0) == (p.head_dim_v > 256),
    },
    Constraint {
        name: "q_in_registers",
        reason: "the fragments of Q take head_dim / 4 registers per 16 rows; past 128 nothing is left for O, and of fp32 nothing at all",
        holds: |p, c, _| c.get("q_in_regs") == 0 || p.head_dim <= 128 && p.dtype != Dtype::Fp32,
    },
    LONGEST_FIRST,
    MASK_BLOCKS,
    SHARED_MEMORY,
    THREADS,
    Constraint {
        name: "registers",
        reason: "O, S and the Q fragments of a thread must fit its share of the SM's registers",
        holds: |p, c, d| registers(p, c) <= register_budget(c, d),
    },
    GRID,
];

const BACKWARD_CONSTRAINTS: &[Constraint] = &[
    Constraint {
        name: "warp_grid",
        reason: "warps form a grid over each product",
        holds: |_, c, _| {
            ["sdp_warps_m", "dkv_warps_n", "dq_warps_m"].iter().all(|w| c.get("num_warps") % c.get(w) == 0)
        },
    },
    Constraint {
        name: "whole_patches",
        reason: "a warp owns whole 16 x 16 patches of S: the unit of the dropout mask and of a k-step",
        holds: |_, c, _| {
            c.get("block_m") % (16 * c.get("sdp_warps_m")) == 0 && c.get("block_n") % (16 * sdp_warps_n(c)) == 0
        },
    },
    Constraint {
        name: "idle_warps",
        reason: "warps without a patch of S are worth it only where the head dim, or the blocks of a block mask, leave no room for a larger tile",
        holds: |p, c, _| {
            let is_small =
                p.head_dim.max(p.head_dim_v) * p.dtype.bytes() as i64 > 512 || p.features.block_mask.is_some();
            c.get("sdp_warps_m") * sdp_warps_n(c) == c.get("num_warps") || is_small
        },
    },
    Constraint {
        name: "turns_in_one_place",
        reason: "loading each tile again for each product is worth it only where they do not fit together: fp32 and very wide; dV goes out through the place of Q and dO",
        holds: |p, c, _| {
            let is_very_wide = p.dtype == Dtype::Fp32 && p.head_dim + p.head_dim_v > 512;
            c.get("num_stages") > 0 || is_very_wide && c.get("block_n") <= c.get("block_m")
        },
    },
    Constraint {
        name: "whole_slabs",
        reason: "a warp owns whole 16-row tiles of dK, dV and dQ",
        holds: |_, c, _| {
            c.get("block_n") % (16 * c.get("dkv_warps_n")) == 0 && c.get("block_m") % (16 * c.get("dq_warps_m")) == 0
        },
    },
    LONGEST_FIRST,
    MASK_BLOCKS,
    SHARED_MEMORY,
    THREADS,
    Constraint {
        name: "registers",
        reason: "dK, dV and the larger of (S and dP) and dQ must fit a thread's share of the SM's registers",
        holds: |p, c, d| registers(p, c) <= register_budget(c, d),
    },
    GRID,
];

const LONGEST_FIRST: Constraint = Constraint {
    name: "longest_first",
    reason: "without a causal mask rows are equally long, those of a window but for the first ones, and without turns to take the order only costs L2 hits",
    holds: |p, c, _| c.get("longest_first") == 0 || p.causal != Causal::None || p.deterministic,
};

/// Warps along the keys of S and dP; small tiles leave warps without a patch.
fn sdp_warps_n(config: &Config) -> u32 {
    (config.get("num_warps") / config.get("sdp_warps_m").max(1)).clamp(1, (config.get("block_n") / 16).max(1))
}

/// Registers that a thread of the main kernel needs at least: its fragments, and 40 for addresses and statistics. Of fp32 also what
/// splits an operand of 16 rows, and one of 8 columns with its sum.
fn registers(problem: &Problem, config: &Config) -> u32 {
    let get = |knob| config.get(knob);
    let (dim, dim_v) = (problem.head_dim as u32, problem.head_dim_v as u32);
    let (split_rows, split_cols) = if problem.dtype == Dtype::Fp32 { (16, 16) } else { (0, 0) };
    let fragments = match problem.pass {
        Pass::Forward => {
            let tiles = get("block_m") / (16 * get("num_warps"));
            let dim_v = if get("block_dim_v") == 0 { dim_v } else { dim_v.min(get("block_dim_v")) };
            tiles * (dim_v.div_ceil(8) * 4 + get("block_n") / 2 + get("q_in_regs") * dim.div_ceil(16) * 4 + split_rows)
        }
        Pass::Backward => {
            let (dim, dim_v) = (dim.div_ceil(8), dim_v.div_ceil(8));
            let (kv_dims, q_dims) = (get("num_warps") / get("dkv_warps_n"), get("num_warps") / get("dq_warps_m"));
            let kv = get("block_n") / get("dkv_warps_n") / 16 * (dim.div_ceil(kv_dims) + dim_v.div_ceil(kv_dims)) * 4;
            let s = get("block_m") / get("sdp_warps_m") / 16 * (get("block_n") / sdp_warps_n(config) / 8) * 4;
            let q = get("block_m") / get("dq_warps_m") / 16 * dim.div_ceil(q_dims) * 4;
            // 16-row tiles of the product that has the most.
            let rows_of = |rows, warps| get(rows) / get(warps) / 16;
            let tiles = rows_of("block_m", "sdp_warps_m")
                .max(rows_of("block_n", "dkv_warps_n"))
                .max(rows_of("block_m", "dq_warps_m"));
            kv + (2 * s).max(q) + tiles * split_rows
        }
    };
    fragments + split_cols + 40
}

/// The first of a short list of known good configs, most demanding first, that passes every constraint. The last ones
/// fit any head dim on any device.
///
/// Which tile is the widest whose kernel still spills nothing moves with the head dim and with what else is in the loop
/// (masks, dropout), by the compiler's register allocation alone. So the first ones are given by class, as NVRTC 13.0
/// compiles them and as they were measured on an H200 (`tuning-db`); `tests/kernels/matrix.rs` holds them to it.
pub fn heuristic(problem: &Problem, device: &Device) -> Config {
    let configs = match problem.pass {
        Pass::Forward => known_forward(problem, device),
        Pass::Backward if problem.dtype == Dtype::Fp32 => fp32::known_backward(problem),
        Pass::Backward => known_backward(problem),
    };
    let fits = configs.iter().find(|config| super::check(problem, config, device).is_ok());
    fits.or(configs.last()).expect("the lists are not empty").clone()
}

fn known_forward(problem: &Problem, device: &Device) -> Vec<Config> {
    let slice = match problem.head_dim_v {
        ..=256 => 0,
        _ if device.smem_per_block > 128 << 10 => 256,
        _ => 128,
    };
    if problem.dtype == Dtype::Fp32 {
        return fp32::known_forward(problem, slice);
    }
    let (is_causal, dropout, features) = (masks(problem), problem.dropout, &problem.features);
    // What a row's end, a lane's addresses or another copy of the loop keeps in registers; a softcap alone does not.
    let needs_registers = problem.left_shift().is_some()
        || Features { window: Window::default(), softcap: features.softcap && dropout, ..*features } != Features::NONE;
    let config = |block_m, block_n, num_warps, num_stages, recompute_offsets, ctas_per_sm| {
        let tile = [("block_m", block_m), ("block_n", block_n), ("block_dim_v", slice), ("num_warps", num_warps)];
        let longest_first = u32::from(problem.causal != Causal::None);
        let order = [("longest_first", longest_first), ("recompute_offsets", recompute_offsets)];
        let flow = [("num_stages", num_stages), ("q_in_regs", 0), ("lazy_log2", 8), ("ctas_per_sm", ctas_per_sm)];
        Config::new(Family::Sm80, tile.into_iter().chain(order).chain(flow))
    };
    let is_before_hopper = device.arch < Arch::Sm(9, 0);
    // Four warps of 32 rows each: the keys of a block, the stages, and whether offsets are recomputed.
    let (block_n, num_stages, recompute_offsets) = match problem.head_dim_v {
        dim_v if problem.head_dim > dim_v.max(128) => (32, 2, 1),
        ..=72 if features.bias => (32, 2, 1),
        ..=72 => (64, 2, 1),
        73..=80 if needs_registers => (48, 2, 1),
        81..=128 if needs_registers => (32, 2, 1),
        73..=80 if !dropout => (64, 2, 1),
        73..=80 => (48, 2, 1),
        81..=112 if is_causal && dropout => (32, 2, 1),
        81..=112 => (48, 2, 1),
        113..=128 if is_before_hopper && is_causal && dropout => (48, 1, 1),
        113..=128 if is_before_hopper && (is_causal || dropout) => (32, 2, 1),
        113..=128 if dropout => (48, 1, 0),
        113..=128 => (48, 2, 0),
        _ => (48, 2, 1),
    };
    let mut configs = Vec::new();
    // The loads of a bias are the compiler's to move, and take what registers they find.
    let asks_in_blocks = features.block_mask.is_some() && features.mask;
    if problem.head_dim <= 64 && !features.bias && !asks_in_blocks {
        configs.push(config(128, 64, 4, 2, 1, 2).with("q_in_regs", 1));
    }
    // Past 128, masks, dropout and what else there may be leave no room for 32 rows.
    let widest = if features.bias { 80 } else { 128 };
    if problem.head_dim_v <= widest || !is_causal && !dropout && features.is_none() {
        configs.push(config(128, block_n, 4, num_stages, recompute_offsets, 2));
    }
    if problem.head_dim_v <= widest {
        configs.push(config(128, block_n, 4, 1, recompute_offsets, 2));
        configs.push(config(128, 32, 4, 1, 1, 2));
    }
    let block_n = if problem.head_dim_v > 192 && is_causal && dropout { 48 } else { 64 };
    configs.extend([
        config(128, block_n, 8, 1, 1, 1),
        config(64, 64, 4, 2, 1, 1),
        config(64, 32, 4, 1, 1, 1),
        config(32, 32, 2, 1, 1, 1),
        config(16, 16, 1, 1, 1, 1),
    ]);
    configs
}

/// Whether rows see keys up to a diagonal or from one on, so that blocks beside it go through a copy of the loop with a
/// mask.
fn masks(problem: &Problem) -> bool {
    problem.right_shift().is_some() || problem.left_shift().is_some()
}

fn known_backward(problem: &Problem) -> Vec<Config> {
    let (is_causal, dropout, features) = (masks(problem), problem.dropout, &problem.features);
    let (softcap, bias, varlen) = (features.softcap, features.bias, features.varlen.is_some());
    let (modifies_scores, window) = (features.modifies_scores(), problem.left_shift().is_some());
    // Groups of query heads make few, long tiles.
    let few_tiles = problem.causal != Causal::None && problem.group_size() > 1;
    // And tiles of one head wait for one another where they take turns.
    let longest_first = u32::from(few_tiles || problem.deterministic);
    let config = |block_m, block_n, num_warps, num_stages, [sdp, dkv, dq]: [u32; 3], ctas_per_sm, recompute_offsets| {
        let tile = [("block_m", block_m), ("block_n", block_n), ("num_warps", num_warps), ("num_stages", num_stages)];
        let warps = [("sdp_warps_m", sdp), ("dkv_warps_n", dkv), ("dq_warps_m", dq), ("ctas_per_sm", ctas_per_sm)];
        let order = [("longest_first", longest_first), ("recompute_offsets", recompute_offsets)];
        Config::new(Family::Sm80, tile.into_iter().chain(warps).chain(order))
    };
    let first = match problem.head_dim.max(problem.head_dim_v) {
        // Narrow loads need more addresses.
        ..=64 if matches!(problem.layout, Layout::Vec1 | Layout::Vec2) => config(64, 64, 8, 2, [4, 2, 2], 1, 1),
        ..=64 if dropout || modifies_scores || varlen => config(64, 64, 4, 2, [2, 2, 2], 2, 1),
        ..=56 => config(64, 96, 4, 2, [2, 2, 2], 2, 1),
        57..=64 => config(64, 96, 4, 2, [2, 2, 2], 2, u32::from(!few_tiles)),
        65..=128 if dropout && (bias || softcap) => config(64, 96, 8, 2, [4, 2, 2], 1, 1),
        113..=128 if bias => config(64, 96, 8, 2, [4, 2, 2], 1, 1),
        113..=128 if features.block_mask.is_some() => config(64, 128, 8, 2, [2, 2, 2], 1, 1),
        65..=80 if !dropout => config(128, 128, 8, 2, [2, 4, 4], 1, 1),
        65..=96 if !dropout => config(64, 128, 8, 2, [2, 4, 2], 1, 1),
        65..=96 => config(64, 128, 8, 2, [2, 4, 4], 1, 1),
        97..=112 => config(64, 128, 8, 2, [2, 2, 2], 1, 1),
        113..=128 if dropout || few_tiles || softcap || varlen || window => config(64, 128, 8, 2, [2, 2, 2], 1, 0),
        113..=128 => config(64, 128, 8, 2, [2, 4, 2], 1, 1),
        129..=160 if !dropout && features.is_none() => config(32, 64, 4, 2, [2, 1, 1], 2, 1),
        129..=192 if !dropout && features.is_none() && problem.head_dim_v > 128 => {
            config(64, 96, 8, 2, [4, 2, 1], 1, 1)
        }
        129..=192 => config(64, 64, 8, 2, [4, 2, 1], 1, 1),
        193..=256 if varlen && !dropout && !modifies_scores => config(64, 64, 8, 2, [4, 2, 1], 1, 1),
        193..=256 if is_causal && !dropout && !modifies_scores => config(64, 64, 8, 2, [4, 2, 1], 1, 0),
        193..=256 => config(64, 64, 8, 2, [2, 1, 1], 1, 1),
        _ => config(32, 32, 8, 2, [2, 1, 1], 1, u32::from(!few_tiles || varlen)),
    };
    // Where two stages do not fit, and the next tile would spill.
    let keeps_tile = (window || varlen && (129..=256).contains(&problem.head_dim)) && !modifies_scores;
    let one_stage = keeps_tile.then(|| first.clone().with("num_stages", 1));
    let others = [
        config(64, 128, 8, 1, [2, 4, 2], 1, 1),
        config(64, 64, 8, 2, [4, 2, 2], 1, 1),
        config(64, 64, 8, 1, [4, 2, 2], 1, 1),
        config(32, 64, 8, 1, [2, 2, 1], 1, 1),
        config(32, 32, 4, 1, [2, 2, 2], 1, u32::from(dropout)),
        config(32, 32, 8, 1, [2, 1, 1], 1, 0),
        config(16, 16, 8, 1, [1, 1, 1], 1, 1),
    ];
    [first].into_iter().chain(one_stage).chain(others).collect()
}

/// Expected cost of a config, only to order candidates: shared-memory fragment loads per product, which share the
/// bottleneck with the products themselves, plus what sweeps on an H200 showed of the rest (DESIGN.md, tuning log).
pub fn cost(problem: &Problem, config: &Config, device: &Device) -> f64 {
    let get = |knob| f64::from(config.get(knob));
    let warps_per_sm = get("num_warps") * get("ctas_per_sm");
    // One `ldmatrix` of four 8 x 8 matrices feeds two products per 16 rows it serves; in units of products.
    let few_warps = if warps_per_sm < 8.0 { 0.05 * (8.0 / warps_per_sm - 1.0) } else { 0.0 };
    // Past about four fifths of the budget the compiler begins to spill or to load fragments late.
    let pressure = (f64::from(registers(problem, config)) / f64::from(register_budget(config, device)) - 0.8).max(0.0);
    match problem.pass {
        Pass::Forward => {
            let tiles = get("block_m") / (16.0 * get("num_warps"));
            let fragments = 0.5 / tiles + (1.0 - get("q_in_regs")) * 4.0 / get("block_n");
            // Barriers, maxima and (with an exact maximum) the rescaling of O come once a block.
            let per_block = (8.0 + (8.0 - get("lazy_log2"))) / get("block_n");
            let stages = [0.0, 0.02, 0.0, 0.02][config.get("num_stages").min(3) as usize];
            let order = if problem.causal == Causal::None { 0.0 } else { 0.02 * (1.0 - get("longest_first")) };
            fragments + per_block + stages + order + few_warps + 8.0 / get("block_m") + pressure
        }
        Pass::Backward => {
            let s =
                (get("block_m") / get("sdp_warps_m") / 16.0, get("block_n") / f64::from(sdp_warps_n(config)) / 16.0);
            let dims = problem.head_dim as f64 / 16.0;
            let kv = (get("block_n") / get("dkv_warps_n") / 16.0, dims * get("dkv_warps_n") / get("num_warps"));
            let q = (get("block_m") / get("dq_warps_m") / 16.0, dims * get("dq_warps_m") / get("num_warps"));
            // Fragment loads per product of a warp tile of a x b 16-row operands: (a + b) loads for 2ab products.
            let loads = |(a, b): (f64, f64)| (1.0 / a + 1.0 / b) / 2.0;
            let fragments = (2.0 * loads(s) + 2.0 * loads(kv) + loads(q)) / 5.0;
            // Each key tile reads Q and dO and adds to dQ anew; each block synchronises twice.
            let traffic = 16.0 / get("block_n") + 6.0 / get("block_m");
            let stages = [1.0, 0.02, 0.0][config.get("num_stages").min(2) as usize];
            fragments + traffic + stages + few_warps + 0.3 * pressure
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::check;
    use super::*;
    use crate::problem::{BlockMask, Varlen};

    /// Shared memory per block and per SM as the CUDA programming guide's table of technical specifications has them.
    fn device(arch: Arch, smem_per_block: u32, smem_per_sm: u32, threads_per_sm: u32) -> Device {
        Device {
            name: arch.to_string(),
            arch,
            sm_count: 100,
            smem_per_block: smem_per_block << 10,
            smem_per_sm: smem_per_sm << 10,
            registers_per_sm: 65536,
            threads_per_sm,
            l2_bytes: 50 << 20,
            memory_bytes: 16 << 30,
            memory_bytes_per_second: 0,
            driver_version: 13000,
            nvrtc_version: (13, 0),
        }
    }

    fn devices() -> [Device; 4] {
        [
            device(Arch::Sm(8, 0), 163, 164, 2048),
            device(Arch::Sm(8, 6), 99, 100, 1536),
            device(Arch::Sm(9, 0), 227, 228, 2048),
            device(Arch::Sm(12, 0), 99, 100, 1536),
        ]
    }

    fn problem(pass: Pass, head_dim: i64, head_dim_v: i64, causal: Causal) -> Problem {
        Problem {
            num_heads_kv: 2,
            head_dim_v,
            causal,
            layout: Layout::Vec1,
            ..Problem::dense(pass, Dtype::Bf16, 1, 8, 1000, head_dim)
        }
    }

    #[test]
    fn the_heuristic_fits_every_head_dim_on_every_device() {
        for (device, dtype) in
            devices().into_iter().flat_map(|device| [(device.clone(), Dtype::Bf16), (device, Dtype::Fp32)])
        {
            for (head_dim, head_dim_v) in (1..=512).flat_map(|d| [(d, d), (d, 512), (d, 1), (d, 513 - d)]) {
                for (pass, causal) in
                    [(Pass::Forward, Causal::None), (Pass::Forward, Causal::TopLeft), (Pass::Backward, Causal::None)]
                {
                    let plain = Problem { dtype, ..problem(pass, head_dim, head_dim_v, causal) };
                    let window = Window { left: Some(100), ..Window::default() };
                    let sliding = Features { window, varlen: Some(Varlen::default()), ..Features::NONE };
                    let biased = Features { bias: true, softcap: true, sinks: true, ..Features::NONE };
                    let of_blocks =
                        |block_q, block_k| Features { block_mask: Some(BlockMask { block_q, block_k }), ..biased };
                    for features in [Features::NONE, sliding, biased, of_blocks(128, 64), of_blocks(16, 48)] {
                        let problem = Problem { features, ..plain };
                        let config = heuristic(&problem, &device);
                        assert_eq!(check(&problem, &config, &device), Ok(()), "{} {problem:?}", device.name);
                    }
                }
            }
        }
    }
}
