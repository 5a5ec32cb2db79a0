//! The range of what scores are multiplied with and capped at: as wide as arithmetic in fp32 gives numbers for.

use crate::error::{Error, Result};
use std::ops::RangeInclusive;

/// Magnitudes of softmax_scale, softcap and their ratio. Both backends multiply them with log2(e) and with what dropout keeps
/// weights up by, at most 2^16, and invert them: all that stays normal, where an infinity times a score of 0 would be NaN.
/// What a GPU flushes to 0 of a score's share of the largest softcap, below 2^-126, is below 2^-26 of a score.
const FACTORS: RangeInclusive<f32> = 1.0 / (1_u128 << 100) as f32..=(1_u128 << 100) as f32;

/// Refuses a number beyond them, but for 0; `zero` is what that stands for.
pub fn check_factor(name: &str, value: f32, zero: &str) -> Result<()> {
    match value == 0.0 || FACTORS.contains(&value.abs()) {
        true => Ok(()),
        false => {
            Err(Error::invalid(format!("{name} is {value:?}; it must be of a magnitude from 2^-100 to 2^100 ({zero})")))
        }
    }
}
