//! Quantising on host memory. A task is a unit: the rows that share a scale.

use super::call::Quantize;
use crate::cpu::Workers;
use crate::error::{Error, Result};
use crate::ops::rows::{largest, widen};
use crate::problem::MAX_HEAD_DIM;
use std::slice::from_raw_parts_mut;
use std::sync::Mutex;

/// Returns when numbers and scales are written. Given scales that are not finite or not above 0 are
/// refused, and their rows are not written.
pub fn run(quantize: &Quantize, workers: &Workers) -> Result<()> {
    let refused = Mutex::new(None);
    let [blocks, groups] = quantize.blocks();
    workers.for_each(quantize.units() as usize, 0, |unit, _| {
        let (block, group) = (unit as i64 / groups, unit as i64 % groups);
        let (batch, block) = (block / blocks, block % blocks);
        let Quantize { rows_per_scale, heads_per_scale, scales, .. } = quantize;
        let place = scales.data.cast::<f32>().wrapping_offset(
            (batch * scales.stride_batch + block * scales.stride_seqlen + group * scales.stride_head) as isize,
        );
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
        if !(scale.is_finite() && scale > 0.0) {
            *refused.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some((batch, block, group, scale));
            return;
        }
        for (position, head) in rows() {
            load(wide, (position, head));
            let out = &quantize.out;
            let at = batch * out.stride_batch + position * out.stride_seqlen + head * out.stride_head;
            // SAFETY: a row of the checked tensor, which this task alone writes.
            let encoded = unsafe { from_raw_parts_mut(out.data.cast::<u8>().offset(at as isize), dim) };
            to.encode_row(wide, scale, encoded);
        }
    })?;
    match refused.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
        None => Ok(()),
        Some((batch, block, group, scale)) => Err(Error::invalid(format!(
            "descale[{batch}][{block}][{group}] is {scale}; a scale must be finite and above 0"
        ))),
    }
}
