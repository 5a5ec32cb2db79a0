//! A training step of grouped-query attention through `flashtune::attention`, on the CPU.
//!
//!     cargo run --example attention
//!
//! It computes out and the gradients of the loss sum(out^2) / 2, for which dout is out. Then it
//! checks both against plain arithmetic: out against the formula, and the gradients against the
//! slope of the loss along a random direction.

use flashtune::attention::{Attention, Causal, Context, Inputs, Result, Tensor};

const BATCH: usize = 2;
const SEQLEN: usize = 33;
const HEADS: usize = 4;
const HEADS_KV: usize = 2;
const DIM: usize = 16;
const Q: [usize; 4] = [BATCH, SEQLEN, HEADS, DIM];
const KV: [usize; 4] = [BATCH, SEQLEN, HEADS_KV, DIM];

fn main() -> Result<()> {
    run()
}

pub fn run() -> Result<()> {
    let context = Context::cpu()?;
    let attention = Attention::new().causal(Causal::BottomRight);
    let (q, k, v) = (random(1, Q), random(2, KV), random(3, KV));

    let inputs = inputs(&q, &k, &v)?;
    let forward = attention.forward(&context, &inputs)?;
    let out = Tensor::new(&forward.out, Q)?;
    let gradients = attention.backward(&context, &inputs, out, &forward.lse, out)?;

    let error = largest_difference(&forward.out, &plain(&q, &k, &v));
    println!("out differs from plain arithmetic by at most {error:.1e}");
    assert!(error < 1e-5, "out is wrong by {error}");

    // The loss changes along a direction by the dot product of the gradients and the direction.
    let directions = [random(4, Q), random(5, KV), random(6, KV)];
    let loss = |step: f32| -> Result<f64> {
        let [q, k, v] = [(&q, 0), (&k, 1), (&v, 2)].map(|(x, i)| moved(x, &directions[i], step));
        let moved = attention.forward(&context, &self::inputs(&q, &k, &v)?)?;
        Ok(moved.out.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / 2.0)
    };
    let step = 1e-2;
    let measured = (loss(step)? - loss(-step)?) / (2.0 * f64::from(step));
    let [dq, dk, dv] = [&gradients.dq, &gradients.dk, &gradients.dv];
    let computed: f64 = [dq, dk, dv].into_iter().zip(&directions).map(|(gradient, along)| dot(gradient, along)).sum();
    println!("the loss changes by {measured:.4}; the gradients say {computed:.4}");
    assert!((measured - computed).abs() < 1e-2 * computed.abs().max(1.0), "the gradients are wrong");
    Ok(())
}

fn inputs<'a>(q: &'a [f32], k: &'a [f32], v: &'a [f32]) -> Result<Inputs<'a, f32>> {
    Ok(Inputs { q: Tensor::new(q, Q)?, k: Tensor::new(k, KV)?, v: Tensor::new(v, KV)? })
}

/// Numbers between -1 and 1 that follow from the seed.
fn random(seed: u64, shape: [usize; 4]) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..shape.iter().product()).map(next).collect()
}

fn moved(x: &[f32], along: &[f32], step: f32) -> Vec<f32> {
    x.iter().zip(along).map(|(x, along)| x + step * along).collect()
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// The formula, one query and head at a time.
fn plain(q: &[f32], k: &[f32], v: &[f32]) -> Vec<f32> {
    let mut out = vec![0.0; q.len()];
    for (row, out) in out.chunks_exact_mut(DIM).enumerate() {
        let (batch, query, head) = (row / (SEQLEN * HEADS), row / HEADS % SEQLEN, row % HEADS);
        let q = &q[row * DIM..][..DIM];
        let at = |key: usize| ((batch * SEQLEN + key) * HEADS_KV + head / (HEADS / HEADS_KV)) * DIM;
        let score = |key| dot(q, &k[at(key)..][..DIM]) / (DIM as f64).sqrt();
        let weights: Vec<f64> = (0..=query).map(|key| score(key).exp()).collect();
        let sum: f64 = weights.iter().sum();
        for (dim, out) in out.iter_mut().enumerate() {
            let weighted = (0..=query).map(|key| weights[key] / sum * f64::from(v[at(key) + dim]));
            *out = weighted.sum::<f64>() as f32;
        }
    }
    out
}
