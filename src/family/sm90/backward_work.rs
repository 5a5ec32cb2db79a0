//! The tiles of the sm90 backward kernels, with the cycles that each is expected to take (work.rs).

use super::backward_geometry::{BackwardKernel, BackwardKnobs, half_cols};
use super::warpgroup::tiles_differ;
use super::work::{div_ceil, in_bytes, lengths, padded, times};
use crate::device::Device;
use crate::family::split_rest::RestTiles;
use crate::family::tile::{BOX_COLS, boxes};
use crate::family::time::{Groups, Tiles, Work, blocks, tiles_of_heads};
use crate::problem::{Features, Problem};

/// Cycles of a block's exponentials and of their packing, for each row and key.
const WEIGHTS: f64 = 0.028;
/// Cycles of a backward tile's first loads and last stores.
const BACKWARD_TILE: f64 = 8000.0;
/// The part of them that goes with the rows of a block where a pair of CTAs shares a tile, for 64
/// rows (docs/tuning/choice.md).
const PAIR_TILE_OF_ROWS: f64 = 4000.0;
/// Further cycles of a tile that shares its walk: first loads that no other tile of the SM covers,
/// and stores in fp32.
const SPLIT_BACKWARD_TILE: f64 = 2000.0;
/// The same of a pair of CTAs, which stores 256 KB, where all SMs do. Fewer pairs wait less: on an
/// H100 1 head of 319 causal tokens at head dim 256 took 20.4 us in splits, and 25.7 unsplit.
const SPLIT_BACKWARD_PAIR: f64 = 9300.0;
/// The share of memory's time that partial gradients of few splits cost: L2 holds many of them
/// between kernels. So many splits cost twice as much a byte, since one is added after the other.
/// Bytes, written and read, past the size of L2 cost all of memory's time (docs/tuning/choice.md).
const PARTIALS_FROM_MEMORY: f64 = 0.33;
const MANY_SPLITS: f64 = 4.3;
/// Microseconds of the three launches under the tuner's clock.
const BACKWARD_LAUNCH_US: f64 = 19.0;
/// Further microseconds of a launch up to head dim 128 whose tiles all run at a time, for each
/// element of a block past so many. On an H200, passes of 17 to 27 us took about 1 us more for a
/// further 1,000 (docs/tuning/choice.md#unusual-shapes-short-passes-and-long-heads).
const LAUNCH_US_OF_BLOCK: f64 = 0.85e-3;
const SMALL_BLOCK: f64 = 6000.0;
/// Microseconds of each split where tiles that share a walk write dQ, up to head dim 96: adding up
/// so many partial gradients takes longer then. On an H200 it took 0.42 to 0.6, and none at 128.
const DIRECT_SPLIT_US: f64 = 0.45;
/// Bytes of dQ's fp32 sum, cleared, added to and read, for each byte of Q; and O, dO and dQ.
const BESIDE_BYTES: f64 = 5.0;
/// The same where the main kernel writes dQ: O and dO are read a second time.
const DIRECT_BESIDE_BYTES: f64 = 2.0;
/// Tiles that walk several heads drift apart, and L2 then holds less of what they share. Where more
/// tiles than run at a time walk h heads each, a block takes (h² - n²) times this share of its
/// time more, up to a limit. n is `HEADS_WITHOUT_DRIFT` for tiles that share a walk, else 1
/// (docs/tuning/sm90-backward.md#groups-splits-and-what-drifts).
const DRIFT: f64 = 0.006;
const MOST_DRIFT: f64 = 0.4;
const HEADS_WITHOUT_DRIFT: f64 = 5.0;
/// The limit of unsplit tiles, which take all heads at one block of rows before the next block.
const MOST_DRIFT_UNSPLIT: f64 = 0.25;
/// Walks that alternate in direction by waves stay together. A block takes this share of its time
/// more for each K/V head of a group past so many, up to a limit.
const OF_ALTERNATING_HEAD: f64 = 0.0012;
const FEW_ALTERNATING_HEADS: f64 = 8.0;
const MOST_OF_ALTERNATING: f64 = 0.04;
/// What a block takes more, as a share of its time, where a CTA does several tiles of a head.
const OF_SEVERAL_TILES: f64 = 0.08;
/// The same of blocks of 128 rows, in tiles that are alike (docs/tuning/choice.md).
const OF_TALL_ALIKE: f64 = 0.05;
const TALL_ROWS: u32 = 128;
/// Cycles of a row of dQ that a later tile of a head reads and adds to.
const LATER_SUM: f64 = 4.0;
/// The same where a pair of CTAs does the tiles: its products of dK and dQ wait for the sum. A part
/// of the wait is as long for any number of rows: blocks of 48 rows took 1.04 to 1.06 times as long
/// as those of 64 on an H100.
const LATER_SUM_OF_PAIR: f64 = 30.0;
const LATER_SUM_OF_PAIR_BLOCK: f64 = 1920.0;
/// The share of memory's time that a second pass over Q, dO and dQ costs, as far as L2 does not
/// hold them: tiles past whole waves that are split run after all others (docs/tuning/choice.md).
const SECOND_PASS: f64 = 0.5;
/// What large blocks of the narrow kernel take more where few tiles of a head run at a time and L2
/// does not hold what they share, so that most of it comes from memory. On an H100, 96 rows at head
/// dim 96 took 1.12 to 1.18 times as long as 80 with 4 and 8 tiles, and 80 rows at 112 1.35 times
/// as long as 64 with 4; other blocks have fewer elements (docs/tuning/choice.md). An H200 was not
/// timed.
const OF_LARGE_BLOCKS: f64 = 0.2;
const LARGE_BLOCK: f64 = 8500.0;
const MANY_TILES_OF_HEAD: f64 = 16.0;
/// What a block of a pair of CTAs from head dim 136 to 192 takes where it adds to dQ, as a share of
/// what the other constants say, up to so many keys. They were fitted past head dim 192, and to
/// longer heads (docs/tuning/sm90-backward.md#pairs-from-head-dim-136-on).
const OF_ADDING_PAIR: f64 = 0.7;
pub const MOST_KEYS_OF_PAIRS: i64 = 768;

/// The tiles of a backward pass: those of keys, each of which walks the rows of its group's heads.
pub fn backward(knobs: &BackwardKnobs, problem: &Problem, device: &Device) -> Option<Work> {
    let (sq, sk) = lengths(problem)?;
    let (dim, dim_v) = (problem.head_dim, problem.head_dim_v);
    let (block_m, block_n) = (f64::from(knobs.block_m), i64::from(knobs.block_n));
    // Columns as padded, cycles of barriers and waits in a block, and CTAs that share a tile.
    let (columns, waits, ctas) = match knobs.kernel(problem) {
        BackwardKernel::Narrow => (3.0 * padded(dim, 16) + 2.0 * padded(dim_v, 16), 750.0, 1),
        BackwardKernel::Middle => {
            let of_boxes = 3 * boxes(dim) + 2 * boxes(dim_v);
            // Past head dim 192 a consumer has 32 keys.
            let waits = if boxes(dim.max(dim_v)) > 3 { 3600.0 } else { 2600.0 };
            (f64::from(of_boxes * BOX_COLS), waits, 1)
        }
        // Blocks of 48 rows took 1.03 times as long a row as blocks of 64 (docs/tuning/choice.md).
        // dQ's columns are halved by boxes.
        BackwardKernel::Wide => {
            let (of_k, of_v) = (boxes(dim) * BOX_COLS, boxes(dim_v) * BOX_COLS);
            (f64::from(2 * (of_k + of_v + half_cols(dim))), 260.0 + 5.3 * block_m, 2)
        }
    };
    let keys = block_n as f64 / f64::from(ctas);
    // All tiles have so many splits, or those past whole waves alone.
    let rest = knobs.rest_tiles(problem, device);
    let num_splits = f64::from(knobs.num_splits(problem, device));
    let splits = if rest.is_some() { 1.0 } else { num_splits };
    let steps = problem.group_size() as f64 / splits;
    let heads_kv = problem.batch_size * problem.num_heads_kv;
    let count = splits * (heads_kv * div_ceil(sk, block_n)) as f64;
    let is_narrow = knobs.kernel(problem) == BackwardKernel::Narrow;
    let of_block = if is_narrow && count <= f64::from(device.sm_count) {
        LAUNCH_US_OF_BLOCK * (block_m * padded(dim, 16) - SMALL_BLOCK).max(0.0)
    } else {
        0.0
    };
    let writes_dq_split = knobs.direct_dq > 0 && splits > 1.0 && dim.max(dim_v) <= 96;
    let of_direct_splits = if writes_dq_split { DIRECT_SPLIT_US * splits } else { 0.0 };
    let groups = backward_groups(knobs, problem, device);
    let drifts = tiles_differ(problem) && count > f64::from(device.sm_count / ctas);
    let drift = match drifts {
        false => 1.0,
        true if splits > 1.0 => 1.0 + drift(steps, HEADS_WITHOUT_DRIFT, MOST_DRIFT),
        true if walks_alternate(problem) => 1.0 + of_alternating(groups.heads as f64 / groups.count as f64),
        true => 1.0 + drift(steps, 1.0, MOST_DRIFT_UNSPLIT),
    };
    let of_several_tiles = if knobs.direct_dq >= 2 { OF_SEVERAL_TILES } else { 0.0 };
    let is_tall = knobs.block_m == TALL_ROWS && !tiles_differ(problem);
    let of_tall = if is_tall { OF_TALL_ALIKE } else { 0.0 };
    let is_large = is_narrow && knobs.direct_dq == 0 && block_m * padded(dim.max(dim_v), 16) > LARGE_BLOCK;
    let is_from_memory = is_slow(device) && bytes_of_queries(problem) as f64 > 2.0 * device.l2_bytes as f64;
    let of_large = if is_large && is_from_memory {
        let heads = groups.heads as f64 / groups.count as f64;
        let at_a_time = (count / heads_kv as f64).min(f64::from(device.sm_count) / heads);
        OF_LARGE_BLOCKS * (2.0 - 2.0 * at_a_time / MANY_TILES_OF_HEAD).clamp(0.0, 1.0)
    } else {
        0.0
    };
    let is_adding_pair = ctas == 2 && knobs.direct_dq == 0 && boxes(dim.max(dim_v)) == 3 && sk <= MOST_KEYS_OF_PAIRS;
    let of_adding_pair = if is_adding_pair { OF_ADDING_PAIR } else { 1.0 };
    let slowdown = of_adding_pair * (drift + of_several_tiles + of_tall + of_large);
    let per_block = slowdown * (block_m * keys * (columns / 2048.0 + WEIGHTS) + waits);
    let of_split = match (splits > 1.0, ctas) {
        (false, _) => 0.0,
        (true, 1) => SPLIT_BACKWARD_TILE,
        (true, _) => {
            let share_of_sms = (count / f64::from(device.sm_count / ctas)).min(1.0);
            SPLIT_BACKWARD_TILE + share_of_sms * (SPLIT_BACKWARD_PAIR - SPLIT_BACKWARD_TILE)
        }
    };
    // Fewer rows of a block fill and drain a pair's longer pipeline sooner.
    let of_rows = if ctas == 2 { PAIR_TILE_OF_ROWS * (block_m / 64.0 - 1.0) } else { 0.0 };
    let tile_end = BACKWARD_TILE + of_split + of_rows;
    let of_part = if ctas == 2 { SPLIT_BACKWARD_PAIR } else { SPLIT_BACKWARD_TILE };
    let part = |blocks: f64| BACKWARD_TILE + of_part + per_block * (blocks / num_splits).ceil();
    let cycles = |tile: i64| {
        let (first, end) = (tile * block_n, ((tile + 1) * block_n).min(sk));
        let from = problem.right_shift().map_or(0, |shift| (first - shift).clamp(0, sq));
        let to = problem.left_shift().map_or(sq, |shift| (end - shift).clamp(0, sq));
        tile_end + per_block * (steps * blocks(from, to, knobs.block_m)).ceil()
    };
    // fp32, once written and once read.
    let split_keys = rest.map_or(sk, |rest| sk - (rest.all - rest.split) * block_n);
    let partial_bytes =
        if num_splits > 1.0 { num_splits * 8.0 * ((dim + dim_v) * heads_kv * split_keys) as f64 } else { 0.0 };
    let from_memory = PARTIALS_FROM_MEMORY * (1.0 + num_splits / MANY_SPLITS);
    let beyond_l2 = (partial_bytes - device.l2_bytes as f64).max(0.0);
    let second_pass = match rest {
        // Q, dO, and dQ in fp32 once read and once written.
        Some(_) => SECOND_PASS * second_pass_bytes(problem, device),
        None => 0.0,
    };
    let tiles = match (knobs.direct_dq, rest) {
        (_, Some(RestTiles { all, split })) => {
            let blocks = problem.group_size() as f64 * blocks(0, sq, knobs.block_m);
            let of = |count: f64, cycles| Tiles { count: count * heads_kv as f64, cycles, alone: cycles };
            vec![of((all - split) as f64, cycles(0)), of(split as f64 * num_splits, part(blocks))]
        }
        (2.., _) => tiles_of_heads(heads_kv, 1, |_| {
            let rows = f64::from(knobs.block_m) * (blocks(0, sq, knobs.block_m) / splits).ceil();
            let later = f64::from(knobs.direct_dq - 1);
            let all = (0..i64::from(knobs.direct_dq)).map(&cycles).sum::<f64>();
            let later_sum = match ctas {
                2 => LATER_SUM_OF_PAIR + LATER_SUM_OF_PAIR_BLOCK / block_m,
                _ => LATER_SUM,
            };
            [all + later * later_sum * rows; 2]
        }),
        _ => tiles_of_heads(heads_kv, div_ceil(sk, block_n), |tile| [cycles(tile); 2]),
    };
    let groups = if rest.is_some() { Groups::ONE } else { groups };
    let beside = if knobs.direct_dq > 0 { DIRECT_BESIDE_BYTES } else { BESIDE_BYTES };
    Some(Work {
        tiles: times(splits, tiles),
        groups,
        slots: f64::from(device.sm_count / ctas),
        slots_per_sm: 1.0,
        load_cycles: 0.0,
        bytes_under: 0.0,
        bytes_beside: from_memory * partial_bytes
            + (1.0 - from_memory).max(0.0) * beyond_l2
            + second_pass
            + beside * (problem.batch_size * problem.num_heads_q * sq) as f64 * in_bytes(problem),
        launch_us: BACKWARD_LAUNCH_US + of_block + of_direct_splits,
    })
}

/// Bytes of Q, dO and the fp32 dQ of all heads.
pub fn bytes_of_queries(problem: &Problem) -> i64 {
    let row_bytes = 6 * problem.head_dim + 2 * problem.head_dim_v;
    problem.batch_size * problem.num_heads_q * problem.seqlen_q * row_bytes
}

/// Bytes in a second between those of an H100 and an H200.
const FAST_MEMORY: u64 = 4_000_000_000_000;

/// Whether a device's memory is as slow as an H100's.
pub fn is_slow(device: &Device) -> bool {
    device.memory_bytes_per_second < FAST_MEMORY
}

/// Bytes of a pass over Q, dO and the fp32 dQ, read and written, as far as L2 does not hold them.
fn second_pass_bytes(problem: &Problem, device: &Device) -> f64 {
    let rows = (problem.batch_size * problem.num_heads_q * problem.seqlen_q) as f64;
    let held = (device.l2_bytes as f64 / bytes_of_queries(problem).max(1) as f64).min(1.0);
    rows * (10 * problem.head_dim + 2 * problem.head_dim_v) as f64 * (1.0 - held)
}

/// The groups of heads in which a launch draws tiles, as `TileOrder` has them
/// (`templates/device/schedule/tile_order.cuh`).
pub fn backward_groups(knobs: &BackwardKnobs, problem: &Problem, device: &Device) -> Groups {
    let heads = (problem.batch_size * problem.num_heads_kv).max(1);
    let splits = i64::from(knobs.num_splits(problem, device));
    let tiles_of_head = div_ceil(problem.seqlen_k.max(1), i64::from(knobs.block_n)) * splits;
    let ctas = if knobs.kernel(problem) == BackwardKernel::Wide { 2 } else { 1 };
    let slots = device.sm_count / ctas;
    let row_bytes = 6 * problem.head_dim + 2 * problem.head_dim_v;
    let head_bytes = problem.seqlen_q.max(1) * row_bytes * problem.group_size();
    let fit = ((i64::from(knobs.group_mb) << 20) / head_bytes).clamp(1, heads);
    let most = if tiles_differ(problem) { fit.max(i64::from(slots) / tiles_of_head) } else { fit };
    let most = if knobs.group_mb == 0 { heads } else { most };
    Groups { count: div_ceil(heads, most), heads }
}

/// Whether unsplit walks alternate in direction by waves of tiles
/// (`templates/device/schedule/group_walk.cuh`).
pub fn walks_alternate(problem: &Problem) -> bool {
    let Features { varlen, block_mask, .. } = problem.features;
    let is_causal = problem.right_shift().is_some() && problem.left_shift().is_none();
    let is_plain = varlen.is_none() && block_mask.is_none() && !problem.deterministic;
    is_causal && is_plain && problem.group_size() > 1
}

/// The share of its time that a block takes more where tiles walk so many heads each.
fn drift(heads: f64, without: f64, most: f64) -> f64 {
    (DRIFT * (heads * heads - without * without)).clamp(0.0, most)
}

/// The same where walks alternate, in groups of so many K/V heads.
fn of_alternating(heads: f64) -> f64 {
    (OF_ALTERNATING_HEAD * (heads - FEW_ALTERNATING_HEADS)).clamp(0.0, MOST_OF_ALTERNATING)
}
