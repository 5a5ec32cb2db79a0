//! The one parameter struct that every kernel gets by value, the twin of `templates/device/params.cuh`.
//!
//! Both sides assert its size and the test below its offsets, so a field added on one side alone fails to build.

use crate::call::{Call, TensorRef};

/// A (batch, seqlen, heads, dim) view as kernels see it: the twin of `TensorRef` in CUDA.
type View = TensorRef;

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct KernelParams {
    pub q: View,
    pub k: View,
    pub v: View,
    pub out: View,
    pub dout: View,
    pub dq: View,
    pub dk: View,
    pub dv: View,
    /// fp32 (batch, heads_q, seqlen_q), natural log; NULL where the caller does not want it.
    pub lse: *mut f32,
    /// Workspace, fp32 (batch, heads_q, workspace_rows): lse * log2(e); +inf for rows without keys and past seqlen_q.
    pub lse_log2: *mut f32,
    /// Workspace, fp32 (batch, heads_q, workspace_rows): rowsum(dO * O); 0 past seqlen_q.
    pub delta: *mut f32,
    /// Workspace, fp32, in the order of `templates/device/dq_accum.cuh`; at most workspace_rows x workspace_cols a head.
    pub dq_accum: *mut f32,
    /// Workspace, what `templates/device/turns.cuh` counts; NULL where the pass is not deterministic.
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
    /// Row i sees keys j <= i + causal_shift (causal kernels only).
    pub causal_shift: i32,
    /// No block of a multiple of 16 rows up to 128 that holds a query reaches past them.
    pub workspace_rows: i32,
    pub softmax_scale: f32,
    /// softmax_scale * log2(e)
    pub softmax_scale_log2: f32,
    /// 16-bit draws below it are dropped.
    pub dropout_threshold: u32,
    /// 1 / probability of keeping
    pub dropout_keep_scale: f32,
}

pub const KERNEL_PARAMS_BYTES: usize = 376;
const _: () = assert!(size_of::<KernelParams>() == KERNEL_PARAMS_BYTES);

impl KernelParams {
    pub fn new(call: &Call) -> Self {
        let p = &call.problem;
        let heads_rows = (p.batch_size * p.num_heads_q * p.workspace_rows()) as usize;
        let workspace = call.workspace.cast::<f32>();
        let at = |index: usize| if workspace.is_null() { workspace } else { workspace.wrapping_add(index) };
        KernelParams {
            q: call.q,
            k: call.k,
            v: call.v,
            out: call.out,
            dout: call.dout,
            dq: call.dq,
            dk: call.dk,
            dv: call.dv,
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
            causal_shift: p.causal.shift(p.seqlen_q, p.seqlen_k) as i32,
            workspace_rows: p.workspace_rows() as i32,
            softmax_scale: call.softmax_scale,
            softmax_scale_log2: call.softmax_scale * std::f32::consts::LOG2_E,
            dropout_threshold: call.dropout.threshold(),
            dropout_keep_scale: call.dropout.keep_scale(),
        }
    }
}
