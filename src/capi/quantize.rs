//! Quantising a tensor to 8 bits: the C struct, its checks, and the C functions.

use super::accesses::Accesses;
use super::context::flashtune_context;
use super::dtypes::{dtype, eight};
use super::kv_append_eight::check as check_scales;
use super::memory::Memory;
use super::op;
use super::operand::{Access, Data, Operand};
use super::params::Params;
use super::sized::{SizedStruct, flag};
use super::types::*;
use crate::call::TensorRef;
use crate::error::{Error, Result};
use crate::ops::quantize::{LEAST_BLOCK, Quantize, QuantizeClass};
use crate::problem::{Dtype, Eight, ElementType, Layout, MAX_HEAD_DIM, MAX_SEQLEN, SCALE_BLOCK, check_range};
use std::ffi::c_void;

/// A tensor to quantise: out holds x / scale in 8 bits, rounded as FLASHTUNE_DTYPE_E4M3 says. The
/// division is x * (1 / scale) in fp32. flashtune_forward takes out as q, k or v, and descale as
/// its scales.
///
/// With a rotation, x above means the rotated rows. Rotate q and k by the same seed, which leaves
/// q k^T as it is. Do not rotate v. Outliers spread over the columns of their row, so that the
/// scale of q or k shrinks (docs/numerics.md).
///
/// Set the whole struct to zero, then struct_size, then the fields that apply.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct flashtune_quantize_params {
    /// sizeof(flashtune_quantize_params).
    pub struct_size: u64,
    /// FLASHTUNE_DTYPE_FP16 or _BF16: the type of x.
    pub dtype: i32,
    /// FLASHTUNE_DTYPE_E4M3, _E5M2 or _INT8: the type of out. With a rotation it may also be dtype.
    /// out then holds the rotated rows, rounded to dtype, and descale.data, keys_per_descale,
    /// heads_per_descale and computes_descale must be 0.
    pub out_dtype: i32,
    /// Batch entries, 0 to 2^31 - 1. Packed sequences are one entry of all their rows. batch_size *
    /// seqlen * num_heads is at most 2^50.
    pub batch_size: i64,
    /// Rows of an entry, 0 to 2^31 - 4096. With 0 the call does nothing.
    pub seqlen: i64,
    /// Heads of x and out, at least 1.
    pub num_heads: i64,
    /// Dim of x and out, 1 to 512.
    pub head_dim: i64,
    /// (batch_size, seqlen, num_heads, head_dim), read.
    pub x: flashtune_const_tensor,
    /// (batch_size, seqlen, num_heads, head_dim), written.
    pub out: flashtune_tensor,
    /// fp32 (batch_size, blocks, num_heads / heads_per_descale): the scales, written with
    /// computes_descale, else read. Blocks are 1 with keys_per_descale 0, else ceil(seqlen /
    /// keys_per_descale). On a CPU context a launch refuses given scales that are not finite or not
    /// above 0. On a CUDA context nothing checks them, and out holds anything there.
    pub descale: flashtune_tensor,
    /// Rows that share a scale: 0 (all of an entry), 1 or 128.
    pub keys_per_descale: i64,
    /// Neighbouring heads that share a scale, a divisor of num_heads: 1 for k and v, and for q the
    /// size of the GQA group.
    pub heads_per_descale: i64,
    /// 0: descale is read. 1: it is written, as the largest magnitude of the elements that share it
    /// over the largest number of out_dtype. NaN does not count, and zeros alone get the scale 1.
    pub computes_descale: i32,
    /// Must be 0.
    pub reserved: i32,
    /// A FLASHTUNE_ROTATION_*. A rotation spreads an infinity or a NaN over its block of columns.
    pub rotation: i32,
    /// Must be 0.
    pub rotation_reserved: i32,
    /// The seed of FLASHTUNE_ROTATION_HADAMARD's signs. It is not read without a rotation.
    pub rotation_seed: u64,
}

// SAFETY: repr(C), a u64 first, then integers and raw pointers, which have no invalid bytes.
unsafe impl SizedStruct for flashtune_quantize_params {
    const NAME: &'static str = "flashtune_quantize_params";
    const OLDEST: usize = 168;
}
// This number grows with the struct. OLDEST stays.
const _: () = assert!(size_of::<flashtune_quantize_params>() == 184);

/// Prepares the kernel that quantises the tensor of these params. This may take a second. After OK,
/// flashtune_quantize only enqueues, for any sizes and for data and strides of the same alignment.
///
/// Data pointers may be NULL, and then count as aligned to 16 bytes. May be called from any thread,
/// but not while a stream of this thread is capturing.
///
/// Statuses: OK, INVALID_ARGUMENT, NOT_PREPARED (the context is sealed), NO_COMPILER,
/// COMPILE_FAILED, CUDA, OUT_OF_MEMORY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_quantize_prepare(
    context: *mut flashtune_context,
    params: *const flashtune_quantize_params,
) -> i32 {
    // SAFETY: the C caller promises what the header says. This holds for the function below too.
    unsafe { op::prepare(context, params) }
}

/// Quantises a tensor to 8 bits, by given scales or by those that it computes and writes. It may
/// rotate the rows first, or only rotate them.
///
/// The rules of flashtune_forward for stream, buffers, capture and threads apply. There is no
/// workspace. A missing kernel is prepared first; on a capturing stream and in a sealed context the
/// call returns NOT_PREPARED instead. out must share no byte with another tensor. The same holds
/// for a descale that is written.
///
/// Statuses: those of flashtune_quantize_prepare.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_quantize(
    context: *mut flashtune_context,
    params: *const flashtune_quantize_params,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: as above.
    unsafe { op::launch(context, params, stream) }
}

impl Params for flashtune_quantize_params {
    type Checked = Quantize;

    fn check(&self, data: Data, memory: Memory) -> Result<Quantize> {
        check(self, data, memory)
    }
}

fn check(params: &flashtune_quantize_params, data: Data, memory: Memory) -> Result<Quantize> {
    let dtype = dtype("dtype", params.dtype)?;
    if dtype == Dtype::Fp32 {
        return Err(Error::invalid("dtype is 3; it must be FLASHTUNE_DTYPE_FP16 (1) or _BF16 (2)"));
    }
    let flashtune_quantize_params { batch_size, seqlen, num_heads, head_dim, .. } = *params;
    for (name, value, low, high) in [
        ("batch_size", batch_size, 0, i64::from(i32::MAX)),
        ("seqlen", seqlen, 0, MAX_SEQLEN),
        ("num_heads", num_heads, 1, i64::from(i32::MAX)),
        ("head_dim", head_dim, 1, MAX_HEAD_DIM),
        ("reserved", params.reserved.into(), 0, 0),
    ] {
        check_range(name, value, low, high)?;
    }
    if i128::from(batch_size) * i128::from(seqlen) * i128::from(num_heads) > 1 << 50 {
        return Err(Error::invalid(format!(
            "batch_size x seqlen x num_heads, {batch_size} x {seqlen} x {num_heads}, overflows; it must be at most 2^50"
        )));
    }
    let rotates = check_rotation(params)?;
    let to = target(params, rotates)?;
    let Sharing { keys, heads } = if to.is_some() { check_sharing(params)? } else { refuse_scales(params)? };
    let sizes = [batch_size, seqlen, num_heads, head_dim];
    let mut x = Operand::new("x", Access::Read, params.x, sizes, dtype);
    let element = to.map_or(ElementType::from(dtype), ElementType::from);
    let mut out = Operand::new("out", Access::Written, params.out, sizes, element);
    let mut accesses = Accesses::default();
    accesses.add(Access::Read, x.check(data)?);
    accesses.add(Access::Written, out.check(data)?);
    let rows_per_scale = if keys == 0 { seqlen.max(1) } else { keys };
    let computes = params.computes_descale == 1;
    if to.is_some() {
        let extents = [batch_size, (seqlen + rows_per_scale - 1) / rows_per_scale, num_heads / heads];
        check_scales("descale", &params.descale, extents, computes, data, &mut accesses)?;
    }
    accesses.check(data, memory)?;
    let layout = match memory {
        Memory::Host | Memory::Fallback => Layout::Vec1,
        Memory::Device { .. } => Layout::widest(dtype, x.layout_quantities().chain(out.layout_quantities())),
    };
    Ok(Quantize {
        class: QuantizeClass { dtype, to, layout, of_rows: keys == 1 && heads == 1, rotates },
        batch_size,
        seqlen,
        num_heads,
        head_dim,
        rows_per_scale,
        heads_per_scale: heads,
        computes,
        rotation_seed: params.rotation_seed,
        x: x.tensor,
        out: out.tensor,
        scales: TensorRef::from(params.descale),
    })
}

/// Whether rows are rotated.
fn check_rotation(params: &flashtune_quantize_params) -> Result<bool> {
    let rotates = flag(("rotation", params.rotation), ("rotation_reserved", params.rotation_reserved))?;
    let head_dim = params.head_dim;
    if rotates && head_dim % LEAST_BLOCK != 0 {
        return Err(Error::invalid(format!(
            "head_dim is {head_dim}; with FLASHTUNE_ROTATION_HADAMARD it must be a multiple of {LEAST_BLOCK}"
        )));
    }
    Ok(rotates)
}

/// The format of out; None: it keeps dtype.
fn target(params: &flashtune_quantize_params, rotates: bool) -> Result<Option<Eight>> {
    let to = eight(params.out_dtype);
    if to.is_some() || rotates && params.out_dtype == params.dtype {
        return Ok(to);
    }
    let or_dtype = if rotates { "dtype, " } else { "" };
    Err(Error::invalid(format!(
        "out_dtype is {}; it must be {or_dtype}FLASHTUNE_DTYPE_E4M3 (4), _E5M2 (5) or _INT8 (6)",
        params.out_dtype
    )))
}

/// Rows (0: all) and neighbouring heads that share a scale.
struct Sharing {
    keys: i64,
    heads: i64,
}

fn check_sharing(params: &flashtune_quantize_params) -> Result<Sharing> {
    let (keys, heads, num_heads) = (params.keys_per_descale, params.heads_per_descale, params.num_heads);
    check_range("heads_per_descale", heads, 1, num_heads)?;
    check_range("computes_descale", params.computes_descale.into(), 0, 1)?;
    if num_heads % heads != 0 {
        return Err(Error::invalid(format!(
            "heads_per_descale is {heads}; it must divide num_heads, which is {num_heads}"
        )));
    }
    if ![0, 1, SCALE_BLOCK].contains(&keys) {
        return Err(Error::invalid(format!("keys_per_descale is {keys}; it must be 0, 1 or 128")));
    }
    Ok(Sharing { keys, heads })
}

/// A tensor that keeps its dtype has no scales. Each row and head is alone.
fn refuse_scales(params: &flashtune_quantize_params) -> Result<Sharing> {
    for (name, value) in [
        ("keys_per_descale", params.keys_per_descale),
        ("heads_per_descale", params.heads_per_descale),
        ("computes_descale", params.computes_descale.into()),
    ] {
        if value != 0 {
            return Err(Error::invalid(format!("{name} is {value}; it must be 0, since out_dtype equals dtype")));
        }
    }
    let data = params.descale.data;
    if !data.is_null() {
        return Err(Error::invalid(format!("descale.data is {data:p}; it must be NULL, since out_dtype equals dtype")));
    }
    Ok(Sharing { keys: 1, heads: 1 })
}
