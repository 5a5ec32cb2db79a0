//! OpClass: what an operation is built for. A class is the key of the operations that an engine has
//! built.
//!
//! All classes stand in this file, below the operations, so that one cache holds every kind.

use crate::problem::{Dtype, Eight, Four, Layout};
use std::fmt;

/// One variant for each operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OpClass {
    Merge(MergeClass),
    KvAppend(KvAppendClass),
    Quantize(QuantizeClass),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MergeClass {
    /// Type of the output.
    pub dtype: Dtype,
    /// Type of the partial outputs: `dtype` or fp32.
    pub partial_dtype: Dtype,
    pub layout: Layout,
}

/// Rows that are not rotated are copied bit by bit, so the class does not hold their type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KvAppendClass {
    /// Bytes of the widest access that all addresses, strides and rows allow: 16, 8, 4 or 2.
    pub access_bytes: i64,
    /// Sequences may be idle or lie in other entries of the cache, and lengths may advance in
    /// place.
    pub slots: bool,
    /// New keys and queries are rotated. The kernel that does so serves slots too.
    pub rotary: Option<RotaryClass>,
    /// The cache has 8 bits or int4 rows. Its kernel serves slots and rotations too.
    pub eight: Option<EightClass>,
}

/// A cache of 8 bits or of int4 rows, and the rows that are quantised into it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EightClass {
    /// Type of the new rows.
    pub dtype: Dtype,
    pub keys: CacheFormat,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CacheFormat {
    Eight(Eight),
    Four(Four),
}

impl CacheFormat {
    pub const fn name(self) -> &'static str {
        match self {
            CacheFormat::Eight(eight) => eight.name(),
            CacheFormat::Four(four) => four.name(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct QuantizeClass {
    /// Type of the tensor that is quantised.
    pub dtype: Dtype,
    /// The format of the result; None: `dtype`, of rows that are only rotated.
    pub to: Option<Eight>,
    pub layout: Layout,
    /// Each row and head has a scale of its own, or none.
    pub of_rows: bool,
    /// Rows are rotated by a Hadamard matrix and signs.
    pub rotates: bool,
}

/// How rows are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RotaryClass {
    /// Type of the rows.
    pub dtype: Dtype,
    /// Type of the tables: `dtype` or fp32.
    pub table_dtype: Dtype,
    /// Columns 2i and 2i + 1 are a pair, else i and i + half of the rotated ones.
    pub interleaved: bool,
}

impl fmt::Display for OpClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OpClass::Merge(class) => class.fmt(f),
            OpClass::KvAppend(class) => class.fmt(f),
            OpClass::Quantize(class) => class.fmt(f),
        }
    }
}

impl fmt::Display for MergeClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "merge {} from {} vec{}", self.dtype.name(), self.partial_dtype.name(), self.layout.elements())
    }
}

impl fmt::Display for KvAppendClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kv_append by {} bytes", self.access_bytes)?;
        if self.slots {
            write!(f, " in slots")?;
        }
        if let Some(EightClass { dtype, keys }) = self.eight {
            write!(f, " {} to {}", dtype.name(), keys.name())?;
        }
        let Some(RotaryClass { dtype, table_dtype, interleaved }) = self.rotary else { return Ok(()) };
        let pairs = if interleaved { "interleaved" } else { "halves" };
        write!(f, " rotary {pairs} {} by {}", dtype.name(), table_dtype.name())
    }
}

impl fmt::Display for QuantizeClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = if self.of_rows { "rows" } else { "blocks" };
        let to = self.to.map_or(self.dtype.name(), Eight::name);
        write!(f, "quantize {} to {to} by {of} vec{}", self.dtype.name(), self.layout.elements())?;
        if self.rotates { write!(f, " rotated") } else { Ok(()) }
    }
}
