//! The tensors of a call, in order, each compared with the shape that it must have.
//!
//! Under `jax.vmap`, XLA puts one more dimension in front of every tensor. Those leading dimensions
//! belong to the batch here.

use super::c_api::{
    DTYPE_BF16, DTYPE_F8E4M3FN, DTYPE_F8E5M2, DTYPE_F16, DTYPE_F32, DTYPE_PRED, DTYPE_S8, DTYPE_S32, DTYPE_S64,
    DTYPE_U8, DTYPE_U32,
};
use super::failure::{Failure, Result};
use super::frame::Buffer;
use crate::capi::types::{flashtune_scores_tensor, flashtune_tensor};

/// The arguments or the results that are left.
pub struct Operands<'a> {
    kind: &'static str,
    buffers: Vec<Buffer<'a>>,
    taken: usize,
}

impl<'a> Operands<'a> {
    pub fn new(kind: &'static str, buffers: Vec<Buffer<'a>>) -> Self {
        Operands { kind, buffers, taken: 0 }
    }

    pub fn take(&mut self, name: &str) -> Result<Buffer<'a>> {
        let taken = self.buffers.get(self.taken).copied();
        self.taken += 1;
        taken.ok_or_else(|| {
            let (kind, count) = (self.kind, self.buffers.len());
            Failure::invalid(format!("the call has {count} {kind}s; {name} must be {kind} {}", self.taken - 1))
        })
    }

    /// The next one, which stays.
    pub fn peek(&self, ahead: usize) -> Option<&Buffer<'a>> {
        self.buffers.get(self.taken + ahead)
    }

    pub fn has_more(&self) -> bool {
        self.taken < self.buffers.len()
    }

    pub fn expect_end(&self) -> Result<()> {
        match self.has_more() {
            false => Ok(()),
            true => {
                let (kind, count) = (self.kind, self.buffers.len());
                Err(Failure::invalid(format!("the call has {count} {kind}s; it must have {}", self.taken)))
            }
        }
    }

    /// The rest of the arguments are initial values of the last of `results`, with which they share
    /// their memory.
    pub fn expect_initial_values(&mut self, results: &Operands) -> Result<()> {
        let (rest, results) = (&self.buffers[self.taken.min(self.buffers.len())..], &results.buffers);
        let first = results.len().checked_sub(rest.len()).ok_or_else(|| {
            Failure::invalid(format!("the call has {} arguments; it must have {}", self.buffers.len(), self.taken))
        })?;
        for (index, (initial, result)) in rest.iter().zip(&results[first..]).enumerate() {
            if initial.dims != result.dims || initial.dtype != result.dtype || initial.data != result.data {
                return Err(Failure::invalid(format!(
                    "argument {} must be the initial value of result {} and alias it",
                    self.taken + index,
                    first + index
                )));
            }
        }
        self.taken = self.buffers.len();
        Ok(())
    }
}

/// The dimensions in front of those that `name` has by itself.
pub fn leading<'a>(name: &str, buffer: &Buffer<'a>, own: usize) -> Result<&'a [i64]> {
    buffer.dims.len().checked_sub(own).map(|count| &buffer.dims[..count]).ok_or_else(|| {
        Failure::invalid(format!("{name} has shape {:?}; it must have at least {own} dimensions", buffer.dims))
    })
}

/// Refuses a tensor of another dtype or shape.
pub fn expect(name: &str, buffer: &Buffer, dtypes: &[i32], leading: &[i64], own: &[i64]) -> Result<()> {
    expect_dtype(name, buffer, dtypes)?;
    let expected = [leading, own].concat();
    match buffer.dims == expected {
        true => Ok(()),
        false => Err(Failure::invalid(format!("{name} has shape {:?}; it must be {expected:?}", buffer.dims))),
    }
}

fn expect_dtype(name: &str, buffer: &Buffer, dtypes: &[i32]) -> Result<()> {
    if dtypes.contains(&buffer.dtype) {
        return Ok(());
    }
    let allowed: Vec<String> = dtypes.iter().map(|dtype| dtype_name(*dtype)).collect();
    let is = dtype_name(buffer.dtype);
    Err(Failure::invalid(format!("{name} is {is}; it must be {}", allowed.join(" or "))))
}

/// A contiguous tensor (batch, seqlen, heads, dim), or (total, heads, dim).
pub fn tensor(buffer: &Buffer) -> Result<flashtune_tensor> {
    let sizes = &buffer.dims[buffer.dims.len() - 3..];
    let stride_seqlen = product(&sizes[1..])?;
    let stride_batch = product(sizes)?;
    Ok(flashtune_tensor { data: buffer.data, stride_batch, stride_seqlen, stride_head: sizes[2] })
}

/// A tensor that broadcasts to (batch, heads, seqlen_q, seqlen_k).
pub fn scores(
    name: &str,
    buffer: &Buffer,
    dtypes: &[i32],
    leading: &[i64],
    full: [i64; 4],
) -> Result<flashtune_scores_tensor> {
    let strides = broadcast(name, buffer, dtypes, leading, full)?;
    let [stride_batch, stride_head, stride_seqlen_q, stride_seqlen_k] = strides;
    Ok(flashtune_scores_tensor { data: buffer.data, stride_batch, stride_head, stride_seqlen_q, stride_seqlen_k })
}

/// The strides of a tensor that broadcasts to `full`, whose first dimension is the batch. With
/// leading dimensions the batch must not be broadcast, since one stride must lead through all of
/// them.
pub fn broadcast<const N: usize>(
    name: &str,
    buffer: &Buffer,
    dtypes: &[i32],
    leading: &[i64],
    full: [i64; N],
) -> Result<[i64; N]> {
    expect_dtype(name, buffer, dtypes)?;
    let dims = buffer.dims.strip_prefix(leading).filter(|dims| dims.len() == N);
    let broadcasts = |dims: &&[i64]| dims.iter().zip(full).all(|(size, whole)| *size == whole || *size == 1);
    let Some(dims) = dims.filter(broadcasts) else {
        let shape = buffer.dims;
        return Err(Failure::invalid(format!(
            "{name} has shape {shape:?}; it must broadcast to {leading:?} + {full:?}"
        )));
    };
    if !leading.is_empty() && dims[0] != full[0] {
        let batch = full[0];
        return Err(Failure::invalid(format!("{name} has a batch of 1; under vmap it must be {batch}, that of q")));
    }
    let mut strides = [0; N];
    for (axis, stride) in strides.iter_mut().enumerate() {
        let is_shared = dims[axis] == 1 && (axis > 0 || leading.is_empty());
        *stride = if is_shared { 0 } else { product(&dims[axis + 1..])? };
    }
    Ok(strides)
}

pub fn product(sizes: &[i64]) -> Result<i64> {
    sizes
        .iter()
        .try_fold(1_i64, |product, size| product.checked_mul(*size))
        .ok_or_else(|| Failure::invalid(format!("the product of the sizes {sizes:?} must be below 2^63")))
}

pub fn dtype_name(dtype: i32) -> String {
    match dtype {
        DTYPE_PRED => "bool".into(),
        DTYPE_S8 => "int8".into(),
        DTYPE_S32 => "int32".into(),
        DTYPE_S64 => "int64".into(),
        DTYPE_U8 => "uint8".into(),
        DTYPE_U32 => "uint32".into(),
        DTYPE_F16 => "float16".into(),
        DTYPE_F32 => "float32".into(),
        DTYPE_BF16 => "bfloat16".into(),
        DTYPE_F8E5M2 => "float8_e5m2".into(),
        DTYPE_F8E4M3FN => "float8_e4m3fn".into(),
        other => format!("XLA's dtype {other}"),
    }
}
