//! Inputs: the fields that both passes have, taken out of either pass's C struct.
//!
//! Each struct keeps its layout for C and grows at its own end, so code must not assume that one
//! begins like the other. This file alone reads the common fields, from each struct by name.

use super::eight_bits::{EightBitInputs, Types};
use super::factor::check_factor;
use super::features::{FeatureInputs, PassInputs};
use super::key_starts::KeyStartInputs;
use super::pages::PageInputs;
use super::types::*;
use crate::dropout::Dropout;
use crate::error::{Error, Result};
use crate::problem::{Causal, Features, Layout, Pass, Problem, Varlen};

/// The fields under their names, unchecked.
pub struct Inputs {
    dtype: i32,
    causal: i32,
    batch_size: i64,
    num_heads_q: i64,
    num_heads_kv: i64,
    seqlen_q: i64,
    seqlen_k: i64,
    head_dim: i64,
    head_dim_v: i64,
    softmax_scale: f32,
    dropout_p: f32,
    dropout_seed: u64,
    dropout_offset: u64,
    dropout_seed_ptr: *const u64,
    dropout_offset_ptr: *const u64,
    pub q: flashtune_const_tensor,
    pub k: flashtune_const_tensor,
    pub v: flashtune_const_tensor,
    pub features: FeatureInputs,
}

/// `$own` gives the fields that only this pass has.
macro_rules! take_from {
    ($params:ty, $own:expr) => {
        impl From<&$params> for Inputs {
            fn from(params: &$params) -> Inputs {
                let own: fn(&$params) -> PassInputs = $own;
                Inputs {
                    dtype: params.dtype,
                    causal: params.causal,
                    batch_size: params.batch_size,
                    num_heads_q: params.num_heads_q,
                    num_heads_kv: params.num_heads_kv,
                    seqlen_q: params.seqlen_q,
                    seqlen_k: params.seqlen_k,
                    head_dim: params.head_dim,
                    head_dim_v: params.head_dim_v,
                    softmax_scale: params.softmax_scale,
                    dropout_p: params.dropout_p,
                    dropout_seed: params.dropout_seed,
                    dropout_offset: params.dropout_offset,
                    dropout_seed_ptr: params.dropout_seed_ptr,
                    dropout_offset_ptr: params.dropout_offset_ptr,
                    q: params.q,
                    k: params.k,
                    v: params.v,
                    features: FeatureInputs {
                        features: params.features,
                        window: params.window,
                        softcap: params.softcap,
                        window_left: params.window_left,
                        window_right: params.window_right,
                        alibi_slopes: params.alibi_slopes,
                        alibi_stride_batch: params.alibi_stride_batch,
                        bias: params.bias,
                        mask: params.mask,
                        sinks: params.sinks,
                        cu_seqlens_q: params.cu_seqlens_q,
                        cu_seqlens_k: params.cu_seqlens_k,
                        seqused_q: params.seqused_q,
                        seqused_k: params.seqused_k,
                        total_q: params.total_q,
                        total_k: params.total_k,
                        block_mask: params.block_mask,
                        pass: own(params),
                    },
                }
            }
        }
    };
}
take_from!(flashtune_forward_params, |params| PassInputs {
    pages: PageInputs::from(params),
    key_starts: KeyStartInputs::from(params),
    eight_bits: EightBitInputs::from(params),
    ..PassInputs::NONE
});
take_from!(flashtune_backward_params, |params| PassInputs {
    dbias: params.dbias,
    dsinks: params.dsinks,
    dlse: params.dlse,
    ..PassInputs::NONE
});

impl Inputs {
    /// The validated problem. The arguments come from fields that only one pass's struct has.
    pub fn problem(&self, pass: Pass, deterministic: bool, batch_invariant: bool) -> Result<Problem> {
        let Types { out: dtype, eight_bits, four_bits } = self.features.pass.eight_bits.types(pass, self.dtype)?;
        let causal = match self.causal {
            FLASHTUNE_CAUSAL_NONE => Causal::None,
            FLASHTUNE_CAUSAL_BOTTOM_RIGHT => Causal::BottomRight,
            FLASHTUNE_CAUSAL_TOP_LEFT => Causal::TopLeft,
            other => {
                return Err(Error::invalid(format!(
                    "causal is {other}; it must be FLASHTUNE_CAUSAL_NONE (0), _BOTTOM_RIGHT (1) or _TOP_LEFT (2)"
                )));
            }
        };
        let mut problem = Problem {
            pass,
            dtype,
            batch_size: self.batch_size,
            num_heads_q: self.num_heads_q,
            num_heads_kv: self.num_heads_kv,
            seqlen_q: self.seqlen_q,
            seqlen_k: self.seqlen_k,
            head_dim: self.head_dim,
            head_dim_v: self.head_dim_v,
            causal,
            dropout: self.dropout_p > 0.0,
            deterministic,
            batch_invariant,
            features: Features { eight_bits, four_bits, ..self.features.of_problem(pass, causal)? },
            // Set after the tensors are checked.
            layout: Layout::Vec1,
        };
        problem.validate()?;
        // Tensors without rows hold empty sequences. Code below this point checks lengths only.
        if let Some(Varlen { total_q, total_k, .. }) = problem.features.varlen {
            problem.seqlen_q = if total_q == Some(0) { 0 } else { problem.seqlen_q };
            problem.seqlen_k = if total_k == Some(0) { 0 } else { problem.seqlen_k };
        }
        Ok(problem.without_idle_causal())
    }

    /// The factor of the scores, and the dropout.
    pub fn scalars(&self) -> Result<(f32, Dropout)> {
        let scale = self.softmax_scale;
        check_factor("softmax_scale", scale, "0 means 1/sqrt(head_dim)")?;
        let p = self.dropout_p;
        if !(0.0..1.0).contains(&p) {
            return Err(Error::invalid(format!(
                "dropout_p is {p}; it is the probability of dropping and must be at least 0 and below 1"
            )));
        }
        let softmax_scale = if scale == 0.0 { (1.0 / (self.head_dim as f64).sqrt()) as f32 } else { scale };
        if let Some(softcap) = self.features.softcap() {
            check_factor(
                "|softmax_scale| / softcap",
                softmax_scale.abs() / softcap,
                &format!("softmax_scale is {softmax_scale:?} and softcap {softcap:?}"),
            )?;
        }
        let dropout = match p > 0.0 {
            false => Dropout::NONE,
            true => Dropout {
                p,
                seed: self.dropout_seed,
                offset: self.dropout_offset,
                seed_ptr: self.dropout_seed_ptr,
                offset_ptr: self.dropout_offset_ptr,
            },
        };
        Ok((softmax_scale, dropout))
    }
}
