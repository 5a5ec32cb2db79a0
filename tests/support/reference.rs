//! Attention by its definition, forward and backward, one row after the other, with the whole row of scores at hand.
//!
//! Two arithmetics: fp64 throughout is the reference; the *naive* one accumulates in fp32 and rounds every
//! intermediate to the dtype, as unfused attention in that dtype does, and is the yardstick of the error rule. No
//! tiles, no online softmax, no code shared with the library but the dropout mask's definition.

use super::case::{Case, Data, Kind, round_to};
use super::subject::{Forward, Gradients};
use rayon::prelude::*;
use std::ops::{Add, AddAssign, Div, Mul, Sub};

pub trait Real:
    Copy
    + PartialOrd
    + Send
    + Sync
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + AddAssign
{
    fn of(value: f64) -> Self;
    fn wide(self) -> f64;
    fn exp(self) -> Self;
}

impl Real for f64 {
    fn of(value: f64) -> f64 {
        value
    }
    fn wide(self) -> f64 {
        self
    }
    fn exp(self) -> f64 {
        self.exp()
    }
}

impl Real for f32 {
    fn of(value: f64) -> f32 {
        value as f32
    }
    fn wide(self) -> f64 {
        f64::from(self)
    }
    fn exp(self) -> f32 {
        self.exp()
    }
}

/// Results of either arithmetic, in the layouts of `Forward` and `Gradients`.
#[derive(Clone, Default)]
pub struct Results {
    pub out: Vec<f64>,
    pub lse: Vec<f64>,
    pub dq: Vec<f64>,
    pub dk: Vec<f64>,
    pub dv: Vec<f64>,
    pub magnitudes: Magnitudes,
}

/// How large the summands are of which results are made: what cancels leaves the rounding of what cancelled.
#[derive(Clone, Copy, Default)]
pub struct Magnitudes {
    /// max of |scale| * sum |q k|, over all scores
    pub score: f64,
    /// max over elements of the sums that make dQ, dK, dV with every term made positive
    pub dq: f64,
    pub dk: f64,
    pub dv: f64,
}

impl Results {
    /// As a backend returns them.
    pub fn forward(&self) -> Forward {
        let narrow = |values: &[f64]| values.iter().map(|value| *value as f32).collect();
        Forward { out: narrow(&self.out), lse: narrow(&self.lse) }
    }

    pub fn gradients(&self) -> Gradients {
        let narrow = |values: &[f64]| values.iter().map(|value| *value as f32).collect();
        Gradients { dq: narrow(&self.dq), dk: narrow(&self.dk), dv: narrow(&self.dv) }
    }
}

pub fn exact(case: &Case, data: &Data) -> Results {
    attention::<f64>(case, data, &|value| value)
}

pub fn naive(case: &Case, data: &Data) -> Results {
    attention::<f32>(case, data, &|value| round_to(case.dtype, value))
}

fn attention<R: Real>(case: &Case, data: &Data, round: &(dyn Fn(R) -> R + Sync)) -> Results {
    let heads = case.num_heads_q as usize;
    let all = (0..case.batch_size as usize * heads).into_par_iter();
    let of_heads: Vec<Head<R>> = all.map(|index| Head::new(case, data, index / heads, index % heads, round)).collect();
    let zeros = |kind| vec![0.0; case.shape(kind).elements()];
    let mut results = Results {
        out: zeros(Kind::Out),
        lse: Vec::new(),
        dq: zeros(Kind::Dq),
        dk: zeros(Kind::Dk),
        dv: zeros(Kind::Dv),
        magnitudes: Magnitudes::default(),
    };
    for (index, head) in of_heads.iter().enumerate() {
        let (batch, head_q) = (index / heads, index % heads);
        let head_kv = head_q / (heads / case.num_heads_kv as usize);
        // The heads of a group are summed wide in both arithmetics, as one long product would.
        let add = |kind, into: &mut Vec<f64>, head_index, values: &[R]| {
            places(case, kind, batch, head_index).zip(values).for_each(|(at, value)| into[at] += value.wide());
        };
        add(Kind::Out, &mut results.out, head_q, &head.out);
        add(Kind::Dq, &mut results.dq, head_q, &head.dq);
        add(Kind::Dk, &mut results.dk, head_kv, &head.dk);
        add(Kind::Dv, &mut results.dv, head_kv, &head.dv);
        results.lse.extend(head.lse.iter().map(|lse| lse.wide()));
        let max = &mut results.magnitudes;
        let group = (case.num_heads_q / case.num_heads_kv) as f64;
        max.score = max.score.max(head.magnitudes.score);
        max.dq = max.dq.max(head.magnitudes.dq);
        max.dk = max.dk.max(group * head.magnitudes.dk);
        max.dv = max.dv.max(group * head.magnitudes.dv);
    }
    for values in [&mut results.out, &mut results.dq, &mut results.dk, &mut results.dv] {
        values.iter_mut().for_each(|value| *value = round(R::of(*value)).wide());
    }
    results
}

/// Packed index of each element of one head's (seqlen, dim) matrix.
fn places(case: &Case, kind: Kind, batch: usize, head: usize) -> impl Iterator<Item = usize> + use<> {
    let shape = case.shape(kind);
    let (seqlen, heads, dim) = (shape.seqlen as usize, shape.heads as usize, shape.dim as usize);
    (0..seqlen).flat_map(move |s| (0..dim).map(move |c| ((batch * seqlen + s) * heads + head) * dim + c))
}

/// One query head: its results, dK and dV being its share of its group's.
struct Head<R> {
    out: Vec<R>,
    lse: Vec<R>,
    dq: Vec<R>,
    dk: Vec<R>,
    dv: Vec<R>,
    magnitudes: Magnitudes,
}

impl<R: Real> Head<R> {
    fn new(case: &Case, data: &Data, batch: usize, head: usize, round: &(dyn Fn(R) -> R + Sync)) -> Self {
        let zero = R::of(0.0);
        let (dim, dim_v) = (case.head_dim as usize, case.head_dim_v as usize);
        let (seqlen_q, seqlen_k) = (case.seqlen_q as usize, case.seqlen_k as usize);
        let head_kv = head / (case.num_heads_q / case.num_heads_kv) as usize;
        let gather = |kind, values: &[f32], head| -> Vec<R> {
            places(case, kind, batch, head).map(|at| R::of(f64::from(values[at]))).collect()
        };
        let q = gather(Kind::Q, &data.q, head);
        let k = gather(Kind::K, &data.k, head_kv);
        let v = gather(Kind::V, &data.v, head_kv);
        let dout = gather(Kind::Dout, &data.dout, head);
        let (k_transposed, v_transposed) = (transpose(&k, dim), transpose(&v, dim_v));
        let scale = R::of(f64::from(case.softmax_scale));
        let mask = (case.dropout_p > 0.0).then(|| case.dropout_mask(batch, head));
        let keep_scale = R::of(f64::from(case.dropout().keep_scale()));
        let keeps = |row: usize, key: usize| match &mask {
            None => R::of(1.0),
            Some(mask) if mask.keeps(row as u32, key as u32) => keep_scale,
            Some(_) => zero,
        };

        let mut this = Head {
            out: vec![zero; seqlen_q * dim_v],
            lse: vec![R::of(f64::NEG_INFINITY); seqlen_q],
            dq: vec![zero; seqlen_q * dim],
            dk: vec![zero; seqlen_k * dim],
            dv: vec![zero; seqlen_k * dim_v],
            magnitudes: Magnitudes::default(),
        };
        // Sums of magnitudes, per element of dK and dV and per row of dQ.
        let (mut dk_terms, mut dv_terms) = (vec![0.0; seqlen_k], vec![0.0; seqlen_k]);
        for row in 0..seqlen_q {
            // A row that sees no key keeps O = 0, LSE = -inf and gives no gradient.
            let keys = case.visible_keys(row);
            if keys == 0 {
                continue;
            }
            let q = &q[row * dim..][..dim];
            let dout = &dout[row * dim_v..][..dim_v];
            let mut scores = vec![zero; keys];
            products(q, &k_transposed, seqlen_k, &mut scores);
            scores.iter_mut().for_each(|score| *score = round(scale * round(*score)));
            let top = scores.iter().fold(R::of(f64::NEG_INFINITY), |top, s| if *s > top { *s } else { top });
            let weights: Vec<R> = scores.iter().map(|score| (*score - top).exp()).collect();
            let sum = weights.iter().fold(zero, |sum, weight| sum + *weight);
            this.lse[row] = R::of(top.wide() + sum.wide().ln());
            let weights: Vec<R> = weights.iter().map(|weight| round(*weight / sum)).collect();
            let kept: Vec<R> = (0..keys).map(|key| round(weights[key] * keeps(row, key))).collect();
            let out = &mut this.out[row * dim_v..][..dim_v];
            kept.iter().zip(v.chunks(dim_v)).for_each(|(weight, v)| add_scaled(out, *weight, v));

            let mut dweights = vec![zero; keys];
            products(dout, &v_transposed, seqlen_k, &mut dweights);
            // delta from the stored O, as the backward pass has it.
            let delta = dout.iter().zip(&*out).fold(zero, |sum, (dout, out)| sum + *dout * round(*out));
            let dq = &mut this.dq[row * dim..][..dim];
            let mut dq_terms = 0.0;
            for key in 0..keys {
                let dweight = round(round(dweights[key]) * keeps(row, key));
                let dscore = round(weights[key] * (dweight - delta));
                add_scaled(dq, scale * dscore, &k[key * dim..][..dim]);
                add_scaled(&mut this.dk[key * dim..][..dim], scale * dscore, q);
                add_scaled(&mut this.dv[key * dim_v..][..dim_v], kept[key], dout);
                let term = (scale * weights[key]).wide().abs() * (dweight.wide().abs() + delta.wide().abs());
                dq_terms += term * largest(&k[key * dim..][..dim]);
                dk_terms[key] += term * largest(q);
                dv_terms[key] += kept[key].wide() * largest(dout);
            }
            let score_terms = (0..keys).map(|key| {
                let terms = q.iter().zip(&k[key * dim..][..dim]).map(|(q, k)| (q.wide() * k.wide()).abs());
                terms.sum::<f64>() * f64::from(case.softmax_scale).abs()
            });
            this.magnitudes.score = score_terms.fold(this.magnitudes.score, f64::max);
            this.magnitudes.dq = this.magnitudes.dq.max(dq_terms);
        }
        this.magnitudes.dk = dk_terms.into_iter().fold(0.0, f64::max);
        this.magnitudes.dv = dv_terms.into_iter().fold(0.0, f64::max);
        this
    }
}

/// `sums[j] += sum over c of row[c] * transposed[c, j]`, for the first keys; `pitch` keys in a row of `transposed`.
fn products<R: Real>(row: &[R], transposed: &[R], pitch: usize, sums: &mut [R]) {
    row.iter().zip(transposed.chunks(pitch)).for_each(|(factor, column)| add_scaled(sums, *factor, column));
}

fn add_scaled<R: Real>(sums: &mut [R], factor: R, values: &[R]) {
    sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += factor * *value);
}

fn transpose<R: Real>(rows: &[R], dim: usize) -> Vec<R> {
    let count = rows.len() / dim;
    (0..dim).flat_map(|c| (0..count).map(move |row| rows[row * dim + c])).collect()
}

fn largest<R: Real>(values: &[R]) -> f64 {
    values.iter().fold(0.0, |top, value| value.wide().abs().max(top))
}
