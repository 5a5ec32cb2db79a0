//! The numbers of FLASHTUNE_DTYPE_* and what they stand for.

use super::types::*;
use crate::error::{Error, Result};
use crate::problem::{Dtype, Eight, Four};

/// The dtype of a field, given by name and value.
pub fn dtype(name: &str, number: i32) -> Result<Dtype> {
    match number {
        FLASHTUNE_DTYPE_FP16 => Ok(Dtype::Fp16),
        FLASHTUNE_DTYPE_BF16 => Ok(Dtype::Bf16),
        FLASHTUNE_DTYPE_FP32 => Ok(Dtype::Fp32),
        other => Err(Error::invalid(format!(
            "{name} is {other}; it must be FLASHTUNE_DTYPE_FP16 (1), _BF16 (2) or _FP32 (3)"
        ))),
    }
}

/// The int4 format of a number; None for other numbers.
pub fn four(number: i32) -> Option<Four> {
    match number {
        FLASHTUNE_DTYPE_INT4_GROUP32 => Some(Four::Int4g32),
        FLASHTUNE_DTYPE_INT4_GROUP64 => Some(Four::Int4g64),
        _ => None,
    }
}

/// The 8-bit format of a number; None for other numbers.
pub fn eight(number: i32) -> Option<Eight> {
    match number {
        FLASHTUNE_DTYPE_E4M3 => Some(Eight::E4m3),
        FLASHTUNE_DTYPE_E5M2 => Some(Eight::E5m2),
        FLASHTUNE_DTYPE_INT8 => Some(Eight::Int8),
        _ => None,
    }
}
