//! The heuristic of the sm90 backward pass: tiles, walks, splits and groups of heads.

use super::backward_geometry::{BackwardKernel, BackwardKnobs, FEW_KEYS, SPLIT_WAVES, direct_tiles, is_narrow};
use super::backward_work::{self, bytes_of_queries, is_slow};
use super::warpgroup::tiles_differ;
use crate::device::Device;
use crate::family::space::Space;
use crate::family::tile::boxes;
use crate::problem::{Causal, Features, Problem};
use std::borrow::Cow;

impl BackwardKnobs {
    /// Two tiles of few keys instead of one of a pair of CTAs, where that is expected to pay.
    fn or_few_keys(self, problem: &Problem, device: &Device) -> Self {
        let device = &*chosen_for(problem, device);
        let few_keys =
            BackwardKnobs { block_m: 64, block_n: FEW_KEYS, direct_dq: 2, split_waves: 0, splits_rest: 0, ..self };
        let may_be_few = self.kernel(problem) == BackwardKernel::Wide && few_keys.fits(problem, device);
        if may_be_few && few_keys.us(problem, device) < self.us(problem, device) { few_keys } else { self }
    }

    /// One CTA for all tiles of a head where that is expected to pay, else splits where they are.
    pub(super) fn with_best_walk(self, problem: &Problem, device: &Device) -> Self {
        let device = &*chosen_for(problem, device);
        let tiles = direct_tiles(problem, self.block_n);
        let summed = BackwardKnobs { direct_dq: u32::from(tiles == Some(1)), ..self }.with_best_split(problem, device);
        let Some(direct_dq) = tiles else { return summed };
        let rows = [128, 112, 96, 80, 64].into_iter().filter(|rows| *rows <= self.block_m);
        let direct = rows.map(|block_m| BackwardKnobs { block_m, direct_dq, split_waves: 0, splits_rest: 0, ..self });
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
    pub(super) fn with_best_groups(self, problem: &Problem, device: &Device) -> Self {
        if !backward_work::walks_alternate(problem) || self.direct_dq > 0 {
            return self;
        }
        let groups = [0, group_mb(problem)].map(|group_mb| BackwardKnobs { group_mb, ..self });
        fastest(groups.into_iter(), f64::INFINITY, problem, device).unwrap_or(self)
    }

    /// Whether its tiles are alike, each of one query head, and three quarters of the SMs have one.
    pub(super) fn is_busy_alike(&self, problem: &Problem, device: &Device) -> bool {
        let is_busy = || self.largest_work(problem, device).is_some_and(|work| work.idle() <= 0.25);
        !tiles_differ(problem) && problem.group_size() == 1 && is_busy()
    }

    /// The config with each number of splits that the problem has, in groups of heads. Where tiles
    /// differ, groups of other sizes end more evenly or less.
    pub(super) fn with_splits(self, problem: &Problem, device: &Device) -> Vec<Self> {
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
        let unsplit = BackwardKnobs { split_waves: 0, splits_rest: 0, ..self }.with_best_groups(problem, device);
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

pub fn heuristic(problem: &Problem, device: &Device) -> Option<BackwardKnobs> {
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
        splits_rest: 0,
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

/// The share of the time for tiles that are alike and busy, also for `alternatives`.
pub fn worth_splitting_alike(problem: &Problem, device: &Device) -> f64 {
    let is_large = bytes_of_queries(problem) > 4 * device.l2_bytes as i64;
    if is_slow(device) && is_large { WORTH_SPLITTING_ALIKE_ON_SLOW_MEMORY } else { WORTH_SPLITTING_ALIKE }
}

/// Whether one CTA that does both tiles of a head for a part of the queries may be faster than
/// tiles that add to dQ: where Q, dO and dQ take more than L2 holds. On an H100 it took 0.70 to
/// 0.96 of the time from 1.5 of L2 on past head dim 64, and 1.07 to 1.32 below and at 64
/// (docs/tuning/sm90-backward.md).
pub fn may_split_pairs(problem: &Problem, device: &Device) -> bool {
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
pub fn wants_groups(problem: &Problem, device: &Device) -> bool {
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
pub fn overflows_l2(problem: &Problem, device: &Device) -> bool {
    bytes_of_queries(problem) as f64 > MOST_OF_L2 * device.l2_bytes as f64
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
pub fn unsplit_group_mb(problem: &Problem, device: &Device) -> u32 {
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
pub fn group_mb(problem: &Problem) -> u32 {
    if has_few_alike_rows(problem) { 4 } else { 16 }
}

/// Whether tiles are alike, each of one query head with few rows. On an H100, 32 x 32 heads of 512
/// tokens took 1.17 times as long in groups of 16 MB as in those of 4, 16 x 32 of 1,024 tokens 1.03
/// times, and smaller batches 1.00 to 1.03 times (docs/tuning/choice.md).
pub fn has_few_alike_rows(problem: &Problem) -> bool {
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
