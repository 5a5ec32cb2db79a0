//! FeatureInputs: the features of a call as the C structs give them, and their checks. It checks
//! bits against pointers, the window against causal, and arrays against their sizes. `inputs` reads
//! the fields, and `lengths` checks lengths on the host.

use super::array::Array;
use super::eight_bits::EightBitInputs;
use super::factor::check_factor;
use super::key_starts::KeyStartInputs;
use super::lengths::Lengths;
use super::operand::{Access, Data};
use super::overlap::Footprint;
use super::pages::PageInputs;
use super::scores::ScoresOperand;
use super::sized::address;
use super::types::*;
use crate::call::{FeatureArgs, ScoresRef};
use crate::error::{Error, Result};
use crate::problem::features::{Bit, bits};
use crate::problem::{Causal, Feature, Features, Pass, Problem, Varlen, Window};
use std::ffi::c_void;

/// The fields that both passes have, under their names, unchecked.
pub struct FeatureInputs {
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
    pub block_mask: flashtune_block_mask,
    pub pass: PassInputs,
}

/// The fields that only one pass has, under their names, unchecked.
pub struct PassInputs {
    pub dbias: flashtune_scores_tensor,
    pub dsinks: *mut f32,
    pub dlse: *const f32,
    pub pages: PageInputs,
    pub key_starts: KeyStartInputs,
    pub eight_bits: EightBitInputs,
}

impl PassInputs {
    pub const NONE: PassInputs = PassInputs {
        dbias: flashtune_scores_tensor {
            data: std::ptr::null_mut(),
            stride_batch: 0,
            stride_head: 0,
            stride_seqlen_q: 0,
            stride_seqlen_k: 0,
        },
        dsinks: std::ptr::null_mut(),
        dlse: std::ptr::null(),
        pages: PageInputs::NONE,
        key_starts: KeyStartInputs::NONE,
        eight_bits: EightBitInputs::NONE,
    };
}

/// Both bits of a mask, as one: either allows mask's data.
const ANY_MASK: Bit =
    Bit { value: bits::MASK.value | bits::MASK_BITS.value, name: "FLASHTUNE_FEATURE_MASK or _MASK_BITS" };

/// The feature bits that a pass may have.
fn known_bits(pass: Pass) -> u64 {
    let rows = Feature::ALL.iter().map(|feature| feature.row()).filter(|row| row.passes.contains(&pass));
    rows.flat_map(|row| row.bits).fold(0, |known, bit| known | bit.value)
}

impl FeatureInputs {
    /// The features of the problem. Data is not checked.
    pub fn of_problem(&self, pass: Pass, causal: Causal) -> Result<Features> {
        let known = known_bits(pass);
        if self.features & !known != 0 {
            let pass_name = if pass == Pass::Forward { "forward" } else { "backward" };
            return Err(Error::invalid(format!(
                "features is {:#x}: {:#x} is no FLASHTUNE_FEATURE_* of the {pass_name} pass",
                self.features,
                self.features & !known
            )));
        }
        if self.has(bits::MASK) && self.has(bits::MASK_BITS) {
            return Err(Error::invalid(format!(
                "features is {:#x}, with {} and {}; a mask holds bytes or bits, not both",
                self.features,
                bits::MASK.name,
                bits::MASK_BITS.name
            )));
        }
        self.refuse_data_without_bit()?;
        if self.softcap < 0.0 {
            return Err(Error::invalid(format!(
                "softcap is {:?}; it must not be negative (0 means none)",
                self.softcap
            )));
        }
        check_factor("softcap", self.softcap, "0 means none")?;
        let varlen = Varlen {
            total_q: self.has(bits::CU_SEQLENS_Q).then_some(self.total_q),
            total_k: self.has(bits::CU_SEQLENS_K).then_some(self.total_k),
            padded_q: self.has(bits::SEQUSED_Q),
        };
        if self.has(bits::CACHE_BATCH_IDX) {
            self.pass.key_starts.check_entries_of_cache()?;
        }
        let window = self.window(causal)?;
        let reason = "since features has FLASHTUNE_FEATURE_PAGED";
        let paged = self.has(bits::PAGED).then(|| self.pass.pages.page_size(reason)).transpose()?;
        let mut features = Features {
            window,
            softcap: self.softcap().is_some(),
            varlen: (self.has_feature(Feature::Varlen) || self.has_feature(Feature::KeyStarts)).then_some(varlen),
            paged,
            block_mask: self.has(bits::BLOCK_MASK).then(|| self.block_mask.block_mask()),
            ..Features::NONE
        };
        let by_bits = Feature::ALL.iter().filter(|feature| self.has_feature(**feature));
        by_bits.for_each(|feature| features.switch_on(*feature));
        Ok(features)
    }

    pub fn softcap(&self) -> Option<f32> {
        (self.softcap > 0.0).then_some(self.softcap)
    }

    /// Whether the bit is set. If `bit` combines several, one of them is enough.
    fn has(&self, bit: Bit) -> bool {
        self.features & bit.value != 0
    }

    fn has_feature(&self, feature: Feature) -> bool {
        feature.row().bits.iter().any(|bit| self.has(*bit))
    }

    /// Data without its feature's bit means that the caller forgot the bit.
    fn refuse_data_without_bit(&self) -> Result<()> {
        let pointers = [
            ("alibi_slopes", self.alibi_slopes.cast::<c_void>(), bits::ALIBI),
            ("bias.data", self.bias.data, bits::BIAS),
            ("mask.data", self.mask.data, ANY_MASK),
            ("sinks", self.sinks.cast(), bits::SINKS),
            ("cu_seqlens_q", self.cu_seqlens_q.cast(), bits::CU_SEQLENS_Q),
            ("cu_seqlens_k", self.cu_seqlens_k.cast(), bits::CU_SEQLENS_K),
            ("seqused_q", self.seqused_q.cast(), bits::SEQUSED_Q),
            ("seqused_k", self.seqused_k.cast(), bits::SEQUSED_K),
            ("dbias.data", self.pass.dbias.data.cast_const(), bits::DBIAS),
            ("dsinks", self.pass.dsinks.cast_const().cast(), bits::SINKS),
            ("dlse", self.pass.dlse.cast(), bits::DLSE),
            ("block_table", self.pass.pages.block_table.cast(), bits::PAGED),
            ("cache_batch_idx", self.pass.key_starts.cache_batch_idx.cast(), bits::CACHE_BATCH_IDX),
            ("leftpad_k", self.pass.key_starts.leftpad_k.cast(), bits::LEFTPAD_K),
        ];
        let list_pointers = self.block_mask.pointers().map(|(name, pointer)| (name, pointer.cast(), bits::BLOCK_MASK));
        if let Some((name, pointer, bit)) =
            pointers.into_iter().chain(list_pointers).find(|(_, pointer, bit)| !pointer.is_null() && !self.has(*bit))
        {
            let pointer = address(pointer);
            return Err(Error::invalid(format!(
                "{name} is {pointer}; it must be NULL, since features has no {}",
                bit.name
            )));
        }
        let sizes = [
            ("total_q", self.total_q, bits::CU_SEQLENS_Q),
            ("total_k", self.total_k, bits::CU_SEQLENS_K),
            ("page_size", self.pass.pages.page_size, bits::PAGED),
            ("num_pages", self.pass.pages.num_pages, bits::PAGED),
            ("batch_size_cache", self.pass.key_starts.batch_size_cache, bits::CACHE_BATCH_IDX),
        ];
        let block_sizes = self.block_mask.sizes().map(|(name, size)| (name, size, bits::BLOCK_MASK));
        for (name, size, bit) in sizes.into_iter().chain(block_sizes) {
            if size != 0 && !self.has(bit) {
                return Err(Error::invalid(format!(
                    "{name} is {size}; it must be 0, since features has no {}",
                    bit.name
                )));
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
                        "{name} is {keys}, and window is FLASHTUNE_WINDOW_NONE (0); without a window it must be 0 or -1"
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
        // -1 means all keys. `Problem::validate` refuses any other negative number.
        let keys = |side: i64| (side != -1).then_some(side);
        // Causal alone already hides the keys after the diagonal.
        let right = keys(self.window_right).filter(|keys| causal == Causal::None || *keys != 0);
        let window = Window { left: keys(self.window_left), right, top_left };
        // The check applies to a window that hides nothing too.
        window.check_corner(causal)?;
        Ok(if (window.left, window.right) == (None, None) { Window::default() } else { window })
    }

    /// Checks all features that take data. `touch` receives the bytes of each tensor that has data.
    pub fn check(&self, p: &Problem, data: Data, touch: &mut dyn FnMut(Access, Footprint)) -> Result<()> {
        if self.alibi_stride_batch < 0 {
            return Err(Error::invalid(format!(
                "alibi_stride_batch is {}; it must be 0 or more elements",
                self.alibi_stride_batch
            )));
        }
        let lse_elements = p.lse_elements();
        let [cache_batch_idx, leftpad_k] = self.pass.key_starts.arrays(p);
        let arrays = [
            (
                bits::ALIBI,
                Array::new("alibi_slopes", self.alibi_slopes, p.num_heads_q).of_batch(p, self.alibi_stride_batch),
            ),
            (bits::SINKS, Array::new("sinks", self.sinks, p.num_heads_q)),
            (bits::CU_SEQLENS_Q, Array::new("cu_seqlens_q", self.cu_seqlens_q, p.batch_size + 1)),
            (bits::CU_SEQLENS_K, Array::new("cu_seqlens_k", self.cu_seqlens_k, p.batch_size + 1)),
            (bits::SEQUSED_Q, Array::new("seqused_q", self.seqused_q, p.batch_size)),
            (bits::SEQUSED_K, Array::new("seqused_k", self.seqused_k, p.batch_size)),
            (bits::DLSE, Array::new("dlse", self.pass.dlse, lse_elements)),
            (bits::PAGED, self.pass.pages.table(p, data)?),
            (bits::CACHE_BATCH_IDX, cache_batch_idx),
            (bits::LEFTPAD_K, leftpad_k),
        ];
        // Without a batch entry, nothing is read.
        for (bit, array) in arrays.into_iter().filter(|(bit, _)| self.has(*bit) && p.batch_size > 0) {
            array.check_required(data, Some(bit.name))?.into_iter().for_each(|bytes| touch(Access::Read, bytes));
        }
        self.block_mask.check(p, data, touch)?;
        let rows_of_keys = match (p.features.paged, p.features.varlen.and_then(|varlen| varlen.total_k)) {
            (Some(page_size), _) => [self.pass.pages.num_pages, page_size],
            (None, Some(total_k)) => [1, total_k],
            (None, None) => [self.pass.key_starts.entries(p), p.seqlen_k],
        };
        self.pass.eight_bits.check(p, rows_of_keys, data, touch)?;
        let dsinks = Array::new("dsinks", self.pass.dsinks.cast_const(), p.num_heads_q);
        dsinks.check()?.into_iter().for_each(|bytes| touch(Access::Written, bytes));

        let element = (p.dtype.bytes(), p.dtype.name());
        let scores = [
            (bits::BIAS, ScoresOperand::new("bias", Access::Read, self.bias, p, element)),
            (bits::MASK, ScoresOperand::new("mask", Access::Read, self.mask, p, (1, "one-byte"))),
            (bits::MASK_BITS, ScoresOperand::bits("mask", self.mask, p)),
            (bits::DBIAS, ScoresOperand::new("dbias", Access::Written, self.pass.dbias, p, (4, "fp32"))),
        ];
        for (bit, operand) in scores.iter().filter(|(bit, _)| self.has(*bit)) {
            operand.check(data)?.into_iter().for_each(|bytes| touch(operand.access, bytes));
            if let Some(dim) = operand.summed_dim().filter(|_| p.deterministic && *bit == bits::DBIAS) {
                return Err(Error::unsupported(format!(
                    "dbias.stride_{dim} is 0 and deterministic is 1: a sum over {dim} into one element has no fixed order; give each score its own element and sum those, or set deterministic to 0"
                )));
            }
        }
        Ok(())
    }

    /// Checks the lengths, the entries of the block table and the entries of the block mask.
    ///
    /// # Safety
    /// A launch on a CPU context, after `check`. Every pointer that is not NULL names readable host
    /// memory of the size that the header says.
    pub unsafe fn check_lengths(&self, p: &Problem) -> Result<()> {
        let (q, k) = (
            ("q", self.cu_seqlens_q, self.seqused_q, self.total_q, p.seqlen_q),
            ("k", self.cu_seqlens_k, self.seqused_k, self.total_k, p.seqlen_k),
        );
        [q, k].into_iter().filter(|_| p.batch_size > 0).try_for_each(
            |(side, cu_seqlens, seqused, total, seqlen)| {
                let is_paged = side == "k" && p.features.paged.is_some();
                let lengths = Lengths { side, cu_seqlens, seqused, batch_size: p.batch_size, total, seqlen, is_paged };
                // SAFETY: by the caller's promise.
                unsafe { lengths.check() }
            },
        )?;
        // SAFETY: by the caller's promise.
        unsafe { self.block_mask.check_entries(p)? };
        // SAFETY: by the caller's promise. The lengths have been checked.
        unsafe { self.pass.key_starts.check(p, self.seqused_k)? };
        // SAFETY: as above.
        if self.has(bits::PAGED) { unsafe { self.pass.pages.check_entries(p, self.seqused_k) } } else { Ok(()) }
    }

    pub fn args(&self) -> FeatureArgs {
        FeatureArgs {
            softcap: self.softcap,
            alibi_slopes: self.alibi_slopes,
            alibi_stride_batch: self.alibi_stride_batch,
            bias: ScoresRef::from(self.bias),
            dbias: ScoresRef::from(self.pass.dbias),
            mask: ScoresRef::from(self.mask),
            sinks: self.sinks,
            dsinks: self.pass.dsinks,
            dlse: self.pass.dlse,
            cu_seqlens_q: self.cu_seqlens_q,
            cu_seqlens_k: self.cu_seqlens_k,
            seqused_q: self.seqused_q,
            seqused_k: self.seqused_k,
            block_table: self.pass.pages.block_table,
            block_table_stride: self.pass.pages.block_table_stride,
            num_pages: self.pass.pages.num_pages.max(self.pass.key_starts.batch_size_cache),
            cache_batch_idx: self.pass.key_starts.cache_batch_idx,
            leftpad_k: self.pass.key_starts.leftpad_k,
            block_lists: self.block_mask.lists(),
            scales: self.pass.eight_bits.scales(),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::problem::Feature;
    use std::collections::BTreeMap;

    /// cbindgen reads this file as text, so the numbers are repeated here.
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
