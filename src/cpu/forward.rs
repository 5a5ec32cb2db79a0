//! The forward pass: one task per (batch, head, block of queries), which walks the keys with an online softmax.
//!
//! Tiles have the queries contiguous (element (row, key) at `key * block_m + row`), and so has the output
//! accumulator: maxima, sums and rescaling run along the vector registers without a horizontal step, and the GEMM
//! reads the queries and the weights in place. Scores are base 2, scaled by the product that makes them.
//!
//! Hidden scores are overwritten, so a NaN in a hidden key's K is never seen. A hidden key's V meets a weight of 0 in
//! the product of its tile: there a NaN or inf does spread, as in every tiled implementation.

use super::Blocks;
use super::dropout::Masks;
use super::element::{Element, Head, Tensor};
use super::mask::Mask;
use super::matmul::{Into, Matrix, multiply};
use super::vector::{LANES, Level, multiply_in_place, scale_rows, softmax_step};
use super::workers::{Workers, take};
use crate::call::Call;
use crate::error::Result;
use crate::problem::Problem;
use std::f32::consts::{LN_2, LOG2_E};

/// Floats of scratch that a task of `run` takes.
pub fn scratch_floats(problem: &Problem, blocks: Blocks) -> usize {
    let (dim, dim_v) = (problem.head_dim as usize, problem.head_dim_v as usize);
    let Blocks { m, n } = blocks;
    let dropout = if problem.dropout { m * n } else { 0 };
    (dim + dim_v) * (m + n) + m * n + 3 * m + dropout
}

pub fn run<E: Element>(call: &Call, blocks: Blocks, level: Level, workers: &Workers) -> Result<()> {
    let problem = &call.problem;
    let pass = Forward::<E> {
        blocks,
        level,
        mask: Mask::new(problem),
        masks: Masks::new(call, level),
        heads: problem.num_heads_q as usize,
        group_size: problem.group_size() as usize,
        seqlen_q: problem.seqlen_q as usize,
        dim: problem.head_dim as usize,
        dim_v: problem.head_dim_v as usize,
        scale_log2: call.softmax_scale * LOG2_E,
        q: Tensor::new(&call.q, problem.head_dim as usize),
        k: Tensor::new(&call.k, problem.head_dim as usize),
        v: Tensor::new(&call.v, problem.head_dim_v as usize),
        out: Tensor::new(&call.out, problem.head_dim_v as usize),
        lse: Lse(call.lse),
    };
    let query_blocks = pass.seqlen_q.div_ceil(blocks.m);
    let tasks = problem.batch_size as usize * pass.heads * query_blocks;
    workers.for_each(tasks, scratch_floats(problem, blocks), |task, scratch| {
        let (head, block) = (task / query_blocks, task % query_blocks);
        pass.query_block(head / pass.heads, head % pass.heads, block * blocks.m, scratch);
    })
}

/// The caller's (batch, heads_q, seqlen_q) array, or NULL.
#[derive(Clone, Copy)]
struct Lse(*mut f32);

// SAFETY: each task writes the rows of its own query block and nothing else.
unsafe impl Send for Lse {}
// SAFETY: as above.
unsafe impl Sync for Lse {}

struct Forward<E> {
    blocks: Blocks,
    level: Level,
    mask: Mask,
    masks: Option<Masks>,
    heads: usize,
    group_size: usize,
    seqlen_q: usize,
    dim: usize,
    dim_v: usize,
    scale_log2: f32,
    q: Tensor<E>,
    k: Tensor<E>,
    v: Tensor<E>,
    out: Tensor<E>,
    lse: Lse,
}

impl<E: Element> Forward<E> {
    fn query_block(&self, batch: usize, head: usize, first_row: usize, mut scratch: &mut [f32]) {
        let Blocks { m, n } = self.blocks;
        let rows = m.min(self.seqlen_q - first_row);
        // Rows up to the next multiple of LANES are computed from zeros and not stored.
        let padded_rows = rows.next_multiple_of(LANES);
        let q = take(&mut scratch, self.dim * m);
        let k = take(&mut scratch, n * self.dim);
        let v = take(&mut scratch, n * self.dim_v);
        let scores = take(&mut scratch, n * m);
        let acc_o = take(&mut scratch, self.dim_v * m);
        let row_max = &mut take(&mut scratch, m)[..padded_rows];
        let row_sum = &mut take(&mut scratch, m)[..padded_rows];
        let rescale = &mut take(&mut scratch, m)[..padded_rows];
        let keep = scratch;
        row_max.fill(f32::NEG_INFINITY);
        row_sum.fill(0.0);

        let kv_head = head / self.group_size;
        let (keys_k, keys_v) = (self.k.head(batch, kv_head), self.v.head(batch, kv_head));
        // SAFETY: the rows lie within seqlen_q of a tensor that the caller keeps alive and unwritten during a launch.
        unsafe { self.q.head(batch, head).load_transposed(first_row, rows, padded_rows, q, m) };

        // Keys beyond the last row's prefix are hidden from the whole block: their tiles are never visited.
        let visible_keys = self.mask.keys_of(first_row + rows - 1);
        for first_key in (0..visible_keys).step_by(n) {
            let keys = n.min(visible_keys - first_key);
            // SAFETY: first_key + keys <= seqlen_k; as above.
            unsafe {
                keys_k.load(first_key, keys, k, self.dim);
                keys_v.load(first_key, keys, v, self.dim_v);
            }
            let (q, k) = (Matrix::columns(q, m), Matrix::columns(k, self.dim));
            multiply([padded_rows, keys, self.dim], scores, m, Into::Overwrite, q, k, self.scale_log2);
            if self.mask.keys_of(first_row) < first_key + keys {
                self.hide(scores, first_row, rows, first_key, keys);
            }
            softmax_step(self.level, scores, m, keys, row_max, row_sum, rescale);
            if let Some(masks) = &self.masks {
                masks.fill(batch * self.heads + head, first_row, rows, first_key, keys, keep, 1, m);
                multiply_in_place(self.level, &mut scores[..keys * m], keep);
            }
            let into = if first_key == 0 { Into::Overwrite } else { Into::Add };
            if into == Into::Add {
                scale_rows(self.level, acc_o, m, rescale);
            }
            let (weights, v) = (Matrix::columns(scores, m), Matrix::rows(v, self.dim_v));
            multiply([padded_rows, self.dim_v, keys], acc_o, m, into, weights, v, 1.0);
        }
        let out = self.out.head(batch, head);
        self.finish(&out, (batch * self.heads + head) * self.seqlen_q, first_row, rows, acc_o, row_max, row_sum);
    }

    /// Puts -inf where a row does not see a key. A row sees a prefix of the keys, so a key hides a prefix of the rows.
    fn hide(&self, scores: &mut [f32], first_row: usize, rows: usize, first_key: usize, keys: usize) {
        for key in 0..keys {
            let hidden = self.mask.first_row_of(first_key + key).saturating_sub(first_row).min(rows);
            scores[key * self.blocks.m..][..hidden].fill(f32::NEG_INFINITY);
        }
    }

    /// Divides by the sums and stores the block's rows and their LSE.
    ///
    /// A row that sees no key is told by the mask, never by its values: O = 0 and LSE = -inf whatever lies in the
    /// accumulator. A row that sees keys but has only -inf scores gives 0/0 = NaN, as softmax has it, with LSE = -inf.
    #[allow(clippy::too_many_arguments)] // where to, which rows, and the three results of the key loop
    fn finish(
        &self,
        out: &Head<E>,
        lse_of_head: usize,
        first_row: usize,
        rows: usize,
        acc_o: &mut [f32],
        row_max: &mut [f32],
        row_sum: &mut [f32],
    ) {
        let m = self.blocks.m;
        let keep_scale = self.masks.map_or(1.0, |masks| masks.keep_scale);
        for row in 0..rows {
            let sees_keys = self.mask.keys_of(first_row + row) > 0;
            if !sees_keys {
                acc_o.iter_mut().skip(row).step_by(m).for_each(|x| *x = 0.0);
            }
            if !self.lse.0.is_null() {
                let lse = if sees_keys { row_max[row] * LN_2 + row_sum[row].ln() } else { f32::NEG_INFINITY };
                // SAFETY: lse has batch * heads_q * seqlen_q elements, and this row is this task's alone.
                unsafe { self.lse.0.add(lse_of_head + first_row + row).write(lse) };
            }
            row_sum[row] = if sees_keys { keep_scale / row_sum[row] } else { 1.0 };
        }
        scale_rows(self.level, acc_o, m, row_sum);
        // SAFETY: the rows lie within seqlen_q of an output that this launch alone writes, and in this task's block.
        unsafe { out.store_transposed(first_row, rows, acc_o, m, 1.0) };
    }
}
