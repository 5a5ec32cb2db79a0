//! The workspace: the bytes that a problem needs, whatever its config, and the sizes of the arrays
//! in it.
//!
//! The size does not depend on the config, so a caller may allocate once. The backends decide where
//! a row lies in the arrays.

use super::widened::MAX_KEY_BLOCK;
use super::{Dtype, Features, Pass, Problem, Varlen, WidenedPlaces};
use std::ops::RangeInclusive;

impl Problem {
    /// Bytes of workspace that any config of any backend may use. The backward pass keeps delta,
    /// the fp32 dQ accumulator with `workspace_rows` rows, if deterministic the turn counters, and
    /// the partial dK and dV of `keys_of_partials` keys. The forward pass keeps the partial
    /// states of at most `max_splits` splits, or of at most `max_short_splits` splits of the short
    /// sequences of a mixed batch: no config splits both. V transposed or 8-bit K and V widened to
    /// 16 bits follow them. The size depends on the problem alone, so callers may compute it once
    /// and keep it.
    pub fn workspace_bytes(&self) -> usize {
        match self.keeps_widened_kv() && !self.is_empty() {
            true => self.places_of_widened().end,
            false => self.workspace_bytes_unwidened(),
        }
    }

    /// The same where no kernel of the backend widens 8-bit K and V.
    pub fn workspace_bytes_unwidened(&self) -> usize {
        match self.pass {
            _ if self.is_empty() => 0,
            Pass::Forward if self.keeps_transposed_v() => {
                self.transposed_v_offset() + self.num_heads_kv as usize * self.transposed_v_stride()
            }
            Pass::Forward => self.partial_bytes(),
            Pass::Backward => self.partials_offset() + self.partial_bytes(),
        }
    }

    /// Query rows per head and sequence in the workspace. Every row block of up to `WORKSPACE_ROWS`
    /// rows (a multiple of 16) that holds a query ends within them, so that the last block may be
    /// read and written whole.
    pub const fn workspace_rows(&self) -> i64 {
        (self.seqlen_q + WORKSPACE_ROWS - 1) / 16 * 16
    }

    /// Columns of the dQ accumulator: the head dim rounded up to `WORKSPACE_COLS`.
    pub const fn workspace_cols(&self) -> i64 {
        (self.head_dim + WORKSPACE_COLS - 1) / WORKSPACE_COLS * WORKSPACE_COLS
    }

    /// Query rows in the workspace of one head over all sequences. With varlen, each sequence takes
    /// as many as its own length needs.
    pub const fn workspace_rows_of_head(&self) -> i64 {
        match self.features.varlen {
            // Add WORKSPACE_ROWS for each earlier sequence to the rows before a sequence: it begins
            // at that number, rounded down to a multiple of 16 (device/attention/sequence.cuh).
            Some(Varlen { total_q: Some(total), .. }) => (total + (self.batch_size + 1) * WORKSPACE_ROWS) / 16 * 16,
            _ => self.batch_size * self.workspace_rows(),
        }
    }

    /// Bytes of delta and of the log2 LSE beside it: two fp32 arrays of (heads_q,
    /// workspace_rows_of_head).
    pub const fn delta_bytes(&self) -> usize {
        (2 * self.num_heads_q * self.workspace_rows_of_head()) as usize * 4
    }

    /// Bytes of the dQ accumulator: fp32 (heads_q, workspace_rows_of_head, workspace_cols).
    pub const fn dq_accum_bytes(&self) -> usize {
        (self.num_heads_q * self.workspace_rows_of_head() * self.workspace_cols()) as usize * 4
    }

    /// Bytes of the uint32 counters by which a deterministic pass draws tiles and orders their
    /// additions. There is one for drawing and one for each row tile of the dQ accumulator, which
    /// has at least 8 rows.
    const fn turn_bytes(&self) -> usize {
        match self.deterministic {
            // In whole multiples of 16 bytes, as vectors follow.
            true => (4 + self.num_heads_q * self.workspace_rows_of_head() / 8) as usize / 4 * 16,
            false => 0,
        }
    }

    /// Where the partial results of splits begin, in bytes.
    pub const fn partials_offset(&self) -> usize {
        match self.pass {
            Pass::Forward => 0,
            Pass::Backward => self.delta_bytes() + self.dq_accum_bytes() + self.turn_bytes(),
        }
    }

    /// Whether the workspace has room for V transposed: e4m3 that `wgmma` multiplies, of sequences
    /// of one length, and past head dim 64, up to which no kernel was faster with it. A
    /// config may transpose V from one and a half times these lengths on, since it serves shorter
    /// problems that share its record.
    pub fn keeps_transposed_v(&self) -> bool {
        let Features { eight_bits, varlen, paged, key_starts, block_mask, .. } = self.features;
        let has_rows = paged.is_none() && !key_starts && varlen.is_none();
        let is_served = eight_bits.is_some_and(|eight| eight.queries) && block_mask.is_none() && !self.batch_invariant;
        let is_long = self.seqlen_q >= TRANSPOSED_V_QUERIES && self.seqlen_k >= TRANSPOSED_V_KEYS;
        let is_wide = self.head_dim.max(self.head_dim_v) > 64;
        self.pass == Pass::Forward && has_rows && is_served && is_long && is_wide
    }

    /// Where V transposed begins, in bytes.
    pub fn transposed_v_offset(&self) -> usize {
        self.partial_bytes().next_multiple_of(16)
    }

    /// Bytes of a head of V transposed: the keys of all sequences, each rounded up to any block
    /// (sm90/forward_fp8/images.cuh).
    pub fn transposed_v_stride(&self) -> usize {
        (self.batch_size * (self.seqlen_k + MAX_KEY_BLOCK) * self.head_dim_v) as usize
    }

    /// The parts of K and V widened to 16 bits.
    pub fn places_of_widened(&self) -> WidenedPlaces {
        self.widened_places(self.partial_bytes())
    }

    /// The most splits, each for its own CTA; 1 means no split. Backward a walk through the
    /// queries is split (`max_query_splits`), forward the keys. The number of CTAs that keep a
    /// GPU's SMs busy limits it, and so does the least number of keys worth a split. A
    /// batch-invariant problem with few queries gets the segments of its longest sequence and at
    /// least 2, so that short sequences are merged too. With more queries it gets the places of
    /// states (`places_of_segments`).
    pub fn max_splits(&self) -> i64 {
        if self.pass == Pass::Backward {
            return self.max_query_splits();
        }
        if self.batch_invariant {
            return match self.may_decode() && self.has_few_queries_in_any_batch() {
                _ if self.is_empty() => 1,
                true => self.segments().max(2).into(),
                false => self.places_of_segments(),
            };
        }
        if self.is_empty() {
            return 1;
        }
        if self.may_decode() && self.has_rows_near_few() {
            let of_keys = self.seqlen_k / SPLIT_KEYS;
            let of_heads = SPLITS_OF_ALL_HEADS / (self.batch_size * self.num_heads_kv);
            return of_keys.min(of_heads).clamp(1, MAX_SPLITS);
        }
        if !self.may_split_tiles() {
            return 1;
        }
        let of_tiles = self.splits_of_all_tiles() / self.tiles_of_least_rows();
        (self.seqlen_k / SPLIT_KEYS_OF_TILE).min(of_tiles).clamp(1, MAX_SPLITS_OF_TILE)
    }

    /// The limit of splits times query tiles of the fewest rows.
    fn splits_of_all_tiles(&self) -> i64 {
        let has_tall_tiles = self.head_dim.max(self.head_dim_v) <= 64 && self.seqlen_k >= LONG_KEYS;
        if has_tall_tiles { SPLITS_OF_ALL_LONG_TILES } else { SPLITS_OF_ALL_TILES }
    }

    /// Query rows for whose partial states the workspace of a forward pass has room, counted once
    /// for each split: those of `max_splits` splits of all rows or, where some tiles are split and
    /// others are whole (`family::split_rest`), those of `splits_of_all_tiles`.
    pub fn state_rows(&self) -> i64 {
        let of_all = match self.max_splits() {
            1 => 0,
            splits => splits * self.query_rows(),
        };
        let of_rest = if self.may_split_rest() { self.splits_of_all_tiles() * SMALLEST_TILE } else { 0 };
        of_all.max(of_rest)
    }

    /// Whether a config may split some tiles and leave others whole: more tiles than SMs, whose
    /// last wave counts, and more than one tile of a head.
    fn may_split_rest(&self) -> bool {
        let is_plain = self.has_features_of_keys_alone() && !self.batch_invariant && !self.is_empty();
        let is_served =
            self.pass == Pass::Forward && is_plain && self.may_split_tiles() && self.seqlen_q > SMALLEST_TILE;
        let is_long = self.seqlen_k >= 2 * SPLIT_KEYS_OF_TILE && !(self.may_decode() && self.has_rows_near_few());
        is_served && is_long && FEW_WAVES_OF_TILES.contains(&self.tiles_of_least_rows())
    }

    /// Query tiles of the fewest rows over all heads.
    pub(super) const fn tiles_of_least_rows(&self) -> i64 {
        self.batch_size * self.num_heads_q * ((self.seqlen_q + SMALLEST_TILE - 1) / SMALLEST_TILE)
    }

    /// The packed rows up to which a sequence of a mixed batch counts as short: those of one token,
    /// and 16 at least, which a product has anyway. None where no tile of the decode family has so
    /// many.
    pub fn short_rows(&self) -> Option<i64> {
        SHORT_ROWS.into_iter().find(|rows| *rows >= self.group_size())
    }

    /// The number of splits of the keys of a mixed batch's short sequences. Splits give each SM two
    /// CTAs, each with at least `SPLIT_KEYS_OF_TILE` keys of the longest sequence. Batches of many
    /// sequences fill the SMs without splits. Keys of 8 bits are not split here.
    pub fn short_splits(&self) -> i64 {
        let is_served = self.may_decode() && self.head_dim.max(self.head_dim_v) <= 256;
        let mixes = self.mixes_lengths() && self.features.eight_bits.is_none();
        if !(is_served && mixes) || self.is_empty() || self.short_rows().is_none() {
            return 1;
        }
        let of_heads = SPLITS_OF_ALL_SHORT / (self.batch_size * self.num_heads_kv);
        (self.seqlen_k / SPLIT_KEYS_OF_TILE).min(of_heads).clamp(1, MAX_SPLITS)
    }

    /// Whether short sequences stay unsplit, so that their CTAs leave SMs to the tiles of long
    /// chunks. They do where the batch takes at least twice the time in which one CTA walks the
    /// longest keys. The estimate gives every sequence these keys. One token may have them alone,
    /// so the longest chunk must also have a quarter as many queries.
    pub fn leaves_short_whole(&self) -> bool {
        let total_q = self.features.varlen.and_then(|varlen| varlen.total_q).unwrap_or(0);
        let rows_of_chunks = (total_q - self.batch_size).max(0);
        let of_short = (CHUNK_ROWS_FOR_SHORT * self.batch_size).saturating_mul(self.num_heads_kv);
        let all = of_short.saturating_add(rows_of_chunks.saturating_mul(self.num_heads_q));
        rows_of_chunks > 0 && self.seqlen_k <= 4 * self.seqlen_q && all >= 2 * CHUNK_ROWS_FOR_LONE_SHORT
    }

    /// The most splits that the workspace holds if each short sequence has `rows` rows. A config
    /// that was chosen for a larger GQA group has more rows than `short_rows`, and so fewer splits.
    pub fn max_short_splits(&self, rows: i64) -> i64 {
        match self.short_rows() {
            Some(own) if self.may_be_short(own) => {
                let best = self.short_splits();
                (best * own / rows).clamp(1, best)
            }
            _ => 1,
        }
    }

    /// Whether some sequence may have at most so many packed rows.
    pub fn may_be_short(&self, rows: i64) -> bool {
        self.has_varlen_queries() || self.packed_rows() <= rows
    }

    /// Rows of the workspace in a split of short sequences: `rows` for each sequence and K/V head.
    pub const fn rows_of_short(&self, rows: i64) -> i64 {
        self.batch_size * self.num_heads_kv * rows
    }

    /// Whether some kernel splits the keys of tiles of many queries: sm90's forward pass. It does
    /// not under a block mask, where a tile's keys are no range.
    pub(super) fn may_split_tiles(&self) -> bool {
        let is_served = self.dtype != Dtype::Fp32 && self.head_dim.max(self.head_dim_v) <= 256;
        self.features.block_mask.is_none() && is_served
    }

    /// The most tiles that share the walk of 128 keys of a key-value head through the queries of
    /// its group: at most one for each 128 rows, and at most `SPLIT_TILES` over all keys and heads.
    /// So partial gradients take no more bytes than `SPLIT_TILES` tiles of 128 keys.
    fn max_query_splits(&self) -> i64 {
        // Lists of blocks are walked whole, and only the sm90 family splits.
        let is_walked_whole = self.features.block_mask.is_some() || self.dtype == Dtype::Fp32;
        if self.is_empty() || self.seqlen_q == 0 || is_walked_whole || self.head_dim.max(self.head_dim_v) > 256 {
            return 1;
        }
        let tiles = self.batch_size * self.num_heads_kv * ((self.seqlen_k + 127) / 128).max(1);
        let steps = self.group_size() * ((self.seqlen_q + 127) / 128);
        (SPLIT_TILES / tiles).min(steps).clamp(1, MAX_QUERY_SPLITS)
    }

    /// Keys of each head, counted once for each split, for whose partial gradients the workspace of
    /// a backward pass has room: those of `max_splits` splits of all keys or, where the last tiles
    /// of each head are split and others are whole (`family::split_rest`), those of `LAST_TILES`.
    pub fn keys_of_partials(&self) -> i64 {
        let of_all = match self.max_splits() {
            1 => 0,
            splits => splits * ((self.seqlen_k + 15) / 16 * 16),
        };
        let of_last = if self.may_split_last() { LAST_TILES / (self.batch_size * self.num_heads_kv) * 128 } else { 0 };
        of_all.max(of_last)
    }

    /// Whether a backward config may split the last tiles of each head alone: tiles are alike, and
    /// so few that the last wave counts.
    fn may_split_last(&self) -> bool {
        let is_plain = self.features == Features::NONE && !self.deterministic && !self.is_empty();
        let is_served = self.dtype != Dtype::Fp32 && self.head_dim.max(self.head_dim_v) <= 256 && self.seqlen_k > 128;
        let tiles = self.batch_size * self.num_heads_kv * ((self.seqlen_k + 127) / 128);
        let fills_a_wave = (FEWEST_TILES_OF_WAVE..=SPLIT_TILES).contains(&tiles);
        let has_walks = self.group_size() * ((self.seqlen_q + 127) / 128) > 1;
        is_plain && is_served && has_walks && self.right_shift().is_none() && fills_a_wave
    }

    /// Whether the decode family is preferred, or the problem shares a record (`plan::key`) with
    /// one that prefers it. Decode splits the keys of such problems.
    fn has_rows_near_few(&self) -> bool {
        2 * self.packed_rows() <= 3 * self.most_few_rows(MOST_NEAR_FEW)
    }

    /// Bytes of the partial results of `max_splits` splits or, forward, of `max_short_splits` if
    /// that is more; 0 if nothing is split. Forward, each query row of each split has an fp32 O,
    /// its columns rounded up to 4, and an LSE. With more than few queries they are the states of
    /// at most `SPLITS_OF_ALL_TILES` tiles of 64 rows, whatever the lengths: 21 MB at head dim 128.
    /// Long keys up to head dim 64 have `SPLITS_OF_ALL_LONG_TILES`: 29 MB. Problems of which some
    /// tiles may be split have as many.
    /// Those of short sequences are at most `SPLITS_OF_ALL_SHORT` times `short_rows`: 2 MB at head
    /// dim 128 and groups of up to 16 heads.
    /// Backward, each key of each split (`keys_of_partials`) has an fp32 dK and dV, with keys and
    /// columns rounded up to 16 (device/layout/partial_gradients.cuh).
    fn partial_bytes(&self) -> usize {
        let splits = self.max_splits();
        if self.pass == Pass::Forward {
            let short_rows = self.short_rows().unwrap_or(0);
            let short = self.state_bytes(self.max_short_splits(short_rows), self.rows_of_short(short_rows));
            let states = if self.may_split_rest() { self.bytes_of_states(self.state_rows()) } else { 0 };
            return self.state_bytes(splits, self.query_rows()).max(short).max(states);
        }
        let cols = [self.head_dim, self.head_dim_v].map(|dim| (dim + WORKSPACE_COLS - 1) / WORKSPACE_COLS);
        let keys = self.batch_size * self.keys_of_partials();
        (self.num_heads_kv * keys * (cols[0] + cols[1]) * WORKSPACE_COLS) as usize * 4
    }

    /// Bytes of the partial states of so many rows in each split; 0 if there is only one.
    fn state_bytes(&self, splits: i64, rows: i64) -> usize {
        if splits == 1 { 0 } else { self.bytes_of_states(splits * rows) }
    }

    fn bytes_of_states(&self, rows: i64) -> usize {
        // A segment keeps a reference and a sum in place of an LSE.
        let statistics = if self.batch_invariant { 2 } else { 1 };
        (rows * (self.partial_cols() + statistics)) as usize * 4
    }

    /// Query rows over the whole batch. Varlen counts every sequence as the longest.
    pub const fn query_rows(&self) -> i64 {
        self.batch_size * self.num_heads_q * self.seqlen_q
    }

    /// Columns of a partial state's O (device/attention/partials.cuh).
    pub const fn partial_cols(&self) -> i64 {
        (self.head_dim_v + 3) / 4 * 4
    }
}

/// The most splits of keys.
pub const MAX_SPLITS: i64 = 128;
/// The least number of keys of the longest sequence in a split.
const SPLIT_KEYS: i64 = 64;
/// The most queries of a problem that shares a record with 16 queries. Such a problem has up to
/// sqrt(3/2) times as many queries, and up to sqrt(3/2) times as many heads in a GQA group.
const MOST_NEAR_FEW: i64 = 19;
/// The limit of splits times batch times key-value heads: several for each CTA that the largest
/// GPUs hold at once.
const SPLITS_OF_ALL_HEADS: i64 = 2048;

/// The limit of splits times the query tiles of 64 rows over all heads, where queries are many: two
/// tiles of 128 rows for each SM of the largest GPUs.
const SPLITS_OF_ALL_TILES: i64 = 640;
/// The same up to head dim 64 where keys are long: three tiles of 256 rows for each SM.
const SPLITS_OF_ALL_LONG_TILES: i64 = 1728;
const LONG_KEYS: i64 = 8192;
/// Tiles of 64 rows where some tiles may be split and others not: more than the SMs of an H100 or
/// H200, and up to four waves of 256 rows there.
const FEW_WAVES_OF_TILES: RangeInclusive<i64> = 133..=MOST_SPLIT_TILES;
/// More query tiles of 64 rows over all heads are never split.
pub const MOST_SPLIT_TILES: i64 = 2112;
/// Query rows of the smallest tile whose keys are split.
const SMALLEST_TILE: i64 = 64;
/// The most splits of a tile of many queries.
const MAX_SPLITS_OF_TILE: i64 = 32;
/// The least number of keys of the longest sequence in a split of such a tile, and in one of short
/// sequences.
const SPLIT_KEYS_OF_TILE: i64 = 256;

/// Rows of the tiles of the decode family, and so of short sequences.
const SHORT_ROWS: [i64; 3] = [16, 32, 64];
/// The limit of splits times batch times key-value heads where a decode kernel takes the short
/// sequences of a mixed batch: two CTAs for each of an H200's SMs. Those of long sequences end at
/// once.
const SPLITS_OF_ALL_SHORT: i64 = 264;
/// Rows of chunks, over all query heads, that an H100 multiplies in the time in which a short
/// sequence reads the same keys of one K/V head. For each column a key has 4 bytes, and takes 4
/// operations a row. So this is 600 TFLOP/s over 3 TB/s, the rate of a batch that fills the GPU.
const CHUNK_ROWS_FOR_SHORT: i64 = 200;
/// The same over 32 GB/s, the rate of one CTA alone.
const CHUNK_ROWS_FOR_LONE_SHORT: i64 = 18_750;

/// The shortest problems whose workspace has room for V transposed.
pub const TRANSPOSED_V_QUERIES: i64 = 128;
pub const TRANSPOSED_V_KEYS: i64 = 256;

/// The limit of splits times tiles of 128 keys in the backward pass: eight waves on 132 SMs.
const SPLIT_TILES: i64 = 1056;
/// Parts of the last tiles of all heads where others are whole: two waves on 132 SMs.
const LAST_TILES: i64 = 264;
/// Tiles of 128 keys of one wave of pairs of CTAs on the smallest Hopper GPU, an H20 of 78 SMs.
const FEWEST_TILES_OF_WAVE: i64 = 39;
/// The most tiles that share a walk through the queries.
const MAX_QUERY_SPLITS: i64 = 64;

/// The largest block_m of the backward pass.
pub const WORKSPACE_ROWS: i64 = 128;
/// Every head dim is padded to a multiple of this in the dQ accumulator.
pub const WORKSPACE_COLS: i64 = 16;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::{BlockMask, Eight, EightBits};

    /// Many queries, so that the decode family does not serve them.
    fn of_heads(num_heads: i64, seqlen_q: i64, seqlen_k: i64) -> Problem {
        let square = Problem::dense(Pass::Forward, Dtype::Bf16, 1, num_heads, seqlen_q, 128);
        Problem { seqlen_k, ..square }
    }

    #[test]
    fn partial_states_of_many_queries_stay_within_their_bound() {
        let bound = (SPLITS_OF_ALL_TILES * SMALLEST_TILE * 129 * 4) as usize;
        for exponent in 7..24 {
            for (num_heads, seqlen_k) in [(1, 1 << 20), (3, 1 << exponent), (64, 1 << exponent)] {
                let problem = of_heads(num_heads, (1 << exponent) + 1, seqlen_k);
                assert!(problem.workspace_bytes() <= bound, "{problem:?}");
            }
        }
    }

    #[test]
    fn long_keys_up_to_head_dim_64_have_room_for_splits_of_tall_tiles() {
        let of = |seqlen, dim| Problem::dense(Pass::Forward, Dtype::Bf16, 2, 2, seqlen, dim);
        assert_eq!([(11438, 64), (11438, 72), (8000, 64)].map(|(s, d)| of(s, d).max_splits()), [2, 1, 1]);
        let bound = (SPLITS_OF_ALL_LONG_TILES * SMALLEST_TILE * 65 * 4) as usize;
        for seqlen in (1..64).map(|nth| 1000 * nth) {
            assert!(of(seqlen, 64).workspace_bytes() <= bound, "{seqlen}");
        }
    }

    #[test]
    fn many_tiles_or_few_keys_need_no_workspace() {
        let sizes = [(64, 4096, 4096), (1, 1 << 18, 1 << 18), (1, 500, 500), (1, 4096, 77), (16, 4096, 500)];
        for (num_heads, seqlen_q, seqlen_k) in sizes {
            assert_eq!(of_heads(num_heads, seqlen_q, seqlen_k).workspace_bytes(), 0);
        }
        // Some tiles may be split, unless there is a feature.
        let some = of_heads(16, 4096, 4096);
        assert_eq!((some.max_splits(), some.workspace_bytes()), (1, 640 * 64 * 129 * 4));
        let sinks = Problem { features: Features { sinks: true, ..Features::NONE }, ..some };
        assert_eq!((sinks.state_rows(), sinks.workspace_bytes()), (0, 0));
        let few = of_heads(1, 4096, 4096);
        assert_eq!((few.max_splits(), few.workspace_bytes()), (10, 10 * 4096 * 129 * 4));
        let of_blocks = Some(BlockMask { block_q: 128, block_k: 128 });
        let others = [
            Problem { dtype: Dtype::Fp32, ..few },
            Problem { head_dim: 512, ..few },
            Problem { features: Features { block_mask: of_blocks, ..Features::NONE }, ..few },
        ];
        assert_eq!(others.map(|problem| problem.workspace_bytes()), [0; 3]);
        let paged = Problem { features: Features { paged: Some(64), ..Features::NONE }, ..few };
        assert_eq!(paged.workspace_bytes(), few.workspace_bytes());
    }

    #[test]
    fn v_transposed_has_room_for_the_images_of_any_block() {
        let eight_bits = Some(EightBits { keys: Eight::E4m3, queries: true, keys_per_scale: 0 });
        let dense =
            Problem { batch_size: 3, features: Features { eight_bits, ..Features::NONE }, ..of_heads(2, 300, 500) };
        // As images_of in sm90/forward_fp8/images.cuh: all sequences have equally many images.
        for block in (32..=MAX_KEY_BLOCK).step_by(32) {
            let images = dense.batch_size * ((dense.seqlen_k + block - 1) / block);
            assert!((images * block * dense.head_dim_v) as usize <= dense.transposed_v_stride(), "{block}");
        }
        let (heads, states) = (dense.num_heads_kv as usize, dense.partial_bytes());
        assert_eq!(dense.workspace_bytes(), states.next_multiple_of(16) + heads * dense.transposed_v_stride());
        let padded = Some(Varlen::default());
        let packed = Some(Varlen { total_k: Some(777), ..Varlen::default() });
        let others = [
            Features { eight_bits: None, ..dense.features },
            Features { varlen: padded, ..dense.features },
            Features { varlen: packed, ..dense.features },
            Features { key_starts: true, ..dense.features },
            Features { paged: Some(64), varlen: padded, ..dense.features },
            Features { block_mask: Some(BlockMask { block_q: 64, block_k: 64 }), ..dense.features },
        ];
        assert!(others.iter().all(|features| !Problem { features: *features, ..dense }.keeps_transposed_v()));
        assert!(!Problem { head_dim: 64, head_dim_v: 64, ..dense }.keeps_transposed_v());
        assert!(!Problem { seqlen_q: TRANSPOSED_V_QUERIES - 1, ..dense }.keeps_transposed_v());
        assert!(!Problem { seqlen_k: TRANSPOSED_V_KEYS - 1, ..dense }.keeps_transposed_v());
    }

    #[test]
    fn states_of_short_sequences_stay_within_their_bound() {
        let varlen = Some(Varlen { total_q: Some(5000), ..Varlen::default() });
        let features = Features { varlen, paged: Some(64), ..Features::NONE };
        // Chunks of 2,048 leave the tiles of many queries no room for splits.
        let mixed = |batch_size, num_heads_kv, group| Problem {
            batch_size,
            num_heads_q: num_heads_kv * group,
            num_heads_kv,
            features,
            ..of_heads(1, 2048, 1 << 15)
        };
        for batch_size in 2..300 {
            for (num_heads_kv, group, rows) in [(1, 1, 16), (2, 16, 16), (8, 4, 16), (8, 17, 32), (3, 64, 64)] {
                let problem = mixed(batch_size, num_heads_kv, group);
                let splits = problem.max_short_splits(rows);
                assert_eq!((splits, problem.short_rows()), (problem.short_splits(), Some(rows)));
                let states = splits * batch_size * num_heads_kv * rows;
                assert!(splits == 1 || states <= SPLITS_OF_ALL_SHORT * rows, "{problem:?}");
                let of_short = if splits == 1 { 0 } else { (states * 129 * 4) as usize };
                let of_tiles = problem.state_bytes(problem.max_splits(), problem.query_rows());
                assert_eq!(problem.workspace_bytes(), of_short.max(of_tiles));
            }
        }
        assert_eq!([2, 8, 16, 17].map(|batch_size| mixed(batch_size, 8, 4).short_splits()), [16, 4, 2, 1]);
        let few = mixed(8, 8, 4);
        let others = [
            Problem { seqlen_k: 511, ..few },
            Problem { batch_invariant: true, ..few },
            Problem { dtype: Dtype::Fp32, ..few },
            Problem { num_heads_q: 8 * 65, ..few },
            Problem { features: Features { paged: None, ..features }, ..few },
        ];
        assert_eq!(others.map(|problem| problem.workspace_bytes()), [0; 5]);
        assert_eq!((few.max_short_splits(32), few.max_short_splits(64)), (2, 1), "rows of larger groups");
    }

    #[test]
    fn short_sequences_stay_whole_beside_long_chunks() {
        let of = |total_q, seqlen_k| {
            let varlen = Some(Varlen { total_q, ..Varlen::default() });
            let features = Features { varlen, paged: Some(16), ..Features::NONE };
            let heads = Problem { batch_size: 7, num_heads_q: 32, num_heads_kv: 8, ..of_heads(1, 855, seqlen_k) };
            Problem { features, ..heads }.leaves_short_whole()
        };
        assert_eq!(
            [Some(861), Some(300), Some(7), Some(0), None].map(|total_q| of(total_q, 1917)),
            [true, false, false, false, false]
        );
        assert!(!of(Some(861), 4000), "one token may have all of these keys, and the chunk its own alone");
    }

    fn backward(batch_size: i64, heads: (i64, i64), seqlen: i64, head_dim: i64) -> Problem {
        let (num_heads_q, num_heads_kv) = heads;
        Problem {
            num_heads_q,
            num_heads_kv,
            ..Problem::dense(Pass::Backward, Dtype::Bf16, batch_size, 1, seqlen, head_dim)
        }
    }

    #[test]
    fn partial_gradients_take_no_more_than_the_bound() {
        for (batch, heads, seqlen, dim) in
            [(1, (1, 1), 40_000, 128), (1, (64, 1), 300, 256), (3, (12, 3), 1000, 72), (2, (56, 8), 16_283, 128)]
        {
            let problem = backward(batch, heads, seqlen, dim);
            let unsplit = batch * heads.1 * (seqlen + 127) / 128 * 128;
            let most = (SPLIT_TILES * 128).max(unsplit) * 2 * (dim + 15) / 16 * 16 * 4;
            assert!(problem.partial_bytes() as i64 <= most, "{problem:?}: {}", problem.partial_bytes());
            assert_eq!(problem.partials_offset() % 16, 0);
            assert_eq!(Problem { deterministic: true, ..problem }.partials_offset() % 16, 0);
        }
        assert_eq!(backward(2, (56, 8), 16_283, 128).partial_bytes(), 0, "enough tiles without splits");
    }

    /// Rows of the tensors behind the longest lengths that the caller names take no room.
    #[test]
    fn partial_gradients_of_packed_sequences_have_room_for_the_longest_each() {
        let varlen = Some(Varlen { total_q: Some(1 << 20), total_k: Some(1 << 20), ..Varlen::default() });
        let features = Features { varlen, ..Features::NONE };
        let padded = backward(4, (8, 1), 512, 128);
        let packed = Problem { features, ..padded };
        assert!(packed.max_splits() > 1);
        assert_eq!(packed.partial_bytes(), padded.partial_bytes());
    }
}
