//! Problem: *what* is asked. Pass, types, shape, mask, dropout on or off, other features, determinism, layout class.
//!
//! It holds nothing that a launch may change freely (pointers, strides, scale, seeds: see `call`) and nothing of
//! how it is done (see `config`). Two calls with equal Problems share a plan.

mod workspace;

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
pub use workspace::{MAX_SPLITS, SPLIT_KEYS_OF_ANY_BATCH, WORKSPACE_COLS, WORKSPACE_ROWS};

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

/// Which keys row i of the queries sees.
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

/// How many keys before and after its diagonal a row sees: j from i + shift - left to i + shift + right, the shift
/// being the causal alignment's. None: all of that side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Window {
    pub left: Option<i64>,
    /// None where the problem is causal, which says the same as 0.
    pub right: Option<i64>,
    /// The diagonal of `Causal::TopLeft`, else of `Causal::BottomRight`; as the problem's causal says, where it is
    /// causal.
    pub top_left: bool,
}

impl Window {
    /// A window of a causal problem has causal's diagonal.
    pub fn check_corner(&self, causal: Causal) -> Result<()> {
        let (of_window, of_causal) = match (self.top_left, causal) {
            (false, Causal::TopLeft) => ("bottom right", "top left"),
            (true, Causal::BottomRight) => ("top left", "bottom right"),
            _ => return Ok(()),
        };
        Err(Error::invalid(format!(
            "the window aligns to the {of_window} and causal to the {of_causal}; both must align to the same corner"
        )))
    }
}

/// Which tensors hold sequences of their own lengths end to end, (total, heads, dim), and how many rows those have;
/// None: (batch, seqlen, heads, dim), of which each sequence uses its first rows. Lengths are in device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Varlen {
    pub total_q: Option<i64>,
    pub total_k: Option<i64>,
    /// Each sequence uses its own number of the rows of q that it has.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub padded_q: bool,
}

/// The blocks of scores that lists name (`call::BlockLists`) are all that count: of so many queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BlockMask {
    pub block_q: i64,
    pub block_k: i64,
}

/// What is asked beyond softmax(scale * Q K^T) V; all off by default. What is off is not in a kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Features {
    pub window: Window,
    /// Scores s become c * tanh(s / c).
    pub softcap: bool,
    /// -slope * |i + seqlen_k - seqlen_q - j| is added to scores.
    pub alibi: bool,
    /// A tensor is added to scores.
    pub bias: bool,
    /// Backward: the gradient of the bias is wanted.
    pub dbias: bool,
    /// A tensor says which keys are seen, by bytes or bits.
    pub mask: bool,
    /// The mask's are bits.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub mask_bits: bool,
    /// Each query head has a score to no key, which takes its share of the softmax.
    pub sinks: bool,
    /// Backward: there is a gradient into the LSE.
    pub dlse: bool,
    /// Sequences have their own lengths. seqlen_q and seqlen_k are the longest that are allowed.
    pub varlen: Option<Varlen>,
    /// Forward: k and v are pages of so many keys, (pages, page size, heads, dim), of which a block table names each
    /// sequence's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paged: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block_mask: Option<BlockMask>,
}

impl Features {
    pub const NONE: Features = Features {
        window: Window { left: None, right: None, top_left: false },
        softcap: false,
        alibi: false,
        bias: false,
        dbias: false,
        mask: false,
        mask_bits: false,
        sinks: false,
        dlse: false,
        varlen: None,
        paged: None,
        block_mask: None,
    };

    pub fn is_none(&self) -> bool {
        *self == Features::NONE
    }

    /// Whether scores go through more than a factor before the softmax.
    pub const fn modifies_scores(&self) -> bool {
        self.softcap || self.alibi || self.bias || self.mask
    }
}

/// The widest access in elements that every row of every tensor of the call allows: the head dims, strides and
/// base addresses are all multiples of it. 8 two-byte elements are the 16 bytes of one `cp.async`, and what TMA demands;
/// strides that TMA cannot take for their size count as narrower. Of fp32 those 16 bytes are 4 elements.
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

    /// The widest class of at most 16 bytes that divides every one of `quantities`, given in elements.
    pub fn widest(dtype: Dtype, quantities: impl IntoIterator<Item = i64>) -> Layout {
        let all = quantities.into_iter().fold(0, |bits, q| bits | q);
        [Layout::Vec8, Layout::Vec4, Layout::Vec2]
            .into_iter()
            .find(|layout| layout.elements() * dtype.bytes() as i64 <= 16 && all % layout.elements() == 0)
            .unwrap_or(Layout::Vec1)
    }
}

/// Blocks of a block mask are multiples of this: the rows of the smallest tile, in both directions.
pub const MASK_BLOCK_STEP: i64 = 16;
/// The largest of them: a block past the last one still lies within int32.
pub const MAX_MASK_BLOCK: i64 = 2048;
/// The largest head dim of either kind.
pub const MAX_HEAD_DIM: i64 = 512;
/// Packed rows of the largest tile that is made for few queries.
const TILE_ROWS: i64 = 64;
/// So few that a tile of one head's would be a quarter full.
const FEW_QUERIES: i64 = 16;
/// The longest sequence, and the most rows of a tensor that holds sequences end to end: row and key indices, and the
/// sum of a row index and a tile, stay within int32 in kernels.
pub const MAX_SEQLEN: i64 = (1 << 31) - 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Problem {
    pub pass: Pass,
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
    /// Of the backward pass: the same bits at every run, whatever was measured. Its config is the heuristic's.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub deterministic: bool,
    /// Of the forward pass: a sequence's result has the same bits alone and in any batch. Its config is the heuristic's for
    /// what no batch changes (`plan::key::canonical`).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub batch_invariant: bool,
    #[serde(default, skip_serializing_if = "Features::is_none")]
    pub features: Features,
    pub layout: Layout,
}

impl Problem {
    /// Self-attention of as many key-value heads as query heads and nothing else, in rows and strides of whole 16 bytes: what else a
    /// problem asks for differs from this.
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

    /// Elements of an access, at most 16 bytes, also where who wrote the problem down gave it the layout of a shorter type.
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

    /// Rows of a block mask's lists, and how many blocks each is of; None without one.
    pub fn list_extents(&self) -> Option<(i64, i64)> {
        let BlockMask { block_q, block_k } = self.features.block_mask?;
        let (q, k) = ((self.seqlen_q + block_q - 1) / block_q, (self.seqlen_k + block_k - 1) / block_k);
        Some(if self.pass == Pass::Forward { (q, k) } else { (k, q) })
    }

    /// Whether the keys may be split over blocks of threads, in pages or not: nothing is dropped or trained while decoding.
    pub fn may_decode(&self) -> bool {
        // A tile's rows are those of several heads, whose lists of blocks differ.
        let has_lists = self.features.block_mask.is_some();
        self.pass == Pass::Forward && self.dtype != Dtype::Fp32 && !self.dropout && !has_lists
    }

    /// Why its result may not follow what was measured, where it may not: the config is the heuristic's alone.
    pub const fn follows_no_record(&self) -> Option<&'static str> {
        match (self.deterministic, self.batch_invariant) {
            (true, _) => Some("deterministic"),
            (_, true) => Some("batch-invariant"),
            _ => None,
        }
    }

    /// Whether one tile of the decode family holds the packed rows or, of few queries, two do: those of each head by
    /// themselves would be a quarter of one.
    pub fn has_few_rows(&self) -> bool {
        (1..=self.most_few_rows(FEW_QUERIES)).contains(&self.packed_rows())
    }

    const fn most_few_rows(&self, few_queries: i64) -> i64 {
        if self.seqlen_q <= few_queries { 2 * TILE_ROWS } else { TILE_ROWS }
    }

    /// Of a batch-invariant problem: whether it is done as few queries are, a split of the keys by each block of threads.
    /// Only where all sequences have equally many queries, so that this is each one's own number.
    pub fn has_few_queries_in_any_batch(&self) -> bool {
        !self.has_own_queries() && self.has_few_rows()
    }

    /// Whether sequences have their own numbers of queries.
    fn has_own_queries(&self) -> bool {
        self.features.varlen.is_some_and(|varlen| varlen.total_q.is_some() || varlen.padded_q)
    }

    /// The same without a causal mask that hides nothing, as of one query for each sequence, aligned to its last key: what is measured of
    /// decoding then serves whether a caller says causal or not. A batch-invariant one stays what it would be beside longer ones.
    pub fn without_idle_causal(self) -> Problem {
        let has_no_window = self.features.window == Window::default();
        let sees_all = self.causal == Causal::BottomRight && self.seqlen_q == 1 && has_no_window;
        match sees_all && !self.has_own_queries() && !self.batch_invariant {
            true => Problem { causal: Causal::None, ..self },
            false => self,
        }
    }

    /// Row i sees keys j <= i + this; None: up to the last one. With sequences of their own lengths it is what comes on
    /// top of their alignment's shift.
    pub fn right_shift(&self) -> Option<i64> {
        let right = if self.causal == Causal::None { self.features.window.right } else { Some(0) };
        right.map(|right| self.alignment_shift() + right)
    }

    /// Row i sees keys j >= i + this; None: from the first one on. With sequences of their own lengths as above.
    pub fn left_shift(&self) -> Option<i64> {
        self.features.window.left.map(|left| self.alignment_shift() - left)
    }

    /// Whether the diagonal goes through each sequence's last query and key, not through its first ones.
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

    /// Whether the output has no element, so that nothing is launched.
    pub const fn is_empty(&self) -> bool {
        let has_no_output = self.seqlen_q == 0 && (matches!(self.pass, Pass::Forward) || self.seqlen_k == 0);
        self.batch_size == 0 || has_no_output
    }

    /// Elements of the LSE: one for each row of queries and query head. Rows of no sequence are nothing without a
    /// sequence.
    pub const fn lse_elements(&self) -> i64 {
        match self.features.varlen {
            Some(Varlen { total_q: Some(total), .. }) if self.batch_size > 0 => self.num_heads_q * total,
            _ => self.batch_size * self.num_heads_q * self.seqlen_q,
        }
    }

    /// Checks what holds for every backend: ranges, the head ratio, and that products of sizes fit in 63 bits.
    pub fn validate(&self) -> Result<()> {
        let range = |name: &str, value: i64, low: i64, high: i64| match (low..=high).contains(&value) {
            true => Ok(()),
            false => Err(Error::invalid(format!("{name} is {value}; it must be from {low} to {high}"))),
        };
        range("batch_size", self.batch_size, 0, i32::MAX as i64)?;
        range("num_heads_q", self.num_heads_q, 1, i32::MAX as i64)?;
        range("num_heads_kv", self.num_heads_kv, 1, i32::MAX as i64)?;
        range("seqlen_q", self.seqlen_q, 0, MAX_SEQLEN)?;
        range("seqlen_k", self.seqlen_k, 0, MAX_SEQLEN)?;
        range("head_dim", self.head_dim, 1, MAX_HEAD_DIM)?;
        range("head_dim_v", self.head_dim_v, 1, MAX_HEAD_DIM)?;
        if self.num_heads_q % self.num_heads_kv != 0 {
            return Err(Error::invalid(format!(
                "num_heads_q is {}; it must be a multiple of num_heads_kv, which is {}",
                self.num_heads_q, self.num_heads_kv
            )));
        }
        if self.deterministic && self.pass == Pass::Forward {
            return Err(Error::invalid(
                "deterministic is true in a forward pass, which always is; it must be false but in a backward pass",
            ));
        }
        if self.batch_invariant && self.pass == Pass::Backward {
            return Err(Error::invalid(
                "batch_invariant is true in a backward pass; it is of the forward pass and must be false",
            ));
        }
        if self.batch_invariant && self.dropout {
            return Err(Error::invalid(
                "batch_invariant is true and dropout_p is not 0; what is dropped depends on a sequence's place in the batch",
            ));
        }
        self.validate_features()?;
        let heads = self.batch_size.checked_mul(self.num_heads_q).filter(|n| *n <= i32::MAX as i64);
        let Varlen { total_q, total_k, .. } = self.features.varlen.unwrap_or_default();
        let total = total_q.max(total_k).unwrap_or(0);
        let elements = heads.and_then(|n| {
            // Twice covers both the rows of the batch and those that lie end to end.
            let rows =
                (n.checked_mul(self.seqlen_q.max(self.seqlen_k) + 4096)?).max(self.num_heads_q.checked_mul(total)?);
            rows.checked_mul(2 * 4 * MAX_HEAD_DIM)
        });
        if elements.is_none() {
            return Err(Error::invalid(format!(
                "batch_size {} x num_heads_q {} x seqlen {} (or num_heads_q x {total} rows) overflows: batch_size * num_heads_q must be below 2^31 and the bytes of a tensor below 2^62",
                self.batch_size,
                self.num_heads_q,
                self.seqlen_q.max(self.seqlen_k)
            )));
        }
        Ok(())
    }

    fn validate_features(&self) -> Result<()> {
        let Features { window, dbias, bias, mask, mask_bits, dlse, varlen, .. } = self.features;
        for (name, side) in [("window_left", window.left), ("window_right", window.right)] {
            if let Some(keys) = side.filter(|keys| !(0..=MAX_SEQLEN).contains(keys)) {
                return Err(Error::invalid(format!("{name} is {keys}; it must be from 0 to {MAX_SEQLEN}")));
            }
        }
        if self.causal != Causal::None && window != Window::default() {
            if let Some(right) = window.right {
                return Err(Error::invalid(format!(
                    "window_right is {right}, and causal hides every key after the diagonal; with causal leave it out"
                )));
            }
            window.check_corner(self.causal)?;
        }
        if window != Window::default() && self.seqlen_q + self.seqlen_k > MAX_SEQLEN {
            return Err(Error::invalid(format!(
                "with a window seqlen_q + seqlen_k is {}; it must be at most {MAX_SEQLEN}",
                self.seqlen_q + self.seqlen_k
            )));
        }
        if dbias && !bias {
            return Err(Error::invalid("dbias is asked for without a bias; the gradient of a bias needs the bias"));
        }
        if mask_bits && !mask {
            return Err(Error::invalid("mask_bits is true without a mask; it says what a mask's elements are"));
        }
        if self.pass == Pass::Forward && (dbias || dlse) {
            return Err(Error::invalid(
                "dbias or dlse is asked for in a forward pass; both are of the backward pass and must be off",
            ));
        }
        if let Some(varlen) = varlen {
            for (name, total) in [("total_q", varlen.total_q), ("total_k", varlen.total_k)] {
                if let Some(rows) = total.filter(|rows| !(0..=MAX_SEQLEN).contains(rows)) {
                    return Err(Error::invalid(format!("{name} is {rows}; it must be from 0 to {MAX_SEQLEN}")));
                }
            }
        }
        self.validate_block_mask()?;
        self.validate_pages()
    }

    fn validate_block_mask(&self) -> Result<()> {
        let Some(BlockMask { block_q, block_k }) = self.features.block_mask else { return Ok(()) };
        for (name, size) in [("block_q", block_q), ("block_k", block_k)] {
            if !(MASK_BLOCK_STEP..=MAX_MASK_BLOCK).contains(&size) || size % MASK_BLOCK_STEP != 0 {
                return Err(Error::invalid(format!(
                    "block_mask.{name} is {size}; it must be a multiple of {MASK_BLOCK_STEP} from {MASK_BLOCK_STEP} to {MAX_MASK_BLOCK}"
                )));
            }
        }
        if self.features.varlen.is_some() || self.features.paged.is_some() {
            return Err(Error::unsupported(
                "a block mask goes with sequences of one length alone: leave out cu_seqlens, seqused and pages, or the block mask",
            ));
        }
        Ok(())
    }

    fn validate_pages(&self) -> Result<()> {
        let Some(page_size) = self.features.paged else { return Ok(()) };
        if !(1..=MAX_SEQLEN).contains(&page_size) {
            return Err(Error::invalid(format!("page_size is {page_size}; it must be from 1 to {MAX_SEQLEN}")));
        }
        if self.pass == Pass::Backward {
            return Err(Error::invalid("k and v are paged; there is no backward pass of pages"));
        }
        if self.dropout {
            return Err(Error::invalid("k and v are paged and dropout_p is not 0; with pages nothing may be dropped"));
        }
        if self.features.varlen.is_some_and(|varlen| varlen.total_k.is_some()) {
            return Err(Error::invalid(
                "k and v are both paged and end to end; with pages only seqused_k says how long sequences are",
            ));
        }
        if self.packed_rows() > MAX_SEQLEN {
            return Err(Error::invalid(format!(
                "seqlen_q {} x num_heads_q {} / num_heads_kv {} is {}; with pages it must be at most {MAX_SEQLEN}",
                self.seqlen_q,
                self.num_heads_q,
                self.num_heads_kv,
                self.packed_rows()
            )));
        }
        Ok(())
    }

    /// The multiply-adds of the products that this pass needs, counted as two operations each: two products forward,
    /// five backward; half of them when causal, as the field counts it, and of a window those that it lets be seen. Of
    /// sequences of their own lengths as if all were the longest, under a block mask as if it named all blocks.
    pub fn flops(&self) -> f64 {
        let pairs = self.batch_size as f64 * self.num_heads_q as f64 * self.seqlen_q as f64 * self.keys_of_a_row();
        let (qk, v) = (self.head_dim as f64, self.head_dim_v as f64);
        let products = match self.pass {
            Pass::Forward => qk + v,
            Pass::Backward => 3.0 * qk + 2.0 * v,
        };
        2.0 * pairs * products
    }

    /// Bytes of K and V, each once; of a window those of the keys that some row sees. Of sequences of their own lengths
    /// as `flops`.
    pub fn key_value_bytes(&self) -> f64 {
        let Window { left, right, .. } = self.features.window;
        let right = if self.causal == Causal::None { right } else { Some(0) };
        let side = |keys: Option<i64>| keys.unwrap_or(self.seqlen_k);
        let keys = (side(left) + side(right) + self.seqlen_q).min(self.seqlen_k);
        let elements = self.batch_size as f64 * self.num_heads_kv as f64 * keys as f64;
        elements * (self.head_dim + self.head_dim_v) as f64 * self.dtype.bytes() as f64
    }

    /// Keys that a row sees, in the mean: half of all on either side of its diagonal, or as many as a window has there;
    /// after a causal one none.
    fn keys_of_a_row(&self) -> f64 {
        let Window { left, right, .. } = self.features.window;
        let right = if self.causal == Causal::None { right } else { Some(0) };
        let half = self.seqlen_k as f64 / 2.0;
        let side = |keys: Option<i64>| keys.map_or(half, |keys| (keys as f64).min(half));
        side(left) + side(right)
    }
}
