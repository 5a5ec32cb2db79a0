//! Statistics: the values of each row that the backward pass needs before any tile, and the
//! gradient of the sinks, which needs nothing else.

use super::workspace::Workspace;
use crate::call::Call;
use crate::cpu::element::{Element, Tensor};
use crate::cpu::sequence::Sequences;
use crate::cpu::simd::Level;
use crate::cpu::vector::row_dots;
use crate::cpu::workers::take;
use std::slice::{from_raw_parts, from_raw_parts_mut};

pub struct Statistics<E> {
    level: Level,
    dim_v: usize,
    batch_size: usize,
    sequences: Sequences,
    out: Tensor<E>,
    dout: Tensor<E>,
    lse: *const f32,
    /// NULL if the loss does not depend on the LSE.
    dlse: *const f32,
    sinks: *const f32,
    dsinks: *mut f32,
    workspace: Workspace,
}

// SAFETY: inputs are only read, and each task writes rows or an element of its own.
unsafe impl<E> Send for Statistics<E> {}
// SAFETY: as above.
unsafe impl<E> Sync for Statistics<E> {}

impl<E: Element> Statistics<E> {
    pub fn new(call: &Call, level: Level) -> Self {
        let (of, args) = (&call.problem.features, &call.features);
        let dim_v = call.problem.head_dim_v as usize;
        Statistics {
            level,
            dim_v,
            batch_size: call.problem.batch_size as usize,
            sequences: Sequences::new(call),
            out: Tensor::new(&call.out, dim_v),
            dout: Tensor::new(&call.dout, dim_v),
            lse: call.lse,
            dlse: if of.dlse { args.dlse } else { std::ptr::null() },
            sinks: args.sinks,
            dsinks: if of.sinks { args.dsinks } else { std::ptr::null_mut() },
            workspace: Workspace::new(call),
        }
    }

    /// delta = rowsum(dO * O) - dLSE and LSE in base 2 of up to `block_m` rows from `first_row` on,
    /// into the workspace.
    pub fn rows(&self, batch: usize, head: usize, first_row: usize, block_m: usize, mut scratch: &mut [f32]) {
        let sequence = self.sequences.of(batch);
        if first_row >= sequence.seqlen_q {
            return;
        }
        let rows = block_m.min(sequence.seqlen_q - first_row);
        let out = take(&mut scratch, rows * self.dim_v);
        let dout = take(&mut scratch, rows * self.dim_v);
        let in_workspace = self.sequences.workspace_row(&sequence, head) + first_row;
        let in_lse = self.sequences.lse_row(&sequence, head) + first_row;
        // SAFETY: rows of the sequence in inputs that nobody writes during a launch; the statistics
        // of these rows are this task's alone.
        unsafe {
            let out = self.out.head(sequence.place_q, head).rows(first_row, rows, out, self.dim_v);
            let dout = self.dout.head(sequence.place_q, head).rows(first_row, rows, dout, self.dim_v);
            let lse = from_raw_parts(self.lse.add(in_lse), rows);
            let kept_lse = from_raw_parts_mut(self.workspace.lse(in_workspace), rows);
            let delta = from_raw_parts_mut(self.workspace.delta(in_workspace), rows);
            row_dots(self.level, out, dout, self.dim_v, delta);
            if !self.dlse.is_null() {
                let dlse = from_raw_parts(self.dlse.add(in_lse), rows);
                delta.iter_mut().zip(dlse).for_each(|(delta, dlse)| *delta -= dlse);
            }
            for ((lse, kept_lse), delta) in lse.iter().zip(kept_lse).zip(delta) {
                // A row that sees nothing gives no gradient, whatever its LSE's gradient is.
                (*kept_lse, *delta) = match *lse == f32::NEG_INFINITY {
                    true => (f32::INFINITY, 0.0),
                    false => (*lse, *delta),
                };
            }
        }
    }

    pub fn wants_dsinks(&self) -> bool {
        !self.dsinks.is_null()
    }

    /// The gradient of a head's sink, after `rows` of all its rows: minus the sum of its weight
    /// times delta. It is summed in one order and in fp64, since terms of either sign cancel.
    pub fn dsink(&self, head: usize) {
        // SAFETY: one of heads_q floats.
        let sink = f64::from(unsafe { self.sinks.add(head).read() });
        let mut sum = 0.0;
        for batch in 0..self.batch_size {
            let sequence = self.sequences.of(batch);
            let first = self.sequences.workspace_row(&sequence, head);
            // SAFETY: written in an earlier phase, only read in this one.
            let (lse, delta) = unsafe {
                (
                    from_raw_parts(self.workspace.lse(first), sequence.seqlen_q),
                    from_raw_parts(self.workspace.delta(first), sequence.seqlen_q),
                )
            };
            let terms = lse.iter().zip(delta).map(|(lse, delta)| (sink - f64::from(*lse)).exp() * f64::from(*delta));
            sum += terms.sum::<f64>();
        }
        // SAFETY: one of heads_q floats, and this task's alone.
        unsafe { self.dsinks.add(head).write(-sum as f32) };
    }
}
