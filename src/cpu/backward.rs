//! The backward pass: weights recomputed tile by tile from LSE, then the five products of a tile.
//!
//! Tiles have the keys contiguous (element (row, key) at `row * block_n + key`): what belongs to a row (LSE, delta)
//! is then one scalar for a vector of keys, and the GEMM reads weights, score gradients, dO and K in place.
//!
//! Two schedules with the same sums in the same order, hence the same bits. *Whole heads*: one task per (batch, kv
//! head) makes each tile once and adds dQ up in the workspace. *Split*: tasks per (kv head, key block) for dK and dV,
//! then per (head, query block) for dQ, which make each tile twice but keep many threads busy with few heads.

use super::Blocks;
use super::dropout::Masks;
use super::element::{Element, Tensor};
use super::mask::Mask;
use super::matmul::{Into, Matrix, multiply};
use super::vector::{LANES, Level, multiply_in_place, row_dots, score_gradients};
use super::workers::{Workers, take};
use crate::call::Call;
use crate::error::Result;
use crate::problem::Problem;
use std::f32::consts::LOG2_E;
use std::slice::{from_raw_parts, from_raw_parts_mut};

/// Floats of scratch that any task of `run` takes.
pub fn scratch_floats(problem: &Problem, blocks: Blocks) -> usize {
    let (dim, dim_v) = (problem.head_dim as usize, problem.head_dim_v as usize);
    let padded_dim = problem.workspace_cols() as usize;
    let Blocks { m, n } = blocks;
    let tiles = if problem.dropout { 3 } else { 2 };
    let key_side = n * (2 * (dim + dim_v) + padded_dim);
    let query_side = m * (dim + dim_v + padded_dim);
    let row_statistics = 2 * m * dim_v;
    (key_side + query_side + tiles * m * n).max(row_statistics)
}

pub fn run<E: Element>(call: &Call, blocks: Blocks, level: Level, workers: &Workers) -> Result<()> {
    let pass = Backward::<E>::new(call, blocks, level);
    let (batches, heads, kv_heads) = (call.problem.batch_size as usize, pass.heads, pass.heads / pass.group_size);
    let floats = scratch_floats(&call.problem, blocks);
    let query_blocks = pass.seqlen_q.div_ceil(blocks.m);
    let key_blocks = pass.seqlen_k.div_ceil(blocks.n);

    workers.for_each(batches * heads * query_blocks, floats, |task, scratch| {
        let (head, block) = (task / query_blocks, task % query_blocks);
        pass.row_statistics(call, head / heads, head % heads, block * blocks.m, scratch);
    })?;

    // Five products a tile on as many threads as there are heads, or seven on all of them. Either gives the same bits.
    let kv_tasks = batches * kv_heads;
    let whole_heads = 5 * kv_tasks.div_ceil(workers.count()) * workers.count() <= 7 * kv_tasks;
    if whole_heads {
        return workers.for_each(kv_tasks, floats, |task, scratch| {
            let (batch, kv_head) = (task / kv_heads, task % kv_heads);
            for first_key in (0..pass.seqlen_k).step_by(blocks.n) {
                pass.key_block(batch, kv_head, first_key, true, scratch);
            }
            for head in kv_head * pass.group_size..(kv_head + 1) * pass.group_size {
                pass.store_accumulated_dq(batch, head);
            }
        });
    }
    workers.for_each(kv_tasks * key_blocks, floats, |task, scratch| {
        let (head, block) = (task / key_blocks, task % key_blocks);
        pass.key_block(head / kv_heads, head % kv_heads, block * blocks.n, false, scratch);
    })?;
    workers.for_each(batches * heads * query_blocks, floats, |task, scratch| {
        let (head, block) = (task / query_blocks, task % query_blocks);
        pass.query_block(head / heads, head % heads, block * blocks.m, scratch);
    })
}

struct Backward<E> {
    blocks: Blocks,
    level: Level,
    mask: Mask,
    masks: Option<Masks>,
    heads: usize,
    group_size: usize,
    seqlen_q: usize,
    seqlen_k: usize,
    dim: usize,
    dim_v: usize,
    /// `head_dim` rounded up to whole registers: the pitch of K tiles and of dQ accumulators.
    padded_dim: usize,
    softmax_scale: f32,
    q: Tensor<E>,
    k: Tensor<E>,
    v: Tensor<E>,
    dout: Tensor<E>,
    dq: Tensor<E>,
    dk: Tensor<E>,
    dv: Tensor<E>,
    workspace: Workspace,
}

/// The call's workspace: per (batch, head_q) `rows` floats of lse_log2, then of delta, then `rows * cols` of dQ.
#[derive(Clone, Copy)]
struct Workspace {
    data: *mut f32,
    rows: usize,
    cols: usize,
    total_heads: usize,
}

// SAFETY: tasks of one phase write disjoint heads or rows; a phase ends before the next reads what it wrote.
unsafe impl Send for Workspace {}
// SAFETY: as above.
unsafe impl Sync for Workspace {}

impl Workspace {
    /// Where lse_log2 of a head begins, at `row`; the workspace of a checked call holds `rows` of each head.
    fn lse_log2(&self, head: usize, row: usize) -> *mut f32 {
        self.data.wrapping_add(head * self.rows + row)
    }

    fn delta(&self, head: usize, row: usize) -> *mut f32 {
        self.data.wrapping_add((self.total_heads + head) * self.rows + row)
    }

    fn dq_accum(&self, head: usize, row: usize) -> *mut f32 {
        self.data.wrapping_add((2 * self.total_heads + head * self.cols) * self.rows + row * self.cols)
    }
}

/// K and V of a key block in the orientations that the products want.
struct KeyTile<'a> {
    first: usize,
    keys: usize,
    /// `keys` rounded up to whole registers; what lies between is 0.
    padded_keys: usize,
    /// (key, c) at `key * padded_dim + c`
    k: &'a [f32],
    /// (key, c) at `c * block_n + key`
    k_transposed: &'a [f32],
    v_transposed: &'a [f32],
}

/// Q and dO of a query block, row by row, and the two tiles of one (query block, key block).
struct QueryTile<'a> {
    first: usize,
    rows: usize,
    q: &'a mut [f32],
    dout: &'a mut [f32],
    /// Scores, then weights, in the end without the dropped ones.
    weights: &'a mut [f32],
    /// Gradients of the weights, then of the scores.
    gradients: &'a mut [f32],
    keep: &'a mut [f32],
}

impl<E: Element> Backward<E> {
    fn new(call: &Call, blocks: Blocks, level: Level) -> Self {
        let problem = &call.problem;
        let (dim, dim_v) = (problem.head_dim as usize, problem.head_dim_v as usize);
        Backward {
            blocks,
            level,
            mask: Mask::new(problem),
            masks: Masks::new(call, level),
            heads: problem.num_heads_q as usize,
            group_size: problem.group_size() as usize,
            seqlen_q: problem.seqlen_q as usize,
            seqlen_k: problem.seqlen_k as usize,
            dim,
            dim_v,
            padded_dim: problem.workspace_cols() as usize,
            softmax_scale: call.softmax_scale,
            q: Tensor::new(&call.q, dim),
            k: Tensor::new(&call.k, dim),
            v: Tensor::new(&call.v, dim_v),
            dout: Tensor::new(&call.dout, dim_v),
            dq: Tensor::new(&call.dq, dim),
            dk: Tensor::new(&call.dk, dim),
            dv: Tensor::new(&call.dv, dim_v),
            workspace: Workspace {
                data: call.workspace.cast(),
                rows: problem.workspace_rows() as usize,
                cols: problem.workspace_cols() as usize,
                total_heads: (problem.batch_size * problem.num_heads_q) as usize,
            },
        }
    }

    /// delta = rowsum(dO * O) and LSE in base 2, into the workspace.
    fn row_statistics(&self, call: &Call, batch: usize, head: usize, first_row: usize, mut scratch: &mut [f32]) {
        let rows = self.blocks.m.min(self.seqlen_q - first_row);
        let out = take(&mut scratch, rows * self.dim_v);
        let dout = take(&mut scratch, rows * self.dim_v);
        let index = batch * self.heads + head;
        // SAFETY: inputs within seqlen_q rows that nobody writes during a launch; the statistics of these rows are
        // this task's alone.
        unsafe {
            Tensor::<E>::new(&call.out, self.dim_v).head(batch, head).load(first_row, rows, out, self.dim_v);
            self.dout.head(batch, head).load(first_row, rows, dout, self.dim_v);
            let lse = from_raw_parts(call.lse.add(index * self.seqlen_q + first_row), rows);
            let lse_log2 = from_raw_parts_mut(self.workspace.lse_log2(index, first_row), rows);
            lse_log2.iter_mut().zip(lse).for_each(|(log2, lse)| *log2 = lse * LOG2_E);
            let delta = from_raw_parts_mut(self.workspace.delta(index, first_row), rows);
            row_dots(self.level, out, dout, self.dim_v, delta);
        }
    }

    /// dK and dV of a key block, from all query heads of the group; with `accumulate_dq` also its part of their dQ.
    fn key_block(&self, batch: usize, kv_head: usize, first_key: usize, accumulate_dq: bool, mut scratch: &mut [f32]) {
        let Blocks { m, n } = self.blocks;
        let acc_dk = take(&mut scratch, self.dim * n);
        let acc_dv = take(&mut scratch, self.dim_v * n);
        let keys = self.load_keys(batch, kv_head, first_key, &mut scratch);
        let mut queries = self.query_tile(scratch);
        let mut into = Into::Overwrite;
        // Rows before the first that sees the block's first key see none of it.
        let first_block = self.mask.first_row_of(first_key) / m * m;
        for head in kv_head * self.group_size..(kv_head + 1) * self.group_size {
            for first_row in (first_block..self.seqlen_q).step_by(m) {
                self.load_queries(batch, head, first_row, &mut queries);
                self.fill_tile(batch * self.heads + head, &keys, &mut queries);
                let rows = queries.rows;
                let weights = Matrix::columns(queries.weights, n);
                let gradients = Matrix::columns(queries.gradients, n);
                let dout = Matrix::rows(queries.dout, self.dim_v);
                let q = Matrix::rows(queries.q, self.dim);
                multiply([keys.padded_keys, self.dim_v, rows], acc_dv, n, into, weights, dout, 1.0);
                multiply([keys.padded_keys, self.dim, rows], acc_dk, n, into, gradients, q, 1.0);
                into = Into::Add;
                if accumulate_dq {
                    // SAFETY: in this schedule all tiles of a head belong to one task.
                    let acc_dq = unsafe { self.accumulated_dq(batch, head, first_row, rows) };
                    self.add_dq(&keys, &queries, acc_dq);
                }
            }
        }
        if into == Into::Overwrite {
            acc_dk.fill(0.0);
            acc_dv.fill(0.0);
        }
        let keep_scale = self.masks.map_or(1.0, |masks| masks.keep_scale);
        // SAFETY: the rows lie within seqlen_k of outputs that this launch alone writes, and in this task's block.
        unsafe {
            self.dk.head(batch, kv_head).store_transposed(first_key, keys.keys, acc_dk, n, self.softmax_scale);
            self.dv.head(batch, kv_head).store_transposed(first_key, keys.keys, acc_dv, n, keep_scale);
        }
    }

    /// dQ of a query block, all tiles made anew.
    fn query_block(&self, batch: usize, head: usize, first_row: usize, mut scratch: &mut [f32]) {
        let rows = self.blocks.m.min(self.seqlen_q - first_row);
        let acc_dq = take(&mut scratch, rows * self.padded_dim);
        for first_key in (0..self.mask.keys_of(first_row + rows - 1)).step_by(self.blocks.n) {
            let mut scratch = &mut *scratch;
            let keys = self.load_keys(batch, head / self.group_size, first_key, &mut scratch);
            let mut queries = self.query_tile(scratch);
            self.load_queries(batch, head, first_row, &mut queries);
            self.fill_tile(batch * self.heads + head, &keys, &mut queries);
            self.add_dq(&keys, &queries, acc_dq);
        }
        self.store_dq(batch, head, first_row, rows, acc_dq);
    }

    fn load_keys<'a>(&self, batch: usize, kv_head: usize, first: usize, scratch: &mut &'a mut [f32]) -> KeyTile<'a> {
        let n = self.blocks.n;
        let keys = n.min(self.seqlen_k - first);
        let padded_keys = keys.next_multiple_of(LANES);
        let k = take(scratch, n * self.padded_dim);
        let k_transposed = take(scratch, self.dim * n);
        let v_transposed = take(scratch, self.dim_v * n);
        let (head_k, head_v) = (self.k.head(batch, kv_head), self.v.head(batch, kv_head));
        // SAFETY: the rows lie within seqlen_k of tensors that the caller keeps alive and unwritten during a launch.
        unsafe {
            head_k.load(first, keys, k, self.padded_dim);
            head_k.load_transposed(first, keys, padded_keys, k_transposed, n);
            head_v.load_transposed(first, keys, padded_keys, v_transposed, n);
        }
        KeyTile { first, keys, padded_keys, k, k_transposed, v_transposed }
    }

    fn query_tile<'a>(&self, mut scratch: &'a mut [f32]) -> QueryTile<'a> {
        let Blocks { m, n } = self.blocks;
        QueryTile {
            first: 0,
            rows: 0,
            q: take(&mut scratch, m * self.dim),
            dout: take(&mut scratch, m * self.dim_v),
            weights: take(&mut scratch, m * n),
            gradients: take(&mut scratch, m * n),
            keep: scratch,
        }
    }

    fn load_queries(&self, batch: usize, head: usize, first: usize, tile: &mut QueryTile) {
        tile.first = first;
        tile.rows = self.blocks.m.min(self.seqlen_q - first);
        // SAFETY: the rows lie within seqlen_q of tensors that the caller keeps alive and unwritten during a launch.
        unsafe {
            self.q.head(batch, head).load(first, tile.rows, tile.q, self.dim);
            self.dout.head(batch, head).load(first, tile.rows, tile.dout, self.dim_v);
        }
    }

    /// The weights and the score gradients of a tile. Both passes' dropout: what was dropped has weight 0 in dV, and
    /// the gradient of its weight is 0, while the weight itself stays in the score gradient.
    fn fill_tile(&self, head: usize, keys: &KeyTile, tile: &mut QueryTile) {
        let n = self.blocks.n;
        let rows = tile.rows;
        let k = Matrix::columns(keys.k_transposed, n);
        let q = Matrix::columns(tile.q, self.dim);
        let scale_log2 = self.softmax_scale * LOG2_E;
        multiply([keys.padded_keys, rows, self.dim], tile.weights, n, Into::Overwrite, k, q, scale_log2);
        let v = Matrix::columns(keys.v_transposed, n);
        let dout = Matrix::columns(tile.dout, self.dim_v);
        let keep_scale = self.masks.map_or(1.0, |masks| masks.keep_scale);
        multiply([keys.padded_keys, rows, self.dim_v], tile.gradients, n, Into::Overwrite, v, dout, keep_scale);
        if let Some(masks) = &self.masks {
            masks.fill(head, tile.first, rows, keys.first, keys.keys, tile.keep, n, 1);
            multiply_in_place(self.level, &mut tile.gradients[..rows * n], tile.keep);
        }
        // SAFETY: written in an earlier phase, only read in this one.
        let (lse_log2, delta) = unsafe {
            (
                from_raw_parts(self.workspace.lse_log2(head, tile.first), rows),
                from_raw_parts(self.workspace.delta(head, tile.first), rows),
            )
        };
        for row in 0..rows {
            let weights = &mut tile.weights[row * n..][..keys.padded_keys];
            let gradients = &mut tile.gradients[row * n..][..keys.padded_keys];
            let visible = self.mask.keys_of(tile.first + row).saturating_sub(keys.first).min(keys.padded_keys);
            score_gradients(self.level, &mut weights[..visible], &mut gradients[..visible], lse_log2[row], delta[row]);
            weights[visible..].fill(0.0);
            gradients[visible..].fill(0.0);
        }
        if self.masks.is_some() {
            multiply_in_place(self.level, &mut tile.weights[..rows * n], tile.keep);
        }
    }

    /// Adds the tile's part to a dQ accumulator; the first key block, which every row that sees keys sees, begins it.
    fn add_dq(&self, keys: &KeyTile, tile: &QueryTile, acc_dq: &mut [f32]) {
        let into = if keys.first == 0 { Into::Overwrite } else { Into::Add };
        let k = Matrix::columns(keys.k, self.padded_dim);
        let gradients = Matrix::columns(tile.gradients, self.blocks.n);
        multiply([self.padded_dim, tile.rows, keys.keys], acc_dq, self.padded_dim, into, k, gradients, 1.0);
    }

    /// The dQ accumulator of some rows of a head.
    ///
    /// # Safety
    /// All tiles of the head must belong to the calling task.
    #[allow(clippy::mut_from_ref)] // the slice is the workspace's memory, not part of `self`
    unsafe fn accumulated_dq(&self, batch: usize, head: usize, first_row: usize, rows: usize) -> &mut [f32] {
        let data = self.workspace.dq_accum(batch * self.heads + head, first_row);
        // SAFETY: within `Problem::workspace_bytes`; the rest is the caller's promise.
        unsafe { from_raw_parts_mut(data, rows * self.padded_dim) }
    }

    fn store_accumulated_dq(&self, batch: usize, head: usize) {
        for first_row in (0..self.seqlen_q).step_by(self.blocks.m) {
            let rows = self.blocks.m.min(self.seqlen_q - first_row);
            // SAFETY: in this schedule all tiles of a head belong to one task, which has made them all.
            let acc_dq = unsafe { self.accumulated_dq(batch, head, first_row, rows) };
            self.store_dq(batch, head, first_row, rows, acc_dq);
        }
    }

    /// Scales and stores dQ. A row that sees no key gets 0; its accumulator may hold anything.
    fn store_dq(&self, batch: usize, head: usize, first_row: usize, rows: usize, acc_dq: &mut [f32]) {
        let dq = self.dq.head(batch, head);
        for (row, acc) in (first_row..first_row + rows).zip(acc_dq.chunks_exact_mut(self.padded_dim)) {
            match self.mask.keys_of(row) {
                0 => acc.fill(0.0),
                _ => acc.iter_mut().for_each(|x| *x *= self.softmax_scale),
            }
            // SAFETY: the row lies within seqlen_q of an output that this launch alone writes, and in this task's part.
            unsafe { dq.store(row, &acc[..self.dim]) };
        }
    }
}
