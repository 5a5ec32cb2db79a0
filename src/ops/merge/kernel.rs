//! The merging kernel: what its text is rendered from, its argument and its grid.
//!
//! The kernel is short and bound by reading the partials, so it has no config to search for.

use super::call::Merge;
use crate::call::TensorRef;
use crate::kernel::{FixedSpec, Value};
use crate::ops::class::MergeClass;
use crate::ops::op::Op;
use crate::problem::Dtype;

/// One warp computes one row of the output.
const THREADS: u32 = 128;

impl MergeClass {
    /// The kernel of this class.
    pub fn kernel(&self) -> FixedSpec {
        FixedSpec {
            name: Merge::NAME,
            threads: THREADS,
            class: vec![
                ("dtype", Value::Name(self.dtype.name().to_owned())),
                ("vec", Value::Integer(self.layout.elements() as u32)),
            ],
            knobs: vec![("partials_are_fp32", Value::Flag(self.partial_dtype == Dtype::Fp32))],
        }
    }
}

/// The kernel's argument, the twin of `MergeParams` in `templates/merge.cu.tera`.
#[repr(C)]
pub struct MergeParams {
    partial_out: TensorRef,
    out: TensorRef,
    partial_out_stride: i64,
    partial_lse: *const f32,
    partial_lse_stride: i64,
    lse: *mut f32,
    num_partials: i64,
    rows: i64,
    num_heads: i64,
    seqlen: i64,
    head_dim_v: i64,
}

const _: () = assert!(size_of::<MergeParams>() == 2 * 32 + 9 * 8);

impl MergeParams {
    pub fn new(merge: &Merge) -> MergeParams {
        MergeParams {
            partial_out: merge.partial_out,
            out: merge.out,
            partial_out_stride: merge.partial_out_stride,
            partial_lse: merge.partial_lse,
            partial_lse_stride: merge.partial_lse_stride,
            lse: merge.lse,
            num_partials: merge.num_partials,
            rows: merge.rows(),
            num_heads: merge.num_heads,
            seqlen: merge.seqlen,
            head_dim_v: merge.head_dim_v,
        }
    }
}

/// `capi` bounds the rows below 2^31, which a grid's x dimension holds.
pub fn grid(merge: &Merge) -> [u32; 3] {
    let ctas = (merge.rows() as u64).div_ceil(u64::from(THREADS / 32));
    [ctas as u32, 1, 1]
}
