//! The backward pass of the sm90 family, in three kernels.
//!
//! Up to head dim 128 each consumer warpgroup computes 64 keys, up to 192 fewer, transposed
//! (`templates/sm90_backward_middle.cu.tera`), and beyond a half of the columns of 64 keys
//! (`templates/sm90_backward_wide.cu.tera`).

use super::backward_geometry::{BackwardKernel, BackwardKnobs, PAIR_KEYS, direct_tiles, half_cols, is_narrow};
use super::backward_heuristic::{
    group_mb, has_few_alike_rows, heuristic, overflows_l2, unsplit_group_mb, wants_groups,
};
use super::warpgroup::{WARPGROUP_ROWS, last_wave, padded, tiles_differ};
use super::{backward_alternatives, backward_work};
use crate::device::Device;
use crate::family::backward;
use crate::family::knob::{Constraint, Knob};
use crate::family::limits::{divides_mask_blocks, grid, mask_blocks, shared_memory};
use crate::family::space::Space;
use crate::family::spec::{Arguments, Axis, Boxes, KernelSpec, Schedule};
use crate::family::tile::boxes;
use crate::family::time::Work;
use crate::problem::Problem;

impl Space for BackwardKnobs {
    const CONSTRAINTS: &'static [Constraint<Self>] = &[
        Constraint {
            name: "narrow_only",
            reason: "past head dim 128 there is no room for V in registers or a second tile of K and V, and no wait for dP follows the exponentials",
            holds: |p, k, _| is_narrow(p) || (k.v_regs, k.sink_softmax, k.kv_stages) == (0, 0, 1),
        },
        Constraint {
            name: "num_stages",
            reason: "past head dim 128 two blocks of Q are in flight, behind which a third of dO waits; pairs of CTAs from 136 to 192 spill with two blocks of dO",
            holds: |p, k, _| match (BackwardKernel::of(p), k.kernel(p)) {
                (BackwardKernel::Narrow, _) => true,
                (BackwardKernel::Middle, BackwardKernel::Wide) => k.num_stages == 1,
                _ => k.num_stages <= 2,
            },
        },
        Constraint {
            name: "wgmma_m",
            reason: "wgmma's M is 64. It counts keys up to head dim 128 and, past 192, in each of two CTAs, so that a tile has 128 keys. It counts queries from 136 to 192, with fewer keys a tile, and past 192 in tiles of 64 keys; tiles of 128 keys from 136 on are those of two CTAs",
            holds: |p, k, _| match k.kernel(p) {
                BackwardKernel::Middle => k.block_m == 64 && k.block_n < 128,
                BackwardKernel::Narrow | BackwardKernel::Wide => k.block_n == 128,
            },
        },
        Constraint {
            name: "direct_dq",
            reason: "one tile writes dQ; so does a CTA that does up to four tiles of a head, in blocks of up to 112 rows, past which it spills; its walk may be split where tiles are alike, since parts then have the same rows",
            holds: |p, k, _| match (direct_tiles(p, k.block_n), k.direct_dq) {
                (Some(1), direct) => direct <= 1,
                (Some(tiles), direct) => {
                    let may_split = k.split_waves == 0 || !tiles_differ(p);
                    direct == 0 || direct == tiles && may_split && k.block_m <= 112
                }
                (None, direct) => direct == 0,
            },
        },
        Constraint {
            name: "v_regs",
            reason: "the first k16 step of dP overwrites it, from shared memory",
            holds: |p, k, _| i64::from(k.v_regs) < (p.head_dim_v + 15) / 16,
        },
        mask_blocks(|p, k, _| divides_mask_blocks(p, k.block_m, k.block_n)),
        shared_memory(),
        Constraint {
            name: "registers",
            reason: "dK, dV, S, dP, P and the part of V that a consumer thread keeps must fit the registers that setmaxnreg gives it",
            holds: |p, k, _| k.fits_registers(p),
        },
        grid(),
        Constraint {
            name: "split_waves",
            reason: "splits need queries enough for each, and not tiles for as many waves already; lists of a block mask are walked whole",
            holds: |p, k, d| k.split_waves == 0 || k.num_splits(p, d) > 1,
        },
        Constraint {
            name: "splits_rest",
            reason: "tiles past whole waves are split where tiles are alike and add to dQ; a wave must be whole, some tiles of each head too, and the workspace must have room",
            holds: |p, k, d| {
                let is_served = k.direct_dq == 0 && k.split_waves == 0;
                k.splits_rest == 0 || is_served && k.rest_tiles(p, d).is_some()
            },
        },
    ];

    /// The tile that bare kernels were fastest with on an H200, or the largest block whose
    /// consumers spill nothing (NVRTC 13.0; `tests/kernels/matrix.rs` holds them to it), with fewer
    /// rows and less in flight where that does not fit.
    fn heuristic(problem: &Problem, device: &Device) -> Option<Self> {
        heuristic(problem, device)
    }

    /// Expected time over that of a perfect config. The shares are what bare kernels showed of each
    /// choice on an H200.
    fn cost(&self, problem: &Problem, device: &Device) -> f64 {
        let [block_m, block_n, kv_stages] = [self.block_m, self.block_n, self.kv_stages].map(f64::from);
        let heads = (problem.batch_size * problem.num_heads_kv) as f64;
        let tiles = heads * (problem.seqlen_k as f64 / block_n).ceil();
        let last_wave = last_wave(tiles, device.sm_count, tiles_differ(problem));
        // Barriers, statistics and the addition of dQ come once a block.
        let per_block = 45.0 / block_m;
        // Products of few keys read shared memory for longer than they multiply
        // (docs/tuning/sm90-backward.md).
        let (per_tile, in_flight) = match self.kernel(problem) {
            BackwardKernel::Narrow => (0.0, [0.15, 0.0, 0.02]),
            BackwardKernel::Middle => (120.0 / block_n, [0.02, 0.0, 0.0]),
            BackwardKernel::Wide => (0.0, [0.0, 0.02, 0.04]),
        };
        let in_flight = in_flight[self.num_stages as usize - 1];
        // Nothing is multiplied during a tile's first loads and last stores; it walks the queries
        // of all heads of its group.
        let tile_end = 250.0 / kv_stages / (problem.seqlen_q * problem.group_size()).max(1) as f64;
        let order = match (self.group_mb, unsplit_group_mb(problem, device)) {
            (mine, best) if mine == best => 0.0,
            _ if backward_work::walks_alternate(problem) => 0.03,
            (0, _) => 0.2,
            _ => 0.03,
        };
        let fragments = match (problem.head_dim_v, self.v_regs) {
            (..=64, 0) | (65.., 2) => 0.0,
            _ => 0.02,
        } + 0.005 * f64::from(self.sink_softmax);
        let work = padded(problem.seqlen_q, block_m) * padded(problem.seqlen_k, block_n);
        let split = match self.split_waves {
            0 => 1.0,
            _ => self.us(problem, device) / BackwardKnobs { split_waves: 0, ..*self }.us(problem, device),
        };
        let rest = match self.splits_rest {
            0 => 1.0,
            _ => self.us(problem, device) / BackwardKnobs { splits_rest: 0, ..*self }.us(problem, device),
        };
        work * split * rest * last_wave * (1.0 + per_block + per_tile + in_flight + tile_end + order + fragments)
    }

    /// Another shape has other waves and groups. Heads of few alike rows have their own best group,
    /// which says nothing of other shapes. A config that was measured with tiles that add to dQ
    /// says little of those that write it.
    fn carried_over(self, from: &Problem, to: &Problem, device: &Device) -> Self {
        let differ_and_are_few = tiles_differ(to) && !to.deterministic && !wants_groups(to, device);
        let group_mb = match self.on_another_gpu(to, device).group_mb {
            _ if differ_and_are_few => unsplit_group_mb(to, device),
            1.. if has_few_alike_rows(from) => group_mb(to),
            group_mb => group_mb,
        };
        let writes_dq = |fresh: &BackwardKnobs| fresh.direct_dq > 0 && fresh.direct_dq != self.direct_dq;
        let fresh = heuristic(to, device).filter(writes_dq);
        if let Some(fresh) = fresh {
            return fresh;
        }
        let carried = BackwardKnobs { group_mb, ..self }.with_best_walk(to, device);
        // A tile that writes dQ does so for few keys alone.
        if carried.fits(to, device) { carried } else { heuristic(to, device).unwrap_or(carried) }
    }

    fn on_another_gpu(self, problem: &Problem, device: &Device) -> Self {
        let overflows = || !problem.deterministic && wants_groups(problem, device) && overflows_l2(problem, device);
        let group_mb = match self.group_mb {
            0 if !overflows() => 0,
            1.. if !has_few_alike_rows(problem) => self.group_mb,
            _ => group_mb(problem),
        };
        BackwardKnobs { group_mb, ..self }
    }

    fn kernels(&self, problem: &Problem) -> Vec<KernelSpec> {
        backward::around(problem, self.main(problem))
    }

    fn usable(knob: &Knob, problem: &Problem) -> &'static [u32] {
        match knob.name {
            "direct_dq" => match (BackwardKernel::of(problem), direct_tiles(problem, PAIR_KEYS)) {
                (_, None) => &[0],
                (BackwardKernel::Middle | BackwardKernel::Wide, _) => &[0, 1, 2],
                (_, Some(1)) => &[1],
                (_, Some(2)) => &[0, 2],
                (_, Some(3)) => &[0, 3],
                (_, Some(_)) => &[0, 4],
            },
            _ => knob.values,
        }
    }

    fn work(&self, problem: &Problem, device: &Device) -> Option<Work> {
        backward_work::backward(self, problem, device)
    }

    fn alternatives(problem: &Problem, device: &Device) -> Vec<Self> {
        backward_alternatives::alternatives(problem, device)
    }
}

impl BackwardKnobs {
    fn main(&self, problem: &Problem) -> KernelSpec {
        let kernel = self.kernel(problem);
        let (template, schedule, key_rows) = match kernel {
            BackwardKernel::Narrow => ("sm90_backward", Schedule::Persistent, self.block_n),
            BackwardKernel::Middle => ("sm90_backward_middle", Schedule::Persistent, self.block_n),
            BackwardKernel::Wide => ("sm90_backward_wide", Schedule::PersistentPairs, WARPGROUP_ROWS),
        };
        KernelSpec {
            template,
            entry: "flashtune_sm90_backward",
            threads: 128 * (kernel.consumers() + 1),
            smem_bytes: self.smem_bytes(problem),
            rows: self.block_n,
            axis: Axis::Keys,
            schedule,
            arguments: Arguments::ParamsMapsCounter {
                boxes: Boxes { query_rows: self.block_m, key_rows },
                // The narrow kernel's last tile of a head may be shorter, and parts are shorter
                // than whole tiles. Deterministic tiles are drawn from the workspace. Whole heads
                // are alike.
                is_dynamic: (tiles_differ(problem) || kernel == BackwardKernel::Narrow || self.splits_rest > 0)
                    && !problem.deterministic
                    && self.direct_dq < 2,
            },
            registers: Some(kernel.registers()),
            split_waves: self.split_waves,
            most_splits: self.splits_rest.max(1),
            split_rest: self.split_rest(problem),
            direct_tiles: self.direct_dq.min(3),
            dq_transposed: kernel != BackwardKernel::Middle,
            ..KernelSpec::MAIN
        }
    }

    pub fn num_splits(&self, problem: &Problem, device: &Device) -> u32 {
        self.main(problem).num_splits(problem, device.sm_count)
    }

    /// The expected work. Every sequence counts as the longest, and a block mask counts as if it
    /// listed all blocks.
    pub(super) fn largest_work(&self, problem: &Problem, device: &Device) -> Option<Work> {
        backward_work::backward(self, &problem.of_longest(), device)
    }

    pub(super) fn us(&self, problem: &Problem, device: &Device) -> f64 {
        self.largest_work(problem, device).map_or(f64::INFINITY, |work| work.us(device))
    }

    /// Whether a thread of each consumer warpgroup has the registers that it needs at least: those
    /// of `gradients` and `scores`, and 12 for addresses. The shapes that an H200's sweeps found
    /// serialised, and those found not, bound the 12.
    ///
    /// A narrow kernel holds dK, dV, S and dP in fp32, P in 16 bits, and V's k16 steps. A middle
    /// one holds S and dP or dQ, and no P: at most 204, so that `wgmma_m` alone bounds its keys. In
    /// a wide one two consumers hold a half of dV, one of S and dP, and LSE or delta; the last one
    /// holds dK and a box of dQ.
    fn fits_registers(&self, problem: &Problem) -> bool {
        let (block_m, block_n) = (self.block_m, self.block_n);
        let (dim, dim_v) = (problem.head_dim, problem.head_dim_v);
        let (gradients, scores) = match self.kernel(problem) {
            BackwardKernel::Narrow => {
                let columns = (dim as u32).next_multiple_of(8) + (dim_v as u32).next_multiple_of(8);
                // Later tiles of a head load dQ's sum or add to it.
                let sum = if self.direct_dq >= 2 { 8 } else { 0 };
                (columns / 2, block_m + block_m / 4 + 4 * self.v_regs + sum)
            }
            BackwardKernel::Middle => {
                let dq_cols = boxes(dim) * 32;
                ((boxes(dim) + boxes(dim_v)) * block_n / 4, (block_n / 2).max(dq_cols / 2))
            }
            BackwardKernel::Wide => (half_cols(dim_v) / 2, block_m / 2 + block_m / 4),
        };
        let last = match self.kernel(problem) {
            BackwardKernel::Wide => half_cols(dim) + block_m / 2,
            BackwardKernel::Narrow | BackwardKernel::Middle => gradients + scores,
        };
        let given = self.kernel(problem).registers();
        gradients + scores + 12 <= given.consumer && last + 12 <= given.last_consumer
    }
}

#[cfg(test)]
mod tests;
