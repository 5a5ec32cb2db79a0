//! The params of a pass, from the buffers and attributes of a call.
//!
//! Forward pass: the arguments are q, k and v; then seed, if dropout_p is not 0; then the tensors
//! of each feature, in ascending order of the bits; then q_descale if q is e4m3; then k_descale and
//! v_descale if k and v have 8 bits. A block mask has num_blocks and indices, and with
//! has_full_blocks those of full blocks. The results are out, and lse if it is wanted.
//!
//! Backward pass: the arguments are q, k, v, out, lse and dout; then dlse with its feature; then
//! seed and the features as above. The results are dq, dk and dv; then dsinks with sinks; then
//! dbias with its feature.
//!
//! Further arguments are initial values of the last results, which alias them. Rows that no
//! sequence uses keep those values, and dbias is added to its own.

use super::c_api::DTYPE_F32;
use super::failure::{Failure, Result, check};
use super::features;
use super::frame::{Buffer, Frame};
use super::operands::{Operands, expect, product, scores, tensor};
use super::options::{Options, narrow};
use super::sizes::Sizes;
use super::types::Types;
use crate::capi::backward::flashtune_backward_params_from_forward;
use crate::capi::quantize::flashtune_quantize_params;
use crate::capi::types::*;
use crate::problem::Pass;
use std::mem::MaybeUninit;

/// The features whose operands this face takes.
const KNOWN: u64 = FLASHTUNE_FEATURE_ALIBI
    | FLASHTUNE_FEATURE_BIAS
    | FLASHTUNE_FEATURE_MASK
    | FLASHTUNE_FEATURE_SINKS
    | FLASHTUNE_FEATURE_CU_SEQLENS_Q
    | FLASHTUNE_FEATURE_CU_SEQLENS_K
    | FLASHTUNE_FEATURE_SEQUSED_Q
    | FLASHTUNE_FEATURE_SEQUSED_K
    | FLASHTUNE_FEATURE_MASK_BITS
    | FLASHTUNE_FEATURE_BLOCK_MASK
    | OF_FORWARD
    | OF_BACKWARD;
const OF_FORWARD: u64 = FLASHTUNE_FEATURE_PAGED | FLASHTUNE_FEATURE_CACHE_BATCH_IDX | FLASHTUNE_FEATURE_LEFTPAD_K;
const OF_BACKWARD: u64 = FLASHTUNE_FEATURE_DBIAS | FLASHTUNE_FEATURE_DLSE;
/// The known features whose tensors have no batch dimension of q's kind.
const WITHOUT_BATCH: u64 = FLASHTUNE_FEATURE_ALIBI
    | FLASHTUNE_FEATURE_SINKS
    | FLASHTUNE_FEATURE_CU_SEQLENS_Q
    | FLASHTUNE_FEATURE_CU_SEQLENS_K
    | FLASHTUNE_FEATURE_PAGED
    | FLASHTUNE_FEATURE_CACHE_BATCH_IDX;

pub fn forward(frame: &Frame, options: &Options) -> Result<flashtune_forward_params> {
    let (mut args, mut results) = operands(frame)?;
    let [q, k, v] = [args.take("q")?, args.take("k")?, args.take("v")?];
    if options.features & OF_BACKWARD != 0 {
        return Err(Failure::invalid("attribute features has DBIAS or DLSE, which the backward pass alone has"));
    }
    let out = results.take("out")?;
    let types = Types::of(options, q.dtype, k.dtype, out.dtype)?;
    let sizes = Sizes::of(options, &types, [&q, &k, &v], &out, &args)?;
    let mut params = problem(options, &types, [&q, &k, &v], &sizes)?;
    features::take(&mut params, options, &types, &sizes, Pass::Forward, &mut args)?;
    expect("out", &out, &[types.of_out], sizes.leading, &sizes.out)?;
    params.out = tensor(&out)?;
    if results.has_more() {
        let lse = results.take("lse")?;
        expect("lse", &lse, &[DTYPE_F32], sizes.leading, &sizes.lse)?;
        params.lse = lse.data.cast();
    }
    params.batch_invariant = narrow("batch_invariant", options.batch_invariant)?;
    ended(&mut args, &results)?;
    Ok(params)
}

pub fn backward(frame: &Frame, options: &Options) -> Result<flashtune_backward_params> {
    let (mut args, mut results) = operands(frame)?;
    let [q, k, v, out, lse, dout] =
        [args.take("q")?, args.take("k")?, args.take("v")?, args.take("out")?, args.take("lse")?, args.take("dout")?];
    let has_dlse = options.features & FLASHTUNE_FEATURE_DLSE != 0;
    let dlse = if has_dlse { Some(args.take("dlse")?) } else { None };
    if options.features & OF_FORWARD != 0 {
        return Err(Failure::invalid(
            "attribute features has PAGED, CACHE_BATCH_IDX or LEFTPAD_K, which the forward pass alone has",
        ));
    }
    let types = Types::of(options, q.dtype, k.dtype, out.dtype)?;
    if types.out_dtype != 0 || types.kv_dtype != 0 {
        return Err(Failure::invalid("q, k or v has 8 bits or int4, which have no backward pass"));
    }
    let sizes = Sizes::of(options, &types, [&q, &k, &v], &out, &args)?;
    let mut of_forward = problem(options, &types, [&q, &k, &v], &sizes)?;
    let bias_shape = features::take(&mut of_forward, options, &types, &sizes, Pass::Backward, &mut args)?;
    for (name, buffer) in [("out", &out), ("dout", &dout)] {
        expect(name, buffer, &[q.dtype], sizes.leading, &sizes.out)?;
    }
    for (name, buffer) in [("lse", Some(&lse)), ("dlse", dlse.as_ref())] {
        buffer.map_or(Ok(()), |buffer| expect(name, buffer, &[DTYPE_F32], sizes.leading, &sizes.lse))?;
    }
    of_forward.out = tensor(&out)?;
    of_forward.lse = lse.data.cast();

    let mut params = zeroed::<flashtune_backward_params>();
    params.struct_size = size_of::<flashtune_backward_params>() as u64;
    // SAFETY: both structs live during the call and say their sizes.
    check(unsafe { flashtune_backward_params_from_forward(&of_forward, &mut params) })?;
    params.features |= options.features & OF_BACKWARD;
    params.dout = tensor(&dout)?.into();
    params.dlse = dlse.map_or(std::ptr::null(), |dlse| dlse.data.cast_const().cast());
    for (name, of, place) in [("dq", &q, &mut params.dq), ("dk", &k, &mut params.dk), ("dv", &v, &mut params.dv)] {
        let gradient = results.take(name)?;
        expect(name, &gradient, &[q.dtype], &[], of.dims)?;
        *place = tensor(&gradient)?;
    }
    if options.features & FLASHTUNE_FEATURE_SINKS != 0 {
        let dsinks = results.take("dsinks")?;
        expect("dsinks", &dsinks, &[DTYPE_F32], sizes.leading, &[sizes.heads_q])?;
        params.dsinks = dsinks.data.cast();
    }
    if options.features & FLASHTUNE_FEATURE_DBIAS != 0 {
        let dbias = results.take("dbias")?;
        expect("dbias", &dbias, &[DTYPE_F32], &[], bias_shape)?;
        let full = [sizes.batch, sizes.heads_q, sizes.seqlen_q, sizes.seqlen_k];
        params.dbias = scores("dbias", &dbias, &[DTYPE_F32], sizes.leading, full)?;
        if !args.has_more() {
            return Err(Failure::invalid("the call has no initial value of dbias, which is added to it"));
        }
    }
    params.deterministic = narrow("deterministic", options.deterministic)?;
    ended(&mut args, &results)?;
    Ok(params)
}

fn operands<'a>(frame: &Frame<'a>) -> Result<(Operands<'a>, Operands<'a>)> {
    Ok((Operands::new("argument", frame.args()?), Operands::new("result", frame.results()?)))
}

fn ended(args: &mut Operands, results: &Operands) -> Result<()> {
    results.expect_end()?;
    args.expect_initial_values(results)
}

/// The params of a forward pass without tensors of features and of results.
fn problem(
    options: &Options,
    types: &Types,
    [q, k, v]: [&Buffer; 3],
    sizes: &Sizes,
) -> Result<flashtune_forward_params> {
    let unknown = options.features & !KNOWN;
    if unknown != 0 {
        return Err(Failure::invalid(format!("attribute features has bits {unknown:#x}, which no call has")));
    }
    if !sizes.leading.is_empty() && (options.features & WITHOUT_BATCH != 0 || options.dropout_p != 0.0) {
        return Err(Failure::invalid(format!(
            "q has shape {:?}; alibi_slopes, sinks, cu_seqlens, caches by index or pages and dropout do not take more dimensions",
            q.dims
        )));
    }
    let mut params = zeroed::<flashtune_forward_params>();
    params.struct_size = size_of::<flashtune_forward_params>() as u64;
    (params.dtype, params.kv_dtype, params.out_dtype) = (types.dtype, types.kv_dtype, types.out_dtype);
    params.causal = narrow("causal", options.causal)?;
    params.batch_size = product(sizes.leading)?.checked_mul(sizes.batch).unwrap_or(i64::MAX);
    (params.num_heads_q, params.num_heads_kv) = (sizes.heads_q, sizes.heads_kv);
    (params.seqlen_q, params.seqlen_k) = (sizes.seqlen_q, sizes.seqlen_k);
    (params.head_dim, params.head_dim_v) = (sizes.head_dim, sizes.head_dim_v);
    params.softmax_scale = options.softmax_scale;
    params.dropout_p = options.dropout_p;
    params.q = tensor(q)?.into();
    params.k = tensor(k)?.into();
    params.v = tensor(v)?.into();
    params.features = options.features & !OF_BACKWARD;
    params.window = narrow("window", options.window)?;
    params.softcap = options.softcap;
    params.window_left = options.window_left;
    params.window_right = options.window_right;
    [params.total_q, params.total_k] = sizes.totals;
    params.num_splits = options.num_splits;
    Ok(params)
}

/// A struct of zeros, the default of every optional field.
pub fn zeroed<T: Params>() -> T {
    // SAFETY: the structs hold integers, floats and raw pointers, of which zeros are valid.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

pub trait Params {}
impl Params for flashtune_forward_params {}
impl Params for flashtune_backward_params {}
impl Params for flashtune_quantize_params {}
