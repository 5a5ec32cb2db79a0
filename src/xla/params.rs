//! The params of a pass, from the buffers and attributes of a call.
//!
//! Forward pass: the arguments are q, k and v; then seed, if dropout_p is not 0; then one tensor
//! for each feature, in ascending order of the bits. The results are out, and lse if it is wanted.
//!
//! Backward pass: the arguments are q, k, v, out, lse and dout; then dlse with its feature; then
//! seed and the features as above. The results are dq, dk and dv; then dsinks with sinks; then
//! dbias with its feature.
//!
//! Further arguments are initial values of the last results, which alias them. Rows that no
//! sequence uses keep those values, and dbias is added to its own.

use super::c_api::{DTYPE_BF16, DTYPE_F16, DTYPE_F32, DTYPE_PRED, DTYPE_S32, DTYPE_U8, DTYPE_U32};
use super::failure::{Failure, Result, check};
use super::frame::{Buffer, Frame};
use super::operands::{Operands, expect, leading, product, scores, tensor};
use super::options::{Options, narrow};
use crate::capi::backward::flashtune_backward_params_from_forward;
use crate::capi::types::*;
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
    | OF_BACKWARD;
const OF_BACKWARD: u64 = FLASHTUNE_FEATURE_DBIAS | FLASHTUNE_FEATURE_DLSE;
/// The known features whose tensors have no batch dimension of q's kind.
const WITHOUT_BATCH: u64 =
    FLASHTUNE_FEATURE_ALIBI | FLASHTUNE_FEATURE_SINKS | FLASHTUNE_FEATURE_CU_SEQLENS_Q | FLASHTUNE_FEATURE_CU_SEQLENS_K;

/// The sizes that the shapes of other tensors follow from.
struct Sizes<'a> {
    leading: &'a [i64],
    /// The number of sequences, without the leading dimensions.
    batch: i64,
    heads_q: i64,
    seqlen_q: i64,
    seqlen_k: i64,
    /// The shape of out, and of q and its gradient but for their last dimension.
    out: Vec<i64>,
    lse: Vec<i64>,
}

pub fn forward(frame: &Frame, options: &Options) -> Result<flashtune_forward_params> {
    let (mut args, mut results) = operands(frame)?;
    let [q, k, v] = [args.take("q")?, args.take("k")?, args.take("v")?];
    if options.features & OF_BACKWARD != 0 {
        return Err(Failure::invalid("attribute features has DBIAS or DLSE, which the backward pass alone has"));
    }
    let (mut params, sizes) = problem(options, &q, &k, &v, &args)?;
    features(&mut params, options, &sizes, &q, &mut args)?;
    let out = results.take("out")?;
    expect("out", &out, &[q.dtype], sizes.leading, &sizes.out)?;
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
    let (mut of_forward, sizes) = problem(options, &q, &k, &v, &args)?;
    let bias_shape = features(&mut of_forward, options, &sizes, &q, &mut args)?;
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
fn problem<'a>(
    options: &Options,
    q: &Buffer<'a>,
    k: &Buffer<'a>,
    v: &Buffer<'a>,
    rest: &Operands<'a>,
) -> Result<(flashtune_forward_params, Sizes<'a>)> {
    let unknown = options.features & !KNOWN;
    if unknown != 0 {
        return Err(Failure::invalid(format!(
            "attribute features has bits {unknown:#x}; the XLA face does not take pages, block masks and starts of keys"
        )));
    }
    let is_packed = |bit: u64| options.features & bit != 0;
    let (packs_q, packs_k) = (is_packed(FLASHTUNE_FEATURE_CU_SEQLENS_Q), is_packed(FLASHTUNE_FEATURE_CU_SEQLENS_K));
    let own = |packed: bool| if packed { 3 } else { 4 };
    let leading = leading("q", q, own(packs_q))?;
    let dtype = match q.dtype {
        DTYPE_F16 => FLASHTUNE_DTYPE_FP16,
        DTYPE_BF16 => FLASHTUNE_DTYPE_BF16,
        DTYPE_F32 => FLASHTUNE_DTYPE_FP32,
        other => {
            return Err(Failure::invalid(format!("q has XLA's dtype {other}; it must be F16, BF16 or F32")));
        }
    };
    for (name, buffer) in [("k", k), ("v", v)] {
        let dims = buffer.dims.strip_prefix(leading).filter(|dims| dims.len() == own(packs_k));
        if dims.is_none() || buffer.dtype != q.dtype {
            let (shape, of_q) = (buffer.dims, q.dims);
            return Err(Failure::invalid(format!(
                "{name} has shape {shape:?}; its dtype and its number of dimensions must fit q, {of_q:?}"
            )));
        }
    }
    let [of_q, of_k, of_v] = [q, k, v].map(|buffer| &buffer.dims[leading.len()..]);
    let last = |dims: &[i64]| [dims[dims.len() - 3], dims[dims.len() - 2], dims[dims.len() - 1]];
    let ([rows_q, heads_q, head_dim], [rows_k, heads_kv, _], [.., head_dim_v]) = (last(of_q), last(of_k), last(of_v));
    let batch = match (packs_q, packs_k) {
        (false, _) => of_q[0],
        (true, false) => of_k[0],
        (true, true) => sequences(options, rest)?,
    };
    let mut expected_k = if packs_k { vec![] } else { vec![batch] };
    expected_k.extend([rows_k, heads_kv, head_dim]);
    expect("k", k, &[q.dtype], leading, &expected_k)?;
    *expected_k.last_mut().expect("it has four sizes") = head_dim_v;
    expect("v", v, &[q.dtype], leading, &expected_k)?;
    if !leading.is_empty() && options.features & WITHOUT_BATCH != 0 || !leading.is_empty() && options.dropout_p != 0.0 {
        return Err(Failure::invalid(format!(
            "q has shape {:?}; alibi_slopes, sinks, cu_seqlens and dropout do not take more dimensions",
            q.dims
        )));
    }
    let (seqlen_q, seqlen_k) =
        (if packs_q { options.seqlen_q } else { rows_q }, if packs_k { options.seqlen_k } else { rows_k });
    let mut params = zeroed::<flashtune_forward_params>();
    params.struct_size = size_of::<flashtune_forward_params>() as u64;
    params.dtype = dtype;
    params.causal = narrow("causal", options.causal)?;
    params.batch_size = product(leading)?.checked_mul(batch).unwrap_or(i64::MAX);
    params.num_heads_q = heads_q;
    params.num_heads_kv = heads_kv;
    params.seqlen_q = seqlen_q;
    params.seqlen_k = seqlen_k;
    params.head_dim = head_dim;
    params.head_dim_v = head_dim_v;
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
    params.total_q = if packs_q { rows_q } else { 0 };
    params.total_k = if packs_k { rows_k } else { 0 };
    let out = [&of_q[..of_q.len() - 1], &[head_dim_v]].concat();
    let lse = if packs_q { vec![heads_q, rows_q] } else { vec![batch, heads_q, rows_q] };
    Ok((params, Sizes { leading, batch, heads_q, seqlen_q, seqlen_k, out, lse }))
}

/// The number of sequences of a call whose tensors are all packed: cu_seqlens_q says it. `rest` are
/// the arguments from seed on.
fn sequences(options: &Options, rest: &Operands) -> Result<i64> {
    let before = [FLASHTUNE_FEATURE_ALIBI, FLASHTUNE_FEATURE_BIAS, FLASHTUNE_FEATURE_MASK, FLASHTUNE_FEATURE_SINKS];
    let before = before.iter().filter(|bit| options.features & **bit != 0).count();
    let lengths = rest.peek(before + usize::from(options.dropout_p != 0.0));
    match lengths.map(|lengths| lengths.dims) {
        Some(&[size]) if size > 0 => Ok(size - 1),
        other => Err(Failure::invalid(format!("cu_seqlens_q has shape {other:?}; it must be [batch + 1]"))),
    }
}

/// Takes the operands of dropout and of the features, and returns the shape of bias.
fn features<'a>(
    params: &mut flashtune_forward_params,
    options: &Options,
    sizes: &Sizes,
    q: &Buffer<'a>,
    args: &mut Operands<'a>,
) -> Result<&'a [i64]> {
    if options.dropout_p != 0.0 {
        let seed = args.take("seed")?;
        expect("seed", &seed, &[DTYPE_U32], &[], &[4])?;
        params.dropout_seed_ptr = seed.data.cast_const().cast();
        // The second half is the offset. While XLA initialises, both stay NULL.
        let is_null = seed.data.is_null();
        params.dropout_offset_ptr = if is_null { std::ptr::null() } else { params.dropout_seed_ptr.wrapping_add(1) };
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
        params.bias = scores("bias", &bias, &[q.dtype], leading, full)?.into();
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
    for (name, bit, more, place) in lengths {
        if has(bit) {
            let array = args.take(name)?;
            expect(name, &array, &[DTYPE_S32], leading, &[sizes.batch + more])?;
            *place = array.data.cast_const().cast();
        }
    }
    Ok(bias_shape)
}

/// A struct of zeros, the default of every optional field.
fn zeroed<T: Params>() -> T {
    // SAFETY: the structs hold integers, floats and raw pointers, of which zeros are valid.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

trait Params {}
impl Params for flashtune_forward_params {}
impl Params for flashtune_backward_params {}
