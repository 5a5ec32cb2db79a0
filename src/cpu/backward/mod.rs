//! The backward pass: the tiles of `tiles`, and the parts that each adds to dQ, dK and dV.
//!
//! Two schedules with the same sums in the same order, hence the same bits. *Whole heads*: one task
//! per (batch, kv head) makes each tile once and adds dQ up in the workspace. *Split*: tasks per
//! (kv head, key block) for dK and dV, then per (head, query block) for dQ, which make each tile
//! twice but keep many threads busy with few heads.

mod dbias;
mod products;
mod statistics;
mod tiles;
mod workspace;

use super::amx::TileUnit;
use super::element::{Element, Tensor};
use super::product::{LANES, STRIP};
use super::sequence::Sequence;
use super::simd::Level;
use super::tile::{MAX_BLOCK, TileSize};
use super::workers::{Workers, take};
use crate::call::Call;
use crate::error::Result;
use crate::family::cpu::scratch;
use statistics::Statistics;
use std::slice::from_raw_parts_mut;
use tiles::{ScoresAre, Tiles};

/// Strips of the largest block.
const MOST_STRIPS: usize = MAX_BLOCK as usize / STRIP;

pub fn run<E: Element>(
    call: &Call,
    tile_size: TileSize,
    level: Level,
    tile_unit: Option<TileUnit>,
    workers: &Workers,
) -> Result<()> {
    let problem = &call.problem;
    let pass = Backward::<E>::new(call, tile_size, level, tile_unit);
    let heads = problem.num_heads_q as usize;
    let (batches, kv_heads) = (problem.batch_size as usize, problem.num_heads_kv as usize);
    let floats = scratch::backward(problem, tile_size);
    let query_blocks = (problem.seqlen_q as usize).div_ceil(tile_size.m);
    let key_blocks = (problem.seqlen_k as usize).div_ceil(tile_size.n);

    // Five products a tile on as many threads as there are heads, or seven on all of them. Either
    // gives the same bits.
    let kv_tasks = batches * kv_heads;
    let whole_heads = 5 * kv_tasks.div_ceil(workers.count()) * workers.count() <= 7 * kv_tasks;
    // Delta and LSE of all rows come first if tasks other than a head's own read them. Else each
    // head makes its own, which leaves dO in the caches.
    let statistics = Statistics::<E>::new(call, level);
    let statistics_first = problem.features.dbias || !whole_heads;
    if statistics_first {
        workers.for_each(batches * heads * query_blocks, floats, |task, scratch| {
            let (head, block) = (task / query_blocks, task % query_blocks);
            statistics.rows(head / heads, head % heads, block * tile_size.m, tile_size.m, scratch);
        })?;
    }
    if problem.features.dbias {
        dbias::run(&pass.tiles, call, workers)?;
    }
    if whole_heads {
        workers.for_each(kv_tasks, floats, |task, scratch| {
            let (batch, kv_head) = (task / kv_heads, task % kv_heads);
            let group = kv_head * problem.group_size() as usize..(kv_head + 1) * problem.group_size() as usize;
            if !statistics_first {
                for head in group.clone() {
                    for block in 0..query_blocks {
                        statistics.rows(batch, head, block * tile_size.m, tile_size.m, scratch);
                    }
                }
            }
            if pass.has_one_key_block(batch) {
                return pass.key_block(batch, kv_head, 0, Dq::Store, scratch);
            }
            group.clone().for_each(|head| pass.begin_accumulated_dq(batch, head));
            for block in 0..key_blocks {
                pass.key_block(batch, kv_head, block * tile_size.n, Dq::Accumulate, scratch);
            }
            for head in group {
                pass.store_accumulated_dq(batch, head);
            }
        })?;
    } else {
        workers.for_each(kv_tasks * key_blocks, floats, |task, scratch| {
            let (head, block) = (task / key_blocks, task % key_blocks);
            pass.key_block(head / kv_heads, head % kv_heads, block * tile_size.n, Dq::Leave, scratch);
        })?;
        workers.for_each(batches * heads * query_blocks, floats, |task, scratch| {
            let (head, block) = (task / query_blocks, task % query_blocks);
            pass.query_block(head / heads, head % heads, block * tile_size.m, scratch);
        })?;
    }
    if statistics.wants_dsinks() {
        workers.for_each(heads, 0, |head, _| statistics.dsink(head))?;
    }
    Ok(())
}

/// What a key block does with its part of dQ.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Dq {
    /// Nothing: tasks of their own make dQ.
    Leave,
    /// Adds it to the workspace.
    Accumulate,
    /// Stores it, since it is all of dQ.
    Store,
}

struct Backward<E> {
    tiles: Tiles<E>,
    softmax_scale: f32,
    dq: Tensor<E>,
    dk: Tensor<E>,
    dv: Tensor<E>,
}

impl<E: Element> Backward<E> {
    fn new(call: &Call, tile_size: TileSize, level: Level, tile_unit: Option<TileUnit>) -> Self {
        let (dim, dim_v) = (call.problem.head_dim as usize, call.problem.head_dim_v as usize);
        Backward {
            tiles: Tiles::new(call, tile_size, level, tile_unit),
            softmax_scale: call.softmax_scale,
            dq: Tensor::new(&call.dq, dim),
            dk: Tensor::new(&call.dk, dim),
            dv: Tensor::new(&call.dv, dim_v),
        }
    }

    /// Whether the batch entry's keys are one block that some row sees from the first row to the
    /// last. Each tile then has all of its rows' dQ, and `add_dq` overwrites.
    fn has_one_key_block(&self, batch: usize) -> bool {
        let sequence = self.tiles.sequences.of(batch);
        let keys = 0..sequence.seqlen_k;
        (1..=self.tiles.tile_size.n).contains(&keys.len())
            && sequence.mask.rows_of_block(keys) == (0..sequence.seqlen_q)
            && !self.tiles.block_map.is_on()
    }

    /// dK and dV of a key block, from all query heads of the group, and its part of their dQ.
    fn key_block(&self, batch: usize, kv_head: usize, first_key: usize, of_dq: Dq, mut scratch: &mut [f32]) {
        let Tiles { dim, dim_v, padded_dim, padded_dim_v, group_size, tile_size: TileSize { m, n }, .. } = self.tiles;
        let sequence = &self.tiles.sequences.of(batch);
        if first_key >= sequence.seqlen_k {
            return;
        }
        let acc_dk = take(&mut scratch, n * padded_dim);
        let acc_dv = take(&mut scratch, n * padded_dim_v);
        let acc_dq = take(&mut scratch, if of_dq == Dq::Store { m * padded_dim } else { 0 });
        let keys = self.tiles.load_keys(sequence, kv_head, first_key, &mut scratch);
        let mut blocks = self.tiles.block_map.table();
        let mut is_begun = [false; MOST_STRIPS];
        let seen_by = sequence.mask.rows_of_block(first_key..first_key + keys.keys);
        for head in kv_head * group_size..(kv_head + 1) * group_size {
            for first_row in (seen_by.start / m * m..seen_by.end).step_by(m) {
                let tile_keys = first_key..first_key + keys.keys;
                if !self.tiles.meets(sequence, head, first_row, tile_keys, &mut blocks) {
                    continue;
                }
                let mut queries = self.tiles.load_queries(sequence, head, first_row, &mut *scratch);
                for (strip, is_begun) in keys.strips().zip(&mut is_begun) {
                    let rows =
                        self.tiles.fill(sequence, head, &keys, &strip, &mut queries, &blocks, ScoresAre::Products);
                    if rows.is_empty() {
                        continue;
                    }
                    let (of_dk, of_dv) = (&mut acc_dk[strip.at * padded_dim..], &mut acc_dv[strip.at * padded_dim_v..]);
                    self.tiles.add_dk_and_dv(&keys, &strip, &mut queries, rows, *is_begun, of_dk, of_dv);
                    *is_begun = true;
                }
                match of_dq {
                    Dq::Leave => {}
                    Dq::Accumulate => {
                        // SAFETY: in this schedule all tiles of a head belong to one task.
                        let acc_dq = unsafe { self.accumulated_dq(sequence, head, first_row, queries.rows) };
                        self.tiles.add_dq(sequence, &keys, &mut queries, acc_dq);
                    }
                    Dq::Store => {
                        self.tiles.add_dq(sequence, &keys, &mut queries, acc_dq);
                        self.store_dq(sequence, head, first_row, queries.rows, acc_dq);
                    }
                }
            }
        }
        let (dk, dv) = (self.dk.head(sequence.place_k, kv_head), self.dv.head(sequence.place_k, kv_head));
        let row = take(&mut scratch, LANES * padded_dim.max(padded_dim_v));
        for (strip, is_begun) in keys.strips().zip(is_begun) {
            let of_dk = &mut acc_dk[strip.at * padded_dim..][..strip.padded_keys * padded_dim];
            let of_dv = &mut acc_dv[strip.at * padded_dim_v..][..strip.padded_keys * padded_dim_v];
            if !is_begun {
                of_dk.fill(0.0);
                of_dv.fill(0.0);
            }
            let first = first_key + strip.at;
            // SAFETY: the sequence has these rows, in outputs that this launch alone writes, and
            // they are of this task's block.
            unsafe {
                self.tiles.store_keys(&dk, first, &strip, self.softmax_scale, of_dk, [dim, padded_dim], row);
                self.tiles.store_keys(&dv, first, &strip, self.tiles.keep_scale(), of_dv, [dim_v, padded_dim_v], row);
            }
        }
    }

    /// dQ of a query block, all tiles made anew.
    fn query_block(&self, batch: usize, head: usize, first_row: usize, mut scratch: &mut [f32]) {
        let Tiles { padded_dim, group_size, tile_size: TileSize { m, n }, .. } = self.tiles;
        let sequence = &self.tiles.sequences.of(batch);
        if first_row >= sequence.seqlen_q {
            return;
        }
        let rows = m.min(sequence.seqlen_q - first_row);
        let acc_dq = take(&mut scratch, rows * padded_dim);
        let seen = sequence.mask.keys_of_block(first_row..first_row + rows);
        let mut blocks = self.tiles.block_map.table();
        if self.tiles.block_map.is_on() {
            acc_dq.fill(0.0);
        }
        for first_key in (seen.start / n * n..seen.end).step_by(n) {
            let tile_keys = first_key..sequence.seqlen_k.min(first_key + n);
            if !self.tiles.meets(sequence, head, first_row, tile_keys, &mut blocks) {
                continue;
            }
            let mut scratch = &mut *scratch;
            let keys = self.tiles.load_keys(sequence, head / group_size, first_key, &mut scratch);
            let mut queries = self.tiles.load_queries(sequence, head, first_row, scratch);
            for strip in keys.strips() {
                self.tiles.fill(sequence, head, &keys, &strip, &mut queries, &blocks, ScoresAre::Products);
            }
            self.tiles.add_dq(sequence, &keys, &mut queries, acc_dq);
        }
        self.store_dq(sequence, head, first_row, rows, acc_dq);
    }

    /// The dQ accumulator of some rows of a head.
    ///
    /// # Safety
    /// All tiles of the head must belong to the calling task.
    #[allow(clippy::mut_from_ref)] // the slice is the workspace's memory, not part of `self`
    unsafe fn accumulated_dq(&self, sequence: &Sequence, head: usize, first_row: usize, rows: usize) -> &mut [f32] {
        let row = self.tiles.sequences.workspace_row(sequence, head) + first_row;
        let data = self.tiles.workspace.dq_accum(row);
        // SAFETY: within `Problem::workspace_bytes`; the rest is the caller's promise.
        unsafe { from_raw_parts_mut(data, rows * self.tiles.padded_dim) }
    }

    /// Called before any tile of the head.
    fn begin_accumulated_dq(&self, batch: usize, head: usize) {
        let sequence = self.tiles.sequences.of(batch);
        if self.tiles.block_map.is_on() {
            // SAFETY: in this schedule all tiles of a head belong to one task, which has made none
            // yet.
            unsafe { self.accumulated_dq(&sequence, head, 0, sequence.seqlen_q) }.fill(0.0);
        }
    }

    fn store_accumulated_dq(&self, batch: usize, head: usize) {
        let (sequence, block_m) = (self.tiles.sequences.of(batch), self.tiles.tile_size.m);
        for first_row in (0..sequence.seqlen_q).step_by(block_m) {
            let rows = block_m.min(sequence.seqlen_q - first_row);
            // SAFETY: in this schedule all tiles of a head belong to one task, which has made them
            // all.
            let acc_dq = unsafe { self.accumulated_dq(&sequence, head, first_row, rows) };
            self.store_dq(&sequence, head, first_row, rows, acc_dq);
        }
    }

    /// Scales and stores dQ. A row that sees no key gets 0; its accumulator may hold anything.
    fn store_dq(&self, sequence: &Sequence, head: usize, first_row: usize, rows: usize, acc_dq: &mut [f32]) {
        let dq = self.dq.head(sequence.place_q, head);
        for (row, acc) in (first_row..first_row + rows).zip(acc_dq.chunks_exact_mut(self.tiles.padded_dim)) {
            if sequence.mask.keys_of(row).is_empty() {
                acc.fill(0.0);
            }
            // SAFETY: the sequence has this row, in an output that this launch alone writes, and it
            // is of this task's part.
            unsafe { dq.store_scaled(row, self.softmax_scale, &mut acc[..self.tiles.dim]) };
        }
    }
}
