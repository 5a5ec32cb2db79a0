//! int4: what goes together with rows of 4-bit numbers in k and v.

use super::{Pass, Problem};
use crate::error::{Error, Result};

impl Problem {
    pub(super) fn validate_four_bits(&self) -> Result<()> {
        let Some(four) = self.features.four_bits else { return Ok(()) };
        if self.features.eight_bits.is_some() {
            return Err(Error::invalid("k and v are both int4 and of 8 bits; they have one type"));
        }
        if self.pass == Pass::Backward {
            return Err(Error::invalid(
                "k and v are int4, which has no backward pass: give it the 16-bit tensors that were quantised",
            ));
        }
        if self.dtype == super::Dtype::Fp32 {
            return Err(Error::invalid("dtype is fp32 and k and v are int4, which goes with fp16 and bf16"));
        }
        if self.dropout {
            return Err(Error::invalid("k and v are int4 and dropout_p is not 0; dropout_p must be 0 with int4"));
        }
        let group = four.group();
        for (name, dim) in [("head_dim", self.head_dim), ("head_dim_v", self.head_dim_v)] {
            if dim % group != 0 {
                return Err(Error::invalid(format!(
                    "{name} is {dim} and k and v are {}; it must be a multiple of the {group} columns that share a scale",
                    four.name()
                )));
            }
        }
        Ok(())
    }
}
