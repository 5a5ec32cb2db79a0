//! PageInputs: the block table, which says in which pages of k and v a sequence's keys lie. This
//! file checks its sizes. Its entries are checked on a CPU context only; on a GPU, kernels clamp
//! them.

use super::array::Array;
use super::operand::Data;
use super::types::flashtune_forward_params;
use crate::error::{Error, Result};
use crate::problem::{MAX_SEQLEN, Problem};

/// The fields under their names, unchecked.
pub struct PageInputs {
    pub block_table: *const i32,
    pub block_table_stride: i64,
    pub page_size: i64,
    pub num_pages: i64,
}

impl From<&flashtune_forward_params> for PageInputs {
    fn from(params: &flashtune_forward_params) -> PageInputs {
        PageInputs {
            block_table: params.block_table,
            block_table_stride: params.block_table_stride,
            page_size: params.page_size,
            num_pages: params.num_pages,
        }
    }
}

impl PageInputs {
    /// The inputs of a pass without pages.
    pub const NONE: PageInputs =
        PageInputs { block_table: std::ptr::null(), block_table_stride: 0, page_size: 0, num_pages: 0 };

    /// The page size of a call with pages. Messages end in `reason`.
    pub fn page_size(&self, reason: &str) -> Result<i64> {
        let range = |name: &str, value: i64, highest: i64| match (1..=highest).contains(&value) {
            true => Ok(value),
            false => Err(Error::invalid(format!("{name} is {value}; it must be from 1 to {highest}, {reason}"))),
        };
        range("num_pages", self.num_pages, i32::MAX as i64)?;
        range("page_size", self.page_size, MAX_SEQLEN)
    }

    /// The table of a problem. Without pages it has no element.
    pub fn table(&self, problem: &Problem, data: Data) -> Result<Array> {
        match problem.features.paged {
            None => Ok(Array::new("block_table", self.block_table, 0)),
            Some(_) => self.table_of(problem.batch_size, ("seqlen_k", problem.seqlen_k), data),
        }
    }

    /// The table of sequences of at most `seqlen` keys. `name` is the caller's name of that number.
    pub fn table_of(&self, batch_size: i64, (name, seqlen): (&str, i64), data: Data) -> Result<Array> {
        let page_size = self.page_size;
        let pages = (seqlen + page_size - 1) / page_size;
        let stride = self.block_table_stride;
        // NULL with a stride of 0 stands for any layout.
        let is_unplaced = self.block_table.is_null() && stride == 0 && data == Data::Optional;
        if stride < pages && batch_size > 1 && !is_unplaced {
            return Err(Error::invalid(format!(
                "block_table_stride is {stride}; it must be at least {pages}, since {name} {seqlen} takes {pages} pages of {page_size} keys"
            )));
        }
        Ok(Array::new("block_table", self.block_table, pages).in_rows((batch_size.max(1), stride.max(1))))
    }

    /// Checks that every entry that a kernel reads names an existing page.
    ///
    /// # Safety
    /// `table` and the lengths of `seqused_k` have been checked, and both are readable host memory.
    /// `seqused_k` may be NULL.
    pub unsafe fn check_entries(&self, problem: &Problem, seqused_k: *const i32) -> Result<()> {
        for b in 0..problem.batch_size {
            // SAFETY: one of batch_size values.
            let used = |b: i64| i64::from(unsafe { *seqused_k.offset(b as isize) });
            let length = if seqused_k.is_null() { problem.seqlen_k } else { used(b) };
            for i in 0..(length + self.page_size - 1) / self.page_size {
                // SAFETY: within the sequence's row of the table.
                let page = unsafe { *self.block_table.offset((b * self.block_table_stride + i) as isize) };
                if !(0..self.num_pages).contains(&i64::from(page)) {
                    return Err(Error::invalid(format!(
                        "block_table[{b}][{i}] is {page}; it must be from 0 to num_pages - 1, which is {}",
                        self.num_pages - 1
                    )));
                }
            }
        }
        Ok(())
    }
}
