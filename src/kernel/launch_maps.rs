//! Launch maps: the tensor maps through which an sm90 kernel loads its tiles, and the forward pass may store them.
//!
//! From a call's views to what TMA takes. The problem's layout class promises what TMA demands (addresses and strides
//! are multiples of 16 bytes, strides below its limit), so that at a launch nothing is left to refuse.

use super::geometry::Boxes;
use crate::call::{Call, TensorRef};
use crate::cuda::driver::Driver;
use crate::cuda::tensor_map::{Element, Tensor, TensorMap};
use crate::error::{Error, Result};
use crate::problem::{Dtype, Pass};

pub struct LaunchMaps {
    pub q: TensorMap,
    pub k: TensorMap,
    pub v: TensorMap,
    /// Of O, in the backward pass of dO.
    pub o: TensorMap,
}

/// Columns of a box: the 128 bytes of the swizzle. A tile is as many boxes side by side as its head dim needs.
const BOX_COLS: u32 = 64;

impl LaunchMaps {
    pub fn encode(driver: &Driver, call: &Call, boxes: &Boxes) -> Result<LaunchMaps> {
        let [q, k, v, o] = tensors(call, boxes)?;
        Ok(LaunchMaps {
            q: TensorMap::encode(driver, &q)?,
            k: TensorMap::encode(driver, &k)?,
            v: TensorMap::encode(driver, &v)?,
            o: TensorMap::encode(driver, &o)?,
        })
    }
}

/// Q, K, V and O or dO as TMA sees them.
fn tensors(call: &Call, boxes: &Boxes) -> Result<[Tensor; 4]> {
    let p = &call.problem;
    let element = match p.dtype {
        Dtype::Fp16 => Element::Fp16,
        Dtype::Bf16 => Element::Bf16,
        Dtype::Fp32 => return Err(Error::unsupported("dtype is fp32; the GPU kernels take fp16 and bf16")),
    };
    let of = |view: &TensorRef, dim, seqlen, heads, rows| Tensor {
        element,
        address: view.data as u64,
        extents: [dim as u64, seqlen as u64, heads as u64, p.batch_size as u64],
        strides: strides(view, dim, [seqlen, heads, p.batch_size]),
        box_extents: [BOX_COLS, rows, 1, 1],
    };
    let of_queries = |view, dim| of(view, dim, p.seqlen_q, p.num_heads_q, boxes.query_rows);
    let of_keys = |view, dim| of(view, dim, p.seqlen_k, p.num_heads_kv, boxes.key_rows);
    let (q, k) = (of_queries(&call.q, p.head_dim), of_keys(&call.k, p.head_dim));
    let o = match p.pass {
        Pass::Forward => &call.out,
        Pass::Backward => &call.dout,
    };
    let (v, o) = (of_keys(&call.v, p.head_dim_v), of_queries(o, p.head_dim_v));
    // Nothing is loaded of a tensor without rows, whose view may hold anything; but a map has no extent of 0.
    Ok(match (p.seqlen_q, p.seqlen_k) {
        (_, 0) => [q, q, q, o],
        (0, _) => [k, k, v, k],
        _ => [q, k, v, o],
    })
}

/// In bytes. A dimension of one entry never takes its stride, which may be anything in the view: it gets a row's bytes.
fn strides(view: &TensorRef, dim: i64, extents: [i64; 3]) -> [u64; 3] {
    let given = [view.stride_seqlen, view.stride_head, view.stride_batch];
    std::array::from_fn(|i| 2 * if extents[i] > 1 { given[i] } else { dim } as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dropout::Dropout;
    use crate::problem::{Causal, Layout, Problem};
    use std::ffi::c_void;

    fn call(batch_size: i64, num_heads_kv: i64, seqlen_k: i64) -> Call {
        let at = |address: usize, heads: i64, dim: i64| TensorRef {
            stride_head: dim + 8,
            stride_seqlen: heads * (dim + 8),
            ..TensorRef::packed(address as *mut c_void, 300, heads, dim + 8)
        };
        let problem = Problem {
            pass: Pass::Backward,
            dtype: Dtype::Bf16,
            batch_size,
            num_heads_q: 8,
            num_heads_kv,
            seqlen_q: 300,
            seqlen_k,
            head_dim: 128,
            head_dim_v: 40,
            causal: Causal::None,
            dropout: false,
            deterministic: false,
            layout: Layout::Vec8,
        };
        let inputs = [at(0x10000, 8, 128), at(0x20000, num_heads_kv, 128), at(0x30000, num_heads_kv, 40)];
        let (out, dout) = (at(0x40000, 8, 40), at(0x50000, 8, 40));
        Call { out, dout, ..Call::of_inputs(problem, 1.0, Dropout::NONE, inputs) }
    }

    const BOXES: Boxes = Boxes { query_rows: 80, key_rows: 176 };

    /// A view that no map takes.
    const NOWHERE: TensorRef =
        TensorRef { data: std::ptr::without_provenance_mut(3), stride_batch: 1, stride_seqlen: 1, stride_head: 1 };

    #[test]
    fn extents_and_byte_strides_are_in_the_order_of_tma() {
        let [q, k, v, dout] = tensors(&call(3, 2, 400), &BOXES).unwrap();
        assert_eq!((q.address, q.extents, q.box_extents), (0x10000, [128, 300, 8, 3], [64, 80, 1, 1]));
        assert_eq!(q.strides, [8 * 272, 272, 300 * 8 * 272]);
        assert_eq!((k.address, k.extents, k.box_extents), (0x20000, [128, 400, 2, 3], [64, 176, 1, 1]));
        assert_eq!((v.address, v.extents, v.strides[1]), (0x30000, [40, 400, 2, 3], 96));
        assert_eq!((dout.address, dout.extents, dout.box_extents), (0x50000, [40, 300, 8, 3], q.box_extents));
    }

    #[test]
    fn the_forward_pass_gets_o_where_the_backward_pass_gets_its_gradient() {
        let backward = call(3, 2, 400);
        let forward = Call { problem: Problem { pass: Pass::Forward, ..backward.problem }, ..call(3, 2, 400) };
        let [.., dout] = tensors(&backward, &BOXES).unwrap();
        let [.., out] = tensors(&forward, &BOXES).unwrap();
        assert_eq!(out, Tensor { address: 0x40000, ..dout });
    }

    #[test]
    fn a_stride_that_is_never_taken_may_be_anything() {
        let mut call = call(1, 1, 400);
        (call.k.stride_batch, call.k.stride_head) = (7, i64::MAX / 4);
        assert_eq!(tensors(&call, &BOXES).unwrap()[1].strides, [272, 256, 256]);
    }

    #[test]
    fn views_without_rows_are_not_looked_at() {
        let mut no_keys = call(2, 2, 0);
        (no_keys.k, no_keys.v) = (NOWHERE, NOWHERE);
        let [q, k, v, _] = tensors(&no_keys, &BOXES).unwrap();
        assert!(k == q && v == q && q.extents.iter().all(|extent| *extent > 0));
        let mut no_queries = call(2, 2, 400);
        no_queries.problem.seqlen_q = 0;
        (no_queries.q, no_queries.dout) = (NOWHERE, NOWHERE);
        let [q, k, _, dout] = tensors(&no_queries, &BOXES).unwrap();
        assert!(q == k && dout == k && k.extents.iter().all(|extent| *extent > 0));
    }
}
