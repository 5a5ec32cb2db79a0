//! The one parameter struct that every kernel gets by value. `make header` makes
//! `templates/device/params.cuh` from it, comments included, and tests/mirrors compares; both sides
//! assert the size.

use super::launch_maps;
use crate::call::{BlockLists, Call, Scales, ScoresRef, TensorRef};
use crate::problem::{Pass, Problem};

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct KernelParams {
    /// Tensors of 8 bits (kKeyFormat) have strides in pairs of elements.
    pub q: TensorRef,
    pub k: TensorRef,
    pub v: TensorRef,
    pub out: TensorRef,
    /// Forward, where there is room in the workspace for them: V transposed
    /// (sm90/forward_fp8/images.cuh), or K and V widened (sm90_widen_kv.cu.tera).
    pub dout: TensorRef,
    /// Forward, dq, dk and dv are the fp32 scales of q, k and v (device/eight.cuh). Fields of their
    /// own would move the tensor maps, which follow this struct in the parameters of every kernel.
    pub dq: TensorRef,
    pub dk: TensorRef,
    pub dv: TensorRef,
    /// fp32 (batch, heads_q, seqlen_q), with cu_seqlens_q (heads_q, total_q), natural log. NULL
    /// where the caller does not want it.
    pub lse: *mut f32,
    /// Workspace, fp32 (batch, heads_q, workspace_rows), with cu_seqlens_q (heads_q,
    /// workspace_rows_of_head). It holds lse * log2(e), or lse itself for fp32 tensors (Log2Lse).
    /// It is +inf for rows without keys and for rows past a sequence's last.
    pub lse_log2: *mut f32,
    /// Workspace, in the layout of lse_log2: rowsum(dO * O) - dlse. It is 0 past a sequence's last
    /// row.
    pub delta: *mut f32,
    /// Workspace, fp32, in the layout of device/layout/dq_accum.cuh. It has the rows of lse_log2,
    /// with at most workspace_cols columns.
    pub dq_accum: *mut f32,
    /// Workspace, the counters of device/schedule/dq_turns.cuh. NULL if the pass is not
    /// deterministic.
    pub turns: *mut u32,
    pub dropout_seed_ptr: *const u64,
    pub dropout_offset_ptr: *const u64,
    pub dropout_seed: u64,
    pub dropout_offset: u64,
    pub batch_size: i32,
    pub num_heads_q: i32,
    pub num_heads_kv: i32,
    /// num_heads_q / num_heads_kv
    pub group_size: i32,
    pub seqlen_q: i32,
    pub seqlen_k: i32,
    /// Row i sees keys j <= i + right_shift (kIsCausal). With varlen the kernel adds the shift of
    /// each sequence's alignment (device/attention/sequence.cuh).
    pub right_shift: i32,
    /// Backward: rows of the workspace for each sequence and head. Row blocks of a kernel are a
    /// multiple of 16, up to 128, rows. Each block that holds a query ends within these rows.
    /// Forward with split keys: the packed rows of each short sequence of a mixed batch, or the
    /// rows of each head in split tiles; 0 if the partial states are of all rows
    /// (device/attention/partials.cuh). With kIsBatchInvariant: the runs of each tile whose keys
    /// are split (device/attention/segment_runs.cuh).
    pub workspace_rows: i32,
    pub softmax_scale: f32,
    /// softmax_scale * log2(e)
    pub softmax_scale_log2: f32,
    /// Weights whose 16-bit draw is below this are dropped.
    pub dropout_threshold: u32,
    /// 1 / probability of keeping
    pub dropout_keep_scale: f32,
    pub bias: ScoresRef,
    /// fp32. Kernels add to it.
    pub dbias: ScoresRef,
    /// Bytes, where 0 hides the key. With kMaskIsBits each byte holds the bits of eight keys, the
    /// first key in the lowest bit.
    pub mask: ScoresRef,
    /// The slope of batch b and query head h is at b * alibi_stride_batch + h.
    pub alibi_slopes: *const f32,
    pub alibi_stride_batch: i64,
    /// (heads_q). dsinks has the same layout.
    pub sinks: *const f32,
    pub dsinks: *mut f32,
    /// In the layout of lse.
    pub dlse: *const f32,
    /// (batch + 1). NULL if q is not packed end to end. cu_seqlens_k is the same for k and v.
    pub cu_seqlens_q: *const i32,
    pub cu_seqlens_k: *const i32,
    /// (batch). NULL if all rows are used. seqused_k is the same for k and v.
    pub seqused_q: *const i32,
    pub seqused_k: *const i32,
    /// Workspace rows of a query head, over all sequences.
    pub workspace_rows_of_head: i64,
    /// With cu_seqlens_q: the rows of lse for a query head.
    pub total_q: i64,
    /// softmax_scale / softcap
    pub softcap_factor: f32,
    /// softcap * log2(e)
    pub softcap_log2: f32,
    /// Row i sees keys j >= i + left_shift (kHasWindow). With varlen the kernel adds the same shift
    /// as to right_shift.
    pub left_shift: i32,
    /// Nonzero if each sequence's last query and key lie on its diagonal. Otherwise the first ones
    /// do.
    pub aligns_ends: i32,
    /// (batch, blocks): the pages of each sequence (device/attention/key_pages.cuh).
    pub block_table: *const i32,
    pub block_table_stride: i64,
    /// Workspace of splits: of the keys, as is partial_lse (device/attention/partials.cuh), or
    /// backward the partial dK and dV (device/layout/partial_gradients.cuh).
    pub partial_o: *mut f32,
    pub partial_lse: *mut f32,
    /// The number of splits: of the keys, or backward of a walk through the queries
    /// (device/schedule/group_walk.cuh).
    pub num_splits: i32,
    /// The number of batch entries of k and v: pages, or those that cache_batch_idx names.
    pub num_pages: i32,
    /// Rows from one sequence to the next in q, k, v and out (backward: dout) of padded varlen
    /// tensors, as tensor maps count them (device/layout/tensor_map.cuh).
    pub map_rows_q: i32,
    pub map_rows_k: i32,
    pub map_rows_v: i32,
    pub map_rows_o: i32,
    pub block_lists: BlockLists,
    /// (batch): the entry of k and v that holds each sequence's keys, and the rows there before its
    /// first key (kHasKeyStarts). Each may be NULL.
    pub cache_batch_idx: *const i32,
    pub leftpad_k: *const i32,
    /// Backward, where only the last tiles of each head are split (kSplitsLast): their first key.
    pub first_split_key: i32,
}

pub const KERNEL_PARAMS_BYTES: usize = 376 + 3 * 40 + 11 * 8 + 16 + 40 + 16 + 80 + 16 + 8;
const _: () = assert!(size_of::<KernelParams>() == KERNEL_PARAMS_BYTES);

impl KernelParams {
    /// Unsplit.
    pub fn new(call: &Call) -> Self {
        let call = &call.in_units();
        let p = &call.problem;
        // Only the backward pass has gradients, and only the forward pass scales.
        let Scales { q: q_scales, k: k_scales, v: v_scales } = call.features.scales;
        let [dq, dk, dv] = match p.pass {
            Pass::Forward => [q_scales, k_scales, v_scales],
            Pass::Backward => [call.dq, call.dk, call.dv],
        };
        let heads_rows = (p.num_heads_q * p.workspace_rows_of_head()) as usize;
        let features = &call.features;
        let [map_rows_q, map_rows_k, map_rows_v, map_rows_o] = launch_maps::rows_between(call);
        let dout = if p.keeps_transposed_v() {
            TensorRef {
                data: call.workspace.wrapping_byte_add(p.transposed_v_offset()).cast(),
                stride_head: p.transposed_v_stride() as i64,
                ..call.dout
            }
        } else if p.keeps_widened_kv() {
            let data = call.workspace.wrapping_byte_add(p.places_of_widened().k);
            TensorRef { data, stride_batch: p.widened_rows(), ..TensorRef::NULL }
        } else {
            call.dout
        };
        let workspace = call.workspace.cast::<f32>();
        let at = |index: usize| if workspace.is_null() { workspace } else { workspace.wrapping_add(index) };
        KernelParams {
            q: call.q,
            k: call.k,
            v: call.v,
            out: call.out,
            dout,
            dq,
            dk,
            dv,
            lse: call.lse,
            lse_log2: at(0),
            delta: at(heads_rows),
            dq_accum: at(2 * heads_rows),
            turns: match p.deterministic {
                true => at((p.delta_bytes() + p.dq_accum_bytes()) / size_of::<f32>()).cast(),
                false => std::ptr::null_mut(),
            },
            dropout_seed_ptr: call.dropout.seed_ptr,
            dropout_offset_ptr: call.dropout.offset_ptr,
            dropout_seed: call.dropout.seed,
            dropout_offset: call.dropout.offset,
            batch_size: p.batch_size as i32,
            num_heads_q: p.num_heads_q as i32,
            num_heads_kv: p.num_heads_kv as i32,
            group_size: p.group_size() as i32,
            seqlen_q: p.seqlen_q as i32,
            seqlen_k: p.seqlen_k as i32,
            right_shift: shift(p, p.right_shift()),
            workspace_rows: p.workspace_rows() as i32,
            softmax_scale: call.softmax_scale,
            softmax_scale_log2: call.softmax_scale * std::f32::consts::LOG2_E,
            dropout_threshold: call.dropout.threshold(),
            dropout_keep_scale: call.dropout.keep_scale(),
            bias: features.bias,
            dbias: features.dbias,
            mask: features.mask,
            alibi_slopes: features.alibi_slopes,
            alibi_stride_batch: features.alibi_stride_batch,
            sinks: features.sinks,
            dsinks: features.dsinks,
            dlse: features.dlse,
            cu_seqlens_q: features.cu_seqlens_q,
            cu_seqlens_k: features.cu_seqlens_k,
            seqused_q: features.seqused_q,
            seqused_k: features.seqused_k,
            workspace_rows_of_head: p.workspace_rows_of_head(),
            total_q: p.features.varlen.and_then(|varlen| varlen.total_q).unwrap_or(0),
            softcap_factor: if features.softcap > 0.0 { call.softmax_scale / features.softcap } else { 0.0 },
            softcap_log2: features.softcap * std::f32::consts::LOG2_E,
            left_shift: shift(p, p.left_shift()),
            aligns_ends: p.aligns_ends().into(),
            block_table: features.block_table,
            block_table_stride: features.block_table_stride,
            partial_o: std::ptr::null_mut(),
            partial_lse: std::ptr::null_mut(),
            num_splits: 1,
            num_pages: features.num_pages as i32,
            map_rows_q,
            map_rows_k,
            map_rows_v,
            map_rows_o,
            block_lists: features.block_lists,
            cache_batch_idx: features.cache_batch_idx,
            leftpad_k: features.leftpad_k,
            first_split_key: 0,
        }
    }

    /// With this many splits, at most as many as the workspace has room for (`KernelSpec`). Their
    /// partial results lie in the call's workspace: forward the states of these rows, backward the
    /// gradients of these keys.
    pub fn with_splits(self, call: &Call, num_splits: u32, split: SplitRows) -> Self {
        let p = &call.problem;
        let partial_o = call.workspace.wrapping_byte_add(p.partials_offset()).cast::<f32>();
        if p.pass == Pass::Backward && num_splits > 1 {
            let first_split_key = match split {
                SplitRows::OfHead(keys) => (p.seqlen_k - keys) as i32,
                SplitRows::All | SplitRows::Short(_) => 0,
            };
            return KernelParams { partial_o, num_splits: num_splits as i32, first_split_key, ..self };
        }
        let (rows, workspace_rows) = match split {
            SplitRows::All => (p.query_rows(), 0),
            SplitRows::Short(rows) => (p.rows_of_short(rows.into()), rows as i32),
            SplitRows::OfHead(rows) => (p.batch_size * p.num_heads_q * rows, rows as i32),
        };
        let partial_lse = partial_o.wrapping_add(num_splits as usize * (rows * p.partial_cols()) as usize);
        match num_splits {
            ..=1 => self,
            _ => KernelParams { partial_o, partial_lse, num_splits: num_splits as i32, workspace_rows, ..self },
        }
    }

    /// With this many runs of each tile of a batch-invariant problem whose keys are split; 0: they
    /// are not.
    pub fn with_runs(self, runs: u32) -> Self {
        if runs == 0 { self } else { KernelParams { workspace_rows: runs as i32, ..self } }
    }
}

/// The query rows of a forward pass whose keys are split, or the keys of a backward pass whose walk
/// through the queries is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SplitRows {
    All,
    /// So many packed rows of each short sequence of a mixed batch.
    Short(u32),
    /// So many rows of each head, backward keys (`family::split_rest`).
    OfHead(i64),
}

/// A diagonal's offset, clamped to where it makes a difference, so that a row and an offset add up
/// within int32. With varlen the kernel adds seqlen_k - seqlen_q of the sequence, so the range is
/// from -seqlen_k to seqlen_q.
fn shift(problem: &Problem, keys: Option<i64>) -> i32 {
    let (lowest, highest) = match problem.features.varlen.is_some() && problem.aligns_ends() {
        true => (-problem.seqlen_k, problem.seqlen_q),
        false => (-problem.seqlen_q, problem.seqlen_k),
    };
    keys.unwrap_or(0).clamp(lowest, highest) as i32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::{Dtype, Features, Pass, Varlen, Window};

    #[test]
    fn a_window_far_wider_than_the_queries_is_held_to_what_makes_a_difference() {
        let window = Window { left: Some(100), ..Window::default() };
        let decode = Problem {
            seqlen_k: 1000,
            features: Features { window, ..Features::NONE },
            ..Problem::dense(Pass::Forward, Dtype::Bf16, 1, 1, 1, 64)
        };
        let left = |problem: &Problem| shift(problem, problem.left_shift());
        assert_eq!(left(&decode), 899);
        // The device adds a sequence's seqlen_k - seqlen_q.
        let varlen = Features { window, varlen: Some(Varlen::default()), ..Features::NONE };
        assert_eq!(left(&Problem { features: varlen, ..decode }), -100);
        let top_left = Features { window: Window { top_left: true, ..window }, ..varlen };
        assert_eq!(left(&Problem { features: top_left, ..decode }), -1);
        let all = Features { window: Window { left: Some(1 << 30), ..window }, ..varlen };
        assert_eq!(left(&Problem { features: all, ..decode }), -1000);
    }
}
