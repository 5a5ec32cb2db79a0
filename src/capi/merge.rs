//! Merging partial results: the C struct, its checks, and the C functions.

use super::accesses::Accesses;
use super::args::Memory;
use super::array::Array;
use super::context::flashtune_context;
use super::inputs::dtype;
use super::op;
use super::operand::{Access, Data, Operand};
use super::overlap::Footprint;
use super::params::Params;
use super::sized::SizedStruct;
use super::types::*;
use crate::error::{Error, Result};
use crate::ops::merge::{Merge, MergeClass};
use crate::problem::{Dtype, Layout, MAX_HEAD_DIM};
use std::ffi::c_void;

/// Results of attention of the same queries over several parts of the keys, to be merged into the result over all of
/// them: each weighs as much as its part of the sum of exponentials, which its lse tells. Set all of it to zero first,
/// then struct_size = sizeof(flashtune_merge_params), then what applies.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct flashtune_merge_params {
    /// sizeof(flashtune_merge_params).
    pub struct_size: u64,
    /// FLASHTUNE_DTYPE_*: the type of out.
    pub dtype: i32,
    /// The type of partial_out: that of out, or FLASHTUNE_DTYPE_FP32. Sums are fp32 throughout.
    pub partial_dtype: i32,
    /// At least 1.
    pub num_partials: i64,
    /// 0 or more. For sequences end to end 1, and seqlen then is total_q. batch_size * seqlen * num_heads is below 2^31.
    pub batch_size: i64,
    /// 0 or more, of queries.
    pub seqlen: i64,
    /// At least 1, of queries.
    pub num_heads: i64,
    /// 1 to 512.
    pub head_dim_v: i64,
    /// (batch_size, seqlen, num_heads, head_dim_v), read: the first partial's out. Rows whose lse is -infinity are not
    /// read.
    pub partial_out: flashtune_tensor,
    /// In elements, at least 0: from one partial's out to the next. Ignored where num_partials is 1.
    pub partial_out_stride: i64,
    /// fp32 (batch_size, num_heads, seqlen), contiguous, read: the first partial's lse.
    pub partial_lse: *const f32,
    /// In elements, at least 0: from one partial's lse to the next. Ignored where num_partials is 1.
    pub partial_lse_stride: i64,
    /// (batch_size, seqlen, num_heads, head_dim_v), written. 0 where no partial has seen a key.
    pub out: flashtune_tensor,
    /// fp32 (batch_size, num_heads, seqlen), contiguous, written: the lse over all keys, -infinity where no partial has
    /// seen one. NULL: not wanted.
    pub lse: *mut f32,
}

// SAFETY: repr(C), a u64 first, then integers and raw pointers, which have no invalid bytes.
unsafe impl SizedStruct for flashtune_merge_params {
    const NAME: &'static str = "flashtune_merge_params";
    const OLDEST: usize = 152;
}
// This number grows with the struct. OLDEST stays.
const _: () = assert!(size_of::<flashtune_merge_params>() == 152);

/// Gets the kernel that merges such partials ready; may take a second. Once it returned OK, flashtune_merge only
/// enqueues, for any sizes, and data and strides of the same alignment. Data pointers may be NULL, and then count as
/// aligned to 16 bytes. Any thread, not while a stream of this thread is capturing.
///
/// Statuses: OK, INVALID_ARGUMENT, NOT_PREPARED (the context is sealed), NO_COMPILER, COMPILE_FAILED, CUDA,
/// OUT_OF_MEMORY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_merge_prepare(
    context: *mut flashtune_context,
    params: *const flashtune_merge_params,
) -> i32 {
    // SAFETY: the C caller promises what the header says; so in the function below.
    unsafe { op::prepare(context, params) }
}

/// Merges partial results, for example of attention over a shared prefix and over each sequence's own keys. Attention
/// sinks may be in one of them at most. stream, buffers, capture and threads as of flashtune_forward; there is no
/// workspace, and what is not prepared is prepared first, or NOT_PREPARED on a capturing stream and in a sealed
/// context. out and lse must share no byte with another tensor.
///
/// Statuses: those of flashtune_merge_prepare.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_merge(
    context: *mut flashtune_context,
    params: *const flashtune_merge_params,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: as above.
    unsafe { op::launch(context, params, stream) }
}

impl Params for flashtune_merge_params {
    type Checked = Merge;

    fn check(&self, data: Data, memory: Memory) -> Result<Merge> {
        check(self, data, memory)
    }
}

fn check(params: &flashtune_merge_params, data: Data, memory: Memory) -> Result<Merge> {
    let partial_dtype = dtype("partial_dtype", params.partial_dtype)?;
    let dtype = dtype("dtype", params.dtype)?;
    if partial_dtype != dtype && partial_dtype != Dtype::Fp32 {
        return Err(Error::invalid(format!(
            "partial_dtype is {} and dtype {}; it must be FLASHTUNE_DTYPE_FP32 (3) or dtype",
            params.partial_dtype, params.dtype
        )));
    }
    let flashtune_merge_params { num_partials, batch_size, seqlen, num_heads, head_dim_v, .. } = *params;
    let most = i64::from(i32::MAX);
    for (name, value, low, high) in [
        ("num_partials", num_partials, 1, most),
        ("batch_size", batch_size, 0, most),
        ("seqlen", seqlen, 0, most),
        ("num_heads", num_heads, 1, most),
        ("head_dim_v", head_dim_v, 1, MAX_HEAD_DIM),
        ("partial_out_stride", params.partial_out_stride, 0, i64::MAX),
        ("partial_lse_stride", params.partial_lse_stride, 0, i64::MAX),
    ] {
        if !(low..=high).contains(&value) {
            return Err(Error::invalid(format!("{name} is {value}; it must be from {low} to {high}")));
        }
    }
    let rows = batch_size as i128 * seqlen as i128 * num_heads as i128;
    if rows > most.into() {
        return Err(Error::invalid(format!(
            "batch_size {batch_size} x seqlen {seqlen} x num_heads {num_heads} is {rows}; it must be at most {most}"
        )));
    }

    let sizes = [batch_size, seqlen, num_heads, head_dim_v];
    let partials = (num_partials, params.partial_out_stride);
    let mut partial_out =
        Operand::new("partial_out", Access::Read, &params.partial_out, sizes, partial_dtype).repeated(partials);
    let mut out = Operand::new("out", Access::Written, &params.out, sizes, dtype);
    let mut accesses = Accesses::default();
    accesses.add(Access::Read, partial_out.check(data)?);
    accesses.add(Access::Read, partial_lses(params, rows as i64, data)?);
    accesses.add(Access::Written, out.check(data)?);
    accesses.add(Access::Written, Array::new("lse", params.lse.cast_const(), rows as i64).check()?);
    accesses.refuse_overlaps()?;
    let layout = match memory {
        Memory::Host => Layout::Vec1,
        // A lane loads at most four elements, 16 bytes of an fp32 partial.
        Memory::Device => {
            Layout::widest(dtype, partial_out.layout_quantities().chain(out.layout_quantities())).max(Layout::Vec4)
        }
    };
    Ok(Merge {
        class: MergeClass { dtype, partial_dtype, layout },
        num_partials,
        batch_size,
        seqlen,
        num_heads,
        head_dim_v,
        partial_out: partial_out.tensor,
        partial_out_stride: params.partial_out_stride,
        partial_lse: params.partial_lse,
        partial_lse_stride: params.partial_lse_stride,
        out: out.tensor,
        lse: params.lse,
    })
}

fn partial_lses(params: &flashtune_merge_params, rows: i64, data: Data) -> Result<Option<Footprint>> {
    if params.partial_lse.is_null() && rows > 0 && data == Data::Required {
        let num_partials = params.num_partials;
        return Err(Error::invalid(format!(
            "partial_lse is NULL; it must point to the {rows} fp32 values of each of {num_partials} partials"
        )));
    }
    let partials = (params.num_partials, params.partial_lse_stride);
    Array::new("partial_lse", params.partial_lse, rows).in_rows(partials).check()
}
