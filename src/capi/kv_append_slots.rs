//! The checks of what `flashtune_kv_append` does beside copying: slots and rotations.

use super::array::Array;
use super::dtypes::dtype;
use super::kv_append_params::{FLASHTUNE_APPEND_SLOTS, flashtune_kv_append_params};
use super::operand::Data;
use super::overlap::Footprint;
use super::sized::address;
use crate::call::TensorRef;
use crate::error::{Error, Result};
use crate::ops::kv_append::{Rotary, RotaryClass};
use crate::problem::{Dtype, MAX_SEQLEN, check_range};
use std::ffi::c_void;

/// What the checks of the tables found.
#[derive(Default)]
pub struct Tables {
    pub footprints: [Option<Footprint>; 2],
    /// The quantities, in elements, that limit vector access.
    pub layout_quantities: [i64; 4],
}

/// Whether the lengths after the call replace those before.
pub fn advances_in_place(params: &flashtune_kv_append_params) -> bool {
    let is_same = std::ptr::eq(params.seqused, params.seqlens);
    is_same && has_slots(params)
}

/// Whether the rotated queries replace q.
pub fn is_q_in_place(params: &flashtune_kv_append_params) -> bool {
    let of = |tensor: TensorRef| (tensor.data, tensor.stride_batch, tensor.stride_seqlen, tensor.stride_head);
    of(params.q.into()) == of(params.q_rotated.into())
}

fn has_slots(params: &flashtune_kv_append_params) -> bool {
    params.features & FLASHTUNE_APPEND_SLOTS != 0
}

pub fn check_sizes(params: &flashtune_kv_append_params) -> Result<()> {
    let flashtune_kv_append_params { features, batch_size_cache, page_size, .. } = *params;
    if features & !FLASHTUNE_APPEND_SLOTS != 0 {
        return Err(Error::invalid(format!("features is {features:#x}; it must be 0 or FLASHTUNE_APPEND_SLOTS (1)")));
    }
    let pointers = [("seqused_new", params.seqused_new), ("cache_batch_idx", params.cache_batch_idx)];
    if let Some((name, pointer)) = pointers.into_iter().find(|(_, pointer)| !pointer.is_null() && !has_slots(params)) {
        let pointer = address(pointer.cast());
        return Err(Error::invalid(format!(
            "{name} is {pointer}; it must be NULL, since features has no FLASHTUNE_APPEND_SLOTS"
        )));
    }
    match batch_size_cache {
        0 if !params.cache_batch_idx.is_null() => {
            return Err(Error::invalid("batch_size_cache is 0; with cache_batch_idx it must be from 1 to 2147483647"));
        }
        0 => {}
        _ if !has_slots(params) => {
            return Err(Error::invalid(format!(
                "batch_size_cache is {batch_size_cache}; it must be 0, since features has no FLASHTUNE_APPEND_SLOTS"
            )));
        }
        _ if page_size != 0 => {
            return Err(Error::invalid(format!(
                "batch_size_cache is {batch_size_cache} and page_size {page_size}; with pages it must be 0, since block_table names a sequence's pages"
            )));
        }
        _ => check_range("batch_size_cache", batch_size_cache, 1, i32::MAX.into())?,
    }
    check_rotary_sizes(params)
}

fn check_rotary_sizes(params: &flashtune_kv_append_params) -> Result<()> {
    let flashtune_kv_append_params { rotary_dim, head_dim, seqlen_cache, seqlen_rotary, .. } = *params;
    if rotary_dim == 0 {
        return refuse_stray(params);
    }
    if !(2..=head_dim).contains(&rotary_dim) || rotary_dim % 2 != 0 {
        return Err(Error::invalid(format!(
            "rotary_dim is {rotary_dim}; it must be even and from 2 to head_dim, which is {head_dim}, or 0 for no rotation"
        )));
    }
    for (name, flag) in [
        ("rotary_interleaved", params.rotary_interleaved),
        ("rotary_q_at_one_position", params.rotary_q_at_one_position),
    ] {
        check_range(name, flag.into(), 0, 1)?;
    }
    check_range("rotary_reserved", params.rotary_reserved.into(), 0, 0)?;
    check_range("seqlen_rotary", seqlen_rotary, seqlen_cache.max(1), MAX_SEQLEN)
        .map_err(|error| Error::invalid(format!("{}; the lowest is seqlen_cache, or 1", error.message)))?;
    check_range("seqlen_q", params.seqlen_q, 0, MAX_SEQLEN)?;
    check_range("num_heads_q", params.num_heads_q, (params.seqlen_q > 0).into(), i32::MAX.into())
}

/// Without a rotation all of its fields are 0.
fn refuse_stray(params: &flashtune_kv_append_params) -> Result<()> {
    let sizes = [
        ("rotary_dtype", params.rotary_dtype.into()),
        ("rotary_interleaved", params.rotary_interleaved.into()),
        ("rotary_q_at_one_position", params.rotary_q_at_one_position.into()),
        ("rotary_reserved", params.rotary_reserved.into()),
        ("rotary_stride", params.rotary_stride),
        ("seqlen_rotary", params.seqlen_rotary),
        ("seqlen_q", params.seqlen_q),
        ("num_heads_q", params.num_heads_q),
    ];
    if let Some((name, size)) = sizes.into_iter().find(|(_, size): &(_, i64)| *size != 0) {
        return Err(Error::invalid(format!("{name} is {size}; it must be 0, since rotary_dim is 0")));
    }
    let pointers = [
        ("rotary_cos", params.rotary_cos),
        ("rotary_sin", params.rotary_sin),
        ("q.data", params.q.data),
        ("q_rotated.data", params.q_rotated.data.cast_const()),
    ];
    match pointers.into_iter().find(|(_, pointer)| !pointer.is_null()) {
        None => Ok(()),
        Some((name, pointer)) => {
            let pointer = address(pointer);
            Err(Error::invalid(format!("{name} is {pointer}; it must be NULL, since rotary_dim is 0")))
        }
    }
}

pub fn rotary_class(params: &flashtune_kv_append_params, keys: Dtype) -> Result<Option<RotaryClass>> {
    if params.rotary_dim == 0 {
        return Ok(None);
    }
    let table_dtype = dtype("rotary_dtype", params.rotary_dtype)?;
    if table_dtype != keys && table_dtype != Dtype::Fp32 {
        return Err(Error::invalid(format!(
            "rotary_dtype is {}; it must be {}, as dtype is, or fp32",
            table_dtype.name(),
            keys.name()
        )));
    }
    Ok(Some(RotaryClass { dtype: keys, table_dtype, interleaved: params.rotary_interleaved != 0 }))
}

/// The rotation without its queries, and what its tables touch.
pub fn rotary(params: &flashtune_kv_append_params, keys: Dtype, data: Data) -> Result<(Rotary, Tables)> {
    let Some(class) = rotary_class(params, keys)? else { return Ok((Rotary::NONE, Tables::default())) };
    let (half, rows) = (params.rotary_dim / 2, params.seqlen_rotary);
    let (cos, sin) = (params.rotary_cos, params.rotary_sin);
    let is_unplaced = cos.is_null() && sin.is_null() && params.rotary_stride == 0 && data == Data::Optional;
    let stride = if is_unplaced { half } else { params.rotary_stride };
    if stride < half {
        return Err(Error::invalid(format!(
            "rotary_stride is {stride}; it must be at least {half}, which is rotary_dim / 2"
        )));
    }
    let check = |name, pointer: *const c_void| match class.table_dtype {
        Dtype::Fp32 => Array::new(name, pointer.cast::<f32>(), half).in_rows((rows, stride)).check_required(data, None),
        dtype => {
            Array::of_16_bits(name, pointer, dtype.name(), half).in_rows((rows, stride)).check_required(data, None)
        }
    };
    let footprints = [check("rotary_cos", cos)?, check("rotary_sin", sin)?];
    let element = class.table_dtype.bytes() as i64;
    let layout_quantities = [half, stride, cos as i64 / element, sin as i64 / element];
    let rotary = Rotary {
        cos,
        sin,
        stride,
        seqlen: rows,
        dim: params.rotary_dim,
        num_heads_q: params.num_heads_q,
        seqlen_q: params.seqlen_q,
        q_at_one_position: params.rotary_q_at_one_position != 0,
        ..Rotary::NONE
    };
    Ok((rotary, Tables { footprints, layout_quantities }))
}

/// The bytes of seqused_new and cache_batch_idx.
pub fn arrays(params: &flashtune_kv_append_params, data: Data) -> Result<[Option<Footprint>; 2]> {
    let seqused_new = Array::new("seqused_new", params.seqused_new, params.batch_size).check()?;
    let has_entries = if params.batch_size_cache > 0 { data } else { Data::Optional };
    let entries = Array::new("cache_batch_idx", params.cache_batch_idx, params.batch_size);
    Ok([seqused_new, entries.check_required(has_entries, None)?])
}
