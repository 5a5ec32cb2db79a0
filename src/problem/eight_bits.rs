//! EightBits: k and v, and perhaps q, hold 8-bit numbers, each times a scale. Here are the formats
//! that go together, and the shape of the scales.

use super::{Dtype, Layout, Pass, Problem};
use crate::eight::Eight;
use crate::error::{Error, Result};
use crate::four::Four;
use serde::{Deserialize, Serialize};

/// Keys of a block that shares a scale.
pub const SCALE_BLOCK: i64 = 128;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EightBits {
    /// The format of k and v.
    pub keys: Eight,
    /// q is e4m3 too; the problem's dtype is then that of out and of bias.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub queries: bool,
    /// Keys that share an element of k_descale and of v_descale: 1, `SCALE_BLOCK`, or 0: all keys
    /// of a sequence.
    #[serde(default)]
    pub keys_per_scale: i64,
}

impl EightBits {
    /// The word in a record key: `kve4m3`, `kve4m3s128` or, with fp8 queries, `qkve4m3`.
    pub fn word(&self) -> String {
        let scales = if self.keys_per_scale == 0 { String::new() } else { format!("s{}", self.keys_per_scale) };
        format!("{}{}{scales}", if self.queries { "qkv" } else { "kv" }, self.keys.name())
    }
}

/// The type of a tensor's elements: one of those that a pass computes in, 8 bits, or the bytes of
/// rows of 4-bit numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ElementType {
    Plain(Dtype),
    Eight(Eight),
    Four(Four),
}

impl From<Dtype> for ElementType {
    fn from(dtype: Dtype) -> ElementType {
        ElementType::Plain(dtype)
    }
}

impl From<Eight> for ElementType {
    fn from(eight: Eight) -> ElementType {
        ElementType::Eight(eight)
    }
}

impl From<Four> for ElementType {
    fn from(four: Four) -> ElementType {
        ElementType::Four(four)
    }
}

impl ElementType {
    pub const fn bytes(self) -> usize {
        match self {
            ElementType::Plain(dtype) => dtype.bytes(),
            ElementType::Eight(_) | ElementType::Four(_) => 1,
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            ElementType::Plain(dtype) => dtype.name(),
            ElementType::Eight(eight) => eight.name(),
            ElementType::Four(four) => four.name(),
        }
    }

    /// Elements of a row of so many columns.
    pub const fn elements(self, columns: i64) -> i64 {
        match self {
            ElementType::Plain(_) | ElementType::Eight(_) => columns,
            ElementType::Four(four) => four.row_bytes(columns),
        }
    }

    /// A number of elements as layouts and kernels count them: those of one byte by the pair. An
    /// odd number of those counts as 1, which no vector divides.
    pub const fn units(self, elements: i64) -> i64 {
        match self {
            ElementType::Plain(_) => elements,
            _ if elements % 2 != 0 => 1,
            _ => elements / 2,
        }
    }
}

impl Problem {
    /// The type of k and v.
    pub fn key_type(&self) -> ElementType {
        match self.features.four_bits {
            Some(four) => four.into(),
            None => self.features.eight_bits.map_or(self.dtype.into(), |eight| eight.keys.into()),
        }
    }

    /// Bytes of a row of k and one of v.
    pub fn bytes_of_key(&self) -> i64 {
        let element = self.key_type();
        (element.elements(self.head_dim) + element.elements(self.head_dim_v)) * element.bytes() as i64
    }

    /// The number of k's and v's format in kernels; 0: they have q's.
    pub fn key_format(&self) -> u32 {
        match self.key_type() {
            ElementType::Plain(_) => 0,
            ElementType::Eight(eight) => eight.number(),
            ElementType::Four(_) => Four::NUMBER,
        }
    }

    /// The type of q.
    pub fn query_type(&self) -> ElementType {
        if self.features.has_fp8_queries() { Eight::E4m3.into() } else { self.dtype.into() }
    }

    /// The widest layout of packed tensors with these head dims.
    pub fn widest_layout(&self) -> Layout {
        let dims = [self.head_dim, self.head_dim_v];
        let of = |element: ElementType| dims.map(|dim| element.units(element.elements(dim)));
        Layout::widest(self.dtype, [of(self.dtype.into()), of(self.key_type()), of(self.query_type())].concat())
    }

    /// Extents of the array of scales of k or v: batch entries (or pages), positions, heads.
    /// `rows` are the batch entries and positions of k and v.
    pub fn scale_extents(&self, rows: [i64; 2]) -> [i64; 3] {
        let [entries, positions] = match self.features.eight_bits.map_or(0, |eight| eight.keys_per_scale) {
            0 => [self.batch_size, 1],
            1 => rows,
            keys => [self.batch_size, (self.seqlen_k + keys - 1) / keys],
        };
        [entries, positions, self.num_heads_kv]
    }

    pub(super) fn validate_eight_bits(&self) -> Result<()> {
        let Some(eight) = self.features.eight_bits else { return Ok(()) };
        if self.pass == Pass::Backward {
            return Err(Error::invalid(
                "k and v have 8 bits, which have no backward pass: give it the 16-bit tensors that were quantised",
            ));
        }
        if self.dtype == Dtype::Fp32 {
            return Err(Error::invalid("dtype is fp32 and k and v have 8 bits; 8-bit k and v go with fp16 and bf16"));
        }
        if self.dropout {
            return Err(Error::invalid("k and v have 8 bits and dropout_p is not 0; dropout_p must be 0 with 8 bits"));
        }
        if eight.queries && eight.keys != Eight::E4m3 {
            return Err(Error::invalid(format!(
                "q is e4m3 and k and v are {}; all three must be e4m3",
                eight.keys.name()
            )));
        }
        if ![0, 1, SCALE_BLOCK].contains(&eight.keys_per_scale) {
            return Err(Error::invalid(format!(
                "keys_per_scale is {}; it must be 0 (all keys of a sequence), 1 or {SCALE_BLOCK}",
                eight.keys_per_scale
            )));
        }
        Ok(())
    }
}
