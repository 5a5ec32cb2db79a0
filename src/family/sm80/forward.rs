//! The forward pass of the sm80 family: knobs, constraints, kernel, heuristic and cost.

use super::{longest_first, masks, order_matters};
use crate::device::{Arch, Device};
use crate::family::knob::{Constraint, knobs};
use crate::family::limits::{
    divides_mask_blocks, divides_scale_blocks, grid, mask_blocks, register_budget, shared_memory, threads,
};
use crate::family::space::Space;
use crate::family::spec::KernelSpec;
use crate::family::tile::{key_unit, tile_bytes};
use crate::problem::{Causal, Dtype, Features, Problem, Window};

knobs! {
    pub struct ForwardKnobs of Sm80 {
        block_m: "query rows of a tile" in [16, 32, 64, 128, 192],
        block_n: "keys of a block" in [16, 32, 48, 64, 80, 96, 128],
        block_dim_v: "columns of V per CTA, 0 for all" in [0, 128, 256],
        num_warps: "warps of a CTA" in [1, 2, 4, 8],
        num_stages: "K and V blocks in flight" in [1, 2, 3],
        q_in_regs: "1: Q fragments stay in registers" in [0, 1],
        lazy_log2: "powers of two a row may outgrow its reference" in [0, 8],
        longest_first: "1: longest rows of all heads first" in [0, 1],
        recompute_offsets: "1: load offsets are computed at each load, 0: kept" in [0, 1],
        ctas_per_sm: "CTAs that share an SM's registers" in [1, 2, 3, 4],
    }
}

impl Space for ForwardKnobs {
    const CONSTRAINTS: &'static [Constraint<Self>] = &[
        Constraint {
            name: "whole_slabs",
            reason: "a warp owns whole 16-row tiles of the query block, one to three of them",
            holds: |_, k, _| {
                let slab = 16 * k.num_warps;
                k.block_m % slab == 0 && k.block_m / slab <= 3
            },
        },
        Constraint {
            name: "slices_of_v",
            reason: "V is sliced only where all its columns, in fp32, exceed a thread's registers: past 256",
            holds: |p, k, _| (k.block_dim_v > 0) == (p.head_dim_v > 256),
        },
        Constraint {
            name: "q_in_registers",
            reason: "the fragments of Q take head_dim / 4 registers per 16 rows; past 128 nothing is left for O, and of fp32 nothing at all",
            holds: |p, k, _| k.q_in_regs == 0 || p.head_dim <= 128 && p.dtype != Dtype::Fp32,
        },
        Constraint {
            name: "fixed_order",
            reason: "a batch-invariant sum is in blocks of 64 keys, which decode kernels have too; fp32 and block masks have none of these",
            holds: |p, k, _| !has_fixed_blocks(p) || k.block_n == 64,
        },
        longest_first(|p, k, _| k.longest_first == 0 || order_matters(p)),
        Constraint {
            name: "scale_blocks",
            reason: "a block of keys has one scale where blocks of 128 keys share theirs",
            holds: |p, k, _| divides_scale_blocks(p, k.block_n),
        },
        mask_blocks(|p, k, _| divides_mask_blocks(p, k.block_m, k.block_n)),
        shared_memory(),
        threads(),
        Constraint {
            name: "registers",
            reason: "O, S and the Q fragments of a thread must fit its share of the SM's registers",
            holds: |p, k, d| k.registers(p) <= register_budget(k.num_warps, k.ctas_per_sm, d),
        },
        grid(),
    ];

    fn heuristic(problem: &Problem, device: &Device) -> Option<Self> {
        super::first_that_fits(&known(problem, device), problem, device)
    }

    /// Shared-memory fragment loads per product, which share the bottleneck with the products
    /// themselves, plus what sweeps on an H200 showed of the rest (docs/tuning/sm80.md).
    fn cost(&self, problem: &Problem, device: &Device) -> f64 {
        let [block_m, block_n, num_warps] = [self.block_m, self.block_n, self.num_warps].map(f64::from);
        let [q_in_regs, lazy_log2] = [self.q_in_regs, self.lazy_log2].map(f64::from);
        let few_warps = super::few_warps(num_warps * f64::from(self.ctas_per_sm));
        let budget = register_budget(self.num_warps, self.ctas_per_sm, device);
        let pressure = super::register_pressure(self.registers(problem), budget);
        let tiles = block_m / (16.0 * num_warps);
        // One `ldmatrix` of four 8 x 8 matrices feeds two products per 16 rows it serves; in units
        // of products.
        let fragments = 0.5 / tiles + (1.0 - q_in_regs) * 4.0 / block_n;
        // Barriers, maxima and (with an exact maximum) the rescaling of O come once a block.
        let per_block = (8.0 + (8.0 - lazy_log2)) / block_n;
        let stages = [0.0, 0.02, 0.0, 0.02][self.num_stages as usize];
        let order = if problem.causal == Causal::None { 0.0 } else { 0.02 * (1.0 - f64::from(self.longest_first)) };
        fragments + per_block + stages + order + few_warps + 8.0 / block_m + pressure
    }

    fn kernels(&self, problem: &Problem) -> Vec<KernelSpec> {
        vec![KernelSpec {
            template: "sm80_forward",
            entry: "flashtune_sm80_forward",
            threads: self.num_warps * 32,
            smem_bytes: self.smem_bytes(problem),
            rows: self.block_m,
            slices: match self.block_dim_v {
                0 => 1,
                slice => (problem.head_dim_v as u32).div_ceil(slice),
            },
            ctas_per_sm: self.ctas_per_sm,
            ..KernelSpec::MAIN
        }]
    }
}

impl ForwardKnobs {
    /// Columns of V that one CTA does.
    fn dim_v(&self, problem: &Problem) -> i64 {
        match i64::from(self.block_dim_v) {
            0 => problem.head_dim_v,
            slice => slice.min(problem.head_dim_v),
        }
    }

    fn smem_bytes(&self, problem: &Problem) -> u32 {
        let unit = i64::from(key_unit(problem));
        // Rows of Q, O and V are whole steps of 16 columns beside keys of 8 bits.
        let whole = |dim: i64| if unit == 1 { dim } else { (dim + 15) / 16 * 16 };
        let dim_v = whole(self.dim_v(problem));
        let tile = |rows, dim| tile_bytes(problem.dtype, rows, dim);
        let q = tile(self.block_m, whole(problem.head_dim)).max(tile(self.block_m, dim_v));
        q + self.num_stages * (tile(self.block_n, problem.head_dim / unit) + tile(self.block_n, dim_v / unit))
    }

    /// Registers that a thread needs at least.
    fn registers(&self, problem: &Problem) -> u32 {
        let tiles = self.block_m / (16 * self.num_warps);
        let unit = key_unit(problem);
        let o = (self.dim_v(problem) as u32).div_ceil(8 * unit) * 4 * unit;
        let q = self.q_in_regs * (problem.head_dim as u32).div_ceil(16) * 4;
        tiles * (o + self.block_n / 2 + q + super::split_registers(problem))
            + super::other_registers(problem)
            + 16 * (unit - 1)
    }
}

fn known(problem: &Problem, device: &Device) -> Vec<ForwardKnobs> {
    let slice = match problem.head_dim_v {
        ..=256 => 0,
        _ if device.smem_per_block > 128 << 10 => 256,
        _ => 128,
    };
    if problem.dtype == Dtype::Fp32 {
        return known_fp32(problem, slice);
    }
    if has_fixed_blocks(problem) {
        return in_fixed_order(problem, slice);
    }
    let (is_causal, dropout, features) = (masks(problem), problem.dropout, &problem.features);
    // Features that keep a row's end, a lane's addresses or another copy of the loop in registers;
    // a softcap alone does not.
    let needs_registers = problem.left_shift().is_some()
        || Features { window: Window::default(), softcap: features.softcap && dropout, ..*features } != Features::NONE;
    let config = |block_m, block_n, num_warps, num_stages, recompute_offsets, ctas_per_sm| ForwardKnobs {
        recompute_offsets,
        ..of_tile(problem, slice, [block_m, block_n, num_warps, num_stages], ctas_per_sm)
    };
    let is_before_hopper = device.arch < Arch::Sm(9, 0);
    // Four warps of 32 rows each: the keys of a block, the stages, and whether offsets are
    // recomputed.
    let has_eight_bits = features.eight_bits.is_some();
    let (block_n, num_stages, recompute_offsets) = match problem.head_dim_v {
        // Bytes on their way to 16 bits, and scales, take registers.
        _ if has_eight_bits => (32, 2, 1),
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
    // The compiler may move the loads of a bias, which take the registers that they find.
    let masks_in_blocks = features.block_mask.is_some() && features.mask;
    if problem.head_dim <= 64 && !features.bias && !masks_in_blocks && features.paged.is_none() && !has_eight_bits {
        configs.push(ForwardKnobs { q_in_regs: 1, ..config(128, 64, 4, 2, 1, 2) });
    }
    // Past 128, masks, dropout and other features leave no room for 32 rows.
    let widest = if features.bias { 80 } else { 128 };
    if problem.head_dim_v <= widest || !is_causal && !dropout && features.is_none() {
        configs.push(config(128, block_n, 4, num_stages, recompute_offsets, 2));
    }
    if problem.head_dim_v <= widest {
        configs.push(config(128, block_n, 4, 1, recompute_offsets, 2));
        configs.push(config(128, 32, 4, 1, 1, 2));
    }
    let block_n = match problem.head_dim_v {
        _ if has_eight_bits => 32,
        193.. if is_causal && dropout => 48,
        _ => 64,
    };
    configs.extend([
        config(128, block_n, 8, 1, 1, 1),
        config(64, 64, 4, 2, 1, 1),
        config(64, 32, 4, 1, 1, 1),
        config(32, 32, 2, 1, 1, 1),
        config(16, 16, 1, 1, 1, 1),
    ]);
    configs
}

/// Whether other families' kernels serve other lengths of a batch-invariant problem.
fn has_fixed_blocks(problem: &Problem) -> bool {
    problem.batch_invariant && problem.dtype != Dtype::Fp32 && problem.features.block_mask.is_none()
}

/// The same of a batch-invariant problem. The merged O lies in memory, so that 16 rows a warp leave
/// room for a segment's.
fn in_fixed_order(problem: &Problem, slice: u32) -> Vec<ForwardKnobs> {
    let config = |block_m, num_warps, num_stages, ctas_per_sm| {
        of_tile(problem, slice, [block_m, 64, num_warps, num_stages], ctas_per_sm)
    };
    let narrow = [config(128, 8, 2, 1), config(64, 4, 2, 2)];
    let others =
        [config(128, 8, 1, 1), config(64, 4, 2, 1), config(64, 4, 1, 1), config(32, 2, 1, 1), config(16, 1, 1, 1)];
    narrow.into_iter().filter(|_| problem.head_dim_v <= 128).chain(others).collect()
}

/// The same of fp32, whose tiles take twice the shared memory and whose operands are split in
/// registers.
fn known_fp32(problem: &Problem, slice: u32) -> Vec<ForwardKnobs> {
    let config = |block_m, block_n, num_warps, num_stages, ctas_per_sm| {
        of_tile(problem, slice, [block_m, block_n, num_warps, num_stages], ctas_per_sm)
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

/// A config of a tile, with Q in shared memory and load offsets computed at each load.
fn of_tile(
    problem: &Problem,
    slice: u32,
    [block_m, block_n, num_warps, num_stages]: [u32; 4],
    ctas_per_sm: u32,
) -> ForwardKnobs {
    ForwardKnobs {
        block_m,
        block_n,
        block_dim_v: slice,
        num_warps,
        num_stages,
        q_in_regs: 0,
        lazy_log2: 8,
        longest_first: u32::from(problem.causal != Causal::None),
        recompute_offsets: 1,
        ctas_per_sm,
    }
}
