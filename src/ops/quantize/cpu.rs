//! Quantising on host memory. A task is a unit: the rows that share a scale.

use super::call::Quantize;
use super::rotation::Rotation;
use crate::cpu::Workers;
use crate::error::{Error, Result};
use crate::ops::rows::{largest, narrow, widen};
use crate::problem::{Eight, MAX_HEAD_DIM};
use std::slice::from_raw_parts_mut;

/// Returns when numbers and scales are written. A given scale that is not finite or not above 0 is
/// refused, and nothing is written.
pub fn run(quantize: &Quantize, workers: &Workers) -> Result<()> {
    let rotation = quantize.rotation();
    if quantize.class.to.is_some() && !quantize.computes {
        check_scales(quantize)?;
    }
    workers.for_each(quantize.units() as usize, 0, |unit, _| {
        let rows = Rows { quantize, rotation: rotation.as_ref(), unit: Unit::new(quantize, unit) };
        match quantize.class.to {
            Some(to) => rows.quantise(to),
            None => rows.rotate(),
        }
    })
}

fn check_scales(quantize: &Quantize) -> Result<()> {
    for unit in 0..quantize.units() as usize {
        let unit = Unit::new(quantize, unit);
        // SAFETY: an element of the checked array.
        let scale = unsafe { unit.scale(quantize).read() };
        if !(scale.is_finite() && scale > 0.0) {
            let Unit { batch, block, group } = unit;
            return Err(Error::invalid(format!(
                "descale[{batch}][{block}][{group}] is {scale}; a scale must be finite and above 0"
            )));
        }
    }
    Ok(())
}

/// The batch entry, block of positions and group of heads that share a scale.
struct Unit {
    batch: i64,
    block: i64,
    group: i64,
}

impl Unit {
    fn new(quantize: &Quantize, unit: usize) -> Unit {
        let [blocks, groups] = quantize.blocks();
        let (block, group) = (unit as i64 / groups, unit as i64 % groups);
        Unit { batch: block / blocks, block: block % blocks, group }
    }

    /// The place of the unit's scale.
    fn scale(&self, quantize: &Quantize) -> *mut f32 {
        let scales = &quantize.scales;
        let offset = scales.offset_of(self.batch, self.block, self.group);
        scales.data.cast::<f32>().wrapping_offset(offset as isize)
    }
}

/// The rows of a unit.
struct Rows<'a> {
    quantize: &'a Quantize,
    rotation: Option<&'a Rotation>,
    unit: Unit,
}

impl Rows<'_> {
    fn quantise(&self, to: Eight) {
        let place = self.unit.scale(self.quantize);
        let scale = if self.quantize.computes {
            let mut top = 0.0f32;
            self.for_each(|wide, _| top = top.max(largest(wide)));
            let scale = to.scale_of(top);
            // SAFETY: this unit's element of the checked array.
            unsafe { place.write(scale) };
            scale
        } else {
            // SAFETY: as above.
            unsafe { place.read() }
        };
        let out = self.quantize.out.data.cast::<u8>();
        self.for_each(|wide, at| {
            // SAFETY: a row of the checked tensor, which this task alone writes.
            let encoded = unsafe { from_raw_parts_mut(out.offset(at), wide.len()) };
            to.encode_row(wide, scale, encoded);
        });
    }

    fn rotate(&self) {
        let out = self.quantize.out.data.cast::<u16>();
        // SAFETY: a row of the checked tensor, which this task alone writes.
        self.for_each(|wide, at| unsafe { narrow(self.quantize.class.dtype, wide, out.offset(at).cast()) });
    }

    /// Calls `use_row` with each row as fp32, rotated if the call rotates, and its place in out.
    fn for_each(&self, mut use_row: impl FnMut(&[f32], isize)) {
        let Quantize { rows_per_scale, heads_per_scale, seqlen, x, out, .. } = self.quantize;
        let Unit { batch, block, group } = self.unit;
        let mut wide = [0.0f32; MAX_HEAD_DIM as usize];
        let wide = &mut wide[..self.quantize.head_dim as usize];
        for position in block * rows_per_scale..((block + 1) * rows_per_scale).min(*seqlen) {
            for head in group * heads_per_scale..(group + 1) * heads_per_scale {
                let at = x.offset_of(batch, position, head);
                // SAFETY: a row of the checked tensor.
                unsafe { widen(self.quantize.class.dtype, x.data.cast::<u16>().offset(at as isize).cast(), wide) };
                if let Some(rotation) = self.rotation {
                    rotation.apply(wide);
                }
                use_row(wide, out.offset_of(batch, position, head) as isize);
            }
        }
    }
}
