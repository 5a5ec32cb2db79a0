//! The parameter structs of the two passes, as C sees them. Data alone: `args` checks it.

use std::ffi::c_void;

/// IEEE half precision (CUDA backend and CPU backend).
pub const FLASHTUNE_DTYPE_FP16: i32 = 1;
/// bfloat16 (CUDA backend and CPU backend).
pub const FLASHTUNE_DTYPE_BF16: i32 = 2;
/// IEEE single precision (CUDA backend, but for pages, and CPU backend). Error rule, on both: what is off from exact
/// attention is at most twice what plain fp32 attention, which rounds each product and sum to fp32, is off at its worst
/// element (gradients: three times), and one rounding step; gradients also what 4 such steps come to at the magnitude of
/// the terms that cancel in them. On a GPU products are three of tf32 each, which keep 22 of the 24 bits: there 2^-21 of
/// the largest element comes on top, and where v or dout hold infinities, NaN may come out.
pub const FLASHTUNE_DTYPE_FP32: i32 = 3;

/// Every query sees every key.
pub const FLASHTUNE_CAUSAL_NONE: i32 = 0;
/// Query i sees key j if and only if j <= i + seqlen_k - seqlen_q: the last query sees the last key.
pub const FLASHTUNE_CAUSAL_BOTTOM_RIGHT: i32 = 1;
/// Query i sees key j if and only if j <= i: the first query sees the first key.
pub const FLASHTUNE_CAUSAL_TOP_LEFT: i32 = 2;

/// No window: a query sees keys as causal says.
pub const FLASHTUNE_WINDOW_NONE: i32 = 0;
/// Query i sees key j only if -window_left <= j - (i + seqlen_k - seqlen_q) <= window_right: the last query's diagonal
/// is the last key. The lengths are those of the sequence itself.
pub const FLASHTUNE_WINDOW_BOTTOM_RIGHT: i32 = 1;
/// Query i sees key j only if -window_left <= j - i <= window_right.
pub const FLASHTUNE_WINDOW_TOP_LEFT: i32 = 2;

/// alibi_slopes is used.
pub const FLASHTUNE_FEATURE_ALIBI: u64 = 1;
/// bias is used.
pub const FLASHTUNE_FEATURE_BIAS: u64 = 2;
/// mask is used, and its elements are bytes.
pub const FLASHTUNE_FEATURE_MASK: u64 = 4;
/// sinks is used, and in the backward pass dsinks where it is not NULL.
pub const FLASHTUNE_FEATURE_SINKS: u64 = 8;
/// q, out and their gradients hold sequences end to end: cu_seqlens_q and total_q are used.
pub const FLASHTUNE_FEATURE_CU_SEQLENS_Q: u64 = 16;
/// k, v and their gradients hold sequences end to end: cu_seqlens_k and total_k are used.
pub const FLASHTUNE_FEATURE_CU_SEQLENS_K: u64 = 32;
/// seqused_q is used.
pub const FLASHTUNE_FEATURE_SEQUSED_Q: u64 = 64;
/// seqused_k is used.
pub const FLASHTUNE_FEATURE_SEQUSED_K: u64 = 128;
/// Backward: dbias is wanted. Only with FLASHTUNE_FEATURE_BIAS.
pub const FLASHTUNE_FEATURE_DBIAS: u64 = 256;
/// Backward: dlse is used.
pub const FLASHTUNE_FEATURE_DLSE: u64 = 512;
/// Forward: k and v are pages: block_table, page_size and num_pages are used.
pub const FLASHTUNE_FEATURE_PAGED: u64 = 1024;
/// mask is used, and its elements are bits. Not with FLASHTUNE_FEATURE_MASK.
pub const FLASHTUNE_FEATURE_MASK_BITS: u64 = 2048;

/// block_mask is used.
pub const FLASHTUNE_FEATURE_BLOCK_MASK: u64 = 4096;

/// Which blocks of scores count: lists, for each block of queries, of blocks of keys, in the forward pass; in the
/// backward pass the same transposed, for each block of keys lists of blocks of queries. A score counts if its block is
/// listed and all else (causal, the window, mask, ...) lets it; in a full block mask is not looked at. Time is
/// proportional to the blocks that are listed. A query without a block is one that sees no key.
///
/// Of FlexAttention's BlockMask these are kv_num_blocks, kv_indices, full_kv_num_blocks and full_kv_indices forward, and
/// q_num_blocks, q_indices, full_q_num_blocks and full_q_indices backward.
///
/// rows is ceil(seqlen_q / block_q) forward and ceil(seqlen_k / block_k) backward. A list's entries may be in any order;
/// no block is in a row twice, neither in one list nor in both. Device memory on a CUDA context, where nobody checks
/// it: of more than max_blocks entries the first ones are used, what is no block is passed over, and a block that is
/// listed twice counts twice. Host memory on a CPU context, where a launch refuses what is wrong. Strides are in elements
/// and at least 0; 0 along a dimension where lists are the same.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct flashtune_block_mask {
    /// Queries and keys of a block: multiples of 16 up to 2048. Multiples of 128 run fastest; a kernel is compiled for
    /// each size.
    pub block_q: i64,
    pub block_k: i64,
    /// int32 (batch_size, num_heads_q, rows), read: how many entries of indices are used. Rows are contiguous.
    pub num_blocks: *const i32,
    /// int32 (batch_size, num_heads_q, rows, max_blocks), read: numbers of blocks. Entries are contiguous.
    pub indices: *const i32,
    /// The same of full blocks, in the same strides; both NULL: no block is full.
    pub full_num_blocks: *const i32,
    pub full_indices: *const i32,
    pub num_blocks_stride_batch: i64,
    pub num_blocks_stride_head: i64,
    pub indices_stride_batch: i64,
    pub indices_stride_head: i64,
    pub indices_stride_row: i64,
    /// 0 to 2^31 - 1.
    pub max_blocks: i64,
}

/// A view of a (batch_size, num_heads_q, seqlen_q, seqlen_k) tensor: one element for each score. Borrowed as
/// flashtune_tensor, with data in the same memory and NULL in the same calls.
///
/// Strides are in elements, not bytes, and at least 0; 0 along a dimension where the element is the same. The stride of
/// a dimension of size 1 is ignored. data is aligned to its element. With sequences of their own lengths, what lies
/// past a sequence's last query or key is neither read nor written.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct flashtune_scores_tensor {
    pub data: *mut c_void,
    pub stride_batch: i64,
    pub stride_head: i64,
    pub stride_seqlen_q: i64,
    pub stride_seqlen_k: i64,
}

/// A view of a (batch, seqlen, heads, dim) tensor whose last dimension is contiguous. Borrowed for the call (on a GPU
/// until the work enqueued on the stream is done), never freed.
///
/// Strides are in elements, not bytes, and at least 0. The stride of a dimension of size 1 is ignored. Inputs may
/// have any stride, also 0 (broadcast) and views into one packed buffer. An output must hold each element once: with
/// the dimensions sorted by stride, each stride must reach past everything below it.
///
/// data is device memory on a CUDA context, host memory on a CPU context, and aligned to its element. 16-byte aligned
/// data with strides and head dims that are multiples of 8 run fastest. data may be NULL where the tensor has no
/// element, and in the calls that do not touch data (supported, workspace_size, prepare, plan_info, autotune); in
/// those, NULL with all strides 0 stands for a packed tensor.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct flashtune_tensor {
    pub data: *mut c_void,
    pub stride_batch: i64,
    pub stride_seqlen: i64,
    pub stride_head: i64,
}

/// One forward pass: out = dropout(softmax(mask(softcap(softmax_scale * q k^T) + alibi + bias))) v. Set all of it to
/// zero first, then struct_size = sizeof(flashtune_forward_params), then what applies; zero is the default of every
/// later field.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct flashtune_forward_params {
    /// sizeof(flashtune_forward_params).
    pub struct_size: u64,
    /// FLASHTUNE_DTYPE_*: the type of q, k, v and out. Sums are fp32 throughout.
    pub dtype: i32,
    /// FLASHTUNE_CAUSAL_*.
    pub causal: i32,
    /// 0 to 2^31 - 1. With 0 there is nothing to do. With cu_seqlens_q or cu_seqlens_k the number of sequences.
    ///
    /// So much at most: batch_size * num_heads_q below 2^31; that times 4096 + the longer of seqlen_q and seqlen_k, and
    /// num_heads_q * total_q and * total_k, below 2^51. On a GPU a call of some 2^31 tiles, each of 16 queries or keys of a
    /// head or more, gets FLASHTUNE_STATUS_UNSUPPORTED.
    pub batch_size: i64,
    /// A multiple of num_heads_kv; query head h reads key-value head h / (num_heads_q / num_heads_kv).
    pub num_heads_q: i64,
    /// At least 1.
    pub num_heads_kv: i64,
    /// 0 to 2^31 - 4096. With cu_seqlens_q an upper bound of the sequences' lengths; work is laid out for it.
    pub seqlen_q: i64,
    /// 0 to 2^31 - 4096; with cu_seqlens_k as seqlen_q. A query that sees no key has out = 0 and lse = -infinity (the
    /// sink's score where there is one).
    pub seqlen_k: i64,
    /// Dim of q and k, 1 to 512.
    pub head_dim: i64,
    /// Dim of v and out, 1 to 512.
    pub head_dim_v: i64,
    /// What scores are multiplied with: of a magnitude from 2^-100 to 2^100. 0 means 1/sqrt(head_dim).
    pub softmax_scale: f32,
    /// Probability of dropping (not of keeping) an attention weight, 0 <= dropout_p < 1. It is rounded to a multiple of
    /// 1/65536, and 65535/65536 at most. What is kept is divided by the rounded probability of keeping.
    pub dropout_p: f32,
    /// The dropout mask is a pure function of (seed, offset, batch, head, query, key): equal on every backend and in
    /// both passes. Ignored where dropout_p is 0. With / and % of integers, query and key counted from the sequence's
    /// first, and philox4x32_10 as Salmon et al. define it ("Parallel random numbers: as easy as 1, 2, 3", SC 2011):
    ///
    ///     words = philox4x32_10(
    ///         counter = {key / 16 * 4 + key % 8 / 2, query / 16 * 8 + query % 8, batch * num_heads_q + head, offset low},
    ///         key = {seed low, seed high ^ offset high})        low and high being halves of 32 bits
    ///     draw = words[query % 16 / 8 + 2 * (key % 16 / 8)] >> (16 * (key % 2)) & 0xffff
    ///     dropped = draw < threshold        threshold being dropout_p * 65536, rounded, at most 65535
    pub dropout_seed: u64,
    pub dropout_offset: u64,
    /// NULL, or the address of 8 bytes (device memory on a CUDA context, host memory on a CPU context) read by the
    /// work itself instead of dropout_seed, so that each replay of a captured graph may have its own mask.
    pub dropout_seed_ptr: *const u64,
    pub dropout_offset_ptr: *const u64,
    /// (batch_size, seqlen_q, num_heads_q, head_dim), read. With cu_seqlens_q it and all like it, of queries, are
    /// (total_q, heads, dim), and stride_batch is ignored.
    pub q: flashtune_tensor,
    /// (batch_size, seqlen_k, num_heads_kv, head_dim), read. With cu_seqlens_k it and all like it, of keys, are
    /// (total_k, heads, dim), and stride_batch is ignored.
    pub k: flashtune_tensor,
    /// (batch_size, seqlen_k, num_heads_kv, head_dim_v), read.
    pub v: flashtune_tensor,
    /// (batch_size, seqlen_q, num_heads_q, head_dim_v), written.
    pub out: flashtune_tensor,
    /// fp32 (batch_size, num_heads_q, seqlen_q), with cu_seqlens_q (num_heads_q, total_q), contiguous, written: the
    /// natural logarithm of the sum of the exponentials of what goes into the softmax. NULL: not wanted. The backward
    /// pass needs it.
    pub lse: *mut f32,
    /// FLASHTUNE_FEATURE_*, or-ed: which of the fields below that take data are used. Those that are must not be NULL
    /// at a launch, and may be in the calls that do not touch data; those that are not must be NULL, and totals,
    /// page_size, num_pages and block_mask's block_q, block_k and max_blocks 0.
    pub features: u64,
    /// FLASHTUNE_WINDOW_*. With causal, of the same alignment, and window_right 0 or -1.
    pub window: i32,
    /// Scores s become softcap * tanh(s / softcap), after softmax_scale and before anything is added. From 2^-100 to
    /// 2^100, and so |softmax_scale| / softcap; 0: no soft cap.
    pub softcap: f32,
    /// With a window: how many keys before its diagonal a query sees, at most 2^31 - 4096; -1: all. Without one 0 or
    /// -1. With one seqlen_q + seqlen_k is at most 2^31 - 4096, too.
    pub window_left: i64,
    /// With a window: how many keys after its diagonal a query sees; otherwise as window_left.
    pub window_right: i64,
    /// fp32, read: -slope * |i + seqlen_k - seqlen_q - j| is added to the score of query i and key j, the lengths being
    /// the sequence's own. The slope of batch entry b and query head h is element b * alibi_stride_batch + h.
    pub alibi_slopes: *const f32,
    /// In elements, at least 0. 0: all batch entries share num_heads_q slopes.
    pub alibi_stride_batch: i64,
    /// Of dtype, read: added to the scores. -infinity hides a key.
    pub bias: flashtune_scores_tensor,
    /// Read. With FLASHTUNE_FEATURE_MASK bytes: 0 hides a key, anything else shows it.
    ///
    /// With FLASHTUNE_FEATURE_MASK_BITS bits, packed along the keys, (batch_size, num_heads_q, seqlen_q,
    /// ceil(seqlen_k / 8)) bytes: key j's is bit j % 8 of byte j / 8, bit 0 being the lowest; 0 hides the key, 1 shows
    /// it. Strides are in bytes, and stride_seqlen_k is 1. Little-endian words of 32 bits are such bytes. Bits past the
    /// last key may be anything.
    pub mask: flashtune_scores_tensor,
    /// fp32 (num_heads_q), read: each query head's score to no key. It takes its share of the softmax and adds nothing
    /// to out, and is part of lse.
    pub sinks: *const f32,
    /// int32 (batch_size + 1), read: sequence b is rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q. From 0, not
    /// decreasing, at most total_q, no sequence longer than seqlen_q; rows of no sequence are neither read nor written.
    /// Device memory on a CUDA context, where nobody checks it: of a longer sequence the first seqlen_q rows are used,
    /// and whatever else is wrong is undefined. Host memory on a CPU context, where a launch refuses what is wrong. So
    /// for all four arrays of lengths, each of which may be used without the others.
    pub cu_seqlens_q: *const i32,
    /// int32 (batch_size + 1), read: the same of k and v, with total_k and seqlen_k.
    pub cu_seqlens_k: *const i32,
    /// int32 (batch_size), read: how many rows of each sequence of q are used, from its first on; at least 0 and at
    /// most its length. The others are neither read nor written, nor are their elements of lse.
    pub seqused_q: *const i32,
    /// int32 (batch_size), read: the same of k and v.
    pub seqused_k: *const i32,
    /// With cu_seqlens_q: rows of q, at most 2^31 - 4096.
    pub total_q: i64,
    /// With cu_seqlens_k: rows of k, at most 2^31 - 4096.
    pub total_k: i64,
    /// int32 (batch_size, ceil(seqlen_k / page_size)), read: sequence b has its keys from i * page_size on in page
    /// block_table[b][i] of k and v, which are (num_pages, page_size, num_heads_kv, dim) then, with stride_batch from
    /// one page to the next. Sequences are seqlen_k keys long, or as long as seqused_k says; entries past that are not
    /// read, nor are pages: of its last page all may be read, and what is no key counts for nothing. Pages may be
    /// shared. Device memory on a CUDA context, where an entry that names no page is
    /// taken for the last one; host memory on a CPU context, where a launch refuses it. Not with cu_seqlens_k, and not
    /// with dropout. seqlen_q * num_heads_q / num_heads_kv is at most 2^31 - 4096.
    pub block_table: *const i32,
    /// In elements, from one sequence's row of block_table to the next: at least ceil(seqlen_k / page_size).
    pub block_table_stride: i64,
    /// With block_table: keys of a page, at least 1. A kernel is compiled for each size.
    pub page_size: i64,
    /// With block_table: pages that k and v hold, 1 to 2^31 - 1.
    pub num_pages: i64,
    /// 0, or 1: a sequence's out and lse have the same bits alone and in any batch, wherever in it.
    ///
    /// That holds among calls with batch_invariant on one device by one version of this library and of NVRTC, of equal
    /// dtype, num_heads_q, num_heads_kv, head dims, causal, window with its sides, softmax_scale, softcap, features and
    /// page_size, and of data and strides that are alike multiples of 16 bytes (or of 8, 4 or 2), those of the batch
    /// with them; with lengths of their own the batch's are also whole numbers of rows, as in packed tensors. What may
    /// differ: batch_size, what other sequences are and where they lie; the longest lengths, that is seqlen_q with
    /// cu_seqlens_q or seqused_q, and seqlen_k with cu_seqlens_k or seqused_k; the totals; which pages hold a sequence's
    /// keys. A sequence's own lengths and what it reads are the same, of course.
    ///
    /// Kernels and the order of sums then follow from the above alone, and from no record and no measurement: it costs
    /// the time that a config made for the batch would save. Keys of few queries are split by each sequence's own
    /// length, but not with cu_seqlens_q or seqused_q. dropout_p must be 0.
    pub batch_invariant: i32,
    /// 0.
    pub reserved: i32,
    /// Of each block of queries the blocks of keys that it sees. Not with lengths of sequences, nor with pages.
    pub block_mask: flashtune_block_mask,
}

/// One backward pass. Fields with the names of the forward pass's mean the same and must have the values that it ran
/// with; out and lse are what it wrote. Zero it first, as flashtune_forward_params.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct flashtune_backward_params {
    /// sizeof(flashtune_backward_params).
    pub struct_size: u64,
    pub dtype: i32,
    pub causal: i32,
    pub batch_size: i64,
    pub num_heads_q: i64,
    pub num_heads_kv: i64,
    pub seqlen_q: i64,
    pub seqlen_k: i64,
    pub head_dim: i64,
    pub head_dim_v: i64,
    pub softmax_scale: f32,
    pub dropout_p: f32,
    pub dropout_seed: u64,
    pub dropout_offset: u64,
    pub dropout_seed_ptr: *const u64,
    pub dropout_offset_ptr: *const u64,
    pub q: flashtune_tensor,
    pub k: flashtune_tensor,
    pub v: flashtune_tensor,
    /// (batch_size, seqlen_q, num_heads_q, head_dim_v), read: the forward pass's output.
    pub out: flashtune_tensor,
    /// fp32, contiguous, in the shape of the forward pass's lse, which it is; read. Not NULL.
    pub lse: *const f32,
    /// (batch_size, seqlen_q, num_heads_q, head_dim_v), read: the gradient of out.
    pub dout: flashtune_tensor,
    /// (batch_size, seqlen_q, num_heads_q, head_dim), written: the gradient of q. dq, dk and dv may be views into one
    /// packed buffer, as long as no two of them share an element.
    pub dq: flashtune_tensor,
    /// (batch_size, seqlen_k, num_heads_kv, head_dim), written: the gradient of k.
    pub dk: flashtune_tensor,
    /// (batch_size, seqlen_k, num_heads_kv, head_dim_v), written: the gradient of v.
    pub dv: flashtune_tensor,
    /// 0, or 1: dq, dk, dv and dbias have the same bits at every run. Tiles then take turns at dq, which costs time and
    /// a little more workspace; a dbias that is summed along a dimension is refused; and the config follows from the
    /// problem, the device's architecture and the library's version alone, never from records: flashtune_autotune
    /// refuses such a problem. With 0, on a GPU, dq, and dbias where it is summed, may differ from run to run by the
    /// order of fp32 sums; out, lse, dk, dv and dsinks do not.
    pub deterministic: i32,
    /// 0.
    pub reserved: i32,
    pub features: u64,
    pub window: i32,
    pub softcap: f32,
    pub window_left: i64,
    pub window_right: i64,
    pub alibi_slopes: *const f32,
    pub alibi_stride_batch: i64,
    pub bias: flashtune_scores_tensor,
    pub mask: flashtune_scores_tensor,
    pub sinks: *const f32,
    pub cu_seqlens_q: *const i32,
    pub cu_seqlens_k: *const i32,
    pub seqused_q: *const i32,
    pub seqused_k: *const i32,
    pub total_q: i64,
    pub total_k: i64,
    /// fp32, added to, so set it to zero first: the gradient of bias, summed where a stride is 0. No other two of its
    /// elements may share a place, and with deterministic no stride of a dimension longer than 1 may be 0.
    pub dbias: flashtune_scores_tensor,
    /// fp32 (num_heads_q), written unless there is nothing to do: the gradient of sinks. NULL: not wanted.
    pub dsinks: *mut f32,
    /// fp32, contiguous, in the shape of lse, read: the gradient of lse.
    pub dlse: *const f32,
    /// Of each block of keys the blocks of queries that see it: the forward pass's lists transposed. On a CUDA context
    /// not with deterministic.
    pub block_mask: flashtune_block_mask,
}

#[cfg(test)]
mod tests {
    use crate::problem::Feature;
    use std::collections::BTreeMap;

    /// cbindgen reads this file as text, so the numbers stand here a second time.
    #[test]
    fn the_headers_feature_bits_are_those_of_the_table() {
        let lines = include_str!("types.rs").lines().filter_map(|line| line.strip_prefix("pub const "));
        let literals: BTreeMap<&str, u64> = lines
            .filter_map(|line| line.strip_suffix(';')?.split_once(": u64 = "))
            .map(|(name, number)| (name, number.parse().unwrap()))
            .collect();
        let table: BTreeMap<&str, u64> =
            Feature::ALL.iter().flat_map(|feature| feature.row().bits).map(|bit| (bit.name, bit.value)).collect();
        assert_eq!(literals, table);
    }
}
