//! Merging partial results: the C struct, its checks, and the C functions.

use super::accesses::Accesses;
use super::array::Array;
use super::context::flashtune_context;
use super::dtypes::dtype;
use super::memory::Memory;
use super::op;
use super::operand::{Access, Data, Operand};
use super::overlap::Footprint;
use super::params::Params;
use super::sized::SizedStruct;
use super::types::*;
use crate::error::{Error, Result};
use crate::ops::merge::{Merge, MergeClass};
use crate::problem::{Dtype, Layout, MAX_HEAD_DIM, check_range};
use std::ffi::c_void;

/// Partial results to merge. Each partial is the attention of the same queries over another part of
/// the keys, and the result is their attention over all parts. Each partial is weighted by its
/// share of the sum of exponentials, which follows from its lse.
///
/// Set the whole struct to zero, then struct_size, then the fields that apply.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct flashtune_merge_params {
    /// sizeof(flashtune_merge_params).
    pub struct_size: u64,
    /// A FLASHTUNE_DTYPE_*: the type of out.
    pub dtype: i32,
    /// The type of partial_out: that of out, or FLASHTUNE_DTYPE_FP32. All sums are fp32.
    pub partial_dtype: i32,
    /// Number of partials, at least 1.
    pub num_partials: i64,
    /// Batch entries, 0 or more. For packed sequences it is 1, and seqlen is total_q. batch_size *
    /// seqlen * num_heads is below 2^31.
    pub batch_size: i64,
    /// Queries of a batch entry, 0 or more.
    pub seqlen: i64,
    /// Heads of the queries, at least 1.
    pub num_heads: i64,
    /// Dim of partial_out and out, 1 to 512.
    pub head_dim_v: i64,
    /// (batch_size, seqlen, num_heads, head_dim_v), read: the first partial's out. Rows whose lse
    /// is -infinity are not read.
    pub partial_out: flashtune_const_tensor,
    /// Elements from one partial's out to the next, at least 0. Ignored if num_partials is 1.
    pub partial_out_stride: i64,
    /// fp32 (batch_size, num_heads, seqlen), contiguous, read: the first partial's lse.
    pub partial_lse: *const f32,
    /// Elements from one partial's lse to the next, at least 0. Ignored if num_partials is 1.
    pub partial_lse_stride: i64,
    /// (batch_size, seqlen, num_heads, head_dim_v), written. It is 0 where no partial has seen a
    /// key.
    pub out: flashtune_tensor,
    /// fp32 (batch_size, num_heads, seqlen), contiguous, written: the lse over all keys. It is
    /// -infinity where no partial has seen a key. NULL if not wanted.
    pub lse: *mut f32,
}

// SAFETY: repr(C), a u64 first, then integers and raw pointers, which have no invalid bytes.
unsafe impl SizedStruct for flashtune_merge_params {
    const NAME: &'static str = "flashtune_merge_params";
    const OLDEST: usize = 152;
}
// This number grows with the struct. OLDEST stays.
const _: () = assert!(size_of::<flashtune_merge_params>() == 152);

/// Prepares the kernel that merges the partials of these params. This may take a second. After OK,
/// flashtune_merge only enqueues, for any sizes and for data and strides of the same alignment.
///
/// Data pointers may be NULL, and then count as aligned to 16 bytes. May be called from any thread,
/// but not while a stream of this thread is capturing.
///
/// Statuses: OK, INVALID_ARGUMENT, NOT_PREPARED (the context is sealed), NO_COMPILER,
/// COMPILE_FAILED, CUDA, OUT_OF_MEMORY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_merge_prepare(
    context: *mut flashtune_context,
    params: *const flashtune_merge_params,
) -> i32 {
    // SAFETY: the C caller promises what the header says. This holds for the function below too.
    unsafe { op::prepare(context, params) }
}

/// Merges partial results, for example of attention over a shared prefix and over each sequence's
/// own keys. At most one of the partials may include attention sinks.
///
/// The rules of flashtune_forward for stream, buffers, capture and threads apply. There is no
/// workspace. A missing kernel is prepared first; on a capturing stream and in a sealed context the
/// call returns NOT_PREPARED instead. out and lse must share no byte with another tensor.
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
        check_range(name, value, low, high)?;
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
        Operand::new("partial_out", Access::Read, params.partial_out, sizes, partial_dtype).repeated(partials);
    let mut out = Operand::new("out", Access::Written, params.out, sizes, dtype);
    let mut accesses = Accesses::default();
    accesses.add(Access::Read, partial_out.check(data)?);
    accesses.add(Access::Read, partial_lses(params, rows as i64, data)?);
    accesses.add(Access::Written, out.check(data)?);
    accesses.add(Access::Written, Array::new("lse", params.lse.cast_const(), rows as i64).check()?);
    accesses.check(data, memory)?;
    let layout = match memory {
        Memory::Host | Memory::Fallback => Layout::Vec1,
        // A lane loads at most four elements, 16 bytes of an fp32 partial.
        Memory::Device { .. } => {
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
