//! The workspace: how many bytes a problem needs, whatever config it runs with, and the sizes of
//! the arrays that lie in it.
//!
//! Known without the config, so that a caller may size it once. Where in the arrays a row lies is
//! the backends' to say.

use super::{Pass, Problem, Varlen};

impl Problem {
    /// Bytes of workspace that any config of any backend may use: the backward pass's delta and
    /// fp32 dQ accumulator with `workspace_rows` rows, and turns where it is deterministic; forward
    /// the partial states of as many splits as there may be. Pure, so that callers may size once
    /// and keep it.
    pub fn workspace_bytes(&self) -> usize {
        match self.pass {
            _ if self.is_empty() => 0,
            Pass::Forward => self.partial_bytes(),
            Pass::Backward => self.delta_bytes() + self.dq_accum_bytes() + self.turn_bytes(),
        }
    }

    /// Rows of query per head in the workspace: no block of a multiple of 16 rows up to
    /// `WORKSPACE_ROWS` that holds a query reaches past them, so that the last one may be read and
    /// written whole.
    pub const fn workspace_rows(&self) -> i64 {
        (self.seqlen_q + WORKSPACE_ROWS - 1) / 16 * 16
    }

    /// Columns of the dQ accumulator: the head dim rounded up to `WORKSPACE_COLS`.
    pub const fn workspace_cols(&self) -> i64 {
        (self.head_dim + WORKSPACE_COLS - 1) / WORKSPACE_COLS * WORKSPACE_COLS
    }

    /// Rows of query in the workspace over all of a head's sequences: each sequence's as many as
    /// its own number asks for.
    pub const fn workspace_rows_of_head(&self) -> i64 {
        match self.features.varlen {
            // A sequence begins at the multiple of 16 at or below the rows before it plus
            // WORKSPACE_ROWS for each (device/attention/sequence.cuh).
            Some(Varlen { total_q: Some(total), .. }) => (total + (self.batch_size + 1) * WORKSPACE_ROWS) / 16 * 16,
            _ => self.batch_size * self.workspace_rows(),
        }
    }

    /// Bytes of delta and of the log2 LSE beside it: two fp32 of (heads_q, workspace_rows_of_head).
    pub const fn delta_bytes(&self) -> usize {
        (2 * self.num_heads_q * self.workspace_rows_of_head()) as usize * 4
    }

    /// Bytes of the dQ accumulator: fp32 (heads_q, workspace_rows_of_head, workspace_cols).
    pub const fn dq_accum_bytes(&self) -> usize {
        (self.num_heads_q * self.workspace_rows_of_head() * self.workspace_cols()) as usize * 4
    }

    /// Bytes of the counters by which tiles of a deterministic pass are drawn and take turns:
    /// uint32, one, and as many as the dQ accumulator has tiles of rows, at least 8 each.
    pub const fn turn_bytes(&self) -> usize {
        match self.deterministic {
            true => (1 + self.num_heads_q * self.workspace_rows_of_head() / 8) as usize * 4,
            false => 0,
        }
    }

    /// Into how many splits the keys may be cut at most, each for its own block of threads; 1: they
    /// may not. No more than what a GPU's processors need to have something to do, and not below a
    /// worthwhile number of keys each. Of a batch-invariant problem as many as its longest sequence
    /// is cut into, and never a single one, so that a short sequence, too, is always merged.
    pub fn max_splits(&self) -> i64 {
        if self.batch_invariant {
            let is_split = self.may_decode() && !self.is_empty() && self.has_few_queries_in_any_batch();
            // What a sequence is cut by is counted in whole blocks of keys.
            let of_longest = (self.seqlen_k + KEY_BLOCK - 1) / SPLIT_KEYS_OF_ANY_BATCH;
            return if is_split { of_longest.clamp(2, MAX_SPLITS) } else { 1 };
        }
        if !self.may_decode() || self.is_empty() || !self.has_rows_near_few() {
            return 1;
        }
        let of_keys = self.seqlen_k / SPLIT_KEYS;
        let of_heads = SPLITS_OF_ALL_HEADS / (self.batch_size * self.num_heads_kv);
        of_keys.min(of_heads).clamp(1, MAX_SPLITS)
    }

    /// Whether the decode family is preferred, or a problem that it is preferred for shares a
    /// record (`plan::key`): the most whose keys are split.
    fn has_rows_near_few(&self) -> bool {
        2 * self.packed_rows() <= 3 * self.most_few_rows(MOST_NEAR_FEW)
    }

    /// Bytes of the partial states of `max_splits` splits, 0 where there is but one: of each query
    /// row an fp32 O, its columns rounded up to 4, and an LSE.
    pub fn partial_bytes(&self) -> usize {
        match self.max_splits() {
            1 => 0,
            splits => (splits * self.query_rows() * (self.partial_cols() + 1)) as usize * 4,
        }
    }

    /// Rows of query over the whole batch, sequences of their own lengths as if all were the
    /// longest.
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
/// Of a batch-invariant problem each sequence is cut into as many splits as so many keys fit what
/// its rows see of it, at least one and at most `MAX_SPLITS`: its own length alone decides.
pub const SPLIT_KEYS_OF_ANY_BATCH: i64 = 512;
/// The largest block of keys that splits are whole numbers of.
const KEY_BLOCK: i64 = 64;
/// A split has at least so many keys of the longest sequence.
const SPLIT_KEYS: i64 = 64;
/// Queries that share a record with 16. What shares one has up to sqrt(3/2) times as many, and as
/// many heads in a group.
const MOST_NEAR_FEW: i64 = 19;
/// Splits times batch times key-value heads: several for each place that the largest GPUs have for
/// a block of threads.
const SPLITS_OF_ALL_HEADS: i64 = 2048;

/// The largest block_m of the backward pass.
pub const WORKSPACE_ROWS: i64 = 128;
/// Every head dim is padded to a multiple of this in the dQ accumulator.
pub const WORKSPACE_COLS: i64 = 16;
