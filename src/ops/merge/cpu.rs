//! Merging on host memory: a task is a block of rows of one batch entry and head.

use super::call::Merge;
use crate::call::TensorRef;
use crate::cpu::{Element, Place, Tensor, Workers, take};
use crate::error::Result;
use crate::problem::Dtype;
use half::{bf16, f16};

/// Rows of a task: enough to outweigh the cost of handing it to a worker.
const ROWS: usize = 64;

/// Returns when the outputs are written.
pub fn run(merge: &Merge, workers: &Workers) -> Result<()> {
    match (merge.class.dtype, merge.class.partial_dtype) {
        (Dtype::Fp16, Dtype::Fp32) => merge_rows::<f16, f32>(merge, workers),
        (Dtype::Bf16, Dtype::Fp32) => merge_rows::<bf16, f32>(merge, workers),
        (Dtype::Fp16, _) => merge_rows::<f16, f16>(merge, workers),
        (Dtype::Bf16, _) => merge_rows::<bf16, bf16>(merge, workers),
        (Dtype::Fp32, _) => merge_rows::<f32, f32>(merge, workers),
    }
}

/// `E` is the output's element, `P` a partial's.
fn merge_rows<E: Element, P: Element>(merge: &Merge, workers: &Workers) -> Result<()> {
    let (heads, seqlen, dim) = (merge.num_heads as usize, merge.seqlen as usize, merge.head_dim_v as usize);
    let blocks = seqlen.div_ceil(ROWS);
    let tasks = merge.batch_size as usize * heads * blocks;
    workers.for_each(tasks, merge.num_partials as usize + 2 * dim, |task, mut scratch| {
        let (batch_head, first) = (task / blocks, task % blocks * ROWS);
        let weights = take(&mut scratch, merge.num_partials as usize);
        let (row, wide) = (take(&mut scratch, dim), scratch);
        for position in first..seqlen.min(first + ROWS) {
            merge_row::<E, P>(merge, batch_head / heads, batch_head % heads, position, weights, row, wide);
        }
    })
}

fn merge_row<E: Element, P: Element>(
    merge: &Merge,
    batch: usize,
    head: usize,
    position: usize,
    weights: &mut [f32],
    row: &mut [f32],
    wide: &mut [f32],
) {
    let at = (batch * merge.num_heads as usize + head) * merge.seqlen as usize + position;
    let lses = |partial: usize| {
        let lse = merge.partial_lse.wrapping_offset(partial as isize * merge.partial_lse_stride as isize);
        // SAFETY: an LSE has an element for each row (the caller checked its size).
        unsafe { lse.add(at).read() }
    };
    let lse = weigh(weights, lses);
    row.fill(0.0);
    // A partial that saw no key may hold anything, so its row is not read.
    let seeing = weights.iter().enumerate().filter(|(partial, _)| lses(*partial) != f32::NEG_INFINITY);
    for (partial, weight) in seeing {
        let begin = partial as isize * merge.partial_out_stride as isize;
        let data = merge.partial_out.data.cast::<P>().wrapping_offset(begin).cast();
        let tensor = Tensor::<P>::new(&TensorRef { data, ..merge.partial_out }, wide.len());
        // SAFETY: a row of a partial, which the caller keeps alive and unwritten during a launch.
        unsafe { tensor.head(Place::Entry(batch), head).load(position, 1, wide, wide.len()) };
        row.iter_mut().zip(&*wide).for_each(|(sum, x)| *sum += weight * x);
    }
    let out = Tensor::<E>::new(&merge.out, row.len()).head(Place::Entry(batch), head);
    // SAFETY: a row of the output and its LSE, which are this task's alone.
    unsafe {
        out.store(position, row);
        if !merge.lse.is_null() {
            merge.lse.add(at).write(lse);
        }
    }
}

/// Writes the weights of the partials with these LSEs, 0 for a partial that saw no key. Returns the
/// LSE over all keys.
fn weigh(weights: &mut [f32], lses: impl Fn(usize) -> f32) -> f32 {
    let top = (0..weights.len()).map(&lses).fold(f32::NEG_INFINITY, f32::max);
    if top == f32::NEG_INFINITY && (0..weights.len()).all(|partial| !lses(partial).is_nan()) {
        weights.fill(0.0);
        return f32::NEG_INFINITY;
    }
    weights.iter_mut().enumerate().for_each(|(partial, weight)| *weight = (lses(partial) - top).exp());
    let sum: f32 = weights.iter().sum();
    weights.iter_mut().for_each(|weight| *weight /= sum);
    top + sum.ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weighed(lses: &[f32]) -> (Vec<f32>, f32) {
        let mut weights = vec![f32::NAN; lses.len()];
        let lse = weigh(&mut weights, |partial| lses[partial]);
        (weights, lse)
    }

    #[test]
    fn partials_weigh_as_much_as_their_sums_of_exponentials() {
        let (weights, lse) = weighed(&[1f32.ln(), 3f32.ln(), f32::NEG_INFINITY]);
        assert!((weights[0] - 0.25).abs() < 1e-6 && (weights[1] - 0.75).abs() < 1e-6 && weights[2] == 0.0);
        assert!((lse - 4f32.ln()).abs() < 1e-6);
        // Exponentials of these LSEs underflow in fp32.
        let (weights, lse) = weighed(&[-500.0, -500.0]);
        assert!(weights == [0.5, 0.5] && (lse + 500.0 - 2f32.ln()).abs() < 1e-4);
    }

    #[test]
    fn without_a_key_there_is_nothing_and_nan_stays_nan() {
        assert_eq!(weighed(&[f32::NEG_INFINITY; 2]), (vec![0.0; 2], f32::NEG_INFINITY));
        assert!(weighed(&[f32::NAN, f32::NEG_INFINITY]).1.is_nan());
        let (weights, lse) = weighed(&[0.0, f32::NAN]);
        assert!(weights.iter().all(|weight| weight.is_nan()) && lse.is_nan());
    }
}
