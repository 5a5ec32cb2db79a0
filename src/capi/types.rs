//! The parameter structs of the two passes as C sees them. They hold data only: `args` and the
//! files it uses check them. cbindgen copies the doc comments into include/flashtune.h.

pub use super::views::*;

/// IEEE half precision (CUDA and CPU backends).
pub const FLASHTUNE_DTYPE_FP16: i32 = 1;
/// bfloat16 (CUDA and CPU backends).
pub const FLASHTUNE_DTYPE_BF16: i32 = 2;
/// IEEE single precision (CUDA and CPU backends).
///
/// The error against exact attention is bounded by that of plain fp32 attention, which rounds each
/// product and sum to fp32. Let E be the largest error of any element of plain fp32 attention:
///
/// - Outputs are within 2 E plus one rounding step.
/// - Gradients are within 3 E plus one rounding step, plus 4 rounding steps at the magnitude of the
///   terms that cancel in them.
/// - On a GPU, 2^-21 of the largest element is added to both bounds.
///
/// A GPU computes each product as three tf32 products, which keep 22 of the 24 bits. Infinities in
/// v or dout may therefore give NaN on a GPU.
pub const FLASHTUNE_DTYPE_FP32: i32 = 3;
/// 8 bits: sign, 4 of exponent, 3 of mantissa; the largest number is 448, and there is no infinity
/// (float8_e4m3fn). For k and v with q in fp16 or bf16, and for all three of q, k and v.
///
/// A tensor of 8 bits holds x / scale, and its scales are fp32 (k_descale in
/// flashtune_forward_params). It is made by rounding to the nearest, ties to even. Numbers past the
/// largest, infinities too, become the largest. NaN stays NaN.
pub const FLASHTUNE_DTYPE_E4M3: i32 = 4;
/// 8 bits: sign, 5 of exponent, 2 of mantissa; the largest finite number is 57344 (float8_e5m2).
/// For k and v with q in fp16 or bf16. Quantising never makes an infinity.
pub const FLASHTUNE_DTYPE_E5M2: i32 = 5;
/// 8-bit integers from -127 to 127. For k and v with q in fp16 or bf16. There is no NaN:
/// quantising makes it 0.
pub const FLASHTUNE_DTYPE_INT8: i32 = 6;
/// Rows of 4-bit numbers with their scales, for k and v with q in fp16 or bf16. A tensor has bytes
/// as elements, so strides count bytes. head_dim and head_dim_v must be multiples of 32.
///
/// A row of d columns has d / 2 bytes of numbers from 0 to 15, column 2 i in the low half of byte
/// i and column 2 i + 1 in the high half. Behind them each 32 neighbouring columns have two fp16
/// numbers, a scale and a zero. The row ends at the next multiple of 16 bytes: 48 bytes for 64
/// columns, 80 for 128, 160 for 256. Bytes between the last zero and the end may hold anything.
///
/// A number n stands for scale * n + zero, not rounded to fp16. Scales must be finite and above 0,
/// and zeros finite; the CPU backend refuses others.
///
/// Quantising takes the least number of a group as its zero and a fifteenth of the distance to the
/// largest as its scale, or 1 where that rounds to 0. Magnitudes beyond 65408 become 65408, and a
/// NaN becomes the zero.
pub const FLASHTUNE_DTYPE_INT4_GROUP32: i32 = 7;
/// The same with a scale and a zero for 64 columns, of which head_dim and head_dim_v must be
/// multiples: rows of 80 bytes for 128 columns, 112 for 192, 144 for 256.
pub const FLASHTUNE_DTYPE_INT4_GROUP64: i32 = 8;

/// Rows are quantised as they are.
pub const FLASHTUNE_ROTATION_NONE: i32 = 0;
/// A row x becomes H D x / sqrt(n), in fp32. n is the largest power of two that divides head_dim,
/// which must be a multiple of 8. H is the n x n Walsh-Hadamard matrix and serves each block of n
/// columns. D is a diagonal of signs.
///
/// Column c's sign is -1 if and only if bit c mod 32 of word (c mod 128) / 32 of a draw is set. The
/// draw is Philox4x32-10 with the counter (c / 128, 0, 0, 0) and the key (low half, high half) of
/// rotation_seed.
pub const FLASHTUNE_ROTATION_HADAMARD: i32 = 1;

/// Every query sees every key.
pub const FLASHTUNE_CAUSAL_NONE: i32 = 0;
/// Query i sees key j if and only if j <= i + seqlen_k - seqlen_q. The last query sees the last
/// key.
pub const FLASHTUNE_CAUSAL_BOTTOM_RIGHT: i32 = 1;
/// Query i sees key j if and only if j <= i. The first query sees the first key.
pub const FLASHTUNE_CAUSAL_TOP_LEFT: i32 = 2;

/// There is no window: causal alone decides.
pub const FLASHTUNE_WINDOW_NONE: i32 = 0;
/// Query i sees key j only if -window_left <= j - (i + seqlen_k - seqlen_q) <= window_right. The
/// last query's diagonal is the last key. With varlen, both lengths are the sequence's own.
pub const FLASHTUNE_WINDOW_BOTTOM_RIGHT: i32 = 1;
/// Query i sees key j only if -window_left <= j - i <= window_right.
pub const FLASHTUNE_WINDOW_TOP_LEFT: i32 = 2;

/// alibi_slopes is used.
pub const FLASHTUNE_FEATURE_ALIBI: u64 = 1;
/// bias is used.
pub const FLASHTUNE_FEATURE_BIAS: u64 = 2;
/// mask is used, and its elements are bytes.
pub const FLASHTUNE_FEATURE_MASK: u64 = 4;
/// sinks is used. The backward pass also writes dsinks if it is not NULL.
pub const FLASHTUNE_FEATURE_SINKS: u64 = 8;
/// q, out and their gradients hold packed sequences: cu_seqlens_q and total_q are used.
pub const FLASHTUNE_FEATURE_CU_SEQLENS_Q: u64 = 16;
/// k, v and their gradients hold packed sequences: cu_seqlens_k and total_k are used.
pub const FLASHTUNE_FEATURE_CU_SEQLENS_K: u64 = 32;
/// seqused_q is used.
pub const FLASHTUNE_FEATURE_SEQUSED_Q: u64 = 64;
/// seqused_k is used.
pub const FLASHTUNE_FEATURE_SEQUSED_K: u64 = 128;
/// Backward pass: dbias is written. Requires FLASHTUNE_FEATURE_BIAS.
pub const FLASHTUNE_FEATURE_DBIAS: u64 = 256;
/// Backward pass: dlse is used.
pub const FLASHTUNE_FEATURE_DLSE: u64 = 512;
/// Forward pass: k and v are pages, and block_table, page_size and num_pages are used.
pub const FLASHTUNE_FEATURE_PAGED: u64 = 1024;
/// mask is used, and its elements are bits. Excludes FLASHTUNE_FEATURE_MASK.
pub const FLASHTUNE_FEATURE_MASK_BITS: u64 = 2048;

/// block_mask is used.
pub const FLASHTUNE_FEATURE_BLOCK_MASK: u64 = 4096;
/// Forward pass: cache_batch_idx and batch_size_cache are used.
pub const FLASHTUNE_FEATURE_CACHE_BATCH_IDX: u64 = 8192;
/// Forward pass: leftpad_k is used.
pub const FLASHTUNE_FEATURE_LEFTPAD_K: u64 = 16384;

/// One forward pass: out = dropout(softmax(mask(softcap(softmax_scale * q k^T) + alibi + bias))) v.
///
/// Set the whole struct to zero, then struct_size, then the fields that apply. Zero is the default
/// of every optional field.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct flashtune_forward_params {
    /// sizeof(flashtune_forward_params).
    pub struct_size: u64,
    /// A FLASHTUNE_DTYPE_*: the type of q, k, v and out, unless kv_dtype or out_dtype gives
    /// another. Sums are fp32. On a GPU, sums of e4m3 products have fewer bits (docs/numerics.md).
    pub dtype: i32,
    /// A FLASHTUNE_CAUSAL_*.
    pub causal: i32,
    /// Batch entries, 0 to 2^31 - 1. With 0 the call does nothing. With cu_seqlens_q or
    /// cu_seqlens_k, the number of sequences.
    ///
    /// Three products are limited as well. batch_size * num_heads_q is below 2^31. That product
    /// times (4096 + the longer of seqlen_q and seqlen_k) is below 2^51. num_heads_q * total_q and
    /// num_heads_q * total_k are below 2^51.
    ///
    /// On a GPU, a call of about 2^31 tiles or more is UNSUPPORTED. A tile holds at least 16
    /// queries or keys of one head.
    pub batch_size: i64,
    /// Heads of q and out, a multiple of num_heads_kv. The quotient of the two is the size of a GQA
    /// group. Query head h reads K/V head h / (num_heads_q / num_heads_kv).
    pub num_heads_q: i64,
    /// Heads of k and v, at least 1.
    pub num_heads_kv: i64,
    /// Queries of a batch entry, 0 to 2^31 - 4096. With cu_seqlens_q, an upper bound of the
    /// sequences' lengths; the launch is sized by it.
    pub seqlen_q: i64,
    /// Keys of a batch entry, 0 to 2^31 - 4096. With cu_seqlens_k, an upper bound as for seqlen_q.
    /// A query that sees no key has out = 0 and lse = -infinity (with a sink, lse is the sink's
    /// score).
    pub seqlen_k: i64,
    /// Dim of q and k, 1 to 512.
    pub head_dim: i64,
    /// Dim of v and out, 1 to 512.
    pub head_dim_v: i64,
    /// Factor of the scores, of a magnitude from 2^-100 to 2^100. 0 means 1/sqrt(head_dim).
    pub softmax_scale: f32,
    /// Probability of dropping (not of keeping) an attention weight: 0 <= dropout_p < 1. It is
    /// rounded to a multiple of 1/65536, at most 65535/65536. Kept weights are divided by the
    /// rounded probability of keeping.
    pub dropout_p: f32,
    /// The dropout mask is a pure function of (seed, offset, batch, head, query, key). It is equal
    /// on every backend and in both passes. Seed and offset are ignored if dropout_p is 0.
    ///
    /// philox4x32_10 is defined by Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
    /// 2011. / and % are those of integers, and low and high are the 32-bit halves of a value.
    /// query and key are positions in their sequence, from 0. threshold is dropout_p * 65536,
    /// rounded, at most 65535.
    ///
    ///     words = philox4x32_10(
    ///         counter = {key / 16 * 4 + key % 8 / 2,
    ///                    query / 16 * 8 + query % 8,
    ///                    batch * num_heads_q + head,
    ///                    offset low},
    ///         key = {seed low, seed high ^ offset high})
    ///     draw = words[query % 16 / 8 + 2 * (key % 16 / 8)] >> (16 * (key % 2)) & 0xffff
    ///     dropped = draw < threshold
    pub dropout_seed: u64,
    /// See dropout_seed.
    pub dropout_offset: u64,
    /// NULL, or the address of 8 bytes that replace dropout_seed. The kernels read them when they
    /// run, so each replay of a captured graph may have its own mask. They are device memory on a
    /// CUDA context and host memory on a CPU context.
    pub dropout_seed_ptr: *const u64,
    /// The same for dropout_offset.
    pub dropout_offset_ptr: *const u64,
    /// (batch_size, seqlen_q, num_heads_q, head_dim), read. With cu_seqlens_q, q and all other
    /// tensors of queries are (total_q, heads, dim), and stride_batch is ignored.
    pub q: flashtune_const_tensor,
    /// (batch_size, seqlen_k, num_heads_kv, head_dim), read. With cu_seqlens_k, k and all other
    /// tensors of keys are (total_k, heads, dim), and stride_batch is ignored.
    pub k: flashtune_const_tensor,
    /// (batch_size, seqlen_k, num_heads_kv, head_dim_v), read.
    pub v: flashtune_const_tensor,
    /// (batch_size, seqlen_q, num_heads_q, head_dim_v), written.
    pub out: flashtune_tensor,
    /// fp32 (batch_size, num_heads_q, seqlen_q), with cu_seqlens_q (num_heads_q, total_q);
    /// contiguous, written. It is the natural logarithm of the sum of the exponentials of the
    /// softmax's inputs. NULL if not wanted. The backward pass needs it.
    pub lse: *mut f32,
    /// FLASHTUNE_FEATURE_* combined with |: the features whose data fields below are used.
    ///
    /// A used pointer must not be NULL at a launch; it may be NULL in the calls that do not touch
    /// data. An unused pointer must be NULL. Unused sizes must be 0: total_q, total_k, page_size,
    /// num_pages, batch_size_cache and block_mask's block_q, block_k and max_blocks.
    pub features: u64,
    /// A FLASHTUNE_WINDOW_*. With causal, the window must have the same alignment, and window_right
    /// must be 0 or -1.
    pub window: i32,
    /// Scores s become softcap * tanh(s / softcap), after softmax_scale and before alibi and bias
    /// are added. 0 means no soft cap. Otherwise both softcap and |softmax_scale| / softcap are
    /// from 2^-100 to 2^100.
    pub softcap: f32,
    /// With a window: how many keys before its diagonal a query sees, at most 2^31 - 4096; -1 means
    /// all. seqlen_q + seqlen_k is then at most 2^31 - 4096 too. Without a window: 0 or -1.
    pub window_left: i64,
    /// With a window: how many keys after its diagonal a query sees. The limits are those of
    /// window_left.
    pub window_right: i64,
    /// fp32, read: -slope * |i + seqlen_k - seqlen_q - j| is added to the score of query i and key
    /// j. With varlen, both lengths are the sequence's own. The slope of batch entry b and query
    /// head h is element b * alibi_stride_batch + h.
    pub alibi_slopes: *const f32,
    /// Elements from one batch entry's slopes to the next, at least 0. With 0, all batch entries
    /// share num_heads_q slopes.
    pub alibi_stride_batch: i64,
    /// Elements of dtype, read: added to the scores. -infinity hides a key.
    pub bias: flashtune_const_scores_tensor,
    /// Read. With FLASHTUNE_FEATURE_MASK, elements are bytes: 0 hides a key, any other value shows
    /// it.
    ///
    /// With FLASHTUNE_FEATURE_MASK_BITS, elements are bits, packed along the keys. The tensor is
    /// (batch_size, num_heads_q, seqlen_q, ceil(seqlen_k / 8)) bytes. Bit j % 8 of byte j / 8
    /// belongs to key j, where bit 0 is the lowest: 0 hides the key, 1 shows it. Little-endian
    /// words of 32 bits have this layout. Strides are in bytes, and stride_seqlen_k is 1. Bits past
    /// the last key may have any value.
    pub mask: flashtune_const_scores_tensor,
    /// fp32 (num_heads_q), read: an extra score of each query head that belongs to no key. It takes
    /// its share of the softmax, adds nothing to out, and is part of lse.
    pub sinks: *const f32,
    /// int32 (batch_size + 1), read: sequence b is rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of
    /// q. The offsets begin at 0, do not decrease and are at most total_q. No sequence is longer
    /// than seqlen_q. Rows that belong to no sequence are neither read nor written.
    ///
    /// Four arrays hold lengths: cu_seqlens_q, cu_seqlens_k, seqused_q and seqused_k. Each may be
    /// used without the others. On a CPU context they are host memory, and a launch refuses wrong
    /// values. On a CUDA context they are device memory, and nothing checks them. There, a sequence
    /// longer than seqlen_q or seqlen_k uses its first rows up to that length. Any other wrong
    /// value is undefined behaviour.
    pub cu_seqlens_q: *const i32,
    /// int32 (batch_size + 1), read: the same for k and v, with total_k and seqlen_k.
    pub cu_seqlens_k: *const i32,
    /// int32 (batch_size), read: the number of used rows of each sequence of q, counted from its
    /// first. It is at least 0 and at most the sequence's length. The other rows are neither read
    /// nor written, nor are their elements of lse.
    pub seqused_q: *const i32,
    /// int32 (batch_size), read: the same for k and v.
    pub seqused_k: *const i32,
    /// With cu_seqlens_q: rows of q, at most 2^31 - 4096.
    pub total_q: i64,
    /// With cu_seqlens_k: rows of k, at most 2^31 - 4096.
    pub total_k: i64,
    /// int32 (batch_size, ceil(seqlen_k / page_size)), read. Page block_table[b][i] of k and v
    /// holds sequence b's keys from i * page_size on. Pages may be shared.
    ///
    /// k and v are then (num_pages, page_size, num_heads_kv, dim), and stride_batch leads from one
    /// page to the next. A sequence has seqlen_k keys, or as many as seqused_k says. Entries and
    /// pages past them are not read. All rows of a sequence's last page may be read; those past its
    /// last key do not affect the result.
    ///
    /// On a CUDA context the table is device memory, and an entry that names no page stands for the
    /// last page. On a CPU context it is host memory, and a launch refuses such an entry. Pages
    /// exclude cu_seqlens_k and dropout. With pages, seqlen_q * num_heads_q / num_heads_kv is at
    /// most 2^31 - 4096.
    pub block_table: *const i32,
    /// Elements from one sequence's row of block_table to the next: at least ceil(seqlen_k /
    /// page_size).
    pub block_table_stride: i64,
    /// With block_table: keys of a page, at least 1. Each size has its own kernel.
    pub page_size: i64,
    /// With block_table: pages that k and v hold, 1 to 2^31 - 1.
    pub num_pages: i64,
    /// 0 or 1. With 1, a query's out and lse have the same bits alone and at any place in any
    /// batch, in a prefill at once, in chunks of any lengths, and as the one query of a decoding
    /// step. dropout_p must be 0. On a CUDA context k and v must not have 8 bits.
    ///
    /// The guarantee holds among calls with batch_invariant on one device, with one version of this
    /// library and of NVRTC. These must be equal between the calls:
    ///
    /// - dtype, num_heads_q, num_heads_kv, head_dim and head_dim_v;
    /// - causal, window, window_left and window_right;
    /// - softmax_scale, softcap and other features than varlen and pages;
    /// - the query's values, and the keys and values that it sees at their places in the sequence.
    ///   Hidden keys must have finite values.
    ///
    /// These may differ:
    ///
    /// - which queries of the sequence are in the call, and keys that the query does not see;
    /// - batch_size, the other sequences, and where they lie;
    /// - the longest lengths, total_q and total_k;
    /// - pages or none, page_size, and which pages hold a sequence's keys;
    /// - addresses and strides.
    ///
    /// A block mask must be equal too. On GPUs of compute capability 9.0, calls of few and of
    /// many queries agree because mma.sync and wgmma give the same bits. They do on an H200.
    ///
    /// The order of sums is fixed, and never follows from records or measurements. The mode
    /// therefore gives up the time that another order would save.
    pub batch_invariant: i32,
    /// Must be 0.
    pub reserved: i32,
    /// For each block of queries, the blocks of keys that it sees. Excludes varlen, pages,
    /// cache_batch_idx and leftpad_k.
    pub block_mask: flashtune_block_mask,
    /// int32 (batch_size), read: the batch entry of k and v that holds each sequence's keys. k and
    /// v are then (batch_size_cache, seqlen_k, num_heads_kv, dim). Several sequences may share an
    /// entry. Excludes cu_seqlens_k and block_table.
    ///
    /// On a CUDA context it is device memory, and a number that names no entry stands for the last
    /// entry. On a CPU context it is host memory, and a launch refuses such a number.
    pub cache_batch_idx: *const i32,
    /// int32 (batch_size), read: the rows before each sequence's first key in its entry of k and v.
    /// seqused_k counts from the entry's first row, so sequence b has seqused_k[b] - leftpad_k[b]
    /// keys, or seqlen_k - leftpad_k[b]. Key 0 is row leftpad_k[b]: causal, the window, alibi, bias
    /// and mask count from there. Excludes cu_seqlens_k and block_table.
    ///
    /// On a CUDA context it is device memory, and a number below 0 counts as 0, one above the
    /// entry's used rows as their number. On a CPU context it is host memory, and a launch refuses
    /// both.
    pub leftpad_k: *const i32,
    /// With cache_batch_idx: batch entries of k and v, 1 to 2^31 - 1.
    pub batch_size_cache: i64,
    /// 0: the config decides into how many parts the keys are split over CTAs. Otherwise the most
    /// parts, at least 1. It changes neither the plan nor the workspace's size. With
    /// batch_invariant it must be 0, since the places of the keys decide.
    pub num_splits: i64,
    /// A FLASHTUNE_DTYPE_*: the type of k and v; 0 means dtype. With dtype FP16 or BF16 it may be
    /// E4M3, E5M2, INT8, INT4_GROUP32 or INT4_GROUP64. With dtype E4M3 it is 0 or E4M3.
    ///
    /// With k and v of 8 bits, dropout_p must be 0. On a CUDA context their addresses, strides and
    /// head dims must be multiples of 4 bytes; multiples of 16 bytes run fastest.
    ///
    /// With int4, dropout_p is 0, and k_descale and v_descale are NULL, since rows hold their
    /// scales. On a CUDA context addresses and strides are the same multiples, head dims are at
    /// most 256, and there is no block mask and no batch_invariant. The decode kernels read the
    /// keys once for each 64 rows, queries times heads of a GQA group. On compute capability 9.0
    /// with dtype BF16, the keys of prompts are first widened to 16 bits if the workspace has room.
    pub kv_dtype: i32,
    /// The type of out, and of bias: 0 means dtype. With dtype E4M3 it must be FP16 or BF16.
    pub out_dtype: i32,
    /// fp32 (batch_size, 1, num_heads_kv), read: the scales of q with dtype E4M3, else NULL. The
    /// query heads of a GQA group share one. stride_seqlen is ignored.
    ///
    /// Strides of the three arrays of scales are in elements and at least 0. A stride of 0 shares
    /// the scale along that dimension, so three strides of 0 make one scale for the tensor. An
    /// element stands for its 8-bit number times its scale.
    ///
    /// Scales must be finite and above 0. On a CPU context a launch refuses others. On a CUDA
    /// context nothing checks them: the heads and sequences that use such a scale have results
    /// without meaning, and no others are affected.
    pub q_descale: flashtune_const_tensor,
    /// fp32, read: the scales of k if it has 8 bits, else NULL. keys_per_descale says how many keys
    /// share one:
    ///
    /// - 0: all keys of a sequence. The array is (batch_size, 1, num_heads_kv), and stride_seqlen
    ///   is ignored.
    /// - 1: each key has its own. The array has k's shape without the last dimension: (batch_size,
    ///   seqlen_k, num_heads_kv), with cu_seqlens_k (total_k, num_heads_kv), with pages (num_pages,
    ///   page_size, num_heads_kv). cache_batch_idx and leftpad_k apply to it too.
    /// - 128: blocks of 128 keys, counted from each sequence's key 0. The array is (batch_size,
    ///   ceil(seqlen_k / 128), num_heads_kv), also with pages and packed sequences.
    pub k_descale: flashtune_const_tensor,
    /// The same for v.
    pub v_descale: flashtune_const_tensor,
    /// 0, 1 or 128: see k_descale. With dtype E4M3 a CUDA context takes 0 and 128.
    pub keys_per_descale: i64,
}

/// One backward pass. A field with the name of a forward field means the same and must have the
/// value that the forward pass had. out and lse are the forward pass's results. Set the whole
/// struct to zero first, as for flashtune_forward_params.
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
    pub q: flashtune_const_tensor,
    pub k: flashtune_const_tensor,
    pub v: flashtune_const_tensor,
    /// (batch_size, seqlen_q, num_heads_q, head_dim_v), read: the forward pass's out.
    pub out: flashtune_const_tensor,
    /// fp32, contiguous, read: the forward pass's lse, in its shape. Must not be NULL.
    pub lse: *const f32,
    /// (batch_size, seqlen_q, num_heads_q, head_dim_v), read: the gradient of out.
    pub dout: flashtune_const_tensor,
    /// (batch_size, seqlen_q, num_heads_q, head_dim), written: the gradient of q. dq, dk and dv may
    /// be views into one packed buffer if no two of them share an element.
    pub dq: flashtune_tensor,
    /// (batch_size, seqlen_k, num_heads_kv, head_dim), written: the gradient of k.
    pub dk: flashtune_tensor,
    /// (batch_size, seqlen_k, num_heads_kv, head_dim_v), written: the gradient of v.
    pub dv: flashtune_tensor,
    /// 0 or 1. With 1, dq, dk, dv and dbias have the same bits at every run. Key tiles then add to
    /// dq in a fixed order, which costs time and slightly more workspace.
    ///
    /// - A dbias that is summed along a dimension is UNSUPPORTED.
    /// - The config follows from the problem, the device's architecture and the library's version
    ///   alone, never from records. flashtune_autotune therefore refuses such a problem.
    ///
    /// With 0, on a GPU, the order of fp32 sums may change dq from run to run, and dbias where it
    /// is summed. out, lse, dk, dv and dsinks have the same bits at every run.
    pub deterministic: i32,
    /// Must be 0.
    pub reserved: i32,
    pub features: u64,
    pub window: i32,
    pub softcap: f32,
    pub window_left: i64,
    pub window_right: i64,
    pub alibi_slopes: *const f32,
    pub alibi_stride_batch: i64,
    pub bias: flashtune_const_scores_tensor,
    pub mask: flashtune_const_scores_tensor,
    pub sinks: *const f32,
    pub cu_seqlens_q: *const i32,
    pub cu_seqlens_k: *const i32,
    pub seqused_q: *const i32,
    pub seqused_k: *const i32,
    pub total_q: i64,
    pub total_k: i64,
    /// fp32, added to, so set it to zero first: the gradient of bias. Elements along a stride of 0
    /// are summed into one. No other two elements may share a place. With deterministic, the stride
    /// of a dimension longer than 1 must not be 0.
    pub dbias: flashtune_scores_tensor,
    /// fp32 (num_heads_q): the gradient of sinks, written unless the call does nothing. NULL if not
    /// wanted.
    pub dsinks: *mut f32,
    /// fp32, contiguous, in the shape of lse, read: the gradient of lse.
    pub dlse: *const f32,
    /// For each block of keys, the blocks of queries that see it: the transpose of the forward
    /// pass's lists. On a CUDA context it excludes deterministic.
    pub block_mask: flashtune_block_mask,
}
