//! The backward pass of the sm80 family: knobs, constraints, kernels, heuristic and cost.

use super::{longest_first, masks, order_matters};
use crate::device::Device;
use crate::family::backward;
use crate::family::knob::{Constraint, knobs};
use crate::family::limits::{divides_mask_blocks, grid, mask_blocks, register_budget, shared_memory, threads};
use crate::family::space::Space;
use crate::family::spec::{Axis, KernelSpec};
use crate::family::tile::tile_bytes;
use crate::problem::{Causal, Dtype, Layout, Problem};

knobs! {
    pub struct BackwardKnobs of Sm80 {
        block_m: "query rows of a block" in [16, 32, 64, 128],
        block_n: "keys of a tile" in [16, 32, 64, 96, 128],
        num_warps: "warps of a CTA" in [4, 8],
        num_stages: "Q and dO blocks in flight, 0: Q and dO share one buffer, as K and V do" in [0, 1, 2],
        sdp_warps_m: "warps along the rows of S and dP" in [1, 2, 4, 8],
        dkv_warps_n: "warps along the keys of dK and dV" in [1, 2, 4, 8],
        dq_warps_m: "warps along the rows of dQ" in [1, 2, 4, 8],
        longest_first: "1: keys that most rows see of all heads first" in [0, 1],
        recompute_offsets: "1: load offsets are computed at each load, 0: kept" in [0, 1],
        ctas_per_sm: "CTAs that share an SM's registers" in [1, 2],
    }
}

impl Space for BackwardKnobs {
    const CONSTRAINTS: &'static [Constraint<Self>] = &[
        Constraint {
            name: "warp_grid",
            reason: "warps form a grid over each product",
            holds: |_, k, _| [k.sdp_warps_m, k.dkv_warps_n, k.dq_warps_m].iter().all(|warps| k.num_warps % warps == 0),
        },
        Constraint {
            name: "whole_patches",
            reason: "a warp owns whole 16 x 16 patches of S: the unit of the dropout mask and of a k-step",
            holds: |_, k, _| k.block_m % (16 * k.sdp_warps_m) == 0 && k.block_n % (16 * k.sdp_warps_n()) == 0,
        },
        Constraint {
            name: "idle_warps",
            reason: "warps without a patch of S are worth it only where the head dim, or the blocks of a block mask, leave no room for a larger tile",
            holds: |p, k, _| {
                let is_small =
                    p.head_dim.max(p.head_dim_v) * p.dtype.bytes() as i64 > 512 || p.features.block_mask.is_some();
                k.sdp_warps_m * k.sdp_warps_n() == k.num_warps || is_small
            },
        },
        Constraint {
            name: "shared_buffers",
            reason: "loading each tile again for each product is worth it only where they do not fit together: fp32 and very wide; dV goes out through the buffer of Q and dO",
            holds: |p, k, _| {
                let is_very_wide = p.dtype == Dtype::Fp32 && p.head_dim + p.head_dim_v > 512;
                k.num_stages > 0 || is_very_wide && k.block_n <= k.block_m
            },
        },
        Constraint {
            name: "whole_slabs",
            reason: "a warp owns whole 16-row tiles of dK, dV and dQ",
            holds: |_, k, _| k.block_n % (16 * k.dkv_warps_n) == 0 && k.block_m % (16 * k.dq_warps_m) == 0,
        },
        longest_first(|p, k, _| k.longest_first == 0 || order_matters(p)),
        mask_blocks(|p, k, _| divides_mask_blocks(p, k.block_m, k.block_n)),
        shared_memory(),
        threads(),
        Constraint {
            name: "registers",
            reason: "dK, dV and the larger of (S and dP) and dQ must fit a thread's share of the SM's registers",
            holds: |p, k, d| k.registers(p) <= register_budget(k.num_warps, k.ctas_per_sm, d),
        },
        grid(),
    ];

    fn heuristic(problem: &Problem, device: &Device) -> Option<Self> {
        let configs = match problem.dtype {
            Dtype::Fp32 => known_fp32(problem),
            Dtype::Fp16 | Dtype::Bf16 => known(problem),
        };
        super::first_that_fits(&configs, problem, device)
    }

    /// Shared-memory fragment loads per product, which share the bottleneck with the products
    /// themselves, plus what sweeps on an H200 showed of the rest (docs/tuning/sm80.md).
    fn cost(&self, problem: &Problem, device: &Device) -> f64 {
        let [block_m, block_n, num_warps] = [self.block_m, self.block_n, self.num_warps].map(f64::from);
        let [dkv_warps_n, dq_warps_m] = [self.dkv_warps_n, self.dq_warps_m].map(f64::from);
        let few_warps = super::few_warps(num_warps * f64::from(self.ctas_per_sm));
        let budget = register_budget(self.num_warps, self.ctas_per_sm, device);
        let pressure = super::register_pressure(self.registers(problem), budget);
        let s = (block_m / f64::from(self.sdp_warps_m) / 16.0, block_n / f64::from(self.sdp_warps_n()) / 16.0);
        let dims = problem.head_dim as f64 / 16.0;
        let kv = (block_n / dkv_warps_n / 16.0, dims * dkv_warps_n / num_warps);
        let q = (block_m / dq_warps_m / 16.0, dims * dq_warps_m / num_warps);
        // Fragment loads per product of a warp tile of a x b 16-row operands: (a + b) loads for 2ab
        // products.
        let loads = |(a, b): (f64, f64)| (1.0 / a + 1.0 / b) / 2.0;
        let fragments = (2.0 * loads(s) + 2.0 * loads(kv) + loads(q)) / 5.0;
        // Each key tile reads Q and dO and adds to dQ anew; each block synchronises twice.
        let traffic = 16.0 / block_n + 6.0 / block_m;
        let stages = [1.0, 0.02, 0.0][self.num_stages as usize];
        fragments + traffic + stages + few_warps + 0.3 * pressure
    }

    fn kernels(&self, problem: &Problem) -> Vec<KernelSpec> {
        let main = KernelSpec {
            template: "sm80_backward",
            entry: "flashtune_sm80_backward",
            threads: self.num_warps * 32,
            smem_bytes: self.smem_bytes(problem),
            rows: self.block_n,
            axis: Axis::Keys,
            ctas_per_sm: self.ctas_per_sm,
            ..KernelSpec::MAIN
        };
        backward::around(problem, main)
    }
}

impl BackwardKnobs {
    /// Warps along the keys of S and dP; small tiles leave warps without a patch.
    fn sdp_warps_n(&self) -> u32 {
        (self.num_warps / self.sdp_warps_m).clamp(1, (self.block_n / 16).max(1))
    }

    fn smem_bytes(&self, problem: &Problem) -> u32 {
        let (dim, dim_v) = (problem.head_dim, problem.head_dim_v);
        let tile = |rows, dim| tile_bytes(problem.dtype, rows, dim);
        let weights = 2 * tile(self.block_m, i64::from(self.block_n));
        let of_rows = |rows| match self.num_stages {
            0 => tile(rows, dim.max(dim_v)),
            _ => tile(rows, dim) + tile(rows, dim_v),
        };
        let stage = of_rows(self.block_m) + self.block_m * 8;
        of_rows(self.block_n) + weights + self.num_stages.max(1) * stage + 256
    }

    /// Registers that a thread of the main kernel needs at least.
    fn registers(&self, problem: &Problem) -> u32 {
        let (dim, dim_v) = ((problem.head_dim as u32).div_ceil(8), (problem.head_dim_v as u32).div_ceil(8));
        let (kv_dims, q_dims) = (self.num_warps / self.dkv_warps_n, self.num_warps / self.dq_warps_m);
        // Tiles of 16 rows that a warp has of each product.
        let s_tiles = self.block_m / self.sdp_warps_m / 16;
        let kv_tiles = self.block_n / self.dkv_warps_n / 16;
        let q_tiles = self.block_m / self.dq_warps_m / 16;
        let kv = kv_tiles * (dim.div_ceil(kv_dims) + dim_v.div_ceil(kv_dims)) * 4;
        let s = s_tiles * (self.block_n / self.sdp_warps_n() / 8) * 4;
        let q = q_tiles * dim.div_ceil(q_dims) * 4;
        let most_tiles = s_tiles.max(kv_tiles).max(q_tiles);
        kv + (2 * s).max(q) + most_tiles * super::split_registers(problem) + super::other_registers(problem)
    }
}

fn known(problem: &Problem) -> Vec<BackwardKnobs> {
    let (is_causal, dropout, features) = (masks(problem), problem.dropout, &problem.features);
    let (softcap, bias, varlen) = (features.softcap, features.bias, features.varlen.is_some());
    let (modifies_scores, window) = (features.modifies_scores(), problem.left_shift().is_some());
    let few_tiles = has_few_tiles(problem);
    let config = |block_m, block_n, num_warps, num_stages, warps, ctas_per_sm, recompute_offsets| BackwardKnobs {
        recompute_offsets,
        ctas_per_sm,
        ..of_tile(problem, [block_m, block_n, num_warps, num_stages], warps)
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
    // Where two stages do not fit, the next tile would spill.
    let keeps_tile = (window || varlen && (129..=256).contains(&problem.head_dim)) && !modifies_scores;
    let one_stage = keeps_tile.then_some(BackwardKnobs { num_stages: 1, ..first });
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

/// The same of fp32, whose tiles take twice the shared memory and whose operands are split in
/// registers.
fn known_fp32(problem: &Problem) -> Vec<BackwardKnobs> {
    let config = |block_m, block_n, num_warps, num_stages, warps| {
        of_tile(problem, [block_m, block_n, num_warps, num_stages], warps)
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

/// A config of a tile, with a CTA to itself on an SM and load offsets computed at each load.
/// `warps` are those along the rows of S, the keys of dK and the rows of dQ.
fn of_tile(
    problem: &Problem,
    [block_m, block_n, num_warps, num_stages]: [u32; 4],
    [sdp_warps_m, dkv_warps_n, dq_warps_m]: [u32; 3],
) -> BackwardKnobs {
    BackwardKnobs {
        block_m,
        block_n,
        num_warps,
        num_stages,
        sdp_warps_m,
        dkv_warps_n,
        dq_warps_m,
        // Deterministic tiles of one head wait for their turn at dQ.
        longest_first: u32::from(has_few_tiles(problem) || problem.deterministic),
        recompute_offsets: 1,
        ctas_per_sm: 1,
    }
}

/// Whether tiles are few and long, and differ in length: the heads of a GQA group share a tile of
/// keys.
fn has_few_tiles(problem: &Problem) -> bool {
    problem.causal != Causal::None && problem.group_size() > 1
}
