//! The quantising kernel: what its text is rendered from, its argument and its grid.

use super::call::Quantize;
use super::rotation::SIGN_WORDS;
use crate::call::TensorRef;
use crate::kernel::{FixedSpec, Value};
use crate::ops::class::QuantizeClass;
use crate::ops::op::Op;
use crate::problem::Eight;

const THREADS: u32 = 256;
/// CTAs for each SM, over all units of a launch.
const CTAS_PER_SM: i64 = 8;

impl QuantizeClass {
    /// The kernel of this class.
    pub fn kernel(&self) -> FixedSpec {
        FixedSpec {
            name: Quantize::NAME,
            threads: THREADS,
            class: vec![
                ("dtype", Value::Name(self.dtype.name().to_owned())),
                ("vec", Value::Integer(self.layout.elements() as u32)),
            ],
            knobs: vec![
                ("key_format", Value::Integer(self.to.map_or(0, Eight::number))),
                ("of_rows", Value::Flag(self.of_rows)),
                ("rotates", Value::Flag(self.rotates)),
            ],
        }
    }
}

/// The kernel's argument, the twin of `QuantizeParams` in `templates/quantize.cu.tera`.
#[repr(C)]
pub struct QuantizeParams {
    x: TensorRef,
    out: TensorRef,
    scales: TensorRef,
    units: i64,
    batch_size: i32,
    seqlen: i32,
    num_heads: i32,
    head_dim: i32,
    rows_per_scale: i32,
    heads_per_scale: i32,
    computes: i32,
    rotation_factor: f32,
    signs: [u32; SIGN_WORDS],
}

const _: () = assert!(size_of::<QuantizeParams>() == 3 * 32 + 8 + 8 * 4 + 16 * 4);

impl QuantizeParams {
    /// Each size fits an i32, since `capi` bounds them.
    pub fn new(quantize: &Quantize) -> QuantizeParams {
        let rotation = quantize.rotation();
        QuantizeParams {
            x: quantize.x,
            out: quantize.out,
            scales: quantize.scales,
            units: quantize.units(),
            batch_size: quantize.batch_size as i32,
            seqlen: quantize.seqlen as i32,
            num_heads: quantize.num_heads as i32,
            head_dim: quantize.head_dim as i32,
            rows_per_scale: quantize.rows_per_scale as i32,
            heads_per_scale: quantize.heads_per_scale as i32,
            computes: quantize.computes.into(),
            rotation_factor: rotation.map_or(0.0, |rotation| rotation.factor),
            signs: rotation.map_or([0; SIGN_WORDS], |rotation| rotation.signs),
        }
    }
}

/// CTAs for all units, as far as the device holds them: each has a unit, or each of its warps.
pub fn grid(quantize: &Quantize, sm_count: u32) -> [u32; 3] {
    let of_cta = if quantize.class.of_rows { i64::from(THREADS / 32) } else { 1 };
    let ctas = (quantize.units() + of_cta - 1) / of_cta;
    [ctas.clamp(1, i64::from(sm_count) * CTAS_PER_SM) as u32, 1, 1]
}
