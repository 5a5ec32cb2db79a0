//! The sizes of a call, from the shapes of q, k, v and out. The shapes of all other tensors follow
//! from them.

use super::failure::{Failure, Result};
use super::frame::Buffer;
use super::operands::{Operands, expect, leading};
use super::options::Options;
use super::types::Types;
use crate::capi::types::*;

pub struct Sizes<'a> {
    /// The dimensions that `jax.vmap` puts in front.
    pub leading: &'a [i64],
    /// The number of sequences, without the leading dimensions.
    pub batch: i64,
    pub heads_q: i64,
    pub heads_kv: i64,
    pub seqlen_q: i64,
    pub seqlen_k: i64,
    pub head_dim: i64,
    pub head_dim_v: i64,
    /// Rows of packed q and k; 0 elsewhere.
    pub totals: [i64; 2],
    /// The batch entries or pages of k, 1 if it is packed, and the rows of each.
    pub rows_of_keys: [i64; 2],
    /// The shape of out. q and its gradient have it too, except for the last dimension.
    pub out: Vec<i64>,
    pub lse: Vec<i64>,
}

impl<'a> Sizes<'a> {
    /// `out` is the result of the forward pass, and `rest` are the arguments from seed on.
    pub fn of(
        options: &Options,
        types: &Types,
        [q, k, v]: [&Buffer<'a>; 3],
        out: &Buffer,
        rest: &Operands,
    ) -> Result<Sizes<'a>> {
        let has = |bit: u64| options.features & bit != 0;
        let (packs_q, packs_k) = (has(FLASHTUNE_FEATURE_CU_SEQLENS_Q), has(FLASHTUNE_FEATURE_CU_SEQLENS_K));
        let is_paged = has(FLASHTUNE_FEATURE_PAGED);
        let own = |packed: bool| if packed { 3 } else { 4 };
        let leading = leading("q", q, own(packs_q))?;
        for (name, buffer) in [("k", k), ("v", v)] {
            let dims = buffer.dims.strip_prefix(leading).filter(|dims| dims.len() == own(packs_k));
            if dims.is_none() || buffer.dtype != types.of_keys {
                let (shape, of_q) = (buffer.dims, q.dims);
                return Err(Failure::invalid(format!(
                    "{name} has shape {shape:?}; its dtype and its number of dimensions must fit q, {of_q:?}"
                )));
            }
        }
        let [of_q, of_k] = [q, k].map(|buffer| &buffer.dims[leading.len()..]);
        let last = |dims: &[i64]| [dims[dims.len() - 3], dims[dims.len() - 2], dims[dims.len() - 1]];
        let ([rows_q, heads_q, head_dim], [rows_k, heads_kv, _]) = (last(of_q), last(of_k));
        let head_dim_v = types.columns_of_v(v, out);
        let batch = if packs_q { sequences(options, rest)? } else { of_q[0] };
        let entries = if is_paged || has(FLASHTUNE_FEATURE_CACHE_BATCH_IDX) { of_k[0] } else { batch };
        let before: &[i64] = if packs_k { &[] } else { &[entries] };
        for (name, buffer, columns) in [("k", k, head_dim), ("v", v, head_dim_v)] {
            let own = [before, &[rows_k, heads_kv, types.row(columns)]].concat();
            expect(name, buffer, &[types.of_keys], leading, &own)?;
        }
        Ok(Sizes {
            leading,
            batch,
            heads_q,
            heads_kv,
            seqlen_q: if packs_q { options.seqlen_q } else { rows_q },
            seqlen_k: if packs_k || is_paged { options.seqlen_k } else { rows_k },
            head_dim,
            head_dim_v,
            totals: [if packs_q { rows_q } else { 0 }, if packs_k { rows_k } else { 0 }],
            rows_of_keys: [if packs_k { 1 } else { entries }, rows_k],
            out: [&of_q[..of_q.len() - 1], &[head_dim_v]].concat(),
            lse: if packs_q { vec![heads_q, rows_q] } else { vec![batch, heads_q, rows_q] },
        })
    }
}

/// The number of sequences of packed queries, from the shape of cu_seqlens_q.
fn sequences(options: &Options, rest: &Operands) -> Result<i64> {
    let before = [FLASHTUNE_FEATURE_ALIBI, FLASHTUNE_FEATURE_BIAS, FLASHTUNE_FEATURE_MASK, FLASHTUNE_FEATURE_SINKS];
    let before = before.iter().filter(|bit| options.features & **bit != 0).count();
    let lengths = rest.peek(before + usize::from(options.dropout_p != 0.0));
    match lengths.map(|lengths| lengths.dims) {
        Some(&[size]) if size > 0 => Ok(size - 1),
        other => Err(Failure::invalid(format!("cu_seqlens_q has shape {other:?}; it must be [batch + 1]"))),
    }
}
