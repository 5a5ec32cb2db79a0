//! The lists of a block mask among a call's arguments, with the sizes that the problem gives them.
//! This file checks pointers, strides and extents. Entries are checked on a CPU context only; on a
//! GPU, kernels skip an entry that names no block.

use super::array::Array;
use super::operand::{Access, Data};
use super::overlap::Footprint;
use super::types::flashtune_block_mask;
use crate::call::BlockLists;
use crate::error::{Error, Result};
use crate::problem::{BlockMask, Problem, check_range};

impl flashtune_block_mask {
    /// The pointers by name. Without a block mask they must be NULL, and `sizes` must be 0.
    pub fn pointers(&self) -> [(&'static str, *const i32); 4] {
        [
            ("block_mask.num_blocks", self.num_blocks),
            ("block_mask.indices", self.indices),
            ("block_mask.full_num_blocks", self.full_num_blocks),
            ("block_mask.full_indices", self.full_indices),
        ]
    }

    pub fn sizes(&self) -> [(&'static str, i64); 3] {
        [
            ("block_mask.block_q", self.block_q),
            ("block_mask.block_k", self.block_k),
            ("block_mask.max_blocks", self.max_blocks),
        ]
    }

    /// The block mask of a call that has its feature bit. `Problem::validate` checks the sizes.
    pub fn block_mask(&self) -> BlockMask {
        BlockMask { block_q: self.block_q, block_k: self.block_k }
    }

    pub fn lists(&self) -> BlockLists {
        BlockLists {
            num_blocks: self.num_blocks,
            indices: self.indices,
            full_num_blocks: self.full_num_blocks,
            full_indices: self.full_indices,
            num_blocks_stride_batch: self.num_blocks_stride_batch,
            num_blocks_stride_head: self.num_blocks_stride_head,
            indices_stride_batch: self.indices_stride_batch,
            indices_stride_head: self.indices_stride_head,
            indices_stride_row: self.indices_stride_row,
            max_blocks: self.max_blocks,
        }
    }

    /// Checks the lists of a problem with a block mask. `touch` receives the bytes of each list
    /// that has data.
    pub fn check(&self, p: &Problem, data: Data, touch: &mut dyn FnMut(Access, Footprint)) -> Result<()> {
        let Some((rows, _)) = p.list_extents() else { return Ok(()) };
        let strides = [
            ("num_blocks_stride_batch", self.num_blocks_stride_batch),
            ("num_blocks_stride_head", self.num_blocks_stride_head),
            ("indices_stride_batch", self.indices_stride_batch),
            ("indices_stride_head", self.indices_stride_head),
            ("indices_stride_row", self.indices_stride_row),
        ];
        if let Some((name, stride)) = strides.into_iter().find(|(_, stride)| *stride < 0) {
            return Err(Error::invalid(format!("block_mask.{name} is {stride}; it must be 0 or more elements")));
        }
        check_range("block_mask.max_blocks", self.max_blocks, 0, i32::MAX.into())?;
        // Without a batch entry or a row, nothing is read.
        if p.batch_size == 0 || rows == 0 {
            return Ok(());
        }
        // Lists without room for an entry have no element, so their address may be NULL.
        let is_one_null = self.full_num_blocks.is_null() != self.full_indices.is_null();
        if is_one_null && self.max_blocks > 0 && data == Data::Required {
            return Err(Error::invalid(
                "one of block_mask.full_num_blocks and block_mask.full_indices is NULL; both must be set, or both NULL",
            ));
        }
        let (batches, heads) = (p.batch_size, p.num_heads_q);
        let counts = [(batches, self.num_blocks_stride_batch), (heads, self.num_blocks_stride_head), (1, 0)];
        let indices =
            [(batches, self.indices_stride_batch), (heads, self.indices_stride_head), (rows, self.indices_stride_row)];
        for (at, (name, pointer)) in self.pointers().into_iter().enumerate() {
            let (elements, dims) = if at % 2 == 0 { (rows, counts) } else { (self.max_blocks, indices) };
            if pointer.is_null() && at < 2 && elements > 0 && data == Data::Required {
                return Err(Error::invalid(format!(
                    "{name} is NULL; it must point to int32 values, since features has FLASHTUNE_FEATURE_BLOCK_MASK"
                )));
            }
            let array = Array::new(name, pointer, elements).in_dims(dims);
            array.check()?.into_iter().for_each(|bytes| touch(Access::Read, bytes));
        }
        Ok(())
    }

    /// Checks the counts and block numbers in the lists of a problem with a block mask.
    ///
    /// # Safety
    /// After `check` of a launch's arguments: the lists are readable host memory.
    pub unsafe fn check_entries(&self, p: &Problem) -> Result<()> {
        let Some((rows, cols)) = p.list_extents() else { return Ok(()) };
        let heads = (0..p.batch_size).flat_map(|b| (0..p.num_heads_q).map(move |h| (b, h)));
        let all_rows = heads.flat_map(|(b, h)| (0..rows).map(move |row| (b, h, row)));
        let columns = move || (0..cols.max(1)).step_by(COLUMNS);
        // The columns that the row has listed, COLUMNS at a time, so that nothing is allocated.
        let mut listed = [0u64; COLUMNS / 64];
        for (first_column, (b, h, row)) in all_rows.flat_map(|row| columns().map(move |column| (column, row))) {
            listed[..(cols as usize).min(COLUMNS).div_ceil(64)].fill(0);
            let count_at = b * self.num_blocks_stride_batch + h * self.num_blocks_stride_head + row;
            let first = b * self.indices_stride_batch + h * self.indices_stride_head + row * self.indices_stride_row;
            let lists = [("", self.num_blocks, self.indices), ("full_", self.full_num_blocks, self.full_indices)];
            for (full, counts, indices) in lists.into_iter().filter(|(_, counts, _)| !counts.is_null()) {
                // SAFETY: the count of one row, by the caller's promise.
                let count = i64::from(unsafe { *counts.offset(count_at as isize) });
                if !(0..=self.max_blocks).contains(&count) {
                    return Err(Error::invalid(format!(
                        "block_mask.{full}num_blocks[{b}][{h}][{row}] is {count}; it must be from 0 to max_blocks, which is {}",
                        self.max_blocks
                    )));
                }
                for entry in 0..count {
                    // SAFETY: an entry of the row, by the caller's promise.
                    let block = i64::from(unsafe { *indices.offset((first + entry) as isize) });
                    let name = || format!("block_mask.{full}indices[{b}][{h}][{row}][{entry}]");
                    if !(0..cols).contains(&block) {
                        let most = cols - 1;
                        return Err(Error::invalid(format!("{} is {block}; it must be from 0 to {most}", name())));
                    }
                    let column = block - first_column;
                    if !(0..COLUMNS as i64).contains(&column) {
                        continue;
                    }
                    let (word, bit) = (&mut listed[column as usize / 64], 1 << (column % 64));
                    if std::mem::replace(word, *word | bit) & bit != 0 {
                        return Err(Error::invalid(format!(
                            "{} is {block}, which the row lists twice; a row must list a block once",
                            name()
                        )));
                    }
                }
            }
        }
        Ok(())
    }
}

/// Columns that `check_entries` checks in one pass over a row. A second pass is needed only for
/// lists of more than half a million keys.
const COLUMNS: usize = 1 << 15;
