//! The config that the sm90 forward pass begins with: a tile by head dim and features, and what
//! follows from it.

use super::forward_geometry::{ForwardKnobs, MOST_SHARED_BYTES, common_box_rows, may_convert_in_place};
use super::warpgroup::{WARPGROUP_ROWS, tiles_differ};
use crate::device::{Arch, Device};
use crate::family::decode;
use crate::family::space::Space;
use crate::family::spec::KernelSpec;
use crate::family::tile::boxed_tile_bytes;
use crate::problem::{Dtype, Features, Problem};

/// The unsplit config with O stored by TMA where that is faster. From one of two Q slots: under a
/// block mask tiles are short, so a tile's Q often waits until an earlier O has left its slot, and
/// at head dims up to 64 this wait costs more than the TMA store saves. From a buffer, where one Q
/// slot leaves room for it: with features and unequal head dims it was not timed.
pub fn stored_by_tma(config: ForwardKnobs, problem: &Problem) -> ForwardKnobs {
    let may_wait = problem.features.block_mask.is_none() || problem.head_dim.max(problem.head_dim_v) > 64;
    let by_tma = ForwardKnobs { tma_store: 1, ..config };
    let is_faster = match by_tma.stores_apart() {
        true => {
            let has_room = config.block_m > WARPGROUP_ROWS && by_tma.smem_bytes(problem) <= MOST_SHARED_BYTES;
            let is_timed = is_plain(problem) && problem.head_dim == problem.head_dim_v && problem.head_dim > 160;
            may_store_apart(problem) && is_timed && has_room
        }
        false => fits_q_slot(problem) && may_wait,
    };
    ForwardKnobs { tma_store: u32::from(is_faster), ..config }
}

/// The packed rows up to which a sequence goes to a decode kernel, in batches that may mix chunks
/// of prompts and single tokens. A tile of this family takes as long for one row as for 64. 0 where
/// no such kernel serves.
pub fn decode_rows(problem: &Problem) -> u32 {
    if !problem.mixes_lengths() {
        return 0;
    }
    let rows = problem.short_rows().map(|rows| rows as u32);
    rows.filter(|rows| short_sequences(problem, *rows).is_some()).unwrap_or(0)
}

/// Whether the decode kernel of those sequences may split their keys: where a batch of so few
/// sequences would leave SMs idle.
pub fn decode_splits(problem: &Problem) -> u32 {
    u32::from(decode_rows(problem) > 0 && problem.short_splits() > 1)
}

/// The decode kernel of those sequences, for a typical device of the one architecture that this
/// family runs on.
pub fn short_sequences(problem: &Problem, rows: u32) -> Option<KernelSpec> {
    let device = Device::typical(Arch::Sm(9, 0))?;
    decode::of_short_sequences(problem, rows, &device)
}

/// Whether the kernel may split the keys at all.
pub fn may_split(problem: &Problem) -> bool {
    problem.features.block_mask.is_none() && !problem.batch_invariant
}

pub fn may_be_stale(problem: &Problem) -> bool {
    let takes_scores_as_they_are = !problem.dropout && !problem.features.modifies_scores();
    let has_range = match problem.features.eight_bits {
        None => problem.dtype == Dtype::Bf16,
        // The code that recomputes failed rows multiplies weights by scales in q's type.
        Some(eight) => eight.keys_per_scale == 0 || problem.dtype == Dtype::Bf16,
    };
    // A stale reference depends on the blocks that a tile walks first.
    has_range && takes_scores_as_they_are && !problem.batch_invariant
}

/// Whether a warpgroup's O fits into the slot of its Q.
pub fn fits_q_slot(problem: &Problem) -> bool {
    boxed_tile_bytes(64, problem.head_dim_v) <= boxed_tile_bytes(64, problem.head_dim)
}

/// Whether the problem has no feature at all.
fn is_plain(problem: &Problem) -> bool {
    problem.features == Features::NONE && !problem.dropout && !problem.batch_invariant
}

/// Whether a tile with one Q slot may store O by TMA from a buffer. Up to head dim 128 two Q slots
/// fit.
pub fn may_store_apart(problem: &Problem) -> bool {
    let Features { paged, eight_bits, .. } = problem.features;
    problem.head_dim_v > 128 && !problem.batch_invariant && paged.is_none() && eight_bits.is_none()
}

/// The fastest (block_m, block_n, [k_stages, v_stages, q_stages]) on an H200 for problems of many
/// tiles (docs/tuning/sm90-forward.md). With dropout, and with features that take registers, it is
/// the fastest whose consumers spill nothing.
pub fn tile_of_full_device(problem: &Problem) -> (u32, u32, [u32; 3]) {
    let is_causal = problem.right_shift().is_some();
    let drops_full = problem.dropout && !is_causal;
    let features = &problem.features;
    let modifies = features.modifies_scores();
    let takes_more =
        modifies || features.varlen.is_some() || features.paged.is_some() || problem.left_shift().is_some();
    if problem.batch_invariant {
        return of_fixed_order(problem, takes_more);
    }
    if features.eight_bits.is_some() {
        return of_eight_bits(problem);
    }
    match problem.head_dim.max(problem.head_dim_v) {
        ..=64 if takes_more => (192, if modifies || problem.dropout { 64 } else { 96 }, [4, 4, 2]),
        65..=128 if features.bias || features.mask => (128, 64, [4, 4, 2]),
        129..=160 if takes_more => (128, 64, [3, 3, 1]),
        161..=224 if modifies => (128, 64, [3, 3, 1]),
        225.. if modifies => (128, 64, [3, 2, 1]),
        ..=56 if drops_full => (256, 48, [4, 4, 2]),
        ..=64 => (256, 64, [4, 4, 2]),
        // With 128 keys the consumers spill 24 bytes at head dim 112 (NVRTC 13.0).
        97..=112 if drops_full => (128, 112, [2, 2, 1]),
        65..=128 if drops_full => (128, 128, [2, 2, 1]),
        65..=96 if !problem.dropout => (192, 80, [3, 3, 2]),
        65..=128 => (192, 64, [4, 4, 2]),
        129..=160 => (192, 64, [3, 3, 1]),
        161..=192 if !problem.dropout && features.paged.is_none() => (128, 80, [2, 2, 2]),
        161..=192 if is_causal => (128, 96, [2, 2, 1]),
        161..=192 => (128, 64, [3, 3, 1]),
        // Most pages are of 64 keys, or divide them.
        225.. if problem.dropout || is_causal && features.paged.is_some() => (128, 64, [3, 2, 1]),
        // Two slots leave room for a buffer from which TMA stores O.
        // Its consumers spill 8 bytes at head dim 232 with a causal mask (NVRTC 13.0).
        240.. if is_plain(problem) && problem.head_dim == problem.head_dim_v => (128, 64, [2, 2, 1]),
        _ => (128, 80, [2, 2, 1]),
    }
}

/// The same of 8-bit keys: tiles as for problems that take more registers, and larger blocks where
/// keys are converted in shared memory. docs/tuning/eight-bits.md has the others that were timed.
fn of_eight_bits(problem: &Problem) -> (u32, u32, [u32; 3]) {
    let features = &problem.features;
    let modifies = features.modifies_scores() || problem.dropout;
    let keys_per_scale = features.eight_bits.map(|eight| eight.keys_per_scale);
    let in_place = |block_n| may_convert_in_place(problem, block_n);
    match problem.head_dim.max(problem.head_dim_v) {
        ..=64 if modifies => (192, 64, [4, 4, 2]),
        ..=64 => (192, 96, [4, 4, 2]),
        65..=128 if features.bias || features.mask => (128, 64, [4, 4, 2]),
        65..=128 if in_place(96) => (128, 96, [3, 3, 1]),
        // Scales of keys take the place of two slots.
        65..=128 if keys_per_scale == Some(1) => (192, 64, [3, 3, 2]),
        65..=128 => (192, 64, [4, 4, 2]),
        129..=192 => (128, 64, [3, 3, 1]),
        _ if keys_per_scale == Some(0) && features.paged.is_none() && !modifies => (128, 80, [2, 2, 1]),
        _ => (128, 64, [3, 2, 1]),
    }
}

/// The same of a batch-invariant problem. Where features take registers up to head dim 64, and
/// with modified scores up to 128, a segment's O and the merged one are in registers. Otherwise up
/// to 128 the merged one is in shared memory (docs/tuning/batch-invariant.md).
fn of_fixed_order(problem: &Problem, takes_more: bool) -> (u32, u32, [u32; 3]) {
    match problem.head_dim.max(problem.head_dim_v) {
        ..=64 if !takes_more => (256, 64, [4, 4, 2]),
        // Causal tiles may be short: a second Q slot, from which TMA stores O, takes the place of
        // two slots and of two pieces of the merged O.
        65..=128 if !takes_more && problem.right_shift().is_some() => (192, 64, [2, 2, 2]),
        65..=128 if !problem.features.modifies_scores() => (192, 64, [3, 3, 1]),
        ..=128 => (128, 64, [4, 4, 2]),
        129..=192 => (128, 64, [3, 3, 1]),
        // Fewer slots leave room for a part of the merged O.
        _ => (128, 64, [2, 2, 1]),
    }
}

/// The config whose main kernel reads the keys as they are: the tile of `tile_of_full_device`. A
/// tile has fewer rows if there would be too few tiles for all SMs, and fewer keys and stages if it
/// would not fit.
pub fn reading_keys(problem: &Problem, device: &Device) -> Option<ForwardKnobs> {
    let (rows, ..) = tile_of_full_device(problem);
    // A producer that copies keys itself takes registers that the consumers of 256 rows need.
    rows_by_preference(problem, device, rows).find_map(|block_m| of_rows(problem, device, block_m))
}

/// Rows of a tile, up to `most`: the most that fill the device, then fewer.
pub fn rows_by_preference(problem: &Problem, device: &Device, most: u32) -> impl Iterator<Item = u32> {
    let heads = problem.batch_size * problem.num_heads_q;
    let tiles = |block_m: u32| heads * ((problem.seqlen_q + i64::from(block_m) - 1) / i64::from(block_m));
    let fills = |block_m: &u32| tiles(*block_m) >= i64::from(device.sm_count);
    let block_mask = problem.features.block_mask;
    let fits =
        |block_m: &u32| *block_m <= most && block_mask.is_none_or(|mask| mask.block_q % i64::from(*block_m) == 0);
    // Rows behind the last query are computed too: fewer rows that need no more tiles are better.
    let saves_tiles = |block_m: &u32| tiles(*block_m) < tiles(*block_m - 64);
    let heights: Vec<u32> = [256, 192, 128].into_iter().filter(fits).filter(saves_tiles).collect();
    let full = heights.iter().copied().find(fills).unwrap_or(64);
    let lower = heights.into_iter().filter(move |block_m| *block_m < full);
    [full].into_iter().chain(lower).chain([64])
}

/// The longest keys for which blocks of 64 were as fast as blocks of 80 on an H200, past head dim
/// 128.
pub const FEW_KEYS: i64 = 512;

/// The heuristic's config with so many rows.
pub fn of_rows(problem: &Problem, device: &Device, block_m: u32) -> Option<ForwardKnobs> {
    let (rows, keys, stages) = tile_of_full_device(problem);
    let (block_mask, modifies) = (problem.features.block_mask, problem.features.modifies_scores());
    // Past head dim 192, shared memory has room for two Q slots only with few slots of K and V. Few
    // keys need few, and long keys lose more than the second Q slot gains (docs/tuning/choice.md,
    // Two Q slots for few causal keys at d256).
    let is_plain = is_plain(problem);
    let few = if tiles_differ(problem) { 256 } else { 144 };
    let (keys, stages) = match problem.head_dim.max(problem.head_dim_v) {
        // Two consumer warpgroups have the registers for blocks of 128 keys, which need fewer
        // barriers.
        dim @ ..=128 if block_mask.is_some_and(|mask| block_m == 128 && mask.block_k % 128 == 0) && !modifies => {
            (128, if dim <= 64 { [4, 4, 2] } else { [2, 2, 2] })
        }
        193.. if block_m == 128 && problem.seqlen_k <= few && is_plain => match problem.seqlen_k {
            ..=80 => (80, [1, 1, 2]),
            _ => (48, [2, 2, 2]),
        },
        // Few causal keys: 161 us, 171 with blocks of 80 (H100, 16 x 32 heads of 419 tokens).
        161..=192 if block_m == 128 && is_plain && tiles_differ(problem) && problem.seqlen_k <= FEW_KEYS => {
            (64, [3, 2, 2])
        }
        _ if block_m == rows => (keys, stages),
        ..=128 => (64, [4, 4, 2]),
        129..=192 if !problem.dropout => (64, [3, 2, 2]),
        _ if block_m == 64 && !problem.dropout => (64, [2, 2, 2]),
        _ => (64, [3, 2, 1]),
    };
    let config = |(block_n, [k_stages, v_stages, q_stages]): (u32, [u32; 3])| ForwardKnobs {
        block_m,
        block_n,
        k_stages,
        v_stages,
        q_stages,
        ctas_per_sm: 1,
        tma_store: 0,
        stale_max: u32::from(may_be_stale(problem)),
        group_mb: group_mb(problem),
        num_splits: 1,
        splits_rest: 0,
        decode_rows: decode_rows(problem),
        decode_splits: decode_splits(problem),
        widens: 0,
    };
    let smaller = |block_n| [[2, 2, 1], [2, 1, 1], [1, 1, 1]].map(|stages| (block_n, stages));
    // A block of 64 keys holds whole pages of 8, 16 or 32 keys, and divides larger powers of two,
    // so TMA copies them. At head dims up to 64 blocks of 96 keys are faster, in boxes of 16 or 32
    // keys of such pages (docs/tuning/pages.md).
    let is_narrow = problem.head_dim.max(problem.head_dim_v) <= 64 && problem.features.eight_bits.is_none();
    let takes_boxes = is_narrow && common_box_rows(keys, problem) % 16 == 0;
    let fits_pages = |page_size: i64| page_size % i64::from(keys) == 0 || takes_boxes;
    let keys = if problem.features.paged.is_none_or(fits_pages) { keys } else { 64 };
    let flows = [(keys, stages)].into_iter().chain(smaller(64)).chain(smaller(48));
    flows.map(config).map(|config| stored_by_tma(config, problem)).find(|config| config.fits(problem, device))
}

/// MB of K and V in a group of heads, 0 for one group of all. Where keys are few, fewer MB were
/// faster on an H200 and an H100 (docs/tuning/sm90-forward.md, "Tile order", and
/// docs/tuning/choice.md, "A fit to choices"). The cause was not measured.
pub fn group_mb(problem: &Problem) -> u32 {
    match problem.seqlen_k {
        // Batch-invariant problems of all lengths share their kernels.
        _ if problem.batch_invariant && tiles_differ(problem) => {
            if wants_groups(&problem.in_any_batch()) {
                32
            } else {
                0
            }
        }
        _ if !tiles_differ(problem) => 1,
        _ if !wants_groups(problem) => 0,
        keys if keys <= MOST_KEYS_OF_16_MB => 16,
        keys if keys <= MOST_KEYS_OF_8_MB => 8,
        _ => 32,
    }
}

/// The most keys of a head in groups of 16 MB. Up to it, 8 MB took 0.99 to 1.02 of their time.
const MOST_KEYS_OF_16_MB: i64 = 512;
/// The most keys of a head in groups of 8 MB.
pub const MOST_KEYS_OF_8_MB: i64 = 1024;

/// Whether heads are walked in groups whose K and V fit into L2. At head dims up to 64 and long
/// sequences, groups lose more at their ends than they gain, because concurrent tiles read the same
/// keys anyway (docs/tuning/sm90-forward.md). Under a block mask they do not, so groups still help.
fn wants_groups(problem: &Problem) -> bool {
    let is_narrow = problem.head_dim.max(problem.head_dim_v) <= 64;
    problem.seqlen_k < LONG || !is_narrow || problem.features.block_mask.is_some()
}

const LONG: i64 = 8192;
