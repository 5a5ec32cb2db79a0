//! Call: one attention call as a backend gets it. A Problem plus pointers, strides and the scalars
//! of this launch.
//!
//! `capi` builds and checks a Call, or the tuner does on its own buffers. The layers below do not
//! check pointers again.

use crate::dropout::Dropout;
use crate::problem::{ElementType, Problem};
use std::ffi::c_void;

/// A CUstream on the GPU; ignored by the CPU, where a launch returns when the work is done.
pub type Stream = *mut c_void;

/// The limits of a varlen tensor map: the most rows in it, and the most elements from one row to
/// the next.
pub const MAX_MAP_ROWS: i64 = 1 << 30;
const MAX_MAP_ROW_STRIDE: i64 = 1 << 32;

/// A (batch, seqlen, heads, dim) view. Strides are in elements; the last dim is contiguous.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct TensorRef {
    pub data: *mut c_void,
    pub stride_batch: i64,
    pub stride_seqlen: i64,
    pub stride_head: i64,
}

impl TensorRef {
    pub const NULL: TensorRef =
        TensorRef { data: std::ptr::null_mut(), stride_batch: 0, stride_seqlen: 0, stride_head: 0 };

    /// Elements from `data` to a row.
    pub const fn offset_of(&self, batch: i64, position: i64, head: i64) -> i64 {
        batch * self.stride_batch + position * self.stride_seqlen + head * self.stride_head
    }

    /// The same tensor with its strides in `ElementType::units`: a tensor of bytes as one of pairs.
    pub const fn in_units(self, element: ElementType) -> TensorRef {
        match element {
            ElementType::Plain(_) => self,
            ElementType::Eight(_) | ElementType::Four(_) => TensorRef {
                data: self.data,
                stride_batch: self.stride_batch / 2,
                stride_seqlen: self.stride_seqlen / 2,
                stride_head: self.stride_head / 2,
            },
        }
    }

    /// A packed (batch, seqlen, heads, dim) tensor.
    pub fn packed(data: *mut c_void, seqlen: i64, heads: i64, dim: i64) -> Self {
        TensorRef { data, stride_batch: seqlen * heads * dim, stride_seqlen: heads * dim, stride_head: dim }
    }

    /// Elements from one row to the next of a (batch_size, seqlen, ..) view. If each sequence has a
    /// single row, this is the distance between sequences.
    pub const fn row_stride(&self, batch_size: i64, seqlen: i64) -> i64 {
        match (batch_size, seqlen) {
            (_, 2..) => self.stride_seqlen,
            (2.., _) => self.stride_batch,
            _ => 0,
        }
    }

    /// Rows from one sequence's first row to the next one's, which varlen tensor maps need; 0 if
    /// there is one sequence or all share their rows. None if the distance is no whole number of
    /// rows, if the batch spans more than `MAX_MAP_ROWS` rows from its first to its last, or if the
    /// stride of a row exceeds `MAX_MAP_ROW_STRIDE`.
    pub fn rows_between(&self, batch_size: i64, seqlen: i64) -> Option<i64> {
        let row = self.row_stride(batch_size, seqlen);
        if seqlen > MAX_MAP_ROWS || row > MAX_MAP_ROW_STRIDE {
            return None;
        }
        if batch_size <= 1 || self.stride_batch == 0 {
            return Some(0);
        }
        let rows = self.stride_batch.checked_div(row).filter(|rows| rows * row == self.stride_batch)?;
        let all = rows.checked_mul(batch_size - 1)?.checked_add(seqlen)?;
        (all <= MAX_MAP_ROWS).then_some(rows)
    }
}

/// A (batch, heads_q, seqlen_q, seqlen_k) view with one element for each score. Strides are in
/// elements, and 0 along a dimension of equal elements.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ScoresRef {
    pub data: *mut c_void,
    pub stride_batch: i64,
    pub stride_head: i64,
    pub stride_seqlen_q: i64,
    pub stride_seqlen_k: i64,
}

impl ScoresRef {
    pub const NULL: ScoresRef = ScoresRef {
        data: std::ptr::null_mut(),
        stride_batch: 0,
        stride_head: 0,
        stride_seqlen_q: 0,
        stride_seqlen_k: 0,
    };
}

/// The lists of a block mask (device/attention/block_list.cuh). A row of blocks is a block of
/// queries in the forward pass and a block of keys in the backward pass. Each row of blocks has two
/// lists of blocks of the other kind. The mask tensor, if there is one, applies in the blocks of
/// `indices` and not in those of `full_indices`. Scores of other blocks do not count. Entries are
/// int32, in any order. Strides are in elements, and 0 along a dimension of equal lists.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct BlockLists {
    /// (batch, heads_q, rows of blocks): the lengths of the lists in `indices`.
    pub num_blocks: *const i32,
    /// (batch, heads_q, rows of blocks, max_blocks): numbers of blocks.
    pub indices: *const i32,
    /// The same for the second lists. If NULL, they are empty, and full_indices is NULL too.
    pub full_num_blocks: *const i32,
    pub full_indices: *const i32,
    /// Strides of num_blocks and full_num_blocks. The last dimension is contiguous.
    pub num_blocks_stride_batch: i64,
    pub num_blocks_stride_head: i64,
    /// Strides of indices and full_indices.
    pub indices_stride_batch: i64,
    pub indices_stride_head: i64,
    pub indices_stride_row: i64,
    /// The most entries of a list: the last dimension of indices and of full_indices.
    pub max_blocks: i64,
}

impl BlockLists {
    pub const NULL: BlockLists = BlockLists {
        num_blocks: std::ptr::null(),
        indices: std::ptr::null(),
        full_num_blocks: std::ptr::null(),
        full_indices: std::ptr::null(),
        num_blocks_stride_batch: 0,
        num_blocks_stride_head: 0,
        indices_stride_batch: 0,
        indices_stride_head: 0,
        indices_stride_row: 0,
        max_blocks: 0,
    };
}

/// fp32: the scales of 8-bit q, k and v. The stride of seqlen leads from one block of keys that
/// share a scale to the next (`EightBits::keys_per_scale`). Strides are 0 along a dimension of
/// equal scales.
#[derive(Clone, Copy, Debug)]
pub struct Scales {
    /// (batch, heads_kv); NULL if q has not 8 bits.
    pub q: TensorRef,
    /// (batch, blocks, heads_kv). With a scale for each key, as k without its last dimension.
    pub k: TensorRef,
    pub v: TensorRef,
}

impl Scales {
    pub const NULL: Scales = Scales { q: TensorRef::NULL, k: TensorRef::NULL, v: TensorRef::NULL };
}

/// The arguments of the problem's features; NULL or 0 if a feature is off.
#[derive(Clone, Copy, Debug)]
pub struct FeatureArgs {
    pub softcap: f32,
    /// fp32. Batch b and query head h have the slope at b * alibi_stride_batch + h.
    pub alibi_slopes: *const f32,
    pub alibi_stride_batch: i64,
    /// In the problem's dtype.
    pub bias: ScoresRef,
    /// fp32; the pass adds to it.
    pub dbias: ScoresRef,
    /// Bytes; 0 hides the key. A mask of bits has strides in bytes and stride 1 along seqlen_k; key
    /// j is bit j % 8 of byte j / 8.
    pub mask: ScoresRef,
    /// fp32 (heads_q).
    pub sinks: *const f32,
    /// fp32 (heads_q), written; may be NULL.
    pub dsinks: *mut f32,
    /// fp32, in the layout of lse.
    pub dlse: *const f32,
    /// int32 (batch + 1): the row at which each sequence begins in q, out, dout and dq. NULL if q
    /// is not packed end to end.
    pub cu_seqlens_q: *const i32,
    pub cu_seqlens_k: *const i32,
    /// int32 (batch): the number of rows that each sequence uses. NULL: all of them.
    pub seqused_q: *const i32,
    pub seqused_k: *const i32,
    /// int32 (batch, blocks): the batch entries of k and v that are a sequence's pages, in order.
    /// Entries past the sequence's length are not read.
    pub block_table: *const i32,
    /// Elements from one sequence's row of the table to the next.
    pub block_table_stride: i64,
    /// The number of batch entries of k and v if they are pages or `cache_batch_idx` names them,
    /// else 0.
    pub num_pages: i64,
    /// int32 (batch): the batch entry of k and v that holds each sequence's keys. NULL: its own.
    pub cache_batch_idx: *const i32,
    /// int32 (batch): rows before each sequence's first key, which `seqused_k` counts too. NULL: 0.
    pub leftpad_k: *const i32,
    pub block_lists: BlockLists,
    pub scales: Scales,
}

impl FeatureArgs {
    pub const NONE: FeatureArgs = FeatureArgs {
        softcap: 0.0,
        alibi_slopes: std::ptr::null(),
        alibi_stride_batch: 0,
        bias: ScoresRef::NULL,
        dbias: ScoresRef::NULL,
        mask: ScoresRef::NULL,
        sinks: std::ptr::null(),
        dsinks: std::ptr::null_mut(),
        dlse: std::ptr::null(),
        cu_seqlens_q: std::ptr::null(),
        cu_seqlens_k: std::ptr::null(),
        seqused_q: std::ptr::null(),
        seqused_k: std::ptr::null(),
        block_table: std::ptr::null(),
        block_table_stride: 0,
        num_pages: 0,
        cache_batch_idx: std::ptr::null(),
        leftpad_k: std::ptr::null(),
        block_lists: BlockLists::NULL,
        scales: Scales::NULL,
    };
}

#[derive(Clone, Copy, Debug)]
pub struct Call {
    pub problem: Problem,
    /// The factor of the scores before the softmax. `capi` has replaced the caller's 0 by
    /// 1/sqrt(head_dim).
    pub softmax_scale: f32,
    pub dropout: Dropout,
    pub q: TensorRef,
    pub k: TensorRef,
    pub v: TensorRef,
    /// Written forward, read backward.
    pub out: TensorRef,
    /// fp32, natural log. (batch, heads_q, seqlen_q), or (heads_q, total_q) if q is packed end to
    /// end. Forward: written, may be NULL. Backward: read.
    pub lse: *mut f32,
    /// Backward only, else NULL.
    pub dout: TensorRef,
    pub dq: TensorRef,
    pub dk: TensorRef,
    pub dv: TensorRef,
    pub features: FeatureArgs,
    /// Forward: the most splits of the keys; 0 leaves their number to the config.
    pub most_splits: u32,
    /// At least `problem.workspace_bytes()` bytes, 256-byte aligned; NULL if that is 0. The CPU's
    /// forward pass uses none.
    pub workspace: *mut c_void,
}

impl Call {
    /// The batch entries of k and v if these are (batch, seqlen_k, heads, dim).
    pub const fn key_entries(&self) -> i64 {
        let is_named = self.problem.features.key_starts && self.features.num_pages > 0;
        if is_named { self.features.num_pages } else { self.problem.batch_size }
    }

    /// q, k and v as kernels see them: an 8-bit tensor is one of pairs.
    pub fn in_units(&self) -> Call {
        let (q, k) = (self.problem.query_type(), self.problem.key_type());
        Call { q: self.q.in_units(q), k: self.k.in_units(k), v: self.v.in_units(k), ..*self }
    }

    /// The call of the kernel that reads K and V widened in the workspace. There the kernel that
    /// writes them puts the lengths of varlen sequences, and the scales of single keys.
    pub fn widened(&self) -> Call {
        let (p, places) = (&self.problem, self.problem.places_of_widened());
        let rows = p.widened_rows();
        let at = |begin: usize, columns: i64| TensorRef {
            data: self.workspace.wrapping_byte_add(begin),
            stride_batch: rows * columns,
            stride_seqlen: columns,
            stride_head: p.batch_size * rows * columns,
        };
        let given = &self.features;
        let scales = match p.features.has_key_scales() {
            true => Scales { k: at(places.k_scales, 1), ..Scales::NULL },
            false => given.scales,
        };
        let lengths = self.workspace.wrapping_byte_add(places.lengths).cast_const().cast();
        let features = FeatureArgs {
            cu_seqlens_k: std::ptr::null(),
            seqused_k: if p.features.varlen.is_some() { lengths } else { std::ptr::null() },
            block_table: std::ptr::null(),
            num_pages: 0,
            cache_batch_idx: std::ptr::null(),
            leftpad_k: std::ptr::null(),
            scales,
            ..*given
        };
        let (k, v) = (at(places.k, p.head_dim), at(places.v, p.head_dim_v));
        Call { problem: p.widened(), k, v, features, ..*self }
    }

    /// A call with its three inputs; all else is NULL.
    pub const fn of_inputs(problem: Problem, softmax_scale: f32, dropout: Dropout, [q, k, v]: [TensorRef; 3]) -> Call {
        const NONE: TensorRef = TensorRef::NULL;
        let (lse, workspace) = (std::ptr::null_mut(), std::ptr::null_mut());
        Call {
            problem,
            softmax_scale,
            dropout,
            q,
            k,
            v,
            out: NONE,
            lse,
            dout: NONE,
            dq: NONE,
            dk: NONE,
            dv: NONE,
            features: FeatureArgs::NONE,
            most_splits: 0,
            workspace,
        }
    }
}

// SAFETY: a Call only carries addresses. The backend that dereferences them in a launch answers for
// the access.
unsafe impl Send for Call {}
// SAFETY: as above; the fields are plain data.
unsafe impl Sync for Call {}
