//! Values of the tuner's tensors: random ones, and their bytes in each dtype. This leaf knows no
//! problem and no buffer.

use crate::dropout::philox4x32_10;
use crate::problem::{Dtype, ElementType};
use half::{bf16, f16};

/// Normally distributed values, which follow from the seed.
pub fn normals(count: usize, seed: u32) -> Vec<f32> {
    let unit = |word: u32| (word as f32 + 0.5) / 4_294_967_296.0;
    let pair = |a: u32, b: u32| {
        // The Box-Muller transform.
        let (radius, angle) = ((-2.0 * unit(a).ln()).sqrt(), std::f32::consts::TAU * unit(b));
        [radius * angle.cos(), radius * angle.sin()]
    };
    let draws = (0..count.div_ceil(4) as u32).map(|i| philox4x32_10([i, 0, 0, 0], [seed, 0]));
    let mut values: Vec<f32> = draws.flat_map(|[a, b, c, d]| [pair(a, b), pair(c, d)]).flatten().collect();
    values.truncate(count);
    values
}

pub fn encode(values: &[f32], dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::Fp16 => values.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect(),
        Dtype::Bf16 => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        Dtype::Fp32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

pub fn decode(bytes: &[u8], dtype: Dtype) -> Vec<f32> {
    match dtype {
        Dtype::Fp16 => bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        Dtype::Bf16 => bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        Dtype::Fp32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
    }
}

/// A row of elements of any type.
pub fn encode_row(values: &[f32], element: ElementType) -> Vec<u8> {
    match element {
        ElementType::Plain(dtype) => encode(values, dtype),
        ElementType::Eight(eight) => values.iter().map(|x| eight.encode(*x)).collect(),
        ElementType::Four(four) => {
            let mut row = vec![0; four.row_bytes(values.len() as i64) as usize];
            four.encode_row(values, &mut row);
            row
        }
    }
}

/// So many values of a row.
pub fn decode_row(bytes: &[u8], element: ElementType, columns: usize) -> Vec<f32> {
    match element {
        ElementType::Plain(dtype) => decode(bytes, dtype),
        ElementType::Eight(eight) => bytes.iter().map(|bits| eight.decode(*bits)).collect(),
        ElementType::Four(four) => {
            let mut values = vec![0.0; columns];
            four.decode_row(bytes, &mut values);
            values
        }
    }
}

/// Rounds the values to the dtype.
pub fn rounded(values: &[f32], dtype: Dtype) -> Vec<f32> {
    decode(&encode(values, dtype), dtype)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normals_have_mean_0_and_variance_1() {
        let values = normals(100_000, 7);
        let mean = values.iter().sum::<f32>() / values.len() as f32;
        let variance = values.iter().map(|x| x * x).sum::<f32>() / values.len() as f32;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.02, "mean {mean}, variance {variance}");
    }

    #[test]
    fn rounding_keeps_what_the_dtype_holds() {
        let values = rounded(&normals(1000, 1), Dtype::Bf16);
        assert_eq!(rounded(&values, Dtype::Bf16), values);
        assert!(decode(&[0xff; 12], Dtype::Fp16).iter().all(|x| x.is_nan()));
    }
}
