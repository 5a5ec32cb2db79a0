//! OpClass: what an operation is built for. A class is the key of the operations that an engine has
//! built.
//!
//! All classes stand in this file, below the operations, so that one cache holds every kind.

use crate::problem::{Dtype, Layout};
use std::fmt;

/// One variant for each operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OpClass {
    Merge(MergeClass),
    KvAppend(KvAppendClass),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MergeClass {
    /// Type of the output.
    pub dtype: Dtype,
    /// Type of the partial outputs: `dtype` or fp32.
    pub partial_dtype: Dtype,
    pub layout: Layout,
}

/// Rows are copied bit by bit, so the class does not hold their type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KvAppendClass {
    /// Bytes of the widest access that all addresses, strides and rows allow: 16, 8, 4 or 2.
    pub access_bytes: i64,
}

impl fmt::Display for OpClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OpClass::Merge(class) => class.fmt(f),
            OpClass::KvAppend(class) => class.fmt(f),
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
        write!(f, "kv_append by {} bytes", self.access_bytes)
    }
}
