//! The range of softmax_scale, softcap and their ratio. Within it, fp32 arithmetic on scores gives
//! no infinity and no NaN.

use crate::error::{Error, Result};
use std::ops::RangeInclusive;

/// The allowed magnitudes. Both backends multiply the factors by log2(e) and by the dropout scale,
/// at most 2^16, and invert them. All results stay normal; an infinity times a score of 0 would be
/// NaN. A GPU flushes score / softcap below 2^-126 to 0. With the largest softcap, such a score is
/// below 2^-26.
const FACTOR_RANGE: RangeInclusive<f32> = 1.0 / (1_u128 << 100) as f32..=(1_u128 << 100) as f32;

/// Refuses a factor outside the range. 0 is allowed; `zero` says what it stands for.
pub fn check_factor(name: &str, value: f32, zero: &str) -> Result<()> {
    match value == 0.0 || FACTOR_RANGE.contains(&value.abs()) {
        true => Ok(()),
        false => {
            Err(Error::invalid(format!("{name} is {value:?}; its magnitude must be from 2^-100 to 2^100 ({zero})")))
        }
    }
}
