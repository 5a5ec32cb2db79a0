//! The sizes and tensors of one merge, as a backend gets them.

use crate::call::TensorRef;
use crate::ops::class::MergeClass;

#[derive(Clone, Copy, Debug)]
pub struct Merge {
    pub class: MergeClass,
    pub num_partials: i64,
    pub batch_size: i64,
    pub seqlen: i64,
    pub num_heads: i64,
    pub head_dim_v: i64,
    /// The first partial output, (batch, seqlen, heads, head_dim_v). A row whose LSE is -inf is not
    /// read.
    pub partial_out: TensorRef,
    /// Elements from one partial output to the next.
    pub partial_out_stride: i64,
    /// The first partial's LSE: fp32 (batch, heads, seqlen), natural logarithm.
    pub partial_lse: *const f32,
    /// Elements from one partial's LSE to the next.
    pub partial_lse_stride: i64,
    pub out: TensorRef,
    /// Shaped as a partial's LSE; may be NULL.
    pub lse: *mut f32,
}

impl Merge {
    /// Rows of the output, and elements of an LSE.
    pub const fn rows(&self) -> i64 {
        self.batch_size * self.num_heads * self.seqlen
    }
}

// SAFETY: a Merge only carries addresses; the backend that dereferences them in a launch answers
// for the access.
unsafe impl Send for Merge {}
// SAFETY: as above; the fields are plain data.
unsafe impl Sync for Merge {}
