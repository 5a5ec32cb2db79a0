//! Configs of the sm90 backward pass beside the heuristic's, among which the model of times
//! chooses.

use super::backward_geometry::{BackwardKernel, BackwardKnobs, FEW_KEYS, PAIR_KEYS, SPLITS_REST, direct_tiles};
use super::backward_heuristic::{heuristic, may_split_pairs, unsplit_group_mb, worth_splitting_alike};
use super::backward_work::MOST_KEYS_OF_PAIRS;
use super::warpgroup::tiles_differ;
use crate::device::Device;
use crate::family::space::Space;
use crate::problem::{Features, Problem};
use std::cell::LazyCell;

/// Splits of tiles past whole waves are expected to take less than this share of the time without.
const WORTH_SPLITTING_REST: f64 = 0.97;

/// The heuristic's config, and the same with blocks of fewer rows, which need fewer registers. Each
/// config that writes dQ also comes with tiles that add to dQ. Past head dim 128 there is one with
/// tiles of few keys, and from 136 to 192 one with pairs of CTAs. Each config whose CTAs do one
/// tile of a head or add to dQ also comes with its walk split, and with the walks of tiles past
/// whole waves split where that is expected to pay. If `is_busy_alike`, only splits that are
/// expected to pay come.
pub fn alternatives(problem: &Problem, device: &Device) -> Vec<BackwardKnobs> {
    let plain = Some(problem).filter(|problem| problem.features == Features::NONE);
    let Some(config) = plain.and_then(|problem| heuristic(problem, device)) else { return Vec::new() };
    let unsplit = BackwardKnobs { split_waves: 0, group_mb: unsplit_group_mb(problem, device), ..config };
    let heights = heights(unsplit);
    let writing = heights.iter().copied().filter(|config| config.direct_dq > 0);
    let summed = writing.map(|config| BackwardKnobs { direct_dq: 0, ..config });
    let of_ctas = pairs_of_ctas(unsplit, problem);
    let adding_ctas = adding_pairs_of_ctas(unsplit, problem);
    let walks = heights.iter().copied().chain(summed).chain(few_keys(unsplit, problem));
    let walks = walks.chain(of_ctas).chain(adding_ctas);
    let walks: Vec<_> = walks.map(|config| config.with_best_groups(problem, device)).collect();
    let least_us = || walks.iter().map(|config| config.us(problem, device)).fold(f64::INFINITY, f64::min);
    let least_us = LazyCell::new(least_us);
    // One CTA, or a pair, for both tiles of a head and a part of the queries.
    let does_both =
        |config: &&BackwardKnobs| may_split_pairs(problem, device) && direct_tiles(problem, config.block_n) == Some(2);
    let both = |config: &BackwardKnobs| BackwardKnobs { direct_dq: 2, ..*config };
    let parts: Vec<_> = heights.iter().chain(of_ctas.as_ref()).filter(does_both).map(both).collect();
    let may_split = |config: &&BackwardKnobs| config.direct_dq <= 1;
    let split = walks.iter().filter(may_split).chain(&parts).flat_map(|config| {
        let is_busy_alike = config.is_busy_alike(problem, device);
        let most_us = is_busy_alike.then(|| worth_splitting_alike(problem, device) * *least_us);
        let pays = move |split: &BackwardKnobs| most_us.is_none_or(|most_us| split.us(problem, device) < most_us);
        config.with_splits(problem, device).into_iter().filter(pays)
    });
    let rest: Vec<_> = walks.iter().flat_map(|config| with_split_rest(config, problem, device)).collect();
    let most_us = if rest.is_empty() { 0.0 } else { WORTH_SPLITTING_REST * *least_us };
    let rest = rest.into_iter().filter(|config| config.us(problem, device) < most_us);
    let all = [config].into_iter().chain(walks.iter().copied()).chain(split).chain(rest);
    all.filter(|config| config.fits(problem, device)).collect()
}

/// The config with blocks of as many rows and of fewer.
fn heights(unsplit: BackwardKnobs) -> Vec<BackwardKnobs> {
    let smaller = [112, 96, 80, 64, 48].into_iter().filter(|block_m| *block_m < unsplit.block_m);
    // Blocks of 48 rows were 1.05 times as fast without V's steps in registers (H200, 64 x 3 heads
    // of 77 tokens, d128).
    let v_regs = |block_m| if block_m < 64 { 0 } else { unsplit.v_regs };
    let lower = smaller.map(|block_m| BackwardKnobs { block_m, v_regs: v_regs(block_m), ..unsplit });
    [unsplit].into_iter().chain(lower).collect()
}

/// Tiles of few keys, past head dim 128.
fn few_keys(unsplit: BackwardKnobs, problem: &Problem) -> Option<BackwardKnobs> {
    let num_stages = match BackwardKernel::of(problem) {
        BackwardKernel::Narrow => return None,
        BackwardKernel::Middle => 2,
        BackwardKernel::Wide => 1,
    };
    Some(BackwardKnobs { block_m: 64, block_n: FEW_KEYS, num_stages, direct_dq: 0, ..unsplit })
}

/// Pairs of CTAs that write dQ, from head dim 136 to 192: for heads of one or two tiles of 128
/// keys, of which one CTA does not do all in a tile of 96 keys
/// (docs/tuning/sm90-backward.md#pairs-from-head-dim-136-on).
fn pairs_of_ctas(unsplit: BackwardKnobs, problem: &Problem) -> Option<BackwardKnobs> {
    let is_served = BackwardKernel::of(problem) == BackwardKernel::Middle && problem.seqlen_k > 96;
    let direct_dq = direct_tiles(problem, PAIR_KEYS).filter(|_| is_served)?;
    Some(BackwardKnobs { block_m: 64, block_n: PAIR_KEYS, num_stages: 1, direct_dq, ..unsplit })
}

/// Pairs of CTAs that add to dQ, for some more keys of tiles that are alike. On an H100 they took
/// 0.91 to 0.96 of the time of tiles of 96 keys with 300 and 512 keys, 1.00 with 1,024 and 1.01
/// with 4,096, and with a causal mask 0.99 with 512 and 1.06 with 4,096.
fn adding_pairs_of_ctas(unsplit: BackwardKnobs, problem: &Problem) -> Option<BackwardKnobs> {
    let has_some_keys = (257..=MOST_KEYS_OF_PAIRS).contains(&problem.seqlen_k);
    let is_served = BackwardKernel::of(problem) == BackwardKernel::Middle && !tiles_differ(problem);
    let pairs = BackwardKnobs { block_m: 64, block_n: PAIR_KEYS, num_stages: 1, direct_dq: 0, ..unsplit };
    (has_some_keys && is_served).then_some(pairs)
}

/// The config with each number of parts of the tiles past whole waves.
fn with_split_rest(config: &BackwardKnobs, problem: &Problem, device: &Device) -> Vec<BackwardKnobs> {
    let parts = SPLITS_REST.into_iter().filter(|splits_rest| *splits_rest > 0);
    let split = parts.map(|splits_rest| BackwardKnobs { splits_rest, ..*config });
    split.filter(|config| config.fits(problem, device)).collect()
}
