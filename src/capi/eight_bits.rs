//! EightBitInputs: the types of k, v and out where they differ from q's, and the scales of 8-bit
//! tensors. int4 rows hold their own scales. This file checks which types go together and where the
//! scales lie. Their values are checked by the CPU backend alone.

use super::array::Array;
use super::dtypes::{dtype, eight, four};
use super::operand::{Access, Data};
use super::overlap::Footprint;
use super::types::*;
use crate::call::{Scales, TensorRef};
use crate::error::{Error, Result};
use crate::problem::{Dtype, Eight, EightBits, Four, Pass, Problem};

/// The type of out, and those of k, v and q that are narrower.
pub struct Types {
    pub out: Dtype,
    pub eight_bits: Option<EightBits>,
    pub four_bits: Option<Four>,
}

/// The fields under their names, unchecked.
pub struct EightBitInputs {
    pub kv_dtype: i32,
    pub out_dtype: i32,
    pub q_descale: flashtune_const_tensor,
    pub k_descale: flashtune_const_tensor,
    pub v_descale: flashtune_const_tensor,
    pub keys_per_descale: i64,
}

impl From<&flashtune_forward_params> for EightBitInputs {
    fn from(params: &flashtune_forward_params) -> EightBitInputs {
        let flashtune_forward_params { kv_dtype, out_dtype, q_descale, k_descale, v_descale, keys_per_descale, .. } =
            *params;
        EightBitInputs { kv_dtype, out_dtype, q_descale, k_descale, v_descale, keys_per_descale }
    }
}

const NO_SCALES: flashtune_const_tensor =
    flashtune_const_tensor { data: std::ptr::null(), stride_batch: 0, stride_seqlen: 0, stride_head: 0 };

impl EightBitInputs {
    /// The inputs of a pass without them.
    pub const NONE: EightBitInputs = EightBitInputs {
        kv_dtype: 0,
        out_dtype: 0,
        q_descale: NO_SCALES,
        k_descale: NO_SCALES,
        v_descale: NO_SCALES,
        keys_per_descale: 0,
    };

    pub fn types(&self, pass: Pass, q: i32) -> Result<Types> {
        let four_bits = four(self.kv_dtype).filter(|_| [FLASHTUNE_DTYPE_FP16, FLASHTUNE_DTYPE_BF16].contains(&q));
        let eight_of_q = eight(q);
        if pass == Pass::Backward && eight_of_q.is_some() {
            return Err(Error::invalid(format!(
                "dtype is {q}, which has 8 bits and no backward pass: give it the 16-bit tensors that were quantised"
            )));
        }
        if eight_of_q.is_some_and(|eight| eight != Eight::E4m3) {
            return Err(Error::invalid(format!(
                "dtype is {q}; q must be FLASHTUNE_DTYPE_FP16 (1), _BF16 (2), _FP32 (3) or _E4M3 (4)"
            )));
        }
        let (out, keys) = match eight_of_q {
            None => {
                let out = dtype("dtype", q)?;
                if ![0, q].contains(&self.out_dtype) {
                    return Err(Error::invalid(format!(
                        "out_dtype is {} and dtype {q}; it must be 0 or dtype, unless dtype is FLASHTUNE_DTYPE_E4M3 (4)",
                        self.out_dtype
                    )));
                }
                let is_plain = [0, q].contains(&self.kv_dtype) || four_bits.is_some();
                let keys = if is_plain { None } else { Some(self.eight_of_keys(q)?) };
                (out, keys)
            }
            Some(_) => {
                let out = match self.out_dtype {
                    FLASHTUNE_DTYPE_FP16 => Dtype::Fp16,
                    FLASHTUNE_DTYPE_BF16 => Dtype::Bf16,
                    other => {
                        return Err(Error::invalid(format!(
                            "out_dtype is {other} and dtype FLASHTUNE_DTYPE_E4M3 (4); out_dtype must then be FLASHTUNE_DTYPE_FP16 (1) or _BF16 (2)"
                        )));
                    }
                };
                if ![0, FLASHTUNE_DTYPE_E4M3].contains(&self.kv_dtype) {
                    return Err(Error::invalid(format!(
                        "kv_dtype is {} and dtype FLASHTUNE_DTYPE_E4M3 (4); kv_dtype must then be 0 or the same",
                        self.kv_dtype
                    )));
                }
                (out, Some(Eight::E4m3))
            }
        };
        let eight_bits =
            keys.map(|keys| EightBits { keys, queries: eight_of_q.is_some(), keys_per_scale: self.keys_per_descale });
        self.refuse_scales_without_use(eight_bits.as_ref())?;
        Ok(Types { out, eight_bits, four_bits })
    }

    fn eight_of_keys(&self, q: i32) -> Result<Eight> {
        let kv_dtype = self.kv_dtype;
        if q == FLASHTUNE_DTYPE_FP32 {
            return Err(Error::invalid(format!(
                "kv_dtype is {kv_dtype} and dtype FLASHTUNE_DTYPE_FP32 (3); kv_dtype must then be 0 or the same"
            )));
        }
        eight(kv_dtype).ok_or_else(|| {
            Error::invalid(format!(
                "kv_dtype is {kv_dtype} and dtype {q}; kv_dtype must be 0, dtype, FLASHTUNE_DTYPE_E4M3 (4), _E5M2 (5), _INT8 (6), _INT4_GROUP32 (7) or _INT4_GROUP64 (8)"
            ))
        })
    }

    /// Scales without an 8-bit tensor mean that the caller forgot its type.
    fn refuse_scales_without_use(&self, eight_bits: Option<&EightBits>) -> Result<()> {
        let has_q = eight_bits.is_some_and(|eight| eight.queries);
        let (of_q, of_keys) = ("dtype is not FLASHTUNE_DTYPE_E4M3 (4)", "k and v have not 8 bits (kv_dtype)");
        for (name, scales, is_used, reason) in [
            ("q_descale", &self.q_descale, has_q, of_q),
            ("k_descale", &self.k_descale, eight_bits.is_some(), of_keys),
            ("v_descale", &self.v_descale, eight_bits.is_some(), of_keys),
        ] {
            if !scales.data.is_null() && !is_used {
                return Err(Error::invalid(format!(
                    "{name}.data is {:p}; it must be NULL, since {reason}",
                    scales.data
                )));
            }
        }
        match (self.keys_per_descale, eight_bits) {
            (0, _) | (_, Some(_)) => Ok(()),
            (keys, None) => Err(Error::invalid(format!("keys_per_descale is {keys}; it must be 0, since {of_keys}"))),
        }
    }

    /// Checks where the scales lie. `rows` are the batch entries and positions of k and v. `touch`
    /// receives the bytes of the scales.
    pub fn check(
        &self,
        p: &Problem,
        rows: [i64; 2],
        data: Data,
        touch: &mut dyn FnMut(Access, Footprint),
    ) -> Result<()> {
        let Some(eight) = p.features.eight_bits else { return Ok(()) };
        let of_keys = p.scale_extents(rows);
        let of_queries = [p.batch_size, 1, p.num_heads_kv];
        let q = eight.queries.then_some(("q_descale", &self.q_descale, of_queries));
        let of_k_and_v = [("k_descale", &self.k_descale, of_keys), ("v_descale", &self.v_descale, of_keys)];
        for (name, scales, extents) in q.into_iter().chain(of_k_and_v) {
            let strides = [scales.stride_batch, scales.stride_seqlen, scales.stride_head];
            for (dim, stride) in ["batch", "seqlen", "head"].into_iter().zip(strides) {
                if stride < 0 {
                    return Err(Error::invalid(format!(
                        "{name}.stride_{dim} is {stride}; a stride must be 0 or more elements"
                    )));
                }
            }
            let is_empty = extents.contains(&0);
            let of_dim = |dim: usize| if strides[dim] == 0 { (1, 0) } else { (extents[dim], strides[dim]) };
            let array = Array::new(name, scales.data.cast::<f32>(), i64::from(!is_empty));
            let array = array.in_dims([of_dim(0), of_dim(1), of_dim(2)]);
            array.check_required(data, None)?.into_iter().for_each(|bytes| touch(Access::Read, bytes));
        }
        Ok(())
    }

    pub fn scales(&self) -> Scales {
        Scales {
            q: TensorRef::from(self.q_descale),
            k: TensorRef::from(self.k_descale),
            v: TensorRef::from(self.v_descale),
        }
    }
}
