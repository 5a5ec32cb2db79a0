//! The sequences of a launch: their lengths, their places in the tensors and the workspace, and
//! what their rows see.
//!
//! In a batch that is not varlen all have the problem's lengths. Varlen lengths are host memory
//! here; the caller checked them.

use super::mask::Mask;
use super::read_only::ReadOnly;
use crate::call::Call;
use crate::problem::Problem;

#[derive(Clone, Copy)]
pub struct Sequences {
    problem: Problem,
    cu_seqlens_q: ReadOnly<i32>,
    cu_seqlens_k: ReadOnly<i32>,
    seqused_q: ReadOnly<i32>,
    seqused_k: ReadOnly<i32>,
    cache_batch_idx: ReadOnly<i32>,
    leftpad_k: ReadOnly<i32>,
    block_table: ReadOnly<i32>,
    block_table_stride: usize,
}

/// The place of a sequence's row 0 in a tensor.
#[derive(Clone, Copy)]
pub enum Place {
    /// The first row of this entry of the batch dimension.
    Entry(usize),
    /// This row of a tensor that holds packed sequences.
    Row(usize),
    /// An entry of the batch dimension, and a row there.
    RowOfEntry(usize, usize),
}

/// The place of a sequence's keys in a paged K/V cache, whose pages are entries of the batch
/// dimension.
#[derive(Clone, Copy)]
pub struct Pages {
    pub table: ReadOnly<i32>,
    /// The index of this sequence's first page in the table.
    pub first: usize,
    /// Keys of a page.
    pub size: usize,
}

#[derive(Clone, Copy)]
pub struct Sequence {
    pub batch: usize,
    pub seqlen_q: usize,
    pub seqlen_k: usize,
    /// In q, out and their gradients.
    pub place_q: Place,
    /// In k, v and their gradients, if they are not paged.
    pub place_k: Place,
    pub pages: Option<Pages>,
    pub mask: Mask,
}

impl Sequences {
    pub fn new(call: &Call) -> Sequences {
        let features = &call.features;
        Sequences {
            problem: call.problem,
            cu_seqlens_q: ReadOnly::new(features.cu_seqlens_q),
            cu_seqlens_k: ReadOnly::new(features.cu_seqlens_k),
            seqused_q: ReadOnly::new(features.seqused_q),
            seqused_k: ReadOnly::new(features.seqused_k),
            cache_batch_idx: ReadOnly::new(features.cache_batch_idx),
            leftpad_k: ReadOnly::new(features.leftpad_k),
            block_table: ReadOnly::new(features.block_table),
            block_table_stride: features.block_table_stride as usize,
        }
    }

    pub fn of(&self, batch: usize) -> Sequence {
        let problem = &self.problem;
        let (place_q, seqlen_q) = extent(batch, problem.seqlen_q, self.cu_seqlens_q, self.seqused_q);
        let (place_k, seqlen_k) = match problem.features.key_starts {
            true => self.keys_from_their_start(batch),
            false => extent(batch, problem.seqlen_k, self.cu_seqlens_k, self.seqused_k),
        };
        let shift = match problem.features.varlen {
            Some(_) if problem.aligns_ends() => seqlen_k as i64 - seqlen_q as i64,
            _ => 0,
        };
        let (left_shift, right_shift) = (problem.left_shift(), problem.right_shift());
        let mask = Mask {
            seqlen_q,
            seqlen_k,
            left_shift: left_shift.map(|keys| keys + shift),
            right_shift: right_shift.map(|keys| keys + shift),
        };
        let pages = problem.features.paged.map(|size| Pages {
            table: self.block_table,
            first: batch * self.block_table_stride,
            size: size as usize,
        });
        Sequence { batch, seqlen_q, seqlen_k, place_q, place_k, pages, mask }
    }

    /// The place of a sequence's first key, and the number of its keys.
    fn keys_from_their_start(&self, batch: usize) -> (Place, usize) {
        let (_, used) = extent(batch, self.problem.seqlen_k, self.cu_seqlens_k, self.seqused_k);
        // SAFETY: on this backend the arrays, where given, are host memory of batch elements, none
        // of them negative (the caller checked them).
        let read = |array: ReadOnly<i32>| (!array.is_null()).then(|| unsafe { array.at(batch) } as usize);
        let leftpad = read(self.leftpad_k).unwrap_or(0).min(used);
        (Place::RowOfEntry(read(self.cache_batch_idx).unwrap_or(batch), leftpad), used - leftpad)
    }

    /// Index of a sequence's row 0 in the LSE and its gradient.
    pub fn lse_row(&self, sequence: &Sequence, head: usize) -> usize {
        let problem = &self.problem;
        let total = problem.features.varlen.and_then(|varlen| varlen.total_q).unwrap_or(0);
        self.row_of(sequence, head, problem.seqlen_q, total)
    }

    /// Index of a sequence's row 0 in the workspace's arrays of rows.
    pub fn workspace_row(&self, sequence: &Sequence, head: usize) -> usize {
        self.row_of(sequence, head, self.problem.workspace_rows(), self.problem.workspace_rows_of_head())
    }

    /// The index in an array of `rows` for each batch entry and head or, if sequences are packed,
    /// of `total` rows for each head.
    fn row_of(&self, sequence: &Sequence, head: usize, rows: i64, total: i64) -> usize {
        match sequence.place_q {
            Place::Entry(batch) | Place::RowOfEntry(batch, _) => {
                (batch * self.problem.num_heads_q as usize + head) * rows as usize
            }
            Place::Row(row) => head * total as usize + row,
        }
    }
}

/// A sequence's first row, and the number of its rows in use.
fn extent(batch: usize, seqlen: i64, cu_seqlens: ReadOnly<i32>, seqused: ReadOnly<i32>) -> (Place, usize) {
    // SAFETY: on this backend the arrays, where given, are host memory of batch (+ 1) elements (the
    // header says so).
    let read = |array: ReadOnly<i32>, at: usize| i64::from(unsafe { array.at(at) });
    let (place, length) = match cu_seqlens.is_null() {
        true => (Place::Entry(batch), seqlen),
        false => {
            let begin = read(cu_seqlens, batch);
            (Place::Row(begin as usize), seqlen.min(read(cu_seqlens, batch + 1) - begin))
        }
    };
    let used = if seqused.is_null() { length } else { length.min(read(seqused, batch)) };
    (place, used.max(0) as usize)
}
