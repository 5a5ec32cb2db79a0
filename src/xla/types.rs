//! The dtypes of a call: XLA's of its buffers, and the numbers of the C header.

use super::c_api::{DTYPE_BF16, DTYPE_F8E4M3FN, DTYPE_F8E5M2, DTYPE_F16, DTYPE_F32, DTYPE_S8, DTYPE_U8};
use super::failure::{Failure, Result};
use super::frame::Buffer;
use super::operands::dtype_name;
use super::options::{Options, narrow};
use crate::capi::dtypes::four;
use crate::capi::types::*;

pub struct Types {
    /// FLASHTUNE_DTYPE_* of the params; 0 where they are dtype.
    pub dtype: i32,
    pub kv_dtype: i32,
    pub out_dtype: i32,
    /// XLA's dtype of k and v.
    pub of_keys: i32,
    /// XLA's dtype of out and of bias.
    pub of_out: i32,
}

impl Types {
    /// From q's buffer, k's and out's.
    pub fn of(options: &Options, q: i32, k: i32, out: i32) -> Result<Types> {
        let dtype = match q {
            DTYPE_F16 => FLASHTUNE_DTYPE_FP16,
            DTYPE_BF16 => FLASHTUNE_DTYPE_BF16,
            DTYPE_F32 => FLASHTUNE_DTYPE_FP32,
            DTYPE_F8E4M3FN => FLASHTUNE_DTYPE_E4M3,
            other => {
                return Err(Failure::invalid(format!(
                    "q has XLA's dtype {other}; it must be F16, BF16, F32 or F8E4M3FN"
                )));
            }
        };
        let (out_dtype, of_out) = match (q, out) {
            (DTYPE_F8E4M3FN, DTYPE_F16) => (FLASHTUNE_DTYPE_FP16, out),
            (DTYPE_F8E4M3FN, DTYPE_BF16) => (FLASHTUNE_DTYPE_BF16, out),
            (DTYPE_F8E4M3FN, other) => {
                let out = dtype_name(other);
                return Err(Failure::invalid(format!("out is {out}; with q in float8_e4m3fn it must have 16 bits")));
            }
            _ => (0, q),
        };
        let (kv_dtype, of_keys) = match k {
            _ if options.int4_group != 0 => (int4(options.int4_group)?, DTYPE_U8),
            DTYPE_S8 => (FLASHTUNE_DTYPE_INT8, k),
            DTYPE_F8E5M2 => (FLASHTUNE_DTYPE_E5M2, k),
            DTYPE_F8E4M3FN if q != k => (FLASHTUNE_DTYPE_E4M3, k),
            _ => (0, q),
        };
        Ok(Types { dtype, kv_dtype, out_dtype, of_keys, of_out })
    }

    /// Whether q has scales, and whether k and v have.
    pub fn has_scales(&self) -> [bool; 2] {
        let of_q = self.dtype == FLASHTUNE_DTYPE_E4M3;
        [of_q, of_q || self.kv_dtype != 0 && four(self.kv_dtype).is_none()]
    }

    /// The elements of a row of k or v with so many columns: bytes in int4.
    pub fn row(&self, columns: i64) -> i64 {
        four(self.kv_dtype).map_or(columns, |four| four.row_bytes(columns))
    }

    /// The columns of v: those of out, since a row of int4 does not say them.
    pub fn columns_of_v(&self, v: &Buffer, out: &Buffer) -> i64 {
        let of = if four(self.kv_dtype).is_some() { out } else { v };
        of.dims.last().copied().unwrap_or(0)
    }
}

fn int4(group: i64) -> Result<i32> {
    match narrow("int4_group", group)? {
        32 => Ok(FLASHTUNE_DTYPE_INT4_GROUP32),
        64 => Ok(FLASHTUNE_DTYPE_INT4_GROUP64),
        other => Err(Failure::invalid(format!("attribute int4_group is {other}; it must be 0, 32 or 64"))),
    }
}
