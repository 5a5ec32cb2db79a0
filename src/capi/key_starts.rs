//! KeyStartInputs: where each sequence's keys begin in k and v, if they are neither packed nor
//! paged. The numbers are checked on a CPU context only; on a GPU, kernels clamp them.

use super::array::Array;
use super::types::flashtune_forward_params;
use crate::error::{Error, Result};
use crate::problem::{Problem, check_range};

/// The fields under their names, unchecked.
pub struct KeyStartInputs {
    pub cache_batch_idx: *const i32,
    pub leftpad_k: *const i32,
    pub batch_size_cache: i64,
}

impl From<&flashtune_forward_params> for KeyStartInputs {
    fn from(params: &flashtune_forward_params) -> KeyStartInputs {
        let flashtune_forward_params { cache_batch_idx, leftpad_k, batch_size_cache, .. } = *params;
        KeyStartInputs { cache_batch_idx, leftpad_k, batch_size_cache }
    }
}

impl KeyStartInputs {
    /// The inputs of a pass without them.
    pub const NONE: KeyStartInputs =
        KeyStartInputs { cache_batch_idx: std::ptr::null(), leftpad_k: std::ptr::null(), batch_size_cache: 0 };

    /// Checks the number of entries of a call with `cache_batch_idx`.
    pub fn check_entries_of_cache(&self) -> Result<()> {
        check_range("batch_size_cache", self.batch_size_cache, 1, i32::MAX.into())
    }

    /// Batch entries of k and v.
    pub fn entries(&self, problem: &Problem) -> i64 {
        if self.batch_size_cache > 0 { self.batch_size_cache } else { problem.batch_size }
    }

    pub fn arrays(&self, problem: &Problem) -> [Array; 2] {
        let of = |name, pointer| Array::new(name, pointer, problem.batch_size);
        [of("cache_batch_idx", self.cache_batch_idx), of("leftpad_k", self.leftpad_k)]
    }

    /// Checks every entry and every padding.
    ///
    /// # Safety
    /// The arrays and the lengths of `seqused_k` have been checked, and all are readable host
    /// memory. Each may be NULL.
    pub unsafe fn check(&self, problem: &Problem, seqused_k: *const i32) -> Result<()> {
        // SAFETY: one of batch_size values.
        let at = |array: *const i32, b: i64| i64::from(unsafe { *array.offset(b as isize) });
        if self.cache_batch_idx.is_null() && self.leftpad_k.is_null() {
            return Ok(());
        }
        for b in 0..problem.batch_size {
            if !self.cache_batch_idx.is_null() && !(0..self.batch_size_cache).contains(&at(self.cache_batch_idx, b)) {
                return Err(Error::invalid(format!(
                    "cache_batch_idx[{b}] is {}; it must be from 0 to batch_size_cache - 1, which is {}",
                    at(self.cache_batch_idx, b),
                    self.batch_size_cache - 1
                )));
            }
            let used = if seqused_k.is_null() { problem.seqlen_k } else { at(seqused_k, b) };
            if !self.leftpad_k.is_null() && !(0..=used).contains(&at(self.leftpad_k, b)) {
                let name = if seqused_k.is_null() { "seqlen_k".to_owned() } else { format!("seqused_k[{b}]") };
                return Err(Error::invalid(format!(
                    "leftpad_k[{b}] is {}; it must be from 0 to {name}, which is {used}",
                    at(self.leftpad_k, b)
                )));
            }
        }
        Ok(())
    }
}
