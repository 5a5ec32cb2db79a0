//! The lengths of sequences, where the host can read them: a CPU context's. On a GPU they lie in
//! device memory, and what is wrong there is the kernels' to clamp.

use crate::error::{Error, Result};

/// One side's arrays: where sequences begin, and how many rows of each are used; each may be NULL.
pub struct Lengths {
    /// "q" or "k"
    pub side: &'static str,
    pub cu_seqlens: *const i32,
    pub seqused: *const i32,
    pub batch_size: i64,
    /// Rows that the sequences of `cu_seqlens` may take, and the longest that one may be.
    pub total: i64,
    pub seqlen: i64,
}

impl Lengths {
    /// # Safety
    /// What is not NULL is readable host memory: batch_size + 1 values of `cu_seqlens`, batch_size
    /// of `seqused`.
    pub unsafe fn check(&self) -> Result<()> {
        // SAFETY: by the caller's promise; so below.
        let at = |array: *const i32, index: i64| i64::from(unsafe { *array.offset(index as isize) });
        let side = self.side;
        if !self.cu_seqlens.is_null() && at(self.cu_seqlens, 0) != 0 {
            let first = at(self.cu_seqlens, 0);
            return Err(Error::invalid(format!("cu_seqlens_{side}[0] is {first}; it must be 0")));
        }
        for b in 0..self.batch_size {
            let mut length = self.seqlen;
            if !self.cu_seqlens.is_null() {
                let (start, end) = (at(self.cu_seqlens, b), at(self.cu_seqlens, b + 1));
                if end < start || end > self.total {
                    return Err(Error::invalid(format!(
                        "cu_seqlens_{side}[{}] is {end}; it must be at least the one before it, {start}, and at most total_{side}, {}",
                        b + 1,
                        self.total
                    )));
                }
                length = end - start;
                if length > self.seqlen {
                    return Err(Error::invalid(format!(
                        "cu_seqlens_{side} makes sequence {b} {length} rows long; it must be at most seqlen_{side}, which is {}",
                        self.seqlen
                    )));
                }
            }
            if !self.seqused.is_null() && !(0..=length).contains(&at(self.seqused, b)) {
                return Err(Error::invalid(format!(
                    "seqused_{side}[{b}] is {}; it must be from 0 to the sequence's length, {length}",
                    at(self.seqused, b)
                )));
            }
        }
        Ok(())
    }
}
