//! The attributes of a call: what the params have besides tensors and sizes.

use super::c_api::{ATTRIBUTE_SCALAR, DTYPE_F32, DTYPE_S32, DTYPE_S64, Scalar};
use super::failure::{Failure, Result};
use super::frame::Frame;

/// The fields of the same names of the params structs. A missing attribute is 0.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    pub causal: i64,
    pub softmax_scale: f32,
    pub dropout_p: f32,
    /// The FLASHTUNE_FEATURE_* whose operands follow.
    pub features: u64,
    pub window: i64,
    pub window_left: i64,
    pub window_right: i64,
    pub softcap: f32,
    /// Upper bounds of the lengths of packed sequences, and of keys in pages; 0 elsewhere.
    pub seqlen_q: i64,
    pub seqlen_k: i64,
    pub num_splits: i64,
    /// The sizes of a block of a block mask, and whether full blocks have lists of their own.
    pub block_q: i64,
    pub block_k: i64,
    pub has_full_blocks: i64,
    pub keys_per_descale: i64,
    /// Columns that share a scale where k and v are rows of int4, else 0.
    pub int4_group: i64,
    pub batch_invariant: i64,
    pub deterministic: i64,
    /// These three belong to quantising alone.
    pub heads_per_descale: i64,
    pub rotation: i64,
    pub rotation_seed: u64,
}

enum Number {
    Integer(i64),
    Real(f32),
}

impl Options {
    pub fn of(frame: &Frame) -> Result<Options> {
        let mut options = Options::default();
        for (name, of_type, value) in frame.attributes() {
            if of_type != ATTRIBUTE_SCALAR {
                return Err(Failure::invalid(format!("attribute {name} is of type {of_type}; it must be a scalar")));
            }
            // SAFETY: the type says that the address is of a scalar, which lives as long as the
            // frame.
            options.set(name, number(name, unsafe { &*value.cast::<Scalar>() })?)?;
        }
        Ok(options)
    }

    fn set(&mut self, name: &str, number: Number) -> Result<()> {
        match (name, number) {
            ("causal", Number::Integer(value)) => self.causal = value,
            ("softmax_scale", Number::Real(value)) => self.softmax_scale = value,
            ("dropout_p", Number::Real(value)) => self.dropout_p = value,
            ("features", Number::Integer(value)) => self.features = value as u64,
            ("window", Number::Integer(value)) => self.window = value,
            ("window_left", Number::Integer(value)) => self.window_left = value,
            ("window_right", Number::Integer(value)) => self.window_right = value,
            ("softcap", Number::Real(value)) => self.softcap = value,
            ("seqlen_q", Number::Integer(value)) => self.seqlen_q = value,
            ("seqlen_k", Number::Integer(value)) => self.seqlen_k = value,
            ("num_splits", Number::Integer(value)) => self.num_splits = value,
            ("block_q", Number::Integer(value)) => self.block_q = value,
            ("block_k", Number::Integer(value)) => self.block_k = value,
            ("has_full_blocks", Number::Integer(value)) => self.has_full_blocks = value,
            ("keys_per_descale", Number::Integer(value)) => self.keys_per_descale = value,
            ("int4_group", Number::Integer(value)) => self.int4_group = value,
            ("batch_invariant", Number::Integer(value)) => self.batch_invariant = value,
            ("deterministic", Number::Integer(value)) => self.deterministic = value,
            ("heads_per_descale", Number::Integer(value)) => self.heads_per_descale = value,
            ("rotation", Number::Integer(value)) => self.rotation = value,
            ("rotation_seed", Number::Integer(value)) => self.rotation_seed = value as u64,
            (name, _) => {
                return Err(Failure::invalid(format!(
                    "attribute {name} is unknown to this version of flashtune, or its number is of the wrong type"
                )));
            }
        }
        Ok(())
    }
}

fn number(name: &str, scalar: &Scalar) -> Result<Number> {
    // SAFETY: the dtype tells what the address is of. XLA does not promise its alignment.
    unsafe {
        match scalar.dtype {
            DTYPE_S32 => Ok(Number::Integer(scalar.value.cast::<i32>().read_unaligned().into())),
            DTYPE_S64 => Ok(Number::Integer(scalar.value.cast::<i64>().read_unaligned())),
            DTYPE_F32 => Ok(Number::Real(scalar.value.cast::<f32>().read_unaligned())),
            other => {
                Err(Failure::invalid(format!("attribute {name} has XLA's dtype {other}; it must be S32, S64 or F32")))
            }
        }
    }
}

/// A number that a field of 32 bits holds.
pub fn narrow(name: &str, value: i64) -> Result<i32> {
    i32::try_from(value).map_err(|_| Failure::invalid(format!("attribute {name} is {value}; it must fit in 32 bits")))
}
