//! The params of quantising and rotating, from the buffers and attributes of a call.
//!
//! The arguments are x; then descale, if it is given. The results are the numbers; then descale, if
//! it is computed. descale is (batch, blocks, groups of heads). A result of x's dtype holds rotated
//! rows, and neither the arguments nor the results have a descale then.

use super::c_api::{DTYPE_BF16, DTYPE_F8E4M3FN, DTYPE_F8E5M2, DTYPE_F16, DTYPE_F32, DTYPE_S8};
use super::failure::{Failure, Result};
use super::frame::{Buffer, Frame};
use super::operands::{Operands, expect, leading, product, tensor};
use super::options::{Options, narrow};
use super::params::zeroed;
use crate::capi::quantize::flashtune_quantize_params;
use crate::capi::types::*;

pub fn quantize(frame: &Frame, options: &Options) -> Result<flashtune_quantize_params> {
    let mut args = Operands::new("argument", frame.args()?);
    let mut results = Operands::new("result", frame.results()?);
    let (x, out) = (args.take("x")?, results.take("out")?);
    let leading = leading("x", &x, 4)?;
    let &[batch, seqlen, heads, head_dim] = &x.dims[leading.len()..] else { unreachable!("four are left") };
    expect("out", &out, &[x.dtype, DTYPE_F8E4M3FN, DTYPE_F8E5M2, DTYPE_S8], &[], x.dims)?;
    let mut params = zeroed::<flashtune_quantize_params>();
    params.struct_size = size_of::<flashtune_quantize_params>() as u64;
    params.dtype = match x.dtype {
        DTYPE_F16 => FLASHTUNE_DTYPE_FP16,
        DTYPE_BF16 => FLASHTUNE_DTYPE_BF16,
        other => return Err(Failure::invalid(format!("x has XLA's dtype {other}; it must be F16 or BF16"))),
    };
    params.out_dtype = match out.dtype {
        DTYPE_F8E4M3FN => FLASHTUNE_DTYPE_E4M3,
        DTYPE_F8E5M2 => FLASHTUNE_DTYPE_E5M2,
        DTYPE_S8 => FLASHTUNE_DTYPE_INT8,
        _ => params.dtype,
    };
    params.batch_size = product(leading)?.checked_mul(batch).unwrap_or(i64::MAX);
    (params.seqlen, params.num_heads, params.head_dim) = (seqlen, heads, head_dim);
    (params.x, params.out) = (tensor(&x)?.into(), tensor(&out)?);
    (params.rotation, params.rotation_seed) = (narrow("rotation", options.rotation)?, options.rotation_seed);
    if out.dtype != x.dtype {
        let (keys, group) = (options.keys_per_descale, options.heads_per_descale);
        (params.keys_per_descale, params.heads_per_descale) = (keys, group);
        params.computes_descale = results.has_more().into();
        let descale = if results.has_more() { results.take("descale")? } else { args.take("descale")? };
        params.descale = scales(&descale, leading, batch, seqlen, heads, [keys, group])?;
    }
    args.expect_end()?;
    results.expect_end()?;
    Ok(params)
}

/// The scales (batch, blocks, groups), a scale for `keys` rows and `group` heads.
fn scales(
    descale: &Buffer,
    leading: &[i64],
    batch: i64,
    seqlen: i64,
    heads: i64,
    [keys, group]: [i64; 2],
) -> Result<flashtune_tensor> {
    if keys < 0 || group < 1 || heads % group != 0 {
        return Err(Failure::invalid(format!(
            "attributes keys_per_descale and heads_per_descale are {keys} and {group}; the latter must divide {heads}"
        )));
    }
    let (blocks, groups) = (if keys == 0 { 1 } else { seqlen / keys + i64::from(seqlen % keys != 0) }, heads / group);
    expect("descale", descale, &[DTYPE_F32], leading, &[batch, blocks, groups])?;
    let stride_batch = product(&[blocks, groups])?;
    Ok(flashtune_tensor { data: descale.data, stride_batch, stride_seqlen: groups, stride_head: 1 })
}
