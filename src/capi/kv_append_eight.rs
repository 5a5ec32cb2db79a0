//! The checks of what `flashtune_kv_append` does for a cache of 8 bits or int4: its type and its
//! scales.

use super::accesses::Accesses;
use super::array::Array;
use super::dtypes::{eight, four};
use super::kv_append_params::flashtune_kv_append_params;
use super::operand::{Access, Data};
use super::types::flashtune_tensor;
use crate::call::TensorRef;
use crate::error::{Error, Result};
use crate::ops::kv_append::{AppendScales, CacheFormat, EightClass};
use crate::problem::{Dtype, check_range};

/// The types of a cache of 8 bits or int4 and of the rows that it gets; None for other caches.
pub fn class(params: &flashtune_kv_append_params, dtype: Dtype) -> Result<Option<EightClass>> {
    let cache_dtype = params.cache_dtype;
    if [0, params.dtype].contains(&cache_dtype) {
        refuse_stray(params, "the cache has not 8 bits")?;
        return Ok(None);
    }
    if let Some(four) = four(cache_dtype).filter(|_| dtype != Dtype::Fp32) {
        refuse_stray(params, "int4 rows hold their scales")?;
        for (name, dim) in [("head_dim", params.head_dim), ("head_dim_v", params.head_dim_v)] {
            if dim % four.group() != 0 {
                let (cache, group) = (four.name(), four.group());
                return Err(Error::invalid(format!(
                    "{name} is {dim} and the cache {cache}; it must be a multiple of the {group} columns that share a scale"
                )));
            }
        }
        return Ok(Some(EightClass { dtype, keys: CacheFormat::Four(four) }));
    }
    let keys = eight(cache_dtype).filter(|_| dtype != Dtype::Fp32);
    let keys = keys.ok_or_else(|| {
        Error::invalid(format!(
            "cache_dtype is {cache_dtype} and dtype {}; cache_dtype must be 0 or dtype or, if dtype is FLASHTUNE_DTYPE_FP16 (1) or _BF16 (2), FLASHTUNE_DTYPE_E4M3 (4), _E5M2 (5), _INT8 (6), _INT4_GROUP32 (7) or _INT4_GROUP64 (8)",
            params.dtype
        ))
    })?;
    check_range("computes_descale", params.computes_descale.into(), 0, 1)?;
    check_range("keys_per_descale", params.keys_per_descale, params.computes_descale.into(), 1)?;
    Ok(Some(EightClass { dtype, keys: CacheFormat::Eight(keys) }))
}

/// Without a cache of 8 bits all of its fields are 0, for this reason.
fn refuse_stray(params: &flashtune_kv_append_params, reason: &str) -> Result<()> {
    let numbers = [("computes_descale", params.computes_descale.into()), ("keys_per_descale", params.keys_per_descale)];
    if let Some((name, number)) = numbers.into_iter().find(|(_, number)| *number != 0) {
        return Err(Error::invalid(format!("{name} is {number}; it must be 0, since {reason}")));
    }
    let tensors = [("k_descale", &params.k_descale), ("v_descale", &params.v_descale)];
    match tensors.into_iter().find(|(_, tensor)| !tensor.data.is_null()) {
        None => Ok(()),
        Some((name, tensor)) => {
            Err(Error::invalid(format!("{name}.data is {:p}; it must be NULL, since {reason}", tensor.data)))
        }
    }
}

/// The scales of a cache with these entries and rows.
pub fn scales(
    params: &flashtune_kv_append_params,
    [entries, rows]: [i64; 2],
    has_eight: bool,
    data: Data,
    accesses: &mut Accesses,
) -> Result<AppendScales> {
    if !has_eight {
        return Ok(AppendScales::NONE);
    }
    let (of_keys, computes) = (params.keys_per_descale == 1, params.computes_descale == 1);
    let extents = if of_keys { [entries, rows] } else { [params.batch_size, 1] };
    let extents = [extents[0], extents[1], params.num_heads_kv];
    for (name, scales) in [("k_descale", &params.k_descale), ("v_descale", &params.v_descale)] {
        check(name, scales, extents, computes, data, accesses)?;
    }
    let (k, v) = (TensorRef::from(params.k_descale), TensorRef::from(params.v_descale));
    Ok(AppendScales { k, v, of_keys, computes })
}

/// Checks an array of scales (entries, positions, heads).
pub fn check(
    name: &'static str,
    scales: &flashtune_tensor,
    extents: [i64; 3],
    is_written: bool,
    data: Data,
    accesses: &mut Accesses,
) -> Result<()> {
    let strides = [scales.stride_batch, scales.stride_seqlen, scales.stride_head];
    let is_empty = extents.contains(&0);
    for ((dim, stride), extent) in ["batch", "seqlen", "head"].into_iter().zip(strides).zip(extents) {
        let is_unplaced = scales.data.is_null() && data == Data::Optional;
        if stride < 0 || is_written && stride == 0 && extent > 1 && !is_unplaced && !is_empty {
            let least = if is_written { "above 0, since it is written" } else { "0 or more elements" };
            return Err(Error::invalid(format!("{name}.stride_{dim} is {stride}; it must be {least}")));
        }
    }
    let of_dim = |dim: usize| if strides[dim] == 0 { (1, 0) } else { (extents[dim], strides[dim]) };
    let array = Array::new(name, scales.data.cast_const().cast::<f32>(), i64::from(!is_empty));
    let footprint = array.in_dims([of_dim(0), of_dim(1), of_dim(2)]).check_required(data, None)?;
    if is_written && footprint.as_ref().is_some_and(super::overlap::Footprint::overlaps_itself) {
        return Err(Error::invalid(format!(
            "{name} is written, but its strides put several of its elements in one place"
        )));
    }
    accesses.add(if is_written { Access::Written } else { Access::Read }, footprint);
    Ok(())
}
