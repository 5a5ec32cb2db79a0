//! Input maps: the tensor maps of Q, K and V through which an sm90 kernel loads its tiles.
//!
//! From a call's views to what TMA takes. The problem's layout class promises what TMA demands (addresses and strides
//! are multiples of 16 bytes, strides below its limit), so that at a launch nothing is left to refuse.

use crate::call::{Call, TensorRef};
use crate::config::Config;
use crate::cuda::driver::Driver;
use crate::cuda::tensor_map::{Element, Tensor, TensorMap};
use crate::error::{Error, Result};
use crate::problem::Dtype;

pub struct InputMaps {
    pub q: TensorMap,
    pub k: TensorMap,
    pub v: TensorMap,
}

/// Columns of a box: the 128 bytes of the swizzle. A tile is as many boxes side by side as its head dim needs.
const BOX_COLS: u32 = 64;
/// Query rows of a box: those of one warpgroup.
const BOX_ROWS_Q: u32 = 64;

impl InputMaps {
    pub fn encode(driver: &Driver, call: &Call, config: &Config) -> Result<InputMaps> {
        let [q, k, v] = tensors(call, config)?;
        Ok(InputMaps {
            q: TensorMap::encode(driver, &q)?,
            k: TensorMap::encode(driver, &k)?,
            v: TensorMap::encode(driver, &v)?,
        })
    }
}

/// Q, K and V as TMA sees them.
fn tensors(call: &Call, config: &Config) -> Result<[Tensor; 3]> {
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
    let q = of(&call.q, p.head_dim, p.seqlen_q, p.num_heads_q, BOX_ROWS_Q);
    if p.seqlen_k == 0 {
        // Nothing is loaded of K and V, whose views may hold anything; but a map has no extent of 0.
        return Ok([q, q, q]);
    }
    let block_n = config.get("block_n");
    let k = of(&call.k, p.head_dim, p.seqlen_k, p.num_heads_kv, block_n);
    let v = of(&call.v, p.head_dim_v, p.seqlen_k, p.num_heads_kv, block_n);
    Ok([q, k, v])
}

/// In bytes. A dimension of one entry never takes its stride, which may be anything in the view: it gets a row's bytes.
fn strides(view: &TensorRef, dim: i64, extents: [i64; 3]) -> [u64; 3] {
    let given = [view.stride_seqlen, view.stride_head, view.stride_batch];
    std::array::from_fn(|i| 2 * if extents[i] > 1 { given[i] } else { dim } as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Family;
    use crate::dropout::Dropout;
    use crate::problem::{Causal, Layout, Pass, Problem};
    use std::ffi::c_void;

    fn call(batch_size: i64, num_heads_kv: i64, seqlen_k: i64) -> Call {
        let at = |address: usize, heads: i64, dim: i64| TensorRef {
            stride_head: dim + 8,
            stride_seqlen: heads * (dim + 8),
            ..TensorRef::packed(address as *mut c_void, 300, heads, dim + 8)
        };
        let problem = Problem {
            pass: Pass::Forward,
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
            layout: Layout::Vec8,
        };
        let inputs = [at(0x10000, 8, 128), at(0x20000, num_heads_kv, 128), at(0x30000, num_heads_kv, 40)];
        Call::of_inputs(problem, 1.0, Dropout::NONE, inputs)
    }

    fn config() -> Config {
        Config::new(Family::Sm90, [("block_m", 128), ("block_n", 176)])
    }

    #[test]
    fn extents_and_byte_strides_are_in_the_order_of_tma() {
        let [q, k, v] = tensors(&call(3, 2, 400), &config()).unwrap();
        assert_eq!((q.address, q.extents, q.box_extents), (0x10000, [128, 300, 8, 3], [64, 64, 1, 1]));
        assert_eq!(q.strides, [8 * 272, 272, 300 * 8 * 272]);
        assert_eq!((k.address, k.extents, k.box_extents), (0x20000, [128, 400, 2, 3], [64, 176, 1, 1]));
        assert_eq!((v.address, v.extents, v.strides[1]), (0x30000, [40, 400, 2, 3], 96));
    }

    #[test]
    fn a_stride_that_is_never_taken_may_be_anything() {
        let mut call = call(1, 1, 400);
        (call.k.stride_batch, call.k.stride_head) = (7, i64::MAX / 4);
        let [_, k, _] = tensors(&call, &config()).unwrap();
        assert_eq!(k.strides, [272, 256, 256]);
    }

    #[test]
    fn views_of_no_keys_are_not_looked_at() {
        let mut call = call(2, 2, 0);
        call.k = TensorRef { data: 3 as *mut c_void, stride_batch: 1, stride_seqlen: 1, stride_head: 1 };
        let [q, k, v] = tensors(&call, &config()).unwrap();
        assert!(k == q && v == q && q.extents.iter().all(|extent| *extent > 0));
    }
}
