//! The tiles of the sm90 forward kernels, with the cycles that each is expected to take, and what
//! backward_work.rs shares with them.
//!
//! A change of what a CTA does (split keys, split queries) belongs here: more tiles, each with less
//! work. The constants were fitted to records and to timed configs of an H200 and an H100
//! (docs/tuning/choice.md).

use super::forward_geometry::ForwardKnobs;
use super::fp8_geometry::Fp8Knobs;
use super::splits::Splits;
use super::warpgroup::{WARPGROUP_ROWS, tiles_differ};
use crate::device::Device;
use crate::family::split_rest::{RestTiles, SplitRest};
use crate::family::tile::{BOX_COLS, boxes};
use crate::family::time::{Groups, Tiles, Work, blocks, tiles_of_heads};
use crate::problem::Problem;

/// Microseconds of a forward launch under the tuner's clock, which empties L2.
const FORWARD_LAUNCH_US: f64 = 8.0;
/// Microseconds of the kernel that combines the partial states of splits, as part of a graph.
const COMBINE_LAUNCH_US: f64 = 1.6;

/// The share of the bytes of Q, K, V and O that counts: the forward pass reaches 0.9 of the memory
/// rate, where the model of time (`family::time`) has 0.72.
const FORWARD_BYTES: f64 = 0.8;

/// Cycles in which L2 serves a row of a box of 64 columns, for each SM, where rows are whole
/// sectors of 32 bytes: of a whole box, and of a cut one (docs/tuning/choice.md).
const WHOLE_BOX: f64 = 1.7;
const CUT_BOX: f64 = 5.0;
/// The same of any box where rows cut sectors, and what the row takes more.
const BOX_ACROSS_SECTORS: f64 = 2.65;
const ROW_ACROSS_SECTORS: f64 = 5.1;

/// Bytes of partial states that an SM writes or reads in a microsecond, fitted to an H200 and an
/// H100. L2 holds many of them between kernels, so memory's rate does not decide.
const PARTIAL_STATE_BYTES_PER_US: f64 = 30_000.0;
/// The same of the states of a batch-invariant problem, and further cycles of a tile of one run.
/// Both were fitted to an H100 when each run had one segment. The model then splits tiles of 128
/// rows for 256 queries over 8,192 keys with 32 heads, and not for 384 queries
/// (docs/tuning/batch-invariant.md#runs-of-segments).
const SEGMENT_STATE_BYTES_PER_US: f64 = 44_000.0;
const SEGMENT_END: f64 = 1500.0;

/// What a block takes more for each tile of a head, as a share of its time, where a tile slows down
/// on long heads.
const LONG_HEAD: f64 = 0.0015;
/// The same with a mask in tiles of 192 rows with two Q slots, on heads of 8,192 keys and more. On
/// an H200 they took 1.07 and 1.11 of the best tile's time where the model chose them, and were the
/// best in none of 16 problems (docs/tuning/choice.md).
const LONG_MASKED_HEAD: f64 = 0.003;
/// The most of it in a 16-bit tile (docs/tuning/choice.md). On an H200 tiles of 256 rows without a
/// mask, and those of 192 from head dim 56 to 64, took 1.05 to 1.13 of the time with two Q slots in
/// place of one. With a mask the latter took 1.16 to 1.2 of the time of the best tile. From head
/// dim 56 to 64 tiles of two consumers were slower with 80 or 112 keys than with 64 or 128. Without
/// a mask they took 1.07 to 1.24 of the best tile's time there, and two CTAs of 64 rows 1.04 to
/// 1.08. Tiles of 192 rows with one Q slot took 1.03 to 1.08 on an H100 where heads are few. There
/// unsplit tiles of two consumers took 1.19 and 1.24 of the modelled time at head dim 128 with a
/// mask (2 heads of 15,377 tokens). The cause is not known.
fn most_of_long_head(tile: &ForwardTile, problem: &Problem) -> f64 {
    let (is_about_64, is_masked) = ((56..=64).contains(&problem.head_dim), tiles_differ(problem));
    let is_about_128 = (104..=128).contains(&problem.head_dim);
    match (tile.block_m, tile.block_n) {
        (256, 64) if !tile.has_one_q_slot && !is_masked => 0.105,
        (192, _) if tile.has_one_q_slot && is_about_64 && !is_masked && problem.seqlen_k >= 8192 => 0.03,
        (192, _) if !tile.has_one_q_slot && is_about_64 => {
            if is_masked {
                0.2
            } else {
                0.105
            }
        }
        (128, _) if is_about_64 && !is_masked => 0.2,
        (128, _) if is_masked && tile.splits.count == 1 && is_about_128 && problem.seqlen_k >= 8192 => 0.1,
        (128, keys) if keys % 64 != 0 && is_about_64 => 0.105,
        (64, 128..) if tile.ctas_per_sm == 2 && is_about_64 && !is_masked && problem.seqlen_k >= 4096 => 0.07,
        _ => 0.0,
    }
}

/// The time of a block over that without turns, where consumers issue their products in turns
/// (templates/sm90/forward/turns.cuh). Fitted to an H100 (docs/tuning/sm90-forward.md#turns).
fn of_turns(knobs: &ForwardKnobs, problem: &Problem) -> Option<f64> {
    let features = &problem.features;
    let is_packed = features.varlen.is_some() && features.paged.is_none();
    let modifies = features.modifies_scores() || problem.dropout || problem.left_shift().is_some();
    if modifies || is_packed || problem.batch_invariant || problem.key_format() != 0 || knobs.ctas_per_sm > 1 {
        return None;
    }
    match (knobs.consumers(), problem.head_dim.max(problem.head_dim_v), tiles_differ(problem)) {
        // Short blocks save what the barriers cost.
        (2 | 3, ..=64, _) if knobs.block_n < 80 => Some(1.0),
        (3, ..=48, _) => Some(1.0),
        (2, ..=64, _) => Some(0.975),
        (3, ..=64, _) => Some(0.93),
        (4, ..=64, false) => Some(0.94),
        (3, 65..=80, _) => Some(0.97),
        (2, 65..=80, _) | (2, 81..=112, false) | (2, 113..=128, true) => Some(0.98),
        _ => None,
    }
}

/// The share by which 16-bit blocks of tiles of two consumers exceed the model, at head dims 65 to
/// 96, without a mask, from 1,024 keys on. On an H100 they took 1.06 to 1.30 of the modelled time,
/// over that of 192 x 80, in ten problems with 112 and 128 keys, and 1.07 to 1.16 in three with 64
/// and 80 (docs/tuning/choice.md). At head dim 128 they took 1.00 to 1.08. The cause is not known.
fn excess_of_two_consumers(tile: &ForwardTile, problem: &Problem) -> f64 {
    let is_such = (65..=96).contains(&problem.head_dim) && !tiles_differ(problem) && problem.seqlen_k >= 1024;
    match (tile.block_m, tile.block_n) {
        (128, 112..) if is_such => 0.16,
        (128, _) if is_such => 0.08,
        _ => 0.0,
    }
}

/// What a block of 16 bits takes more, as a share of its time, where CTAs share an SM, than with as
/// many consumers in one CTA. Two small CTAs overlap each other's ends. Past head dim 64 they have
/// two blocks in flight and load twice the keys. Fitted to an H200 (docs/tuning/choice.md).
fn of_sharing(ctas: f64, head_dim: i64) -> f64 {
    match (ctas as u32, head_dim) {
        (..=1, _) => 0.0,
        (2, ..=64) => -0.03,
        (2, _) => 0.06,
        _ => 0.4,
    }
}

/// What the one Q slot of more than two consumers costs, over that of two. 192 x 64 with one slot
/// took 1.22 of the time of 128 x 64 for 2 x 9 heads of 3,001 queries and 88 keys at head dim 136.
const OF_LARGE_Q: f64 = 3.0;

/// The share of a tile's time that is left where the producer reads V^T, from head dim 65, 129 and
/// 225 on, and microseconds of the kernel that writes V^T beside those of its bytes
/// (docs/tuning/eight-bits.md).
const READS_NARROW_TRANSPOSED: f64 = 0.96;
const READS_TRANSPOSED: f64 = 0.94;
const READS_WIDE_TRANSPOSED: f64 = 0.91;
const TRANSPOSE_LAUNCH_US: f64 = 1.0;

/// What tiles take whose producer converts 8-bit keys, over the time of 16-bit ones, with scales of
/// sequences and with scales of keys or blocks: up to head dim 64, up to 128, and past it
/// (docs/tuning/eight-bits.md#prompts-on-hopper).
const CONVERTING_NARROW: [f64; 2] = [1.07, 1.36];
const CONVERTING: [f64; 2] = [1.24, 1.65];
const CONVERTING_WIDE: [f64; 2] = [1.34, 1.67];
/// The same of tiles that read widened keys, each with a scale, and microseconds of the widening
/// kernel beside those of its bytes.
const WIDENED_KEY_SCALES: f64 = 1.05;
const WIDEN_LAUNCH_US: f64 = 3.0;

/// What a forward kernel's tiles cost.
struct ForwardCosts {
    /// Operations of the tensor cores in a cycle.
    rate: f64,
    /// Cycles of a consumer's softmax for each key of a block, when it runs alone.
    softmax_alone: f64,
    /// Cycles of an SM's exponentials for each key and consumer. 64 of them, 16 a cycle, take 4;
    /// the rest is fitted.
    exponentials: f64,
    /// Further cycles of a block for a consumer alone, and for each of several.
    block_alone: f64,
    block: f64,
    /// More of the latter up to head dim 48, where blocks of 96 keys took 0.91 to 0.96 of the time
    /// of blocks of 64 (192 rows, H100). The cause was not measured.
    narrow_block: f64,
    /// Consumers that share an SM: a block takes the root of the sum of these powers of its time
    /// alone and of all consumers' turns.
    shared_power: f64,
    /// Cycles between a tile's last block and the first of the next tile.
    end: f64,
    /// More of them for a tile of several blocks, as a share of those of a block alone: nothing
    /// covers the first product, and the last block's softmax and product.
    fill: f64,
    /// More of them for each column of O and consumer of an SM.
    column: f64,
    /// More of them where keys are split: first loads that no other tile of the SM covers, and
    /// stores in fp32.
    split: f64,
    /// More of them in a whole tile where others are split, since it stores O from registers. On an
    /// H100 such tiles were 1.03 to 1.08 times as slow where the model without it expected them to
    /// be a little faster (docs/tuning/sm90-forward.md#some-tiles-split).
    whole: f64,
    /// More of them in such a tile for each column of O.
    whole_column: f64,
    /// More of them, and one for each column, where Q has one slot: its load begins after the last
    /// product with the Q before. More than two consumers have a larger Q (`OF_LARGE_Q`).
    one_q_slot: f64,
    /// More of them for each of two CTAs that share an SM past head dim 64.
    sharing: f64,
    /// Added to those cycles where TMA stores O from a buffer. It is negative, since they include
    /// stores from registers.
    stored_apart: f64,
    /// More cycles of a block of 64 keys and 128 columns but the first, where V has one slot.
    one_v_slot: f64,
    /// Whether loads are known to bound a launch.
    loads: bool,
    /// The most that blocks of long heads take more.
    most_of_long_head: fn(&ForwardTile, &Problem) -> f64,
    /// The share by which blocks of a tile exceed the model.
    excess: fn(&ForwardTile, &Problem) -> f64,
}

const COSTS: ForwardCosts = ForwardCosts {
    rate: 4096.0,
    softmax_alone: 3.7,
    exponentials: 5.1,
    block_alone: 110.0,
    block: 16.0,
    narrow_block: 60.0,
    shared_power: 2.2,
    end: 1800.0,
    fill: 1.0,
    column: 1.7,
    split: 3500.0,
    whole: 1800.0,
    whole_column: 4.0,
    one_q_slot: 425.0,
    sharing: 400.0,
    stored_apart: -900.0,
    one_v_slot: 600.0,
    loads: true,
    most_of_long_head,
    excess: excess_of_two_consumers,
};

/// The costs of 8 bits were fitted to an H100 (docs/tuning/eight-bits.md). They know no slots.
const FP8_COSTS: ForwardCosts = ForwardCosts {
    rate: 8192.0,
    softmax_alone: 7.0,
    exponentials: 3.2,
    block_alone: 570.0,
    block: 100.0,
    narrow_block: 0.0,
    shared_power: 3.3,
    end: 400.0,
    fill: 0.0,
    column: 13.0,
    split: 7000.0,
    whole: 0.0,
    whole_column: 0.0,
    one_q_slot: 0.0,
    sharing: 0.0,
    stored_apart: 0.0,
    one_v_slot: 0.0,
    loads: false,
    most_of_long_head: |_, _| 0.0,
    excess: |_, _| 0.0,
};

/// What sets the time of a forward tile.
struct ForwardTile {
    block_m: u32,
    block_n: u32,
    splits: Splits,
    split_rest: Option<SplitRest>,
    ctas_per_sm: u32,
    has_one_q_slot: bool,
    stores_apart: bool,
    has_one_v_slot: bool,
    of_turns: Option<f64>,
    costs: &'static ForwardCosts,
}

impl ForwardTile {
    /// A tile that has its SM to itself, several slots of Q and V, and no buffer for O.
    fn plain(block_m: u32, block_n: u32, num_splits: u32, problem: &Problem, costs: &'static ForwardCosts) -> Self {
        ForwardTile {
            block_m,
            block_n,
            splits: Splits::new(num_splits, block_m, problem),
            split_rest: None,
            ctas_per_sm: 1,
            has_one_q_slot: false,
            stores_apart: false,
            has_one_v_slot: false,
            of_turns: None,
            costs,
        }
    }
}

pub fn forward(knobs: &ForwardKnobs, problem: &Problem, device: &Device) -> Option<Work> {
    let &ForwardKnobs { block_m, block_n, num_splits, ctas_per_sm, q_stages, v_stages, .. } = knobs;
    let tile = ForwardTile {
        split_rest: knobs.split_rest(),
        ctas_per_sm,
        has_one_q_slot: q_stages == 1,
        stores_apart: knobs.stores_apart(),
        has_one_v_slot: v_stages == 1,
        of_turns: of_turns(knobs, problem),
        ..ForwardTile::plain(block_m, block_n, num_splits, problem, &COSTS)
    };
    let work = of_forward(&tile, problem, device)?;
    Some(match problem.key_format() {
        0 => work,
        _ if knobs.widens == 1 => with_widened_kv(work, problem),
        _ => converting(work, problem),
    })
}

/// The work where the producer converts 8-bit keys.
fn converting(work: Work, problem: &Problem) -> Work {
    let of = |shares: [f64; 2]| shares[usize::from(problem.features.has_key_scales())];
    let share = match problem.head_dim.max(problem.head_dim_v) {
        ..=64 => of(CONVERTING_NARROW),
        65..=128 => of(CONVERTING),
        _ => of(CONVERTING_WIDE),
    };
    with_cycles(work, share)
}

/// The work where a widening kernel copies 8-bit or int4 K and V first.
fn with_widened_kv(work: Work, problem: &Problem) -> Work {
    let keys = problem.batch_size * problem.num_heads_kv * problem.seqlen_k;
    let bytes = keys * (problem.bytes_of_key() + 2 * (problem.head_dim + problem.head_dim_v));
    let work = if problem.features.has_key_scales() { with_cycles(work, WIDENED_KEY_SCALES) } else { work };
    // Once read as they are, and once written in 16 bits.
    Work { bytes_beside: work.bytes_beside + bytes as f64, launch_us: work.launch_us + WIDEN_LAUNCH_US, ..work }
}

fn with_cycles(work: Work, share: f64) -> Work {
    let of = |tiles: Tiles| Tiles { cycles: share * tiles.cycles, alone: share * tiles.alone, ..tiles };
    Work { tiles: work.tiles.into_iter().map(of).collect(), ..work }
}

pub fn fp8_forward(knobs: &Fp8Knobs, problem: &Problem, device: &Device) -> Option<Work> {
    let &Fp8Knobs { block_m, block_n, num_splits, .. } = knobs;
    let tile = ForwardTile::plain(block_m, block_n, num_splits, problem, &FP8_COSTS);
    let work = of_forward(&tile, problem, device)?;
    Some(if knobs.transposes_before() { with_transposed_v(work, problem) } else { work })
}

/// The work where a transposing kernel writes V^T first.
fn with_transposed_v(work: Work, problem: &Problem) -> Work {
    let share = match problem.head_dim_v {
        ..=64 => 1.0,
        65..=128 => READS_NARROW_TRANSPOSED,
        129..=224 => READS_TRANSPOSED,
        _ => READS_WIDE_TRANSPOSED,
    };
    // V is once read and V^T once written.
    let v_bytes = (2 * problem.batch_size * problem.num_heads_kv * problem.seqlen_k * problem.head_dim_v) as f64;
    let work = with_cycles(work, share);
    Work { bytes_beside: work.bytes_beside + v_bytes, launch_us: work.launch_us + TRANSPOSE_LAUNCH_US, ..work }
}

/// The tiles of a forward pass, as many times as the keys have splits. None where lengths or lists
/// decide.
fn of_forward(tile: &ForwardTile, problem: &Problem, device: &Device) -> Option<Work> {
    let (sq, sk) = lengths_of_queries(problem)?;
    // Every sequence of a varlen problem has the diagonal of the longest, as far as the host knows.
    let problem = &problem.of_longest();
    let (block_m, block_n) = (i64::from(tile.block_m), f64::from(tile.block_n));
    let (consumers, splits) = (f64::from(tile.block_m / WARPGROUP_ROWS), f64::from(tile.splits.count));
    // All tiles are split, or some of them.
    let rest = match tile.split_rest {
        Some(rest) => Some(rest.tiles(problem, device.sm_count, tile.splits.count)?),
        None => None,
    };
    let (sm_count, costs) = (f64::from(device.sm_count), tile.costs);
    let tiles_of_head = div_ceil(sq, block_m);
    let columns = padded(problem.head_dim, 16) + padded(problem.head_dim_v, 16);
    // A row and a key need two operations for each column.
    let products = block_n * columns * 2.0 * f64::from(WARPGROUP_ROWS) / costs.rate;
    // One consumer's products and softmax take turns; those of several, in one CTA or more, fill
    // each other's gaps, until the SM's tensor cores and exponentials are busy.
    let alone = products + costs.softmax_alone * block_n + costs.block_alone;
    let of_narrow = if problem.head_dim.max(problem.head_dim_v) <= 48 { costs.narrow_block } else { 0.0 };
    let each = products.hypot(costs.exponentials * block_n) + costs.block + of_narrow;
    let is_masked_and_long = tiles_differ(problem) && problem.seqlen_k >= 8192;
    let long_head =
        if block_m == 192 && !tile.has_one_q_slot && is_masked_and_long { LONG_MASKED_HEAD } else { LONG_HEAD };
    let of_long_head = (long_head * tiles_of_head as f64).min((costs.most_of_long_head)(tile, problem));
    // Warpgroups that take turns do not slow down on long heads.
    let of_head = if tile.of_turns.is_some() { 0.0 } else { of_long_head };
    let per_block = |ctas: f64| {
        let shared = alone.powf(costs.shared_power) + (ctas * consumers * each).powf(costs.shared_power);
        (1.0 + of_head + (costs.excess)(tile, problem))
            * (1.0 + of_sharing(ctas, problem.head_dim))
            * shared.powf(1.0 / costs.shared_power)
    };
    // The first block is done without turns, and so are those that some rows see with a mask.
    let before_turns = 1.0 + if tiles_differ(problem) { (f64::from(tile.block_m) / block_n).ceil() } else { 0.0 };
    let saved_by_turns = 1.0 - tile.of_turns.unwrap_or(1.0);
    // The first is of a tile in its slot, the second of one alone on an SM.
    let ctas = [f64::from(tile.ctas_per_sm), 1.0];
    let per_block = ctas.map(per_block);
    let is_masked = tiles_differ(problem);
    let of_split = match (splits > 1.0, problem.batch_invariant) {
        (false, _) => 0.0,
        (true, false) => costs.split,
        (true, true) => SEGMENT_END,
    };
    let of_whole = rest.map_or(0.0, |_| costs.whole + costs.whole_column * problem.head_dim_v as f64);
    let dim = problem.head_dim as f64;
    let of_q_slot = |ctas: f64| match (tile.has_one_q_slot, tile.stores_apart) {
        (_, true) => costs.stored_apart,
        (true, false) => (costs.one_q_slot + dim) * if consumers > 2.0 { OF_LARGE_Q } else { 1.0 } / ctas,
        (false, false) => 0.0,
    };
    let columns_of_o = costs.column * problem.head_dim_v as f64 * consumers;
    let of_sharing_end = |ctas: f64| if ctas == 2.0 && problem.head_dim > 64 { costs.sharing } else { 0.0 };
    let tile_end = |ctas: f64| costs.end + columns_of_o * ctas + of_q_slot(ctas) + of_sharing_end(ctas);
    let tile_ends = ctas.map(tile_end);
    let of_v_slot = if tile.has_one_v_slot { costs.one_v_slot * (block_n / 64.0) * (dim / 128.0) } else { 0.0 };
    let blocks_of_consumer = |first: i64, splits: f64| {
        let end = (first + i64::from(WARPGROUP_ROWS)).min(sq);
        let from = problem.left_shift().map_or(0, |shift| (first + shift).clamp(0, sk));
        let to = problem.right_shift().map_or(sk, |shift| (end + shift).clamp(0, sk));
        // A consumer past the last row has nothing to do. Where all tiles are alike, the SMs that
        // have no such tile are waited for; they are alike where a head has one tile, too.
        let is_free = is_masked && first >= sq && sq > block_m;
        if is_free { 0.0 } else { (blocks(from, to, tile.block_n) / splits * tile.splits.longest).ceil() }
    };
    let blocks_of_tile = |nth: i64, splits: f64| {
        let firsts = (0..block_m / i64::from(WARPGROUP_ROWS)).map(|at| nth * block_m + at * i64::from(WARPGROUP_ROWS));
        firsts
            .map(|first| blocks_of_consumer(first, splits))
            .fold((0.0, 0.0f64), |(sum, most), n| (sum + n, most.max(n)))
    };
    let cycles = |nth: i64, splits: f64| {
        let (sum, most) = blocks_of_tile(nth, splits);
        let in_turns = (most - before_turns).max(0.0);
        [0, 1].map(|at| {
            let of_blocks =
                (alone * most).max(per_block[at] * sum / consumers - saved_by_turns * per_block[at] * in_turns);
            let of_fill = costs.fill * alone * (most - 1.0).clamp(0.0, 1.0);
            let of_split = match splits > 1.0 {
                true => of_split,
                false => of_whole,
            };
            tile_ends[at] + of_split + of_blocks + of_fill + of_v_slot * (most - 1.0).max(0.0)
        })
    };
    let heads = problem.batch_size * problem.num_heads_q;
    let rows_of_tile = |nth: i64, splits: f64| [f64::from(tile.block_m) + block_n * blocks_of_tile(nth, splits).1; 2];
    let all_tiles = |of: &dyn Fn(i64, f64) -> [f64; 2]| match rest {
        None => times(splits, tiles_of_heads(heads, tiles_of_head, |nth| of(nth, splits))),
        Some(RestTiles { all, split }) => {
            // Split tiles are the last ones with a mask, else the first ones.
            let [first_split, first_whole] = if is_masked { [all - split, 0] } else { [0, split] };
            let parts = tiles_of_heads(heads, split, |nth| of(first_split + nth, splits));
            let whole = tiles_of_heads(heads, all - split, |nth| of(first_whole + nth, 1.0));
            whole.into_iter().chain(times(splits, parts)).collect()
        }
    };
    let rows_loaded = all_tiles(&rows_of_tile).iter().map(|tiles| tiles.count * tiles.cycles).sum::<f64>();
    let row_cycles = cycles_of_row(problem.head_dim) + cycles_of_row(problem.head_dim_v);
    let elements = problem.num_heads_q * sq + problem.num_heads_kv * sk;
    let share_of_rows = rest.map_or(1.0, |RestTiles { all, split }| split as f64 / all as f64);
    // O and LSE in fp32, once written and once read.
    let rows = share_of_rows * problem.query_rows() as f64;
    let partial_bytes = tile.splits.states * 8.0 * (problem.partial_cols() + 1) as f64 * rows;
    let combine_us = match tile.splits.count {
        1 => 0.0,
        _ => {
            let rate = if problem.batch_invariant { SEGMENT_STATE_BYTES_PER_US } else { PARTIAL_STATE_BYTES_PER_US };
            COMBINE_LAUNCH_US + partial_bytes / (rate * sm_count)
        }
    };
    Some(Work {
        tiles: all_tiles(&cycles),
        // Forward groups have many tiles.
        groups: Groups::ONE,
        slots: f64::from(tile.ctas_per_sm) * sm_count,
        slots_per_sm: f64::from(tile.ctas_per_sm),
        load_cycles: if costs.loads { rows_loaded * row_cycles / sm_count } else { 0.0 },
        bytes_under: FORWARD_BYTES * problem.batch_size as f64 * elements as f64 * in_bytes(problem),
        bytes_beside: 0.0,
        launch_us: FORWARD_LAUNCH_US + combine_us,
    })
}

/// Cycles in which L2 serves a row of so many columns, for each SM.
fn cycles_of_row(columns: i64) -> f64 {
    let (all, whole) = (f64::from(boxes(columns)), (columns / i64::from(BOX_COLS)) as f64);
    if columns % 16 == 0 {
        whole * WHOLE_BOX + (all - whole) * CUT_BOX
    } else {
        all * BOX_ACROSS_SECTORS + ROW_ACROSS_SECTORS
    }
}

pub fn times(splits: f64, tiles: Vec<Tiles>) -> Vec<Tiles> {
    tiles.into_iter().map(|tiles| Tiles { count: tiles.count * splits, ..tiles }).collect()
}

/// Both lengths; None for problems whose tiles they do not tell. Keys in pages count as the
/// longest, since only the device knows their number.
pub fn lengths(problem: &Problem) -> Option<(i64, i64)> {
    let features = &problem.features;
    let are_known = (features.varlen.is_none() || features.paged.is_some()) && features.block_mask.is_none();
    are_known.then_some((problem.seqlen_q.max(1), problem.seqlen_k.max(1)))
}

/// The same forward, where lengths of keys on the device count as the longest without pages, too.
fn lengths_of_queries(problem: &Problem) -> Option<(i64, i64)> {
    if problem.has_features_of_keys_alone() { lengths(&problem.of_longest()) } else { lengths(problem) }
}

/// Bytes of a row of Q and one of O, or of K and one of V.
pub fn in_bytes(problem: &Problem) -> f64 {
    (problem.head_dim + problem.head_dim_v) as f64 * problem.dtype.bytes() as f64
}

pub fn padded(columns: i64, to: i64) -> f64 {
    (div_ceil(columns, to) * to) as f64
}

pub fn div_ceil(length: i64, block: i64) -> i64 {
    (length + block - 1) / block
}
