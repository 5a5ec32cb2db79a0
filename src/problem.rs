//! Problem: *what* is asked. Pass, types, shape, mask, dropout on or off, layout class.
//!
//! It holds nothing that a launch may change freely (pointers, strides, scale, seeds: see `call`) and nothing of
//! how it is done (see `config`). Two calls with equal Problems share a plan.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

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

impl Causal {
    /// The diagonal's offset: row i sees keys j <= i + shift. Meaningless for `None`.
    pub const fn shift(self, seqlen_q: i64, seqlen_k: i64) -> i64 {
        match self {
            Causal::BottomRight => seqlen_k - seqlen_q,
            Causal::None | Causal::TopLeft => 0,
        }
    }
}

/// The widest access in elements that every row of every tensor of the call allows: the head dims, strides and
/// base addresses are all multiples of it. 8 two-byte elements are the 16 bytes of one `cp.async`, and what TMA demands;
/// strides that TMA cannot take for their size count as narrower.
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

    /// The widest class that divides every one of `quantities`, given in elements.
    pub fn widest(quantities: impl IntoIterator<Item = i64>) -> Layout {
        let all = quantities.into_iter().fold(0, |bits, q| bits | q);
        [Layout::Vec8, Layout::Vec4, Layout::Vec2]
            .into_iter()
            .find(|layout| all % layout.elements() == 0)
            .unwrap_or(Layout::Vec1)
    }
}

/// The largest head dim of either kind.
pub const MAX_HEAD_DIM: i64 = 512;
/// The longest sequence: row and key indices, and the sum of a row index and a tile, stay within int32 in kernels.
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
    pub layout: Layout,
}

impl Problem {
    /// Query heads per key-value head.
    pub const fn group_size(&self) -> i64 {
        self.num_heads_q / self.num_heads_kv
    }

    /// Whether the output has no element, so that nothing is launched.
    pub const fn is_empty(&self) -> bool {
        self.batch_size == 0 || (self.seqlen_q == 0 && (matches!(self.pass, Pass::Forward) || self.seqlen_k == 0))
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
        let heads = self.batch_size.checked_mul(self.num_heads_q).filter(|n| *n <= i32::MAX as i64);
        let elements =
            heads.and_then(|n| n.checked_mul(self.seqlen_q.max(self.seqlen_k) + 4096)?.checked_mul(4 * MAX_HEAD_DIM));
        if elements.is_none() {
            return Err(Error::invalid(format!(
                "batch_size {} x num_heads_q {} x seqlen {} overflows: batch_size * num_heads_q must be below 2^31 and the bytes of a tensor below 2^63",
                self.batch_size,
                self.num_heads_q,
                self.seqlen_q.max(self.seqlen_k)
            )));
        }
        Ok(())
    }

    /// The multiply-adds of the products that this pass needs, counted as two operations each: two products forward,
    /// five backward; half of them when causal, as the field counts it.
    pub fn flops(&self) -> f64 {
        let pairs = self.batch_size as f64 * self.num_heads_q as f64 * self.seqlen_q as f64 * self.seqlen_k as f64;
        let (qk, v) = (self.head_dim as f64, self.head_dim_v as f64);
        let products = match self.pass {
            Pass::Forward => qk + v,
            Pass::Backward => 3.0 * qk + 2.0 * v,
        };
        let seen = if self.causal == Causal::None { 1.0 } else { 0.5 };
        2.0 * pairs * products * seen
    }

    /// Bytes of workspace that any config of any backend may use: the backward pass's delta and fp32 dQ accumulator
    /// with `workspace_rows` rows, and turns where it is deterministic; nothing forward. Pure, so that callers may size
    /// once and keep it.
    pub fn workspace_bytes(&self) -> usize {
        match self.pass {
            Pass::Forward => 0,
            Pass::Backward => self.delta_bytes() + self.dq_accum_bytes() + self.turn_bytes(),
        }
    }

    /// Rows of query per head in the workspace: no block of a multiple of 16 rows up to `WORKSPACE_ROWS` that holds a query reaches
    /// past them, so that the last one may be read and written whole.
    pub const fn workspace_rows(&self) -> i64 {
        (self.seqlen_q + WORKSPACE_ROWS - 1) / 16 * 16
    }

    /// Columns of the dQ accumulator: the head dim rounded up to `WORKSPACE_COLS`.
    pub const fn workspace_cols(&self) -> i64 {
        (self.head_dim + WORKSPACE_COLS - 1) / WORKSPACE_COLS * WORKSPACE_COLS
    }

    /// Bytes of delta and of the log2 LSE beside it: two fp32 of (batch, heads_q, workspace_rows).
    pub const fn delta_bytes(&self) -> usize {
        (2 * self.batch_size * self.num_heads_q * self.workspace_rows()) as usize * 4
    }

    /// Bytes of the dQ accumulator: fp32 (batch, heads_q, workspace_rows, workspace_cols).
    pub const fn dq_accum_bytes(&self) -> usize {
        (self.batch_size * self.num_heads_q * self.workspace_rows() * self.workspace_cols()) as usize * 4
    }

    /// Bytes of the counters by which tiles of a deterministic pass are drawn and take turns: uint32, one, and as many as
    /// the dQ accumulator has tiles of rows, at least 8 each.
    pub const fn turn_bytes(&self) -> usize {
        match self.deterministic {
            true => (1 + self.batch_size * self.num_heads_q * self.workspace_rows() / 8) as usize * 4,
            false => 0,
        }
    }
}

/// The largest block_m of the backward pass.
pub const WORKSPACE_ROWS: i64 = 128;
/// Every head dim is padded to a multiple of this in the dQ accumulator.
pub const WORKSPACE_COLS: i64 = 16;
