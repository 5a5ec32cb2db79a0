//! Merge: partial results of attention over parts of the keys, weighed by their log-sum-exps into the result over all of them, as a
//! backend gets it. Built and checked by `capi`; nothing below it checks pointers again.

use crate::call::TensorRef;
use crate::problem::{Dtype, Layout};
use std::fmt;

/// What an executable is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MergeClass {
    /// Of the output.
    pub dtype: Dtype,
    /// Of the partial outputs: `dtype` or fp32.
    pub partial_dtype: Dtype,
    pub layout: Layout,
}

impl fmt::Display for MergeClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "merge {} from {} vec{}", self.dtype.name(), self.partial_dtype.name(), self.layout.elements())
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Merge {
    pub class: MergeClass,
    pub num_partials: i64,
    pub batch_size: i64,
    pub seqlen: i64,
    pub num_heads: i64,
    pub head_dim_v: i64,
    /// The first partial output, (batch, seqlen, heads, head_dim_v), and elements from one to the next. Where a partial's LSE
    /// is -inf it is not read.
    pub partial_out: TensorRef,
    pub partial_out_stride: i64,
    /// fp32 (batch, heads, seqlen), natural log, and elements from one to the next.
    pub partial_lse: *const f32,
    pub partial_lse_stride: i64,
    pub out: TensorRef,
    /// As a partial's; may be NULL.
    pub lse: *mut f32,
}

impl Merge {
    /// Rows of the output, and elements of an LSE.
    pub const fn rows(&self) -> i64 {
        self.batch_size * self.num_heads * self.seqlen
    }
}

// SAFETY: a Merge only carries addresses; who dereferences them (a backend, inside launch) answers for the access.
unsafe impl Send for Merge {}
// SAFETY: as above; the fields are plain data.
unsafe impl Sync for Merge {}
