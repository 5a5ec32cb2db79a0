//! Rotations of rows on host memory: pairs of columns turn by an angle that the row's position
//! gives. The arithmetic is fp32, and the result is rounded once.

use super::call::Rotary;
use crate::cpu::{Element, Level};
use crate::ops::class::RotaryClass;
use crate::problem::{Dtype, MAX_HEAD_DIM};
use half::{bf16, f16};
use std::slice::{from_raw_parts, from_raw_parts_mut};

/// Copies a row of `dim` elements and rotates its first columns. Its position is clamped to the
/// tables.
///
/// # Safety
/// Both rows have `dim` elements of the class's type. They are the same row or share no byte, and
/// no other thread writes either. The tables are as `Rotary` says.
pub type RotateRow = unsafe fn(rotary: &Rotary, from: *const u8, to: *mut u8, dim: i64, position: i64);

/// The function of a class.
pub fn rotate_row(class: RotaryClass) -> RotateRow {
    match (class.dtype, class.table_dtype) {
        (Dtype::Fp32, _) => of_tables::<f32, f32>(class.interleaved),
        (Dtype::Fp16, Dtype::Fp32) => of_tables::<f16, f32>(class.interleaved),
        (Dtype::Fp16, _) => of_tables::<f16, f16>(class.interleaved),
        (Dtype::Bf16, Dtype::Fp32) => of_tables::<bf16, f32>(class.interleaved),
        (Dtype::Bf16, _) => of_tables::<bf16, bf16>(class.interleaved),
    }
}

fn of_tables<E: Element, T: Element>(interleaved: bool) -> RotateRow {
    if interleaved { rotate::<E, T, true> } else { rotate::<E, T, false> }
}

/// # Safety
/// As `RotateRow` says.
unsafe fn rotate<E: Element, T: Element, const INTERLEAVED: bool>(
    rotary: &Rotary,
    from: *const u8,
    to: *mut u8,
    dim: i64,
    position: i64,
) {
    let level = Level::detect();
    let (all, half) = (dim as usize, rotary.dim as usize / 2);
    let at = position.clamp(0, rotary.seqlen - 1) * rotary.stride;
    let entries = |table: *const std::ffi::c_void, wide: &mut [f32]| {
        // SAFETY: a row of the table has `half` entries (the caller's promise).
        T::widen(level, unsafe { from_raw_parts(table.cast::<T>().offset(at as isize), half) }, wide);
    };
    let mut row = [0.0f32; MAX_HEAD_DIM as usize];
    let [mut cos, mut sin] = [[0.0f32; MAX_HEAD_DIM as usize / 2]; 2];
    entries(rotary.cos, &mut cos[..half]);
    entries(rotary.sin, &mut sin[..half]);
    // SAFETY: by the caller's promise. The slice ends before the row is written.
    E::widen(level, unsafe { from_raw_parts(from.cast::<E>(), 2 * half) }, &mut row[..2 * half]);
    for i in 0..half {
        let (x, y) = if INTERLEAVED { (2 * i, 2 * i + 1) } else { (i, i + half) };
        (row[x], row[y]) = (row[x] * cos[i] - row[y] * sin[i], row[x] * sin[i] + row[y] * cos[i]);
    }
    // SAFETY: as above. Both rows may be the same.
    unsafe { std::ptr::copy(from.cast::<E>(), to.cast::<E>(), all) };
    // SAFETY: as above.
    E::narrow(level, &row[..2 * half], unsafe { from_raw_parts_mut(to.cast::<E>(), 2 * half) });
}
