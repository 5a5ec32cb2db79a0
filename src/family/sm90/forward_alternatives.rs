//! Configs of the sm90 forward pass beside the heuristic's, among which the model of times chooses.

use super::forward_geometry::{ForwardKnobs, SEGMENT_SPLITS, SPLITS, common_box_rows};
use super::forward_heuristic::{FEW_KEYS, of_rows, stored_by_tma, tile_of_full_device};
use super::warpgroup::{WARPGROUP_ROWS, tiles_differ};
use crate::device::Device;
use crate::family::space::Space;
use crate::family::split_rest::RestTiles;
use crate::problem::{Features, Problem};

/// The heuristic's config with every number of rows and with blocks of other numbers of keys. Each
/// of these also comes with its keys split. Dense problems of short sequences have further tiles of
/// 64 rows. Over pages and with lengths on the device, the only other blocks are those of
/// 128 x 128 at head dims 65 to 128 and of 256 x 48 up to 64. If sequences may differ in their
/// numbers of queries, only tiles of 64 rows are split.
/// Other features than pages and lengths take registers, so problems with any keep to the tiles of
/// the heuristic and of records. A batch-invariant problem has only the heuristic's config with
/// every number of rows. Each also comes with its keys split into runs of segments.
pub fn of(problem: &Problem, device: &Device) -> Vec<ForwardKnobs> {
    let Features { varlen, paged, .. } = problem.features;
    let is_plain = Features { varlen: None, paged: None, ..problem.features } == Features::NONE;
    if !is_plain || paged.is_none() && problem.has_varlen_queries() {
        return Vec::new();
    }
    let (rows, ..) = tile_of_full_device(problem);
    if problem.batch_invariant {
        // The order of sums fixes the keys of a block, and where the keys of a row may be split.
        let heights = [64, 128, 192, 256].into_iter().filter(|block_m| *block_m <= rows);
        let whole: Vec<_> = heights.filter_map(|block_m| of_rows(problem, device, block_m)).collect();
        let of_split = |config: &ForwardKnobs| ForwardKnobs { num_splits: SEGMENT_SPLITS, tma_store: 0, ..*config };
        // Split tiles of 64 rows spill 1.6 KB past head dim 192, and took 1.15 of the time of 128
        // rows there, on an H100 (docs/tuning/batch-invariant.md#groups-of-segments).
        let is_wide = problem.head_dim.max(problem.head_dim_v) > 192;
        let tall = whole.iter().filter(|config| !(is_wide && config.block_m == 64));
        let split = tall.map(of_split).filter(|config| config.fits(problem, device));
        let split: Vec<_> = split.collect();
        return whole.into_iter().chain(split).collect();
    }
    // A server prepares few kernels, so over pages there are fewer to choose from.
    let lowest = if paged.is_some() { 128 } else { 64 };
    let heights = [64, 128, 192, 256].into_iter().filter(|block_m| (lowest..=rows).contains(block_m));
    let mut configs: Vec<_> = heights.filter_map(|block_m| of_rows(problem, device, block_m)).collect();
    let others: Vec<_> = configs.iter().flat_map(|config| other_blocks(config, problem, device)).collect();
    configs.extend(others);
    if paged.is_some() || varlen.is_some() {
        configs.extend(of_four_consumers(problem, device));
        let tall = if problem.has_varlen_queries() { &[][..] } else { &configs[..] };
        let lowest = of_rows(problem, device, 64).filter(|config| !tall.contains(config));
        let split = tall.iter().chain(&lowest).flat_map(|config| split_keys(config, problem, device));
        let split: Vec<_> = split.collect();
        configs.extend(split);
        return configs;
    }
    configs.extend(of_sharing_ctas(problem, device));
    let split: Vec<_> = configs.iter().flat_map(|config| split_keys(config, problem, device)).collect();
    configs.extend(split);
    configs.extend(of_two_small_ctas(problem, device));
    configs.extend(of_few_rows(problem, device));
    let of_one_q_slot = of_one_q_slot(problem, device);
    configs.extend(of_one_q_slot);
    configs.extend(of_one_q_slot.iter().flat_map(|config| split_keys(config, problem, device)));
    configs.extend(of_stored_apart(problem, device));
    configs
}

/// Tiles of 64 rows, two of which share an SM, or three where keys are short: where SMs have few
/// tiles, smaller ones fill the last wave better. Past head dim 64 they were slower on an H100,
/// since such tiles load twice the keys. A short sequence of 65 to 128 queries is one tile of two
/// CTAs with 128 rows. Without a mask they replace those three where SMs have more than
/// `FEW_HEADS` heads each: there the model expects about the same of both, and they were faster.
fn of_sharing_ctas(problem: &Problem, device: &Device) -> Vec<ForwardKnobs> {
    if problem.dropout || problem.head_dim.max(problem.head_dim_v) > 64 {
        return Vec::new();
    }
    let of = |(block_m, block_n, stages, ctas_per_sm): (u32, u32, [u32; 3], u32)| {
        let config = with_blocks(&of_rows(problem, device, block_m)?, block_n, stages, problem);
        Some(ForwardKnobs { ctas_per_sm, ..config }).filter(|config| config.fits(problem, device))
    };
    let of_two_ctas = of((64, 128, [2; 3], 2));
    if problem.seqlen_k > SHORT {
        return of_two_ctas.into_iter().collect();
    }
    let rows = i64::from(WARPGROUP_ROWS);
    // Three slots hold all keys of the next tile.
    let of_two_tall_ctas = of((128, 48, [3, 3, 2], 2)).filter(|_| (rows + 1..=2 * rows).contains(&problem.seqlen_q));
    let heads = problem.batch_size * problem.num_heads_q;
    let are_many = heads > FEW_HEADS * i64::from(device.sm_count) && !tiles_differ(problem);
    let of_three_ctas = of((64, 64, [2; 3], 3)).filter(|_| of_two_tall_ctas.is_none() || !are_many);
    [of_two_ctas, of_three_ctas, of_two_tall_ctas].into_iter().flatten().collect()
}

/// Two CTAs of 64 rows and blocks of 64 keys on an SM, also with their keys split: tiles of few
/// short causal heads have many lengths, and small parts fill the SMs best. On an H100, 2 heads of
/// 1,691 tokens at d128 took 14.5 us, and 15.7 by the next tile (docs/tuning/choice.md).
fn of_two_small_ctas(problem: &Problem, device: &Device) -> Vec<ForwardKnobs> {
    let dim = problem.head_dim.max(problem.head_dim_v);
    if problem.dropout || !tiles_differ(problem) || dim > 128 || problem.seqlen_k > MOST_KEYS_OF_TWO_SMALL_CTAS {
        return Vec::new();
    }
    let stages = if dim <= 64 { [4, 4, 2] } else { [2; 3] };
    let pair = of_rows(problem, device, 64)
        .map(|config| ForwardKnobs { ctas_per_sm: 2, ..with_blocks(&config, 64, stages, problem) })
        .filter(|config| config.fits(problem, device));
    pair.iter().flat_map(|config| [*config].into_iter().chain(split_keys(config, problem, device))).collect()
}

/// The most keys of a head with them.
const MOST_KEYS_OF_TWO_SMALL_CTAS: i64 = 8192;

/// Heads of an SM, each one tile of two CTAs of 128 rows.
const FEW_HEADS: i64 = 5;

/// The config with blocks of so many keys, and these stages of K, V and Q.
fn with_blocks(config: &ForwardKnobs, block_n: u32, stages: [u32; 3], problem: &Problem) -> ForwardKnobs {
    let [k_stages, v_stages, q_stages] = stages;
    stored_by_tma(ForwardKnobs { block_n, k_stages, v_stages, q_stages, ..*config }, problem)
}

/// The longest keys of `of_few_rows`, whose heads have one tile, and of three CTAs on an SM. The
/// former lost on longer keys on an H200, and heads of two tiles were at most 1.03 times as fast.
/// The latter took 1.03 to 1.12 times the best one's time on an H100 (docs/tuning/choice.md).
const SHORT: i64 = 128;

/// Tiles of 64 rows for short sequences: two CTAs on an SM, or two Q slots in one, load a tile
/// while another is computed. Few blocks leave no other time for it.
fn of_few_rows(problem: &Problem, device: &Device) -> Vec<ForwardKnobs> {
    if problem.seqlen_q > i64::from(WARPGROUP_ROWS) || problem.seqlen_k > SHORT {
        return Vec::new();
    }
    let Some(config) = of_rows(problem, device, 64).filter(|_| !problem.dropout) else { return Vec::new() };
    // block_n, stages of K, V and Q, CTAs on an SM
    let tiles: &[(u32, [u32; 3], u32)] = match problem.head_dim.max(problem.head_dim_v) {
        ..=64 => &[(64, [4, 4, 2], 2), (128, [2, 2, 2], 2)],
        65..=128 => &[(64, [2, 2, 2], 2), (128, [1, 1, 2], 2), (128, [2, 2, 2], 1)],
        129..=192 => &[(64, [2, 1, 1], 2), (64, [2, 2, 2], 1)],
        _ => &[],
    };
    let of_tile = |&(block_n, stages, ctas_per_sm): &(u32, [u32; 3], u32)| ForwardKnobs {
        ctas_per_sm,
        ..with_blocks(&config, block_n, stages, problem)
    };
    tiles.iter().map(of_tile).filter(|config| config.fits(problem, device)).collect()
}

/// Tiles with one Q slot, whose O is stored from a buffer, and with a third slot of V in place of a
/// second Q slot. On an H200 they took 0.95 of the time with 64 x 16 heads of 256 tokens at head
/// dim 192. Longer keys were not timed (docs/tuning/sm90-forward.md).
fn of_stored_apart(problem: &Problem, device: &Device) -> Option<ForwardKnobs> {
    let dim = problem.head_dim.max(problem.head_dim_v);
    if !(161..=192).contains(&dim)
        || problem.dropout
        || tiles_differ(problem)
        || !(SHORT..=256).contains(&problem.seqlen_k)
    {
        return None;
    }
    let config = with_blocks(&of_rows(problem, device, 128)?, 64, [3, 3, 1], problem);
    Some(config).filter(|config| config.stores_apart() && config.fits(problem, device))
}

/// Tiles of 256 rows over pages and with lengths on the device, up to head dim 64. Their consumers
/// have no registers for the 64 keys of a dense block.
fn of_four_consumers(problem: &Problem, device: &Device) -> Option<ForwardKnobs> {
    let is_narrow = problem.head_dim.max(problem.head_dim_v) <= 64;
    if problem.dropout || !is_narrow || common_box_rows(48, problem) % 16 != 0 {
        return None;
    }
    let config = with_blocks(&of_rows(problem, device, 256)?, 48, [6, 6, 2], problem);
    Some(config).filter(|config| config.fits(problem, device))
}

/// Tiles of 256 rows with one Q slot. The model prefers them for long heads, as an H200's tuner
/// did: two Q slots took 1.12 to 1.2 times as long there (docs/tuning/choice.md).
fn of_one_q_slot(problem: &Problem, device: &Device) -> Option<ForwardKnobs> {
    if problem.dropout || tiles_differ(problem) || problem.head_dim.max(problem.head_dim_v) > 64 {
        return None;
    }
    let config = of_rows(problem, device, 256)?;
    Some(with_blocks(&config, 64, [5, 5, 1], problem)).filter(|config| config.fits(problem, device))
}

/// The config with its keys split, while the tiles of all splits fill the CTAs that run at a time
/// at most `MOST_WAVES` times.
fn split_keys(config: &ForwardKnobs, problem: &Problem, device: &Device) -> Vec<ForwardKnobs> {
    let heads = problem.batch_size * problem.num_heads_q;
    let tiles = heads * ((problem.seqlen_q + i64::from(config.block_m) - 1) / i64::from(config.block_m));
    let most = MOST_WAVES * i64::from(device.sm_count * config.ctas_per_sm) / tiles.max(1);
    let of = |num_splits: u32| ForwardKnobs { num_splits, tma_store: 0, ..*config };
    let splits = SPLITS.into_iter().filter(|splits| *splits > 1 && i64::from(*splits) <= most);
    let all = splits.map(of).chain(split_rest(config, problem, device));
    all.filter(|config| config.fits(problem, device)).collect()
}

/// The config with some of its tiles split, and the others whole (`family::split_rest`). Where
/// tiles are alike, the parts of those past whole waves make up one wave, or two.
fn split_rest(config: &ForwardKnobs, problem: &Problem, device: &Device) -> Vec<ForwardKnobs> {
    let of = |num_splits: u32| ForwardKnobs { num_splits, splits_rest: 1, tma_store: 0, ..*config };
    if tiles_differ(&problem.of_longest()) {
        // CTAs that share an SM took up to 1.16 of the time of the choice before, on an H100
        // (docs/tuning/sm90-forward.md#some-tiles-split).
        return if config.ctas_per_sm == 1 { vec![of(2), of(3)] } else { Vec::new() };
    }
    let slots = i64::from(device.sm_count * config.ctas_per_sm);
    let heads = problem.batch_size * problem.num_heads_q;
    // With any number of splits the same tiles are split.
    let rest = of(2).split_rest().and_then(|rest| rest.tiles(problem, device.sm_count, 2));
    let Some(RestTiles { split, .. }) = rest else { return Vec::new() };
    let room = problem.state_rows() / (split * heads * i64::from(config.block_m));
    let most = |waves: i64| (waves * slots / (split * heads)).min(room).min(problem.seqlen_k / LEAST_KEYS_OF_PART);
    let of_waves = |waves: i64| SPLITS.into_iter().rev().find(|splits| i64::from(*splits) <= most(waves));
    let mut splits: Vec<u32> = [1, 2].into_iter().filter_map(of_waves).filter(|splits| *splits > 1).collect();
    splits.dedup();
    splits.into_iter().map(of).collect()
}

const MOST_WAVES: i64 = 3;

/// The least keys of a part of a tile where others are whole and tiles are alike. On an H100 four
/// tiles in 32 parts of 132 keys took 25 us more than a wave of whole ones (the model: 3).
const LEAST_KEYS_OF_PART: i64 = 256;

/// The config with blocks of other numbers of keys, where consumer warpgroups have registers to
/// spare: fewer keys are padded where there are few, and three warpgroups share fewer blocks.
fn other_blocks(config: &ForwardKnobs, problem: &Problem, device: &Device) -> Vec<ForwardKnobs> {
    if problem.dropout {
        return Vec::new();
    }
    let reads_lengths = problem.features.paged.is_some() || problem.features.varlen.is_some();
    // Past head dim 128 two blocks of 64 keys are in flight, which long keys feel.
    let blocks: &[u32] = match problem.head_dim.max(problem.head_dim_v) {
        // In boxes of at least 16 rows, as blocks of 96 keys are (`of_rows`).
        65..=128 if reads_lengths && config.block_m == 128 && common_box_rows(128, problem) % 16 == 0 => &[128],
        _ if reads_lengths => &[],
        // Three consumers take turns (docs/tuning/sm90-forward.md#turns).
        ..=64 if config.block_m == 192 => &[96, 128],
        // Under a causal mask it was not faster (docs/tuning/choice.md).
        ..=48 if config.block_m == 256 && !tiles_differ(problem) => &[48, 80],
        ..=64 if config.block_m == 256 => &[48],
        _ if config.block_m > 128 => &[],
        ..=128 => &[80, 112, 128],
        129.. if config.block_m == 128 && problem.seqlen_k > FEW_KEYS => &[80],
        129.. => &[64, 80],
    };
    let in_flight: &[[u32; 3]] = match problem.head_dim.max(problem.head_dim_v) {
        ..=64 if config.block_m == 256 => &[[6, 6, 2]],
        ..=128 => &[[4, 4, 2], [3, 3, 2], [2, 2, 2], [2, 2, 1]],
        129..=192 => &[[3, 2, 2], [2, 2, 2]],
        _ => &[[2, 2, 2], [3, 2, 1], [2, 2, 1]],
    };
    let of_keys = |block_n: u32| {
        let mut of_stages = in_flight.iter().map(|stages| with_blocks(config, block_n, *stages, problem));
        of_stages.find(|config| config.fits(problem, device))
    };
    blocks.iter().copied().filter_map(of_keys).collect()
}
