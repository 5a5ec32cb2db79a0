//! The element types of tensors.

use crate::capi::types::{FLASHTUNE_DTYPE_BF16, FLASHTUNE_DTYPE_FP16, FLASHTUNE_DTYPE_FP32};
use half::{bf16, f16};

/// An element of a tensor: [`half::f16`], [`half::bf16`] or `f32`.
pub trait Element: Copy + Default + Send + Sync + sealed::Sealed {}

impl Element for f16 {}
impl Element for bf16 {}
impl Element for f32 {}

/// The dtype of a tensor's elements, with its number in the C face.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Dtype {
    Fp16 = FLASHTUNE_DTYPE_FP16,
    Bf16 = FLASHTUNE_DTYPE_BF16,
    Fp32 = FLASHTUNE_DTYPE_FP32,
}

pub(super) mod sealed {
    use super::Dtype;

    pub trait Sealed {
        const DTYPE: Dtype;
    }
}

impl sealed::Sealed for f16 {
    const DTYPE: Dtype = Dtype::Fp16;
}
impl sealed::Sealed for bf16 {
    const DTYPE: Dtype = Dtype::Bf16;
}
impl sealed::Sealed for f32 {
    const DTYPE: Dtype = Dtype::Fp32;
}
