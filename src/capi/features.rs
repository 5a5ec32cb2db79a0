//! FeatureInputs: what a call asks beyond plain attention, taken out of either pass's C struct, and its checks: bits
//! against pointers, the window against causal, arrays and their sizes. Lengths on the host are `lengths`'.

use super::array::Array;
use super::factor::check_factor;
use super::lengths::Lengths;
use super::operand::{Access, Data};
use super::overlap::Footprint;
use super::pages::PageInputs;
use super::scores::ScoresOperand;
use super::sized::address;
use super::types::*;
use crate::call::{FeatureArgs, ScoresRef};
use crate::error::{Error, Result};
use crate::problem::{Causal, Features, Pass, Problem, Varlen, Window};
use std::ffi::c_void;

/// The fields of the same names, unchecked; NULL where the pass does not have them.
pub struct FeatureInputs {
    features: u64,
    window: i32,
    softcap: f32,
    window_left: i64,
    window_right: i64,
    alibi_slopes: *const f32,
    alibi_stride_batch: i64,
    bias: flashtune_scores_tensor,
    mask: flashtune_scores_tensor,
    sinks: *const f32,
    cu_seqlens_q: *const i32,
    cu_seqlens_k: *const i32,
    seqused_q: *const i32,
    seqused_k: *const i32,
    total_q: i64,
    total_k: i64,
    dbias: flashtune_scores_tensor,
    dsinks: *mut f32,
    dlse: *const f32,
    pub pages: PageInputs,
    block_mask: flashtune_block_mask,
}

const NO_SCORES: flashtune_scores_tensor = flashtune_scores_tensor {
    data: std::ptr::null_mut(),
    stride_batch: 0,
    stride_head: 0,
    stride_seqlen_q: 0,
    stride_seqlen_k: 0,
};

macro_rules! take_features_from {
    ($params:ty, $dbias:expr, $dsinks:expr, $dlse:expr, $pages:expr) => {
        impl From<&$params> for FeatureInputs {
            fn from(params: &$params) -> FeatureInputs {
                FeatureInputs {
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
                    dbias: $dbias(params),
                    dsinks: $dsinks(params),
                    dlse: $dlse(params),
                    pages: $pages(params),
                    block_mask: params.block_mask,
                }
            }
        }
    };
}
type Forward = flashtune_forward_params;
type Backward = flashtune_backward_params;
take_features_from!(
    Forward,
    |_: &Forward| NO_SCORES,
    |_: &Forward| std::ptr::null_mut(),
    |_: &Forward| std::ptr::null(),
    |p: &Forward| PageInputs::from(p)
);
take_features_from!(
    Backward,
    |p: &Backward| p.dbias,
    |p: &Backward| p.dsinks,
    |p: &Backward| p.dlse,
    |_: &Backward| PageInputs::NONE
);

/// A feature's bit as the header names it.
type Bit = (u64, &'static str);
const ALIBI: Bit = (FLASHTUNE_FEATURE_ALIBI, "FLASHTUNE_FEATURE_ALIBI");
const BIAS: Bit = (FLASHTUNE_FEATURE_BIAS, "FLASHTUNE_FEATURE_BIAS");
const MASK: Bit = (FLASHTUNE_FEATURE_MASK, "FLASHTUNE_FEATURE_MASK");
const SINKS: Bit = (FLASHTUNE_FEATURE_SINKS, "FLASHTUNE_FEATURE_SINKS");
const CU_SEQLENS_Q: Bit = (FLASHTUNE_FEATURE_CU_SEQLENS_Q, "FLASHTUNE_FEATURE_CU_SEQLENS_Q");
const CU_SEQLENS_K: Bit = (FLASHTUNE_FEATURE_CU_SEQLENS_K, "FLASHTUNE_FEATURE_CU_SEQLENS_K");
const SEQUSED_Q: Bit = (FLASHTUNE_FEATURE_SEQUSED_Q, "FLASHTUNE_FEATURE_SEQUSED_Q");
const SEQUSED_K: Bit = (FLASHTUNE_FEATURE_SEQUSED_K, "FLASHTUNE_FEATURE_SEQUSED_K");
const DBIAS: Bit = (FLASHTUNE_FEATURE_DBIAS, "FLASHTUNE_FEATURE_DBIAS");
const DLSE: Bit = (FLASHTUNE_FEATURE_DLSE, "FLASHTUNE_FEATURE_DLSE");
const PAGED: Bit = (FLASHTUNE_FEATURE_PAGED, "FLASHTUNE_FEATURE_PAGED");
const MASK_BITS: Bit = (FLASHTUNE_FEATURE_MASK_BITS, "FLASHTUNE_FEATURE_MASK_BITS");
const ANY_MASK: Bit = (MASK.0 | MASK_BITS.0, "FLASHTUNE_FEATURE_MASK or _MASK_BITS");
const BLOCK_MASK: Bit = (FLASHTUNE_FEATURE_BLOCK_MASK, "FLASHTUNE_FEATURE_BLOCK_MASK");

const VARLEN: u64 = CU_SEQLENS_Q.0 | CU_SEQLENS_K.0 | SEQUSED_Q.0 | SEQUSED_K.0;
const OF_BOTH: u64 = ALIBI.0 | BIAS.0 | ANY_MASK.0 | SINKS.0 | VARLEN | BLOCK_MASK.0;
const OF_FORWARD: u64 = OF_BOTH | PAGED.0;
const OF_BACKWARD: u64 = OF_BOTH | DBIAS.0 | DLSE.0;

impl FeatureInputs {
    /// What the problem says of them; nothing of data.
    pub fn of_problem(&self, pass: Pass, causal: Causal) -> Result<Features> {
        let known = if pass == Pass::Forward { OF_FORWARD } else { OF_BACKWARD };
        if self.features & !known != 0 {
            let of_the_pass = if pass == Pass::Forward { "forward" } else { "backward" };
            return Err(Error::invalid(format!(
                "features is {:#x}: {:#x} is no FLASHTUNE_FEATURE_* of the {of_the_pass} pass",
                self.features,
                self.features & !known
            )));
        }
        if self.has(MASK) && self.has(MASK_BITS) {
            return Err(Error::invalid(format!(
                "features is {:#x}, with {} and {}; a mask is of bytes or of bits",
                self.features, MASK.1, MASK_BITS.1
            )));
        }
        self.refuse_unasked()?;
        if self.softcap < 0.0 {
            return Err(Error::invalid(format!(
                "softcap is {:?}; it must not be negative (0 means none)",
                self.softcap
            )));
        }
        check_factor("softcap", self.softcap, "0 means none")?;
        let varlen = Varlen {
            total_q: self.has(CU_SEQLENS_Q).then_some(self.total_q),
            total_k: self.has(CU_SEQLENS_K).then_some(self.total_k),
            padded_q: self.has(SEQUSED_Q),
        };
        Ok(Features {
            window: self.window(causal)?,
            softcap: self.softcap().is_some(),
            alibi: self.has(ALIBI),
            bias: self.has(BIAS),
            dbias: self.has(DBIAS),
            mask: self.has(ANY_MASK),
            mask_bits: self.has(MASK_BITS),
            sinks: self.has(SINKS),
            dlse: self.has(DLSE),
            varlen: (self.features & VARLEN != 0).then_some(varlen),
            paged: self
                .has(PAGED)
                .then(|| self.pages.page_size("since features has FLASHTUNE_FEATURE_PAGED"))
                .transpose()?,
            block_mask: self.has(BLOCK_MASK).then(|| self.block_mask.block_mask()),
        })
    }

    pub fn softcap(&self) -> Option<f32> {
        (self.softcap > 0.0).then_some(self.softcap)
    }

    /// Whether it is asked for; of several bits whether one is.
    fn has(&self, (bit, _): Bit) -> bool {
        self.features & bit != 0
    }

    /// Data of a feature that is not asked for is a bit forgotten.
    fn refuse_unasked(&self) -> Result<()> {
        let pointers = [
            ("alibi_slopes", self.alibi_slopes.cast::<c_void>(), ALIBI),
            ("bias.data", self.bias.data.cast_const(), BIAS),
            ("mask.data", self.mask.data.cast_const(), ANY_MASK),
            ("sinks", self.sinks.cast(), SINKS),
            ("cu_seqlens_q", self.cu_seqlens_q.cast(), CU_SEQLENS_Q),
            ("cu_seqlens_k", self.cu_seqlens_k.cast(), CU_SEQLENS_K),
            ("seqused_q", self.seqused_q.cast(), SEQUSED_Q),
            ("seqused_k", self.seqused_k.cast(), SEQUSED_K),
            ("dbias.data", self.dbias.data.cast_const(), DBIAS),
            ("dsinks", self.dsinks.cast_const().cast(), SINKS),
            ("dlse", self.dlse.cast(), DLSE),
            ("block_table", self.pages.block_table.cast(), PAGED),
        ];
        let of_blocks = self.block_mask.pointers().map(|(name, pointer)| (name, pointer.cast(), BLOCK_MASK));
        if let Some((name, pointer, (_, bit))) =
            pointers.into_iter().chain(of_blocks).find(|(_, pointer, bit)| !pointer.is_null() && !self.has(*bit))
        {
            let pointer = address(pointer);
            return Err(Error::invalid(format!("{name} is {pointer}; it must be NULL, since features has no {bit}")));
        }
        let sizes = [
            ("total_q", self.total_q, CU_SEQLENS_Q),
            ("total_k", self.total_k, CU_SEQLENS_K),
            ("page_size", self.pages.page_size, PAGED),
            ("num_pages", self.pages.num_pages, PAGED),
        ];
        let of_blocks = self.block_mask.sizes().map(|(name, size)| (name, size, BLOCK_MASK));
        for (name, size, bit) in sizes.into_iter().chain(of_blocks) {
            if size != 0 && !self.has(bit) {
                return Err(Error::invalid(format!("{name} is {size}; it must be 0, since features has no {}", bit.1)));
            }
        }
        Ok(())
    }

    fn window(&self, causal: Causal) -> Result<Window> {
        let top_left = match self.window {
            FLASHTUNE_WINDOW_NONE => {
                let sides = [("window_left", self.window_left), ("window_right", self.window_right)];
                let stray = sides.into_iter().find(|(_, keys)| !(-1..=0).contains(keys));
                return stray.map_or(Ok(Window::default()), |(name, keys)| {
                    Err(Error::invalid(format!(
                        "{name} is {keys}, and window FLASHTUNE_WINDOW_NONE (0); without a window it must be 0 or -1"
                    )))
                });
            }
            FLASHTUNE_WINDOW_BOTTOM_RIGHT => false,
            FLASHTUNE_WINDOW_TOP_LEFT => true,
            other => {
                return Err(Error::invalid(format!(
                    "window is {other}; it must be FLASHTUNE_WINDOW_NONE (0), _BOTTOM_RIGHT (1) or _TOP_LEFT (2)"
                )));
            }
        };
        // Any other number that is none of keys the problem refuses.
        let keys = |side: i64| (side != -1).then_some(side);
        // No key after the diagonal is what causal says, too.
        let right = keys(self.window_right).filter(|keys| causal == Causal::None || *keys != 0);
        let window = Window { left: keys(self.window_left), right, top_left };
        // Also of one that hides nothing.
        window.check_corner(causal)?;
        Ok(if (window.left, window.right) == (None, None) { Window::default() } else { window })
    }

    /// Checks all that takes data; `touch` gets the bytes of each that is there.
    pub fn check(&self, p: &Problem, data: Data, touch: &mut dyn FnMut(Access, Footprint)) -> Result<()> {
        if self.alibi_stride_batch < 0 {
            return Err(Error::invalid(format!(
                "alibi_stride_batch is {}; it must be 0 or more elements",
                self.alibi_stride_batch
            )));
        }
        let in_lse = p.lse_elements();
        let arrays = [
            (ALIBI, Array::new("alibi_slopes", self.alibi_slopes, p.num_heads_q).of_batch(p, self.alibi_stride_batch)),
            (SINKS, Array::new("sinks", self.sinks, p.num_heads_q)),
            (CU_SEQLENS_Q, Array::new("cu_seqlens_q", self.cu_seqlens_q, p.batch_size + 1)),
            (CU_SEQLENS_K, Array::new("cu_seqlens_k", self.cu_seqlens_k, p.batch_size + 1)),
            (SEQUSED_Q, Array::new("seqused_q", self.seqused_q, p.batch_size)),
            (SEQUSED_K, Array::new("seqused_k", self.seqused_k, p.batch_size)),
            (DLSE, Array::new("dlse", self.dlse, in_lse)),
            (PAGED, self.pages.table(p, data)?),
        ];
        // With no batch entry nothing is read.
        for (bit, array) in arrays.into_iter().filter(|(bit, _)| self.has(*bit) && p.batch_size > 0) {
            array.check_given(data, Some(bit.1))?.into_iter().for_each(|bytes| touch(Access::Read, bytes));
        }
        self.block_mask.check(p, data, touch)?;
        let dsinks = Array::new("dsinks", self.dsinks.cast_const(), p.num_heads_q);
        dsinks.check()?.into_iter().for_each(|bytes| touch(Access::Written, bytes));

        let element = (p.dtype.bytes(), p.dtype.name());
        let scores = [
            (BIAS, ScoresOperand::new("bias", Access::Read, self.bias, p, element)),
            (MASK, ScoresOperand::new("mask", Access::Read, self.mask, p, (1, "one-byte"))),
            (MASK_BITS, ScoresOperand::bits("mask", self.mask, p)),
            (DBIAS, ScoresOperand::new("dbias", Access::Written, self.dbias, p, (4, "fp32"))),
        ];
        for (bit, operand) in scores.iter().filter(|(bit, _)| self.has(*bit)) {
            operand.check(data)?.into_iter().for_each(|bytes| touch(operand.access, bytes));
            if let Some(dim) = operand.summed_dim().filter(|_| p.deterministic && *bit == DBIAS) {
                return Err(Error::unsupported(format!(
                    "dbias.stride_{dim} is 0 and deterministic 1: a sum over {dim} into one element has no fixed order; give each score its own element and sum those, or set deterministic to 0"
                )));
            }
        }
        Ok(())
    }

    /// Checks the lengths themselves, and which pages and blocks are named.
    ///
    /// # Safety
    /// A launch on a CPU context, after `check`: what is not NULL is readable host memory of the size that the header
    /// says.
    pub unsafe fn check_lengths(&self, p: &Problem) -> Result<()> {
        let (q, k) = (
            ("q", self.cu_seqlens_q, self.seqused_q, self.total_q, p.seqlen_q),
            ("k", self.cu_seqlens_k, self.seqused_k, self.total_k, p.seqlen_k),
        );
        [q, k].into_iter().filter(|_| p.batch_size > 0).try_for_each(
            |(side, cu_seqlens, seqused, total, seqlen)| {
                let lengths = Lengths { side, cu_seqlens, seqused, batch_size: p.batch_size, total, seqlen };
                // SAFETY: by the caller's promise.
                unsafe { lengths.check() }
            },
        )?;
        // SAFETY: by the caller's promise.
        unsafe { self.block_mask.check_entries(p)? };
        // SAFETY: by the caller's promise, and the lengths are right.
        if self.has(PAGED) { unsafe { self.pages.check_entries(p, self.seqused_k) } } else { Ok(()) }
    }

    pub fn args(&self) -> FeatureArgs {
        FeatureArgs {
            softcap: self.softcap,
            alibi_slopes: self.alibi_slopes,
            alibi_stride_batch: self.alibi_stride_batch,
            bias: ScoresRef::from(self.bias),
            dbias: ScoresRef::from(self.dbias),
            mask: ScoresRef::from(self.mask),
            sinks: self.sinks,
            dsinks: self.dsinks,
            dlse: self.dlse,
            cu_seqlens_q: self.cu_seqlens_q,
            cu_seqlens_k: self.cu_seqlens_k,
            seqused_q: self.seqused_q,
            seqused_k: self.seqused_k,
            block_table: self.pages.block_table,
            block_table_stride: self.pages.block_table_stride,
            num_pages: self.pages.num_pages,
            block_lists: self.block_mask.lists(),
        }
    }
}
