//! The kernel that writes new keys and values into a K/V cache: what its text is rendered from, its
//! argument and its grid.
//!
//! The kernel only copies, so it has no config to search for.

use super::call::KvAppend;
use crate::call::TensorRef;
use crate::kernel::{FixedSpec, Value};
use crate::ops::class::KvAppendClass;
use crate::ops::op::Op;

const THREADS: u32 = 128;
/// CTAs for each SM, over all keys and values of a launch. Each thread has 32 bytes in flight, so
/// an SM has 32 KB. Decode's reads come within 3 % of the memory's rate with 64 KB (DESIGN.md,
/// tuning log), and half of a copy's traffic is reads.
const CTAS_PER_SM: u64 = 8;
/// Limit of a grid's y dimension. A CTA loops over further sequences.
const MAX_GRID_SEQUENCES: i64 = 65535;

impl KvAppendClass {
    /// The kernel of this class.
    pub fn kernel(&self) -> FixedSpec {
        FixedSpec {
            name: KvAppend::NAME,
            threads: THREADS,
            class: Vec::new(),
            knobs: vec![("access_bytes", Value::Integer(self.access_bytes as u32))],
        }
    }
}

/// The kernel's argument, the twin of `KvAppendParams` in `templates/kv_append.cu.tera`.
#[repr(C)]
pub struct KvAppendParams {
    k_new: TensorRef,
    v_new: TensorRef,
    k_cache: TensorRef,
    v_cache: TensorRef,
    seqlens: *const i32,
    seqused: *mut i32,
    block_table: *const i32,
    block_table_stride: i64,
    batch_size: i32,
    num_heads: i32,
    seqlen_new: i32,
    seqlen_cache: i32,
    row_k: i32,
    row_v: i32,
    page_size: i32,
    num_pages: i32,
}

const _: () = assert!(size_of::<KvAppendParams>() == 4 * 32 + 4 * 8 + 8 * 4);

impl KvAppendParams {
    /// Each size fits an i32, since `capi` bounds them. Each stride that is used is a whole number
    /// of accesses.
    pub fn new(append: &KvAppend) -> KvAppendParams {
        let elements = append.class.access_bytes / append.element_bytes;
        let in_accesses = |tensor: &TensorRef| TensorRef {
            data: tensor.data,
            stride_batch: tensor.stride_batch / elements,
            stride_seqlen: tensor.stride_seqlen / elements,
            stride_head: tensor.stride_head / elements,
        };
        KvAppendParams {
            k_new: in_accesses(&append.k_new),
            v_new: in_accesses(&append.v_new),
            k_cache: in_accesses(&append.k_cache),
            v_cache: in_accesses(&append.v_cache),
            seqlens: append.seqlens,
            seqused: append.seqused,
            block_table: append.block_table,
            block_table_stride: append.block_table_stride,
            batch_size: append.batch_size as i32,
            num_heads: append.num_heads_kv as i32,
            seqlen_new: append.seqlen_new as i32,
            seqlen_cache: append.seqlen_cache as i32,
            row_k: (append.head_dim / elements) as i32,
            row_v: (append.head_dim_v / elements) as i32,
            page_size: append.page_size as i32,
            num_pages: append.num_pages as i32,
        }
    }
}

/// x: CTAs for each sequence, y: sequences, z: 2 for keys and values.
pub fn grid(append: &KvAppend, sm_count: u32) -> [u32; 3] {
    let sequences = append.batch_size.min(MAX_GRID_SEQUENCES) as u64;
    let row = append.head_dim.max(append.head_dim_v) * append.element_bytes / append.class.access_bytes;
    let accesses = (append.seqlen_new * append.num_heads_kv * row) as u64;
    let ctas_of_device = u64::from(sm_count) * CTAS_PER_SM;
    let ctas = accesses.div_ceil(THREADS.into()).min(ctas_of_device.div_ceil(2 * sequences)).max(1);
    [ctas as u32, sequences as u32, 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn append(batch_size: i64, seqlen_new: i64) -> KvAppend {
        KvAppend {
            class: KvAppendClass { access_bytes: 16 },
            element_bytes: 2,
            batch_size,
            num_heads_kv: 8,
            seqlen_new,
            seqlen_cache: 1 << 20,
            head_dim: 128,
            head_dim_v: 64,
            k_new: TensorRef::packed(std::ptr::null_mut(), seqlen_new, 8, 128),
            v_new: TensorRef::packed(std::ptr::null_mut(), seqlen_new, 8, 64),
            k_cache: TensorRef::packed(std::ptr::null_mut(), 1 << 20, 8, 128),
            v_cache: TensorRef::packed(std::ptr::null_mut(), 1 << 20, 8, 64),
            seqlens: std::ptr::null(),
            seqused: std::ptr::null_mut(),
            block_table: std::ptr::null(),
            block_table_stride: 0,
            page_size: 0,
            num_pages: 0,
        }
    }

    #[test]
    fn a_grid_has_a_thread_for_each_access_as_far_as_the_device_holds_them() {
        // 128 accesses of K a token.
        assert_eq!(grid(&append(1, 1), 132), [1, 1, 2]);
        assert_eq!(grid(&append(1, 5), 132), [5, 1, 2]);
        assert_eq!(grid(&append(1, 100_000), 132), [528, 1, 2]);
        assert_eq!(grid(&append(100, 2048), 132), [6, 100, 2]);
        // Lengths alone, and more sequences than a grid holds.
        assert_eq!(grid(&append(3, 0), 132), [1, 3, 2]);
        assert_eq!(grid(&append(1 << 20, 7), 132), [1, 65535, 2]);
    }

    #[test]
    fn strides_and_rows_are_counted_in_accesses() {
        let params = KvAppendParams::new(&append(2, 3));
        assert_eq!((params.row_k, params.row_v), (16, 8));
        let TensorRef { stride_batch, stride_seqlen, stride_head, .. } = params.v_new;
        assert_eq!((stride_batch, stride_seqlen, stride_head), (3 * 64, 64, 8));
    }
}
