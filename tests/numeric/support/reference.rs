//! Attention by its definition, forward and backward, one row after the other, with the whole row
//! of scores in memory.
//!
//! There are two arithmetics. fp64 throughout is the reference. The *naive* one accumulates in fp32
//! and rounds every intermediate to the dtype, as unfused attention in that dtype does; it is the
//! yardstick of the error rule. There are no tiles and no online softmax, and the only code shared
//! with the library defines the dropout mask.

use super::blocks::{BlockKind, BlockMap, block_kind};
use super::case::{Case, Data, Kind, round_to};
use super::eight;
use super::lengths::{Rows, Side};
use super::per_score::PerScore;
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
    fn tanh(self) -> Self;
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
    fn tanh(self) -> f64 {
        self.tanh()
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
    fn tanh(self) -> f32 {
        self.tanh()
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
    /// Includes the values before the pass; empty if dbias is not requested.
    pub dbias: Vec<f64>,
    /// Empty without sinks.
    pub dsinks: Vec<f64>,
    pub magnitudes: Magnitudes,
}

/// Largest sums of the magnitudes of an element's terms. Terms that cancel leave rounding errors of
/// their own size.
#[derive(Clone, Copy, Default)]
pub struct Magnitudes {
    /// Over all scores: |scale| * sum |q k| and the magnitudes of the score's other terms.
    pub score: f64,
    /// Over the elements of dQ; the next fields likewise for dK, dV and the others.
    pub dq: f64,
    pub dk: f64,
    pub dv: f64,
    pub dbias: f64,
    pub dsinks: f64,
    /// Standard deviation of a sink's gradient per unit of relative error in O: sqrt(sum (p_sink dO
    /// O)^2).
    pub dsinks_deviation: f64,
}

pub fn exact(case: &Case, data: &Data) -> Results {
    attention::<f64>(case, data, &|value| value, &|weight| weight)
}

pub fn naive(case: &Case, data: &Data) -> Results {
    attention::<f32>(case, data, &|value| round_to(case.dtype, value), &|weight| eight::rounded_weight(case, weight))
}

/// `round_weight` rounds a weight before it is divided by the row's sum.
fn attention<R: Real>(
    case: &Case,
    data: &Data,
    round: &(dyn Fn(R) -> R + Sync),
    round_weight: &(dyn Fn(R) -> R + Sync),
) -> Results {
    let heads = case.num_heads_q as usize;
    let all = (0..case.batch_size as usize * heads).into_par_iter();
    let of_heads: Vec<Head<R>> =
        all.map(|index| Head::new(case, data, [index / heads, index % heads], round, round_weight)).collect();
    let zeros = |kind| vec![0.0; case.shape(kind).elements()];
    let bias = case.extras.bias.filter(|_| case.extras.dbias).map(|spread| PerScore::new(case, spread));
    let mut dbias_terms = vec![0.0; data.dbias.len()];
    let mut dsinks_terms = vec![[0.0; 2]; data.sinks.len()];
    let mut results = Results {
        out: zeros(Kind::Out),
        lse: vec![f64::NEG_INFINITY; case.lse_len()],
        dq: zeros(Kind::Dq),
        dk: zeros(Kind::Dk),
        dv: zeros(Kind::Dv),
        dbias: data.dbias.iter().map(|before| f64::from(*before)).collect(),
        dsinks: vec![0.0; data.sinks.len()],
        magnitudes: Magnitudes::default(),
    };
    for (index, head) in of_heads.iter().enumerate() {
        let (batch, head_q) = (index / heads, index % heads);
        let head_kv = head_q / (heads / case.num_heads_kv as usize);
        // Both arithmetics sum the heads of a GQA group in fp64, as one long product would.
        let add = |kind, into: &mut Vec<f64>, head_index, values: &[R]| {
            places(case, kind, batch, head_index).zip(values).for_each(|(at, value)| into[at] += value.wide());
        };
        add(Kind::Out, &mut results.out, head_q, &head.out);
        add(Kind::Dq, &mut results.dq, head_q, &head.dq);
        add(Kind::Dk, &mut results.dk, head_kv, &head.dk);
        add(Kind::Dv, &mut results.dv, head_kv, &head.dv);
        let lse_begin = case.lse_begin(batch, head_q);
        head.lse.iter().enumerate().for_each(|(row, lse)| results.lse[lse_begin + row] = lse.wide());
        if let Some(bias) = &bias {
            for (row, key, dscore, term) in &head.dscores {
                let at = bias.index([batch, head_q, *row, *key]);
                results.dbias[at] += dscore.wide();
                dbias_terms[at] += term;
            }
        }
        if case.extras.sinks {
            results.dsinks[head_q] += head.dsink.wide();
            let terms = &mut dsinks_terms[head_q];
            *terms = [terms[0] + head.magnitudes.dsinks, terms[1] + head.magnitudes.dsinks_deviation.powi(2)];
        }
        let max = &mut results.magnitudes;
        let group = (case.num_heads_q / case.num_heads_kv) as f64;
        max.score = max.score.max(head.magnitudes.score);
        max.dq = max.dq.max(head.magnitudes.dq);
        max.dk = max.dk.max(group * head.magnitudes.dk);
        max.dv = max.dv.max(group * head.magnitudes.dv);
    }
    results.magnitudes.dbias = dbias_terms.into_iter().fold(0.0, f64::max);
    for [terms, of_out] in dsinks_terms {
        let max = &mut results.magnitudes;
        (max.dsinks, max.dsinks_deviation) = (max.dsinks.max(terms), max.dsinks_deviation.max(of_out.sqrt()));
    }
    for values in [&mut results.out, &mut results.dq, &mut results.dk, &mut results.dv] {
        values.iter_mut().for_each(|value| *value = round(R::of(*value)).wide());
    }
    results
}

/// Packed index of each element of one head's matrix, over a sequence's used rows.
fn places(case: &Case, kind: Kind, batch: usize, head: usize) -> impl Iterator<Item = usize> + use<> {
    let shape = case.shape(kind);
    let (seqlen, heads, dim) = (shape.seqlen as usize, shape.heads as usize, shape.dim as usize);
    let Rows { entry, begin, used, .. } = case.rows(Side::of(kind))[batch];
    let first = entry * seqlen + begin;
    (first..first + used).flat_map(move |row| (0..dim).map(move |c| (row * heads + head) * dim + c))
}

/// The terms of one head's scores besides Q K^T, by their definitions.
struct Modifier<'a> {
    case: &'a Case,
    data: &'a Data,
    batch: usize,
    head: usize,
    seqlen_q: usize,
    seqlen_k: usize,
    bias: Option<PerScore>,
    mask: Option<PerScore>,
    map: Option<BlockMap>,
}

impl<'a> Modifier<'a> {
    fn new(case: &'a Case, data: &'a Data, batch: usize, head: usize) -> Self {
        let per_score = |spread: Option<_>| spread.map(|spread| PerScore::new(case, spread));
        Modifier {
            case,
            data,
            batch,
            head,
            seqlen_q: case.rows(Side::Q)[batch].used,
            seqlen_k: case.rows(Side::K)[batch].used,
            bias: per_score(case.extras.bias),
            mask: per_score(case.extras.mask),
            map: BlockMap::new(case),
        }
    }

    fn hides(&self, row: usize, key: usize) -> bool {
        let place = [self.batch, self.head, row, key];
        let masks = || self.mask.is_some_and(|mask| self.data.mask[mask.index(place)] == 0);
        !self.case.sees([self.seqlen_q, self.seqlen_k], row, key)
            || match block_kind(&self.map, place) {
                BlockKind::Hidden => true,
                BlockKind::Partial => masks(),
                BlockKind::Full => false,
            }
    }

    /// The score with all terms except hiding, and the factor of its gradient on the way back.
    fn apply<R: Real>(&self, score: R, row: usize, key: usize, round: &dyn Fn(R) -> R) -> (R, R) {
        let (mut score, mut slope) = (score, R::of(1.0));
        if self.case.extras.softcap != 0.0 {
            let cap = R::of(f64::from(self.case.extras.softcap));
            let tanh = round(round(score / cap).tanh());
            (score, slope) = (round(cap * tanh), round(R::of(1.0) - round(tanh * tanh)));
        }
        for added in [self.alibi(row, key), self.bias(row, key)].into_iter().flatten() {
            score = round(score + round(R::of(added)));
        }
        (score, slope)
    }

    fn alibi(&self, row: usize, key: usize) -> Option<f64> {
        let spread = self.case.extras.alibi?;
        let batch = if spread.batch { self.batch } else { 0 };
        let slope = f64::from(self.data.alibi[batch * self.case.num_heads_q as usize + self.head]);
        let distance = (row + self.seqlen_k) as f64 - (self.seqlen_q + key) as f64;
        Some(-slope * distance.abs())
    }

    fn bias(&self, row: usize, key: usize) -> Option<f64> {
        let shape = self.bias.as_ref()?;
        Some(f64::from(self.data.bias[shape.index([self.batch, self.head, row, key])]))
    }

    /// The magnitude of the terms besides Q K^T. Infinities leave nothing to round and do not
    /// count.
    fn magnitude(&self, row: usize, key: usize) -> f64 {
        let terms = [Some(f64::from(self.case.extras.softcap)), self.alibi(row, key), self.bias(row, key)];
        terms.into_iter().flatten().map(f64::abs).filter(|term| term.is_finite()).sum()
    }
}

/// The results of one query head; dK and dV are its share of the group's.
struct Head<R> {
    out: Vec<R>,
    lse: Vec<R>,
    dq: Vec<R>,
    dk: Vec<R>,
    dv: Vec<R>,
    /// Row, key, gradient and magnitude of terms for each score; empty if dbias is not requested.
    dscores: Vec<(usize, usize, R, f64)>,
    dsink: R,
    magnitudes: Magnitudes,
}

impl<R: Real> Head<R> {
    fn new(
        case: &Case,
        data: &Data,
        [batch, head]: [usize; 2],
        round: &(dyn Fn(R) -> R + Sync),
        round_weight: &(dyn Fn(R) -> R + Sync),
    ) -> Self {
        let zero = R::of(0.0);
        let (dim, dim_v) = (case.head_dim as usize, case.head_dim_v as usize);
        let modifier = Modifier::new(case, data, batch, head);
        let (seqlen_q, seqlen_k) = (modifier.seqlen_q, modifier.seqlen_k);
        let head_kv = head / (case.num_heads_q / case.num_heads_kv) as usize;
        let gather = |kind, values: &[f32], head| -> Vec<R> {
            let has_scales = case.element(kind).bytes() == 1;
            // Numbers times scales are rounded to the dtype where the arithmetic rounds.
            let input = |at: usize| R::of(f64::from(values[at]));
            places(case, kind, batch, head).map(|at| if has_scales { round(input(at)) } else { input(at) }).collect()
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
        let sink = data.sinks.get(head).map(|sink| R::of(f64::from(*sink)));
        let lse_begin = case.lse_begin(batch, head);

        let mut this = Head {
            out: vec![zero; seqlen_q * dim_v],
            lse: vec![R::of(f64::NEG_INFINITY); seqlen_q],
            dq: vec![zero; seqlen_q * dim],
            dk: vec![zero; seqlen_k * dim],
            dv: vec![zero; seqlen_k * dim_v],
            dscores: Vec::new(),
            dsink: zero,
            magnitudes: Magnitudes::default(),
        };
        let sizes_of = |values: &[R]| -> Vec<f64> { values.iter().map(|value| value.wide().abs()).collect() };
        let (k_sizes, k_largest) = (sizes_of(&k_transposed), k.chunks(dim).map(largest).collect::<Vec<f64>>());
        // Sums of magnitudes, one per key for dK and dV, and one per row for dQ.
        let (mut dk_terms, mut dv_terms) = (vec![0.0; seqlen_k], vec![0.0; seqlen_k]);
        for row in 0..seqlen_q {
            let keys: Vec<usize> = (0..seqlen_k).filter(|key| !modifier.hides(row, *key)).collect();
            let q = &q[row * dim..][..dim];
            let dout = &dout[row * dim_v..][..dim_v];
            let dlse = data.dlse.get(lse_begin + row).map_or(zero, |dlse| R::of(f64::from(*dlse)));
            let mut scores = vec![zero; seqlen_k];
            products(q, &k_transposed, seqlen_k, &mut scores);
            let (scores, slopes): (Vec<R>, Vec<R>) =
                keys.iter().map(|key| modifier.apply(round(scale * round(scores[*key])), row, *key, round)).unzip();
            let top = scores.iter().fold(R::of(f64::NEG_INFINITY), |top, s| if *s > top { *s } else { top });
            // A row without keys, or with only scores of -inf, keeps O = 0. Its only gradient is
            // that of its LSE to the sink.
            if top.wide() == f64::NEG_INFINITY && !scores.iter().any(|score| score.wide().is_nan()) {
                if let Some(sink) = sink.filter(|sink| sink.wide() > f64::NEG_INFINITY) {
                    this.lse[row] = sink;
                    this.dsink += dlse;
                    this.magnitudes.dsinks += dlse.wide().abs();
                }
                continue;
            }
            let top = sink.map_or(top, |sink| if sink > top { sink } else { top });
            let weights: Vec<R> = scores.iter().map(|score| (*score - top).exp()).collect();
            let sum_of_keys = weights.iter().fold(zero, |sum, weight| sum + *weight);
            let sum = sink.map_or(sum_of_keys, |sink| sum_of_keys + (sink - top).exp());
            this.lse[row] = R::of(top.wide() + sum.wide().ln());
            let weights: Vec<R> = weights.iter().map(|weight| round(round_weight(*weight) / sum)).collect();
            let kept: Vec<R> =
                weights.iter().zip(&keys).map(|(weight, key)| round(*weight * keeps(row, *key))).collect();
            let out = &mut this.out[row * dim_v..][..dim_v];
            kept.iter().zip(&keys).for_each(|(weight, key)| add_scaled(out, *weight, &v[key * dim_v..][..dim_v]));

            let mut dweights = vec![zero; seqlen_k];
            products(dout, &v_transposed, seqlen_k, &mut dweights);
            // delta comes from the stored O, as in the backward pass.
            let delta = dout.iter().zip(&*out).fold(zero, |sum, (dout, out)| sum + *dout * round(*out)) - dlse;
            if let Some(sink) = sink {
                let weight = (sink - top).exp() / sum;
                this.dsink += zero - weight * delta;
                let terms = dout.iter().zip(&*out).map(|(dout, out)| weight.wide() * dout.wide() * out.wide());
                let of_row = terms.fold([0.0, 0.0], |[sum, squares], term| [sum + term.abs(), squares + term * term]);
                this.magnitudes.dsinks += of_row[0] + weight.wide() * dlse.wide().abs();
                this.magnitudes.dsinks_deviation = this.magnitudes.dsinks_deviation.hypot(of_row[1].sqrt());
            }
            let dq = &mut this.dq[row * dim..][..dim];
            let mut dq_terms = 0.0;
            let (q_largest, dout_largest) = (largest(q), largest(dout));
            let mut score_sizes = vec![0.0; seqlen_k];
            products(&sizes_of(q), &k_sizes, seqlen_k, &mut score_sizes);
            for (at, key) in keys.iter().copied().enumerate() {
                let dweight = round(round(dweights[key]) * keeps(row, key));
                let dscore = round(weights[at] * (dweight - delta));
                let term = weights[at].wide() * (dweight.wide().abs() + delta.wide().abs());
                if case.extras.dbias {
                    this.dscores.push((row, key, dscore, term));
                }
                let dscore = round(dscore * slopes[at]);
                add_scaled(dq, scale * dscore, &k[key * dim..][..dim]);
                add_scaled(&mut this.dk[key * dim..][..dim], scale * dscore, q);
                add_scaled(&mut this.dv[key * dim_v..][..dim_v], kept[at], dout);
                let term = scale.wide().abs() * term;
                dq_terms += term * k_largest[key];
                dk_terms[key] += term * q_largest;
                dv_terms[key] += kept[at].wide() * dout_largest;
                let score = score_sizes[key] * scale.wide().abs() + modifier.magnitude(row, key);
                this.magnitudes.score = this.magnitudes.score.max(score);
            }
            this.magnitudes.dq = this.magnitudes.dq.max(dq_terms);
        }
        this.magnitudes.dk = dk_terms.into_iter().fold(0.0, f64::max);
        this.magnitudes.dv = dv_terms.into_iter().fold(0.0, f64::max);
        this
    }
}

/// `sums[j] += sum over c of row[c] * transposed[c, j]`. A row of `transposed` has `pitch` keys;
/// only the first `sums.len()` count.
fn products<R: Real>(row: &[R], transposed: &[R], pitch: usize, sums: &mut [R]) {
    row.iter().zip(transposed.chunks(pitch.max(1))).for_each(|(factor, column)| add_scaled(sums, *factor, column));
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
