//! Quantising on host memory. A task is a unit: the rows that share a scale.

use super::call::Quantize;
use crate::cpu::Workers;
use crate::error::{Error, Result};
use crate::ops::rows::{largest, widen};
use crate::problem::MAX_HEAD_DIM;
use std::slice::from_raw_parts_mut;

/// Returns when numbers and scales are written. A given scale that is not finite or not above 0 is
/// refused, and nothing is written.
pub fn run(quantize: &Quantize, workers: &Workers) -> Result<()> {
    if !quantize.computes {
        for unit in 0..quantize.units() as usize {
            let (batch, block, group, place) = unit_at(quantize, unit);
            // SAFETY: an element of the checked array.
            let scale = unsafe { place.read() };
            if !(scale.is_finite() && scale > 0.0) {
                return Err(Error::invalid(format!(
                    "descale[{batch}][{block}][{group}] is {scale}; a scale must be finite and above 0"
                )));
            }
        }
    }
    workers.for_each(quantize.units() as usize, 0, |unit, _| {
        let (batch, block, group, place) = unit_at(quantize, unit);
        let Quantize { rows_per_scale, heads_per_scale, .. } = quantize;
        let positions = block * rows_per_scale..((block + 1) * rows_per_scale).min(quantize.seqlen);
        let heads = group * heads_per_scale..(group + 1) * heads_per_scale;
        let rows = || positions.clone().flat_map(|position| heads.clone().map(move |head| (position, head)));
        let dim = quantize.head_dim as usize;
        let mut wide = [0.0f32; MAX_HEAD_DIM as usize];
        let wide = &mut wide[..dim];
        let to = quantize.class.to;
        let load = |wide: &mut [f32], (position, head)| {
            let x = &quantize.x;
            let at = batch * x.stride_batch + position * x.stride_seqlen + head * x.stride_head;
            // SAFETY: a row of the checked tensor.
            unsafe { widen(quantize.class.dtype, x.data.cast::<u16>().offset(at as isize).cast(), wide) };
        };
        let scale = if quantize.computes {
            let mut top = 0.0f32;
            for row in rows() {
                load(wide, row);
                top = top.max(largest(wide));
            }
            let scale = to.scale_of(top);
            // SAFETY: this unit's element of the checked array.
            unsafe { place.write(scale) };
            scale
        } else {
            // SAFETY: as above.
            unsafe { place.read() }
        };
        for (position, head) in rows() {
            load(wide, (position, head));
            let out = &quantize.out;
            let at = batch * out.stride_batch + position * out.stride_seqlen + head * out.stride_head;
            // SAFETY: a row of the checked tensor, which this task alone writes.
            let encoded = unsafe { from_raw_parts_mut(out.data.cast::<u8>().offset(at as isize), dim) };
            to.encode_row(wide, scale, encoded);
        }
    })
}

/// The batch entry, block of positions and group of heads of a unit, and the place of its scale.
fn unit_at(quantize: &Quantize, unit: usize) -> (i64, i64, i64, *mut f32) {
    let [blocks, groups] = quantize.blocks();
    let (block, group) = (unit as i64 / groups, unit as i64 % groups);
    let (batch, block) = (block / blocks, block % blocks);
    let scales = &quantize.scales;
    let offset = batch * scales.stride_batch + block * scales.stride_seqlen + group * scales.stride_head;
    (batch, block, group, scales.data.cast::<f32>().wrapping_offset(offset as isize))
}
