//! Rows of elements on host memory as fp32, for operations that quantise.

use crate::cpu::{Element, Level};
use crate::problem::Dtype;
use half::{bf16, f16};
use std::slice::{from_raw_parts, from_raw_parts_mut};

/// The row as fp32.
///
/// # Safety
/// `row` has as many elements of the dtype as `wide`, and nobody writes them meanwhile.
pub unsafe fn widen(dtype: Dtype, row: *const u8, wide: &mut [f32]) {
    let (level, dim) = (Level::detect(), wide.len());
    // SAFETY: the caller's promise, in each of the arms.
    unsafe {
        match dtype {
            Dtype::Fp16 => f16::widen(level, from_raw_parts(row.cast(), dim), wide),
            Dtype::Bf16 => bf16::widen(level, from_raw_parts(row.cast(), dim), wide),
            Dtype::Fp32 => f32::widen(level, from_raw_parts(row.cast(), dim), wide),
        }
    }
}

/// The row in the dtype, rounded.
///
/// # Safety
/// `row` has as many elements of the dtype as `wide`, and nobody else uses them meanwhile.
pub unsafe fn narrow(dtype: Dtype, wide: &[f32], row: *mut u8) {
    let (level, dim) = (Level::detect(), wide.len());
    // SAFETY: the caller's promise, in each of the arms.
    unsafe {
        match dtype {
            Dtype::Fp16 => f16::narrow(level, wide, from_raw_parts_mut(row.cast(), dim)),
            Dtype::Bf16 => bf16::narrow(level, wide, from_raw_parts_mut(row.cast(), dim)),
            Dtype::Fp32 => f32::narrow(level, wide, from_raw_parts_mut(row.cast(), dim)),
        }
    }
}

/// The largest magnitude; NaN does not count.
pub fn largest(row: &[f32]) -> f32 {
    row.iter().fold(0.0, |top: f32, x| top.max(x.abs()))
}
