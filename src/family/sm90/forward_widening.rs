//! Configs whose widening kernel copies 8-bit or int4 K and V in 16 bits before sm90's forward
//! kernel, and whether they are expected to be faster than a conversion in that kernel.

use super::forward_alternatives;
use super::forward_geometry::ForwardKnobs;
use super::forward_heuristic::{
    decode_rows, decode_splits, of_rows, reading_keys, rows_by_preference, stored_by_tma, tile_of_full_device,
};
use super::warpgroup::WARPGROUP_ROWS;
use super::work;
use crate::device::Device;
use crate::family::space::Space;
use crate::problem::Problem;

/// What a config must be expected to gain over one that is preferred to it.
const GAIN: f64 = 0.03;

/// The config to begin with. No kernel of the family converts int4.
pub fn heuristic(problem: &Problem, device: &Device) -> Option<ForwardKnobs> {
    if problem.features.four_bits.is_some() {
        let config = widening(problem, device)?;
        return Some(of_long_keys(&config, problem, device).unwrap_or(config));
    }
    let reading = reading_keys(problem, device)?;
    let widening = widening(problem, device).filter(|config| gains(config, &reading, problem, device));
    Some(widening.map_or(reading, |config| of_long_keys(&config, problem, device).unwrap_or(config)))
}

/// The least keys of `of_long_keys`. With 4,096 keys its tile was slower, and with 16,384 faster.
const LONG_KEYS: i64 = 8192;

/// The tile that was fastest on an H200 under a causal mask over long keys at head dim 128.
/// The model of time takes it for slow there, as an H100 showed over keys of 16 bits. Beside a
/// decode kernel and at head dim 96 it was slower with scales of keys
/// (docs/tuning/eight-bits.md#widened-before-the-kernel).
fn of_long_keys(config: &ForwardKnobs, problem: &Problem, device: &Device) -> Option<ForwardKnobs> {
    let is_plain = !problem.features.modifies_scores() && !problem.dropout && problem.left_shift().is_none();
    let is_causal = problem.right_shift().is_some() && problem.seqlen_k >= LONG_KEYS;
    let is_tall = config.block_m > WARPGROUP_ROWS && config.num_splits == 1 && config.decode_rows == 0;
    let is_served = (97..=128).contains(&problem.head_dim.max(problem.head_dim_v)) && is_plain && is_causal && is_tall;
    let tile = ForwardKnobs { block_m: 128, block_n: 128, k_stages: 2, v_stages: 2, q_stages: 2, ..*config };
    let tile = stored_by_tma(tile, problem);
    Some(tile).filter(|tile| is_served && tile.fits(problem, device))
}

/// The config that widens 8-bit or int4 K and V first: the heuristic's for the 16-bit problem
/// or, of its alternatives, the one that is expected to be fastest. None where the workspace has no
/// room for them.
pub fn widening(problem: &Problem, device: &Device) -> Option<ForwardKnobs> {
    if !problem.keeps_widened_kv_nearby() {
        return None;
    }
    let widened = problem.widened();
    let (rows, ..) = tile_of_full_device(&widened);
    let heuristics = rows_by_preference(&widened, device, rows).filter_map(|rows| of_rows(&widened, device, rows));
    let of_problem = |config: ForwardKnobs| {
        let (decode_rows, decode_splits) = (decode_rows(problem), decode_splits(problem));
        let config = ForwardKnobs { decode_rows, decode_splits, widens: 1, ..config };
        beside_factors(config, problem).into_iter().find(|config| config.fits(problem, device))
    };
    let first = heuristics.filter_map(of_problem).next()?;
    // Over pages and with lengths on the device, others were not timed with widened keys.
    let is_dense = widened.of_longest() == widened;
    let is_timed = |config: &ForwardKnobs| {
        is_dense || config.block_m == WARPGROUP_ROWS || config.num_splits == 1 && config.block_m <= rows
    };
    let others = forward_alternatives::of(&widened, device).into_iter().filter(is_timed).filter_map(of_problem);
    let fastest = others.min_by(|a, b| us(a, problem, device).total_cmp(&us(b, problem, device)));
    Some(fastest.filter(|config| gains(config, &first, problem, device)).unwrap_or(first))
}

/// The config and, where factors of keys take shared memory and registers, others with fewer slots
/// and keys.
fn beside_factors(config: ForwardKnobs, problem: &Problem) -> Vec<ForwardKnobs> {
    let has_factors = problem.features.has_key_scales();
    let of = |block_n| [3, 2].map(|stages| ForwardKnobs { block_n, k_stages: stages, v_stages: stages, ..config });
    let fewer = [config.block_n, 64, 48].into_iter().flat_map(of);
    [config].into_iter().chain(fewer.filter(|_| has_factors)).collect()
}

/// Whether a config is expected to be well faster than another.
fn gains(config: &ForwardKnobs, other: &ForwardKnobs, problem: &Problem, device: &Device) -> bool {
    us(config, problem, device) < (1.0 - GAIN) * us(other, problem, device)
}

/// The expected time, where every sequence counts as the longest.
pub fn us(config: &ForwardKnobs, problem: &Problem, device: &Device) -> f64 {
    work::forward(config, &problem.of_longest(), device).map_or(f64::INFINITY, |work| work.us(device))
}
