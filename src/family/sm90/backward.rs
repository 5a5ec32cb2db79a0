//! The backward pass of the sm90 family, in three kernels.
//!
//! Up to head dim 128 each consumer warpgroup computes 64 keys, up to 192 fewer, transposed
//! (`templates/sm90_backward_middle.cu.tera`), and beyond a half of the columns of 64 keys
//! (`templates/sm90_backward_wide.cu.tera`).

use super::backward_geometry::{BackwardKernel, BackwardKnobs, FEW_KEYS, SPLIT_WAVES, direct_tiles, half_cols};
use super::warpgroup::{WARPGROUP_ROWS, last_wave, padded, tiles_differ};
use super::{backward_work, work};
use crate::device::Device;
use crate::family::backward;
use crate::family::knob::{Constraint, Knob};
use crate::family::limits::{divides_mask_blocks, grid, mask_blocks, shared_memory};
use crate::family::space::Space;
use crate::family::spec::{Arguments, Axis, Boxes, KernelSpec, Schedule};
use crate::family::tile::boxes;
use crate::family::time::Work;
use crate::problem::{Causal, Features, Problem};
use std::borrow::Cow;

impl Space for BackwardKnobs {
    const CONSTRAINTS: &'static [Constraint<Self>] = &[
        Constraint {
            name: "narrow_only",
            reason: "past head dim 128 there is no room for V in registers or a second tile of K and V, and no wait for dP follows the exponentials",
            holds: |p, k, _| is_narrow(p) || (k.v_regs, k.sink_softmax, k.kv_stages) == (0, 0, 1),
        },
        Constraint {
            name: "num_stages",
            reason: "past head dim 128 two blocks of Q are in flight, behind which a third of dO waits",
            holds: |p, k, _| is_narrow(p) || k.num_stages <= 2,
        },
        Constraint {
            name: "wgmma_m",
            reason: "wgmma's M is 64. It counts keys up to head dim 128 and, past 192, in each of two CTAs, so that a tile has 128 keys. It counts queries from 136 to 192, with fewer keys a tile, and past 192 in tiles of 64 keys",
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
        work * split * last_wave * (1.0 + per_block + per_tile + in_flight + tile_end + order + fragments)
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
            "direct_dq" => match (BackwardKernel::of(problem), direct_tiles(problem, 128)) {
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

    /// The heuristic's config, and the same with blocks of fewer rows, which need fewer registers.
    /// Each config that writes dQ also comes with tiles that add to dQ. Past head dim 128 there is
    /// one with tiles of few keys. Each config whose CTAs do one tile of a head or add to dQ also
    /// comes with its walk split. If `is_busy_alike`, only splits that are expected to pay come.
    fn alternatives(problem: &Problem, device: &Device) -> Vec<Self> {
        let plain = Some(problem).filter(|problem| problem.features == Features::NONE);
        let Some(config) = plain.and_then(|problem| heuristic(problem, device)) else { return Vec::new() };
        let smaller = [112, 96, 80, 64, 48].into_iter().filter(|block_m| *block_m < config.block_m);
        // Blocks of 48 rows were 1.05 times as fast without V's steps in registers (H200, 64 x 3
        // heads of 77 tokens, d128).
        let v_regs = |block_m| if block_m < 64 { 0 } else { config.v_regs };
        let unsplit = BackwardKnobs { split_waves: 0, group_mb: unsplit_group_mb(problem, device), ..config };
        let lower = smaller.map(|block_m| BackwardKnobs { block_m, v_regs: v_regs(block_m), ..unsplit });
        let heights: Vec<_> = [unsplit].into_iter().chain(lower).collect();
        let writing = heights.iter().copied().filter(|config| config.direct_dq > 0);
        let summed = writing.map(|config| BackwardKnobs { direct_dq: 0, ..config });
        let stages_of_few_keys = match BackwardKernel::of(problem) {
            BackwardKernel::Narrow => None,
            BackwardKernel::Middle => Some(2),
            BackwardKernel::Wide => Some(1),
        };
        let few_keys = stages_of_few_keys.map(|num_stages| BackwardKnobs {
            block_m: 64,
            block_n: FEW_KEYS,
            num_stages,
            direct_dq: 0,
            ..unsplit
        });
        let walks = heights.iter().copied().chain(summed).chain(few_keys);
        let walks: Vec<_> = walks.map(|config| config.with_best_groups(problem, device)).collect();
        let may_split = |config: &&Self| config.direct_dq <= 1;
        let least_us = || walks.iter().map(|config| config.us(problem, device)).fold(f64::INFINITY, f64::min);
        // One CTA for both tiles of a head and a part of the queries.
        let both = |config: &Self| BackwardKnobs { direct_dq: 2, ..*config };
        let is_pair = may_split_pairs(problem, device) && direct_tiles(problem, unsplit.block_n) == Some(2);
        let pairs: Vec<_> = heights.iter().filter(|_| is_pair).map(both).collect();
        let split = walks.iter().filter(may_split).chain(&pairs).flat_map(|config| {
            let is_busy_alike = config.is_busy_alike(problem, device);
            let most_us = is_busy_alike.then(|| worth_splitting_alike(problem, device) * least_us());
            let pays = move |split: &Self| most_us.is_none_or(|most_us| split.us(problem, device) < most_us);
            config.with_splits(problem, device).into_iter().filter(pays)
        });
        let all = [config].into_iter().chain(walks.iter().copied()).chain(split);
        all.filter(|config| config.fits(problem, device)).collect()
    }
}

fn is_narrow(problem: &Problem) -> bool {
    BackwardKernel::of(problem) == BackwardKernel::Narrow
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
                // The narrow kernel's last tile of a head may be shorter. Deterministic tiles are
                // drawn from the workspace. Whole heads are alike.
                is_dynamic: (tiles_differ(problem) || kernel == BackwardKernel::Narrow)
                    && !problem.deterministic
                    && self.direct_dq < 2,
            },
            registers: Some(kernel.registers()),
            split_waves: self.split_waves,
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
    fn largest_work(&self, problem: &Problem, device: &Device) -> Option<Work> {
        backward_work::backward(self, &work::of_longest(problem), device)
    }

    fn us(&self, problem: &Problem, device: &Device) -> f64 {
        self.largest_work(problem, device).map_or(f64::INFINITY, |work| work.us(device))
    }

    /// Two tiles of few keys instead of one of a pair of CTAs, where that is expected to pay.
    fn or_few_keys(self, problem: &Problem, device: &Device) -> Self {
        let device = &*chosen_for(problem, device);
        let few_keys = BackwardKnobs { block_m: 64, block_n: FEW_KEYS, direct_dq: 2, split_waves: 0, ..self };
        let may_be_few = self.kernel(problem) == BackwardKernel::Wide && few_keys.fits(problem, device);
        if may_be_few && few_keys.us(problem, device) < self.us(problem, device) { few_keys } else { self }
    }

    /// One CTA for all tiles of a head where that is expected to pay, else splits where they are.
    fn with_best_walk(self, problem: &Problem, device: &Device) -> Self {
        let device = &*chosen_for(problem, device);
        let tiles = direct_tiles(problem, self.block_n);
        let summed = BackwardKnobs { direct_dq: u32::from(tiles == Some(1)), ..self }.with_best_split(problem, device);
        let Some(direct_dq) = tiles else { return summed };
        let rows = [128, 112, 96, 80, 64].into_iter().filter(|rows| *rows <= self.block_m);
        let direct = rows.map(|block_m| BackwardKnobs { block_m, direct_dq, split_waves: 0, ..self });
        let fitting = direct.filter(|knobs| knobs.fits(problem, device));
        let share = match (direct_dq, problem.head_dim.max(problem.head_dim_v)) {
            (..=2, _) => 1.0,
            (_, ..=64) => WORTH_DOING_WHOLE,
            _ => WORTH_DOING_WHOLE_WIDE,
        };
        fastest(fitting, share * summed.us(problem, device), problem, device).unwrap_or(summed)
    }

    /// All heads together or in groups, as is expected to pay, where unsplit walks alternate.
    /// Groups then gain little by L2, and may end unevenly
    /// (docs/tuning/sm90-backward.md#groups-splits-and-what-drifts).
    fn with_best_groups(self, problem: &Problem, device: &Device) -> Self {
        if !backward_work::walks_alternate(problem) || self.direct_dq > 0 {
            return self;
        }
        let groups = [0, group_mb(problem)].map(|group_mb| BackwardKnobs { group_mb, ..self });
        fastest(groups.into_iter(), f64::INFINITY, problem, device).unwrap_or(self)
    }

    /// Whether its tiles are alike, each of one query head, and three quarters of the SMs have one.
    fn is_busy_alike(&self, problem: &Problem, device: &Device) -> bool {
        let is_busy = || self.largest_work(problem, device).is_some_and(|work| work.idle() <= 0.25);
        !tiles_differ(problem) && problem.group_size() == 1 && is_busy()
    }

    /// The config with each number of splits that the problem has, in groups of heads. Where tiles
    /// differ, groups of other sizes end more evenly or less.
    fn with_splits(self, problem: &Problem, device: &Device) -> Vec<Self> {
        let first = if self.group_mb == 0 { group_mb(problem) } else { self.group_mb };
        let holds_all = bytes_of_queries(problem) as f64 <= MOST_OF_L2_SPLIT * device.l2_bytes as f64;
        let others: &[u32] = match tiles_differ(problem) && !problem.deterministic {
            true if holds_all => &[16, 32, 0],
            true => &[16, 32],
            false => &[],
        };
        let sizes = || [first].into_iter().chain(others.iter().copied());
        let all = SPLIT_WAVES.iter().flat_map(|waves| sizes().map(|group_mb| (*waves, group_mb)));
        let (mut split, mut seen) = (Vec::new(), Vec::new());
        for (split_waves, group_mb) in all {
            let knobs = BackwardKnobs { split_waves, group_mb, ..self };
            let num_splits = knobs.num_splits(problem, device);
            let kind = (num_splits, backward_work::backward_groups(&knobs, problem, device));
            if num_splits > 1 && !seen.contains(&kind) {
                seen.push(kind);
                split.push(knobs);
            }
        }
        split
    }

    /// Splits where they are expected to pay.
    fn with_best_split(self, problem: &Problem, device: &Device) -> Self {
        let unsplit = BackwardKnobs { split_waves: 0, ..self }.with_best_groups(problem, device);
        // Lengths and modified scores leave no registers for the bounds of a part of the walk: its
        // loop would spill.
        if problem.features.varlen.is_some() && problem.features.modifies_scores() {
            return unsplit;
        }
        let device = &*chosen_for(problem, device);
        let Some(work) = unsplit.largest_work(problem, device) else { return unsplit };
        let share = match work.idle() {
            idle if idle > 0.5 => WORTH_SPLITTING_IF_IDLE,
            _ if unsplit.is_busy_alike(problem, device) => worth_splitting_alike(problem, device),
            _ => WORTH_SPLITTING,
        };
        let split = unsplit.with_splits(problem, device).into_iter();
        fastest(split, share * work.us(device), problem, device).unwrap_or(unsplit)
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

/// The one of these configs that is expected to take the least time, the first of equal ones, if
/// that is less than `most_us`. Most are passed over by a bound of their time.
fn fastest(
    configs: impl Iterator<Item = BackwardKnobs>,
    most_us: f64,
    problem: &Problem,
    device: &Device,
) -> Option<BackwardKnobs> {
    let (mut best, mut best_us) = (None, most_us);
    for knobs in configs {
        let work = knobs.largest_work(problem, device).filter(|work| work.least_us(device) < best_us);
        let us = work.map_or(f64::INFINITY, |work| work.us(device));
        if us < best_us {
            (best, best_us) = (Some(knobs), us);
        }
    }
    best
}

fn heuristic(problem: &Problem, device: &Device) -> Option<BackwardKnobs> {
    let features = &problem.features;
    // The tensors that go with each score take an address and a bound each, a bias in both
    // directions the most.
    let looks_up_twice = features.dbias || (features.bias && features.softcap);
    let (rows, [num_stages, kv_stages, v_regs]) = match (problem.head_dim.max(problem.head_dim_v), problem.dropout) {
        (..=64, _) if looks_up_twice => (64, [2, 2, 0]),
        (65..=128, _) if looks_up_twice => (32, [2, 1, 0]),
        (..=64, _) if features.modifies_scores() => (96, [2, 2, 0]),
        (65..=128, false) if features.modifies_scores() => (64, [2, 1, 0]),
        (129..=192, _) => (64, [2, 1, 0]),
        (193.., _) if features.modifies_scores() => (48, [1, 1, 0]),
        (..=64, false) => (128, [2, 2, 0]),
        (..=64, true) => (96, [2, 2, 0]),
        (65..=96, false) => (96, [2, 1, 0]),
        (97..=112, false) => (80, [2, 1, 0]),
        (65..=112, true) => (64, [2, 1, 0]),
        (113..=128, false) => (64, [2, 1, 2]),
        (113..=128, true) => (48, [2, 1, 0]),
        (_, false) if !problem.deterministic => (64, [1, 1, 0]),
        _ => (48, [1, 1, 0]),
    };
    let group_mb = unsplit_group_mb(problem, device);
    let has_three_boxes_each = boxes(problem.head_dim.min(problem.head_dim_v)) == 3;
    let keys: &[u32] = match BackwardKernel::of(problem) {
        // Where dK and dV are of three boxes each, dropout or a bias takes more than 48 keys leave.
        BackwardKernel::Middle if (problem.dropout || features.bias) && has_three_boxes_each => &[64],
        BackwardKernel::Middle => &[96, 64],
        // Two CTAs would share 128 keys, of which one had none.
        BackwardKernel::Wide if direct_tiles(problem, FEW_KEYS) == Some(1) => &[FEW_KEYS, 128],
        BackwardKernel::Narrow | BackwardKernel::Wide => &[128],
    };
    let config = |(block_n, block_m, [num_stages, kv_stages, v_regs]): (u32, u32, [u32; 3])| BackwardKnobs {
        block_m,
        block_n,
        num_stages,
        kv_stages,
        group_mb,
        direct_dq: u32::from(direct_tiles(problem, block_n) == Some(1)),
        sink_softmax: 0,
        v_regs,
        split_waves: 0,
    };
    let in_flight = [[num_stages, kv_stages, v_regs], [num_stages, 1, 0], [1, 1, 0]];
    // Few keys past head dim 192 are the middle kernel's, whose blocks have 64 rows with any
    // features.
    let rows_of = |block_n: u32| if block_n == FEW_KEYS { rows.max(64) } else { rows };
    let blocks = |most: u32| [128, 96, 80, 64, 48, 32, 16].into_iter().filter(move |block_m| *block_m <= most);
    let tiles = keys.iter().flat_map(|block_n| blocks(rows_of(*block_n)).map(|block_m| (*block_n, block_m)));
    let flows = tiles.flat_map(|(block_n, block_m)| in_flight.map(|in_flight| (block_n, block_m, in_flight)));
    let tile = flows.map(config).find(|config| config.fits(problem, device))?;
    Some(tile.with_best_walk(problem, device).or_few_keys(problem, device))
}

/// Splits are expected to take less than this share of the time without.
const WORTH_SPLITTING: f64 = 0.95;
/// The same where more than half of the SMs have no tile. The model is least sure of the time of
/// such launches.
const WORTH_SPLITTING_IF_IDLE: f64 = 0.97;
/// The same for tiles that are alike and busy (`is_busy_alike`).
const WORTH_SPLITTING_ALIKE: f64 = 0.94;
/// The same where memory is slow, and Q, dO and dQ take several times L2. 4 x 20 heads of 9,216
/// queries over 512 keys took 1.15 times as long in two splits on an H100, and 0.93 times on an
/// H200 (docs/tuning/choice.md).
const WORTH_SPLITTING_ALIKE_ON_SLOW_MEMORY: f64 = 0.8;
/// Bytes in a second between those of an H100 and an H200.
const FAST_MEMORY: u64 = 4_000_000_000_000;

/// The share of the time for tiles that are alike and busy, also for `alternatives`.
fn worth_splitting_alike(problem: &Problem, device: &Device) -> f64 {
    let is_slow = device.memory_bytes_per_second < FAST_MEMORY;
    let is_large = bytes_of_queries(problem) > 4 * device.l2_bytes as i64;
    if is_slow && is_large { WORTH_SPLITTING_ALIKE_ON_SLOW_MEMORY } else { WORTH_SPLITTING_ALIKE }
}

/// Whether one CTA that does both tiles of a head for a part of the queries may be faster than
/// tiles that add to dQ: where Q, dO and dQ take more than L2 holds. On an H100 it took 0.70 to
/// 0.96 of the time from 1.5 of L2 on past head dim 64, and 1.07 to 1.32 below and at 64
/// (docs/tuning/sm90-backward.md).
fn may_split_pairs(problem: &Problem, device: &Device) -> bool {
    let most = if problem.head_dim.max(problem.head_dim_v) <= 64 { 3.0 } else { 1.5 };
    !tiles_differ(problem) && bytes_of_queries(problem) as f64 > most * device.l2_bytes as f64
}

/// One CTA for three and four tiles of a head is expected to take less than this share of the time
/// of tiles that add to dQ, up to head dim 64 and beyond. On an H200, 0.95 was expected for 32 x 32
/// heads of 512 tokens at head dim 64, and 0.92 measured; 0.89 and 0.99 for 14 x 8 heads of 494
/// tokens at head dim 128.
const WORTH_DOING_WHOLE: f64 = 0.97;
const WORTH_DOING_WHOLE_WIDE: f64 = 0.9;

/// Heads are walked in groups that fit L2, except long ones all tiles of which are alike: tiles
/// that run at a time read the same queries (docs/tuning/sm90-backward.md). Where tiles differ and
/// are few, a group has hardly more of them than there are SMs, and the end of each group leaves
/// SMs idle: 3 heads of 13,821 causal queries took 1.25 times as long in groups (H200, head dim
/// 128).
fn wants_groups(problem: &Problem, device: &Device) -> bool {
    let tiles = problem.batch_size * problem.num_heads_kv * ((problem.seqlen_k + 127) / 128);
    let few = match BackwardKernel::of(problem) {
        BackwardKernel::Narrow | BackwardKernel::Middle => FEW_WAVES * i64::from(device.sm_count),
        BackwardKernel::Wide => FEW_WAVES_OF_PAIRS * i64::from(device.sm_count / 2),
    };
    if tiles_differ(problem) { tiles > few } else { problem.seqlen_q < LONG }
}

/// The device that the walk is chosen for. A deterministic pass chooses alike on all GPUs of an
/// architecture, as its bits are.
fn chosen_for<'a>(problem: &Problem, device: &'a Device) -> Cow<'a, Device> {
    let typical = Device::typical(device.arch).filter(|_| problem.deterministic);
    typical.map_or(Cow::Borrowed(device), Cow::Owned)
}

/// Whether Q, dO and the fp32 dQ of all heads take most of L2. On an H100, one group of all heads
/// then took 1.07 to 2.03 times as long as groups of 16 MB where tiles are alike or many.
fn overflows_l2(problem: &Problem, device: &Device) -> bool {
    bytes_of_queries(problem) as f64 > MOST_OF_L2 * device.l2_bytes as f64
}

/// Bytes of Q, dO and the fp32 dQ of all heads.
fn bytes_of_queries(problem: &Problem) -> i64 {
    let row_bytes = 6 * problem.head_dim + 2 * problem.head_dim_v;
    problem.batch_size * problem.num_heads_q * problem.seqlen_q * row_bytes
}

/// K, V and their gradients take L2 too. On an H100, groups took 1.02 to 1.04 of the time below 0.5
/// of L2, 0.96 at 0.56, 0.91 at 0.63 and less beyond (docs/tuning/choice.md).
const MOST_OF_L2: f64 = 0.6;

/// The share of L2 that Q, dO and dQ of all heads may take for splits in one group. On an H100 one
/// group took 0.94 of the time of groups of 16 MB at 0.7 of L2, 0.97 at 0.9, 1.01 at 1.4 and 1.06
/// to 1.41 beyond, except with 4 K/V heads (docs/tuning/choice.md).
const MOST_OF_L2_SPLIT: f64 = 0.8;

/// MB of a group of heads where tiles share no walk, 0 for one group. Deterministic tiles wait
/// least for their turn at dQ where few heads are walked together, however long the heads are.
fn unsplit_group_mb(problem: &Problem, device: &Device) -> u32 {
    match problem.deterministic || wants_groups(problem, device) {
        true => group_mb(problem),
        false if has_many_causal_heads(problem) => MB_OF_MANY_HEADS,
        false => 0,
    }
}

/// Whether tiles of different lengths run at a time for many heads, so that few of them share
/// queries in L2.
/// On an H200, 16 x 8 heads of 634 causal queries at head dim 128 took 1.19 times as long in one
/// group as in groups of 32 MB, and 64 heads of 1,270 took 1.09 times as long. 32 heads of 1,270
/// and of 2,540 took 1.02 and 1.00 times as long, and 1.16 and 1.04 in groups of 16 MB.
fn has_many_causal_heads(problem: &Problem) -> bool {
    let heads = problem.batch_size * problem.num_heads_kv;
    let is_plain = problem.features == Features::NONE && is_narrow(problem) && problem.group_size() == 1;
    problem.causal != Causal::None && is_plain && problem.seqlen_k > 256 && heads >= MANY_HEADS
}

const MANY_HEADS: i64 = 32;
const MB_OF_MANY_HEADS: u32 = 32;

/// MB of Q, dO and fp32 dQ in a group of heads that L2 holds. Tiles that share a walk always take
/// such groups: in one group of all heads they took up to 1.53 times as long on an H100.
fn group_mb(problem: &Problem) -> u32 {
    if has_few_alike_rows(problem) { 4 } else { 16 }
}

/// Whether tiles are alike, each of one query head with few rows. On an H100, 32 x 32 heads of 512
/// tokens took 1.17 times as long in groups of 16 MB as in those of 4, 16 x 32 of 1,024 tokens 1.03
/// times, and smaller batches 1.00 to 1.03 times (docs/tuning/choice.md).
fn has_few_alike_rows(problem: &Problem) -> bool {
    !problem.deterministic && !tiles_differ(problem) && problem.group_size() == 1 && problem.seqlen_q <= FEW_ROWS
}

/// The most queries of a head in groups of 4 MB.
const FEW_ROWS: i64 = 1024;

/// Tiles for each SM, or for each pair of SMs, up to which the end of a group costs more than L2
/// gains. On an H100, groups took 1.17 of the time at 4.1 tiles for each SM and 0.88 at 5.8, and
/// 0.94 at 3.9 tiles for each pair.
const FEW_WAVES: i64 = 5;
const FEW_WAVES_OF_PAIRS: i64 = 3;

const LONG: i64 = 16384;

#[cfg(test)]
mod tests;
