//! Checks of the sequences' lengths where the host can read them: on a CPU context. On a GPU they
//! lie in device memory, and kernels clamp wrong ones.

use crate::error::{Error, Result};

/// The arrays of one side: the offsets of the sequences, and the used rows of each. Each may be
/// NULL.
pub struct Lengths {
    /// "q" or "k"
    pub side: &'static str,
    pub cu_seqlens: *const i32,
    pub seqused: *const i32,
    pub batch_size: i64,
    /// Rows of the packed tensor, and the longest allowed sequence.
    pub total: i64,
    pub seqlen: i64,
    /// A block table says where the rows lie.
    pub is_paged: bool,
}

impl Lengths {
    /// # Safety
    /// Pointers that are not NULL name readable host memory: batch_size + 1 values of `cu_seqlens`,
    /// and batch_size values of `seqused`.
    pub unsafe fn check(&self) -> Result<()> {
        // SAFETY: by the caller's promise. All indices below are within the arrays.
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
                let most = match self.is_paged {
                    true => "seqlen_k, the keys that its row of block_table stands for",
                    false => "the sequence's length",
                };
                return Err(Error::invalid(format!(
                    "seqused_{side}[{b}] is {}; it must be from 0 to {most}, {length}",
                    at(self.seqused, b)
                )));
            }
        }
        Ok(())
    }
}
