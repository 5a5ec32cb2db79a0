//! Call: one attention call as a backend gets it. A Problem plus pointers, strides and the scalars of this launch.
//!
//! Built and checked by `capi` (or by the tuner on its own buffers); nothing below it checks pointers again.

use crate::dropout::Dropout;
use crate::problem::Problem;
use std::ffi::c_void;

/// A CUstream on the GPU; ignored by the CPU, where a launch returns when the work is done.
pub type Stream = *mut c_void;

/// A (batch, seqlen, heads, dim) view. Strides in elements; the last dim is contiguous.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct TensorRef {
    pub data: *mut c_void,
    pub stride_batch: i64,
    pub stride_seqlen: i64,
    pub stride_head: i64,
}

impl TensorRef {
    pub const NULL: TensorRef =
        TensorRef { data: std::ptr::null_mut(), stride_batch: 0, stride_seqlen: 0, stride_head: 0 };

    /// A packed (batch, seqlen, heads, dim) tensor.
    pub fn packed(data: *mut c_void, seqlen: i64, heads: i64, dim: i64) -> Self {
        TensorRef { data, stride_batch: seqlen * heads * dim, stride_seqlen: heads * dim, stride_head: dim }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Call {
    pub problem: Problem,
    /// What the scores are multiplied with before the softmax; never 0 by default (`capi` has put in 1/sqrt(head_dim)).
    pub softmax_scale: f32,
    pub dropout: Dropout,
    pub q: TensorRef,
    pub k: TensorRef,
    pub v: TensorRef,
    /// Written forward, read backward.
    pub out: TensorRef,
    /// fp32 (batch, heads_q, seqlen_q), natural log. Forward: written, may be NULL. Backward: read.
    pub lse: *mut f32,
    /// Backward only, else NULL.
    pub dout: TensorRef,
    pub dq: TensorRef,
    pub dk: TensorRef,
    pub dv: TensorRef,
    /// At least `problem.workspace_bytes()` bytes, 256-byte aligned; NULL where that is 0.
    pub workspace: *mut c_void,
}

impl Call {
    /// A call with its three inputs; all else is NULL.
    pub const fn of_inputs(problem: Problem, softmax_scale: f32, dropout: Dropout, [q, k, v]: [TensorRef; 3]) -> Call {
        const NONE: TensorRef = TensorRef::NULL;
        let (lse, workspace) = (std::ptr::null_mut(), std::ptr::null_mut());
        Call {
            problem,
            softmax_scale,
            dropout,
            q,
            k,
            v,
            out: NONE,
            lse,
            dout: NONE,
            dq: NONE,
            dk: NONE,
            dv: NONE,
            workspace,
        }
    }
}

// SAFETY: a Call only carries addresses; who dereferences them (a backend, inside launch) answers for the access.
unsafe impl Send for Call {}
// SAFETY: as above; the fields are plain data.
unsafe impl Sync for Call {}
