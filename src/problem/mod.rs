//! Problem: *what* is computed. Pass, types, shape, mask, dropout on or off, other features,
//! determinism, layout class.
//!
//! It excludes what a launch may change freely (pointers, strides, scale, seeds: see `call`) and
//! how the problem is solved (see `config`). Two calls with equal Problems share a plan.

mod cost;
mod eight_bits;
mod feature_sizes;
pub mod features;
mod four_bits;
mod of_bits;
mod segments;
mod validate;
mod widened;
mod workspace;

pub use crate::eight::Eight;
pub use crate::four::Four;
pub use eight_bits::{EightBits, ElementType, SCALE_BLOCK};
pub use features::{BlockMask, Feature, Features, Varlen, Window};
pub use segments::MAX_SEGMENTS;
use serde::{Deserialize, Serialize};
pub use validate::check_range;
pub use widened::WidenedPlaces;
pub use workspace::{
    MAX_SPLITS, MOST_SPLIT_TILES, TRANSPOSED_V_KEYS, TRANSPOSED_V_QUERIES, WORKSPACE_COLS, WORKSPACE_ROWS,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pass {
    Forward,
    Backward,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    Fp16,
    Bf16,
    Fp32,
}

impl Dtype {
    pub const fn bytes(self) -> usize {
        match self {
            Dtype::Fp16 | Dtype::Bf16 => 2,
            Dtype::Fp32 => 4,
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            Dtype::Fp16 => "fp16",
            Dtype::Bf16 => "bf16",
            Dtype::Fp32 => "fp32",
        }
    }
}

/// The keys that query row i sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Causal {
    /// All of them.
    None,
    /// Key j iff j <= i + seqlen_k - seqlen_q: the last query sees the last key.
    BottomRight,
    /// Key j iff j <= i: the first query sees the first key.
    TopLeft,
}

/// The widest access, in elements, that every row of every tensor of the call allows. The head
/// dims, strides and base addresses are all multiples of it. One `cp.async` and TMA take 16 bytes:
/// 8 elements of a 16-bit dtype, 4 of fp32. Elements of 8 bits count by the pair. Strides that are
/// too long for TMA count as a narrower layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    Vec8,
    Vec4,
    Vec2,
    Vec1,
}

impl Layout {
    pub const fn elements(self) -> i64 {
        match self {
            Layout::Vec8 => 8,
            Layout::Vec4 => 4,
            Layout::Vec2 => 2,
            Layout::Vec1 => 1,
        }
    }

    /// The widest class of at most 16 bytes that divides every one of `quantities`, given in
    /// elements.
    pub fn widest(dtype: Dtype, quantities: impl IntoIterator<Item = i64>) -> Layout {
        let all = quantities.into_iter().fold(0, |bits, q| bits | q);
        [Layout::Vec8, Layout::Vec4, Layout::Vec2]
            .into_iter()
            .find(|layout| layout.elements() * dtype.bytes() as i64 <= 16 && all % layout.elements() == 0)
            .unwrap_or(Layout::Vec1)
    }
}

/// Blocks of a block mask are multiples of this: the rows or keys of the smallest tile.
pub const MASK_BLOCK_STEP: i64 = 16;
/// The largest block. With it, the block after the last one still lies within int32.
pub const MAX_MASK_BLOCK: i64 = 2048;
/// The largest head dim, of Q and K as of V.
pub const MAX_HEAD_DIM: i64 = 512;
/// Packed rows of the largest tile of the decode family.
const TILE_ROWS: i64 = 64;
/// Up to this many queries, a tile of one head's queries would be at most a quarter full.
const FEW_QUERIES: i64 = 16;
/// The longest sequence, and the most rows of a tensor that holds sequences end to end. In kernels,
/// row and key indices, and the sum of a row index and a tile, stay within int32.
pub const MAX_SEQLEN: i64 = (1 << 31) - 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Problem {
    pub pass: Pass,
    /// The type of q, k, v and out; `features.eight_bits` changes those of k, v and q.
    pub dtype: Dtype,
    pub batch_size: i64,
    pub num_heads_q: i64,
    pub num_heads_kv: i64,
    pub seqlen_q: i64,
    pub seqlen_k: i64,
    pub head_dim: i64,
    pub head_dim_v: i64,
    pub causal: Causal,
    pub dropout: bool,
    /// Backward: every run gives the same bits. The config is the heuristic's, whatever was
    /// measured.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub deterministic: bool,
    /// Forward: a sequence's result has the same bits alone and in any batch. The config is the
    /// heuristic's for the batch-independent part of the problem (`plan::key`).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub batch_invariant: bool,
    #[serde(default, skip_serializing_if = "Features::is_none")]
    pub features: Features,
    pub layout: Layout,
}

/// The length of a batch-invariant problem in any batch: one head's tiles fill a GPU, and the keys
/// are cut into the largest number of splits.
pub const ANY_SEQLEN: i64 = 1 << 16;

impl Problem {
    /// Self-attention with as many key-value heads as query heads and no features. Rows and strides
    /// are whole multiples of 16 bytes. Other problems are written as differences from this one.
    pub const fn dense(
        pass: Pass,
        dtype: Dtype,
        batch_size: i64,
        num_heads: i64,
        seqlen: i64,
        head_dim: i64,
    ) -> Problem {
        Problem {
            pass,
            dtype,
            batch_size,
            num_heads_q: num_heads,
            num_heads_kv: num_heads,
            seqlen_q: seqlen,
            seqlen_k: seqlen,
            head_dim,
            head_dim_v: head_dim,
            causal: Causal::None,
            dropout: false,
            deterministic: false,
            batch_invariant: false,
            features: Features::NONE,
            layout: Layout::Vec8,
        }
    }

    /// Elements of an access of at most 16 bytes. A problem file may name a layout that only a
    /// narrower dtype can use.
    pub const fn access_elements(&self) -> i64 {
        let (of_layout, of_16_bytes) = (self.layout.elements(), 16 / self.dtype.bytes() as i64);
        if of_layout < of_16_bytes { of_layout } else { of_16_bytes }
    }

    /// Query heads per key-value head.
    pub const fn group_size(&self) -> i64 {
        self.num_heads_q / self.num_heads_kv
    }

    /// The queries of all heads that share a key-value head.
    pub const fn packed_rows(&self) -> i64 {
        self.seqlen_q.saturating_mul(self.group_size())
    }

    /// Rows of a block mask's lists, and the blocks that a row may name; None without a block mask.
    pub fn list_extents(&self) -> Option<(i64, i64)> {
        let BlockMask { block_q, block_k } = self.features.block_mask?;
        let (q, k) = ((self.seqlen_q + block_q - 1) / block_q, (self.seqlen_k + block_k - 1) / block_k);
        Some(if self.pass == Pass::Forward { (q, k) } else { (k, q) })
    }

    /// Whether the keys may be split over CTAs, paged or not. Dropout and the backward pass exclude
    /// this, since decoding needs neither.
    pub fn may_decode(&self) -> bool {
        // A tile holds rows of several heads, whose block lists differ.
        let has_lists = self.features.block_mask.is_some();
        self.pass == Pass::Forward && self.dtype != Dtype::Fp32 && !self.dropout && !has_lists
    }

    /// The property that forbids the use of records, so that the config is the heuristic's alone.
    pub const fn follows_no_record(&self) -> Option<&'static str> {
        match (self.deterministic, self.batch_invariant) {
            (true, _) => Some("deterministic"),
            (_, true) => Some("batch-invariant"),
            _ => None,
        }
    }

    /// Whether the packed rows fit into one tile of the decode family. With few queries they may
    /// fill two, since the rows of one head would fill only a quarter of a tile.
    pub fn has_few_rows(&self) -> bool {
        (1..=self.most_few_rows(FEW_QUERIES)).contains(&self.packed_rows())
    }

    const fn most_few_rows(&self, few_queries: i64) -> i64 {
        if self.seqlen_q <= few_queries { 2 * TILE_ROWS } else { TILE_ROWS }
    }

    /// Whether a batch-invariant problem runs as few queries do, with the keys split over CTAs. All
    /// sequences must have equally many queries, so that a sequence's own size decides.
    pub fn has_few_queries_in_any_batch(&self) -> bool {
        !self.has_varlen_queries() && self.has_few_rows()
    }

    /// A batch-invariant problem as it is for every batch and all lengths; others as they are. The
    /// number of queries stays where it decides the kernel family in every batch.
    pub fn in_any_batch(&self) -> Problem {
        if !self.batch_invariant {
            return *self;
        }
        let seqlen_q = if self.has_few_queries_in_any_batch() { self.seqlen_q } else { ANY_SEQLEN };
        Problem { batch_size: 1, seqlen_q, seqlen_k: ANY_SEQLEN, ..*self }
    }

    /// Whether sequences may differ in their numbers of queries.
    pub fn has_varlen_queries(&self) -> bool {
        self.features.varlen.is_some_and(|varlen| varlen.total_q.is_some() || varlen.padded_q)
    }

    /// Whether keys in pages and their lengths on the device are the only features, so that all
    /// sequences have equally many query tiles.
    pub fn has_features_of_keys_alone(&self) -> bool {
        let is_plain = Features { varlen: None, paged: None, ..self.features } == Features::NONE;
        is_plain && !self.has_varlen_queries()
    }

    /// The problem whose every sequence is the longest, without pages, and whose block mask lists
    /// all blocks.
    pub fn of_longest(&self) -> Problem {
        Problem { features: Features { varlen: None, paged: None, block_mask: None, ..self.features }, ..*self }
    }

    /// Whether a decode kernel may take the short sequences of a batch over pages.
    pub fn mixes_lengths(&self) -> bool {
        let Features { varlen, paged, block_mask, .. } = self.features;
        varlen.is_some() && paged.is_some() && block_mask.is_none() && !self.batch_invariant
    }

    /// The same problem without a causal mask that hides nothing: one query for each sequence,
    /// aligned to the last key. Records of decoding then serve callers that set causal and callers
    /// that do not. A batch-invariant problem keeps the mask, as it would beside longer sequences.
    pub fn without_idle_causal(self) -> Problem {
        let has_no_window = self.features.window == Window::default();
        let sees_all = self.causal == Causal::BottomRight && self.seqlen_q == 1 && has_no_window;
        match sees_all && !self.has_varlen_queries() && !self.batch_invariant {
            true => Problem { causal: Causal::None, ..self },
            false => self,
        }
    }

    /// Row i sees keys j <= i + this; None: up to the last one. With varlen the kernel adds the
    /// shift of each sequence's alignment.
    pub fn right_shift(&self) -> Option<i64> {
        self.keys_after_diagonal().map(|keys| self.alignment_shift() + keys)
    }

    /// How many keys after its diagonal a row sees; None: all.
    pub fn keys_after_diagonal(&self) -> Option<i64> {
        if self.causal == Causal::None { self.features.window.right } else { Some(0) }
    }

    /// Row i sees keys j >= i + this; None: from the first one on. With varlen the kernel adds the
    /// shift of each sequence's alignment.
    pub fn left_shift(&self) -> Option<i64> {
        self.features.window.left.map(|left| self.alignment_shift() - left)
    }

    /// Whether the diagonal goes through each sequence's last query and key, or else through its
    /// first ones.
    pub fn aligns_ends(&self) -> bool {
        match self.causal {
            Causal::None => !self.features.window.top_left,
            causal => causal == Causal::BottomRight,
        }
    }

    fn alignment_shift(&self) -> i64 {
        match self.features.varlen {
            None if self.aligns_ends() => self.seqlen_k - self.seqlen_q,
            _ => 0,
        }
    }

    /// Whether the output has no elements, so that nothing is launched.
    pub const fn is_empty(&self) -> bool {
        let has_no_output = self.seqlen_q == 0 && (matches!(self.pass, Pass::Forward) || self.seqlen_k == 0);
        self.batch_size == 0 || has_no_output
    }

    /// Elements of the LSE: one for each query row of each query head, and none without a sequence.
    pub const fn lse_elements(&self) -> i64 {
        match self.features.varlen {
            Some(Varlen { total_q: Some(total), .. }) if self.batch_size > 0 => self.num_heads_q * total,
            _ => self.batch_size * self.num_heads_q * self.seqlen_q,
        }
    }
}
