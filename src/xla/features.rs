//! The operands after q, k and v: the seed, one or more operands for each feature in ascending
//! order of the bits, and the scales of 8-bit tensors.

use super::c_api::{DTYPE_F32, DTYPE_PRED, DTYPE_S32, DTYPE_U8, DTYPE_U32};
use super::failure::{Failure, Result};
use super::operands::{Operands, broadcast, expect, product, scores};
use super::options::Options;
use super::sizes::Sizes;
use super::types::Types;
use crate::capi::types::*;
use crate::problem::Pass;
use std::ptr::null;

/// Takes the operands of dropout and of the features, and returns the shape of bias.
pub fn take<'a>(
    params: &mut flashtune_forward_params,
    options: &Options,
    types: &Types,
    sizes: &Sizes,
    pass: Pass,
    args: &mut Operands<'a>,
) -> Result<&'a [i64]> {
    if options.dropout_p != 0.0 {
        seed(params, args)?;
    }
    let has = |bit: u64| options.features & bit != 0;
    let (leading, heads) = (sizes.leading, sizes.heads_q);
    let full = [sizes.batch, heads, sizes.seqlen_q, sizes.seqlen_k];
    if has(FLASHTUNE_FEATURE_ALIBI) {
        let slopes = args.take("alibi_slopes")?;
        let own: &[i64] = if slopes.dims.len() == 2 { &[sizes.batch, heads] } else { &[heads] };
        expect("alibi_slopes", &slopes, &[DTYPE_F32], &[], own)?;
        params.alibi_slopes = slopes.data.cast_const().cast();
        params.alibi_stride_batch = if own.len() == 2 { heads } else { 0 };
    }
    let mut bias_shape: &[i64] = &[];
    if has(FLASHTUNE_FEATURE_BIAS) {
        let bias = args.take("bias")?;
        params.bias = scores("bias", &bias, &[types.of_out], leading, full)?.into();
        bias_shape = bias.dims;
    }
    if has(FLASHTUNE_FEATURE_MASK) {
        let mask = args.take("mask")?;
        params.mask = scores("mask", &mask, &[DTYPE_PRED, DTYPE_U8], leading, full)?.into();
    }
    if has(FLASHTUNE_FEATURE_SINKS) {
        let sinks = args.take("sinks")?;
        expect("sinks", &sinks, &[DTYPE_F32], &[], &[heads])?;
        params.sinks = sinks.data.cast_const().cast();
    }
    let lengths: [(&str, u64, i64, &mut *const i32); 4] = [
        ("cu_seqlens_q", FLASHTUNE_FEATURE_CU_SEQLENS_Q, 1, &mut params.cu_seqlens_q),
        ("cu_seqlens_k", FLASHTUNE_FEATURE_CU_SEQLENS_K, 1, &mut params.cu_seqlens_k),
        ("seqused_q", FLASHTUNE_FEATURE_SEQUSED_Q, 0, &mut params.seqused_q),
        ("seqused_k", FLASHTUNE_FEATURE_SEQUSED_K, 0, &mut params.seqused_k),
    ];
    take_vectors(options, sizes, args, lengths)?;
    if has(FLASHTUNE_FEATURE_PAGED) {
        pages(params, sizes, args)?;
    }
    if has(FLASHTUNE_FEATURE_MASK_BITS) {
        let bytes = (sizes.seqlen_k + 7) / 8;
        let mask = args.take("mask_bits")?;
        let strides = scores("mask_bits", &mask, &[DTYPE_U8], leading, [full[0], full[1], full[2], bytes])?;
        if mask.dims.last() != Some(&bytes) {
            return Err(Failure::invalid(format!("mask_bits has shape {:?}; it must end in {bytes}", mask.dims)));
        }
        params.mask = flashtune_scores_tensor { stride_seqlen_k: 1, ..strides }.into();
    }
    if has(FLASHTUNE_FEATURE_BLOCK_MASK) {
        params.block_mask = block_mask(options, sizes, pass, args)?;
    }
    let starts: [(&str, u64, i64, &mut *const i32); 2] = [
        ("cache_batch_idx", FLASHTUNE_FEATURE_CACHE_BATCH_IDX, 0, &mut params.cache_batch_idx),
        ("leftpad_k", FLASHTUNE_FEATURE_LEFTPAD_K, 0, &mut params.leftpad_k),
    ];
    take_vectors(options, sizes, args, starts)?;
    if has(FLASHTUNE_FEATURE_CACHE_BATCH_IDX) {
        params.batch_size_cache = sizes.rows_of_keys[0];
    }
    scales(params, options, types, sizes, args)?;
    Ok(bias_shape)
}

fn seed(params: &mut flashtune_forward_params, args: &mut Operands) -> Result<()> {
    let seed = args.take("seed")?;
    expect("seed", &seed, &[DTYPE_U32], &[], &[4])?;
    params.dropout_seed_ptr = seed.data.cast_const().cast();
    // The second half is the offset. While XLA initialises, both stay NULL.
    let is_null = seed.data.is_null();
    params.dropout_offset_ptr = if is_null { null() } else { params.dropout_seed_ptr.wrapping_add(1) };
    Ok(())
}

/// Takes int32 arrays of so many elements more than sequences. Each is (name, bit, more, field).
fn take_vectors<const N: usize>(
    options: &Options,
    sizes: &Sizes,
    args: &mut Operands,
    arrays: [(&str, u64, i64, &mut *const i32); N],
) -> Result<()> {
    for (name, bit, more, place) in arrays {
        if options.features & bit != 0 {
            let array = args.take(name)?;
            expect(name, &array, &[DTYPE_S32], sizes.leading, &[sizes.batch + more])?;
            *place = array.data.cast_const().cast();
        }
    }
    Ok(())
}

fn pages(params: &mut flashtune_forward_params, sizes: &Sizes, args: &mut Operands) -> Result<()> {
    let table = args.take("block_table")?;
    let columns = table.dims.last().copied().unwrap_or(0);
    expect("block_table", &table, &[DTYPE_S32], &[], &[sizes.batch, columns])?;
    let [num_pages, page_size] = sizes.rows_of_keys;
    if columns.checked_mul(page_size).is_none_or(|keys| keys < sizes.seqlen_k) {
        return Err(Failure::invalid(format!(
            "attribute seqlen_k is {}; block_table has {columns} pages of {page_size} keys for a sequence",
            sizes.seqlen_k
        )));
    }
    (params.block_table, params.block_table_stride) = (table.data.cast_const().cast(), columns);
    (params.num_pages, params.page_size) = (num_pages, page_size);
    Ok(())
}

/// The lists of this pass: its rows are blocks of queries in the forward pass and of keys in the
/// backward pass.
fn block_mask(options: &Options, sizes: &Sizes, pass: Pass, args: &mut Operands) -> Result<flashtune_block_mask> {
    let Options { block_q, block_k, .. } = *options;
    let (seqlen, block) = match pass {
        Pass::Forward => (sizes.seqlen_q, block_q),
        Pass::Backward => (sizes.seqlen_k, block_k),
    };
    if block_q <= 0 || block_k <= 0 {
        return Err(Failure::invalid(format!(
            "attributes block_q and block_k are {block_q} and {block_k}; both must be above 0"
        )));
    }
    let rows = seqlen / block + i64::from(seqlen % block != 0);
    let mut mask = flashtune_block_mask {
        block_q,
        block_k,
        num_blocks: null(),
        indices: null(),
        full_num_blocks: null(),
        full_indices: null(),
        num_blocks_stride_batch: 0,
        num_blocks_stride_head: 0,
        indices_stride_batch: 0,
        indices_stride_head: 0,
        indices_stride_row: 0,
        max_blocks: 0,
    };
    let full = [sizes.batch, sizes.heads_q, rows];
    let mut first: Option<&[i64]> = None;
    let has_full = options.has_full_blocks != 0;
    for (name, counts, indices) in [
        ("block_mask", &mut mask.num_blocks, &mut mask.indices),
        ("block_mask.full", &mut mask.full_num_blocks, &mut mask.full_indices),
    ] {
        if first.is_some() && !has_full {
            break;
        }
        let (of_counts, of_indices) = (args.take(name)?, args.take(name)?);
        let strides = broadcast(name, &of_counts, &[DTYPE_S32], sizes.leading, full)?;
        let max_blocks = of_indices.dims.last().copied().unwrap_or(0);
        let own = &of_counts.dims[sizes.leading.len()..];
        expect(name, &of_indices, &[DTYPE_S32], sizes.leading, &[own, &[max_blocks]].concat())?;
        if own[2] != rows || *first.get_or_insert(of_indices.dims) != of_indices.dims {
            let shape = of_indices.dims;
            return Err(Failure::invalid(format!(
                "{name} has lists of shape {shape:?}; full blocks have the shape of the others, with {rows} rows"
            )));
        }
        (*counts, *indices) = (of_counts.data.cast_const().cast(), of_indices.data.cast_const().cast());
        [mask.num_blocks_stride_batch, mask.num_blocks_stride_head, _] = strides;
        mask.indices_stride_batch = product(&[strides[0], max_blocks])?;
        mask.indices_stride_head = product(&[strides[1], max_blocks])?;
        (mask.indices_stride_row, mask.max_blocks) = (max_blocks, max_blocks);
    }
    Ok(mask)
}

/// fp32 arrays (sequences, rows, heads of k), of which each size may be 1.
fn scales(
    params: &mut flashtune_forward_params,
    options: &Options,
    types: &Types,
    sizes: &Sizes,
    args: &mut Operands,
) -> Result<()> {
    let Sizes { leading, batch, heads_kv, seqlen_k, rows_of_keys, .. } = *sizes;
    let [of_q, of_keys] = types.has_scales();
    let (entries, rows) = match options.keys_per_descale {
        0 => (batch, 1),
        1 => (rows_of_keys[0], rows_of_keys[1]),
        128 => (batch, seqlen_k / 128 + i64::from(seqlen_k % 128 != 0)),
        other => {
            return Err(Failure::invalid(format!("attribute keys_per_descale is {other}; it must be 0, 1 or 128")));
        }
    };
    let (of_heads, of_rows) = ([batch, 1, heads_kv], [entries, rows, heads_kv]);
    for (name, is_used, full, place) in [
        ("q_descale", of_q, of_heads, &mut params.q_descale),
        ("k_descale", of_keys, of_rows, &mut params.k_descale),
        ("v_descale", of_keys, of_rows, &mut params.v_descale),
    ] {
        if is_used {
            let array = args.take(name)?;
            let [stride_batch, stride_seqlen, stride_head] = broadcast(name, &array, &[DTYPE_F32], leading, full)?;
            let data = array.data.cast_const();
            *place = flashtune_const_tensor { data, stride_batch, stride_seqlen, stride_head };
        }
    }
    params.keys_per_descale = options.keys_per_descale;
    Ok(())
}
