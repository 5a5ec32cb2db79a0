//! Attention over random tensors in fp64, to compare the handlers with. Every tensor has values of
//! its own, so a handler that confuses two of them shows.

use crate::{BATCH, DIM, HEADS, SEQLEN_K, SEQLEN_Q};

/// The results of both passes, each contiguous: out, lse, dq, dk, dv.
pub struct Results {
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
    pub dq: Vec<f64>,
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
}

/// Values from -1 to 1, which follow from the seed.
pub fn random(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// All heads share one head of keys and values.
pub fn attention(q: &[f32], k: &[f32], v: &[f32], dout: &[f32], scale: f64) -> Results {
    let [batch, rows, keys, heads, dim] = [BATCH, SEQLEN_Q, SEQLEN_K, HEADS, DIM].map(|size| size as usize);
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let mut results = Results {
        out: vec![0.0; q.len()],
        lse: vec![0.0; batch * heads * rows],
        dq: vec![0.0; q.len()],
        dk: vec![0.0; k.len()],
        dv: vec![0.0; v.len()],
    };
    for (b, row, head) in (0..batch * rows * heads).map(|i| (i / heads / rows, i / heads % rows, i % heads)) {
        let at = ((b * rows + row) * heads + head) * dim;
        let key = |j: usize| (b * keys + j) * dim;
        let scores: Vec<f64> = (0..keys).map(|j| scale * dot(&q[at..at + dim], &k[key(j)..key(j) + dim])).collect();
        let lse = scores.iter().map(|score| score.exp()).sum::<f64>().ln();
        results.lse[(b * heads + head) * rows + row] = lse;
        let weights: Vec<f64> = scores.iter().map(|score| (score - lse).exp()).collect();
        let dweights: Vec<f64> = (0..keys).map(|j| dot(&dout[at..at + dim], &v[key(j)..key(j) + dim])).collect();
        let delta: f64 = weights.iter().zip(&dweights).map(|(weight, dweight)| weight * dweight).sum();
        for j in 0..keys {
            let dscore = weights[j] * (dweights[j] - delta) * scale;
            for c in 0..dim {
                results.out[at + c] += weights[j] * f64::from(v[key(j) + c]);
                results.dq[at + c] += dscore * f64::from(k[key(j) + c]);
                results.dk[key(j) + c] += dscore * f64::from(q[at + c]);
                results.dv[key(j) + c] += weights[j] * f64::from(dout[at + c]);
            }
        }
    }
    results
}
