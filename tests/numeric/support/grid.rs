//! A thinned form of the grid in FlashAttention's tests. Its axes are lengths, head dims, head
//! ratios and masks, and window, softcap, ALiBi, dropout and deterministic, each on and off. Any
//! two values of different axes meet at least once, in far fewer problems than the full product.

use super::case::Case;
use super::extras::{Extras, Spread};
use super::shapes::{MASKS, unless_one_is_given};
use flashtune::problem::{Causal, Dtype, Window};
use std::collections::BTreeSet;

/// (seqlen_q, seqlen_k).
pub const LENGTHS: [(i64, i64); 7] =
    [(113, 203), (128, 217), (108, 256), (64, 128), (256, 512), (512, 256), (113, 211)];
pub const LONG: [(i64, i64); 2] = [(1023, 1024), (2048, 2048)];
pub const HEAD_DIMS: [i64; 12] = [32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256];
/// MHA, MQA, GQA.
const HEADS: [(i64, i64); 3] = [(2, 2), (2, 1), (4, 2)];

/// Cases for these lengths and head dims, thinned over all axes.
pub fn thinned(dtypes: &[Dtype], lengths: &[(i64, i64)], head_dims: &[i64]) -> Vec<Case> {
    let axes = [head_dims.len(), lengths.len(), MASKS.len(), HEADS.len(), dtypes.len(), 2, 2, 2, 2, 2];
    let of = |(index, point): (usize, Vec<usize>)| {
        let [dim, length, mask, heads, dtype, ref switches @ ..] = point[..] else { unreachable!() };
        let [has_window, has_softcap, has_slopes, has_dropout, deterministic] =
            [0, 1, 2, 3, 4].map(|at| switches[at] == 1);
        let (seqlen_q, seqlen_k) = lengths[length];
        let causal = MASKS[mask];
        let right = if causal == Causal::None { Some(seqlen_k / 8) } else { None };
        let window = Window { left: Some(seqlen_k / 5), right, top_left: causal == Causal::TopLeft };
        Case {
            num_heads_q: HEADS[heads].0,
            num_heads_kv: HEADS[heads].1,
            seqlen_k,
            causal,
            dropout_p: if has_dropout { 0.17 } else { 0.0 },
            deterministic,
            seed: 170 + index as u64,
            extras: Extras {
                window: if has_window { window } else { Window::default() },
                softcap: if has_softcap { 15.0 } else { 0.0 },
                alibi: has_slopes.then_some(Spread::of("h")),
                ..Extras::default()
            },
            ..Case::plain(dtypes[dtype], seqlen_q, head_dims[dim])
        }
    };
    unless_one_is_given(covering(&axes).into_iter().enumerate().map(of).collect())
}

/// fp32 cases whose ALiBi term puts the scores of some rows 100 and more below 0. Those rows see
/// keys at the top left, but distances count from the bottom right. The rounding of such a row's
/// LSE enters all of its weights, and a small softcap amplifies it.
pub fn far_below() -> Vec<Case> {
    let of = |((seqlen_q, head_dim, seed), softcap)| {
        let window = Window { left: Some(51), right: None, top_left: true };
        Case {
            num_heads_q: 4,
            num_heads_kv: 2,
            seqlen_k: 256,
            causal: Causal::TopLeft,
            dropout_p: 0.17,
            deterministic: true,
            seed,
            extras: Extras { window, softcap, alibi: Some(Spread::of("h")), ..Extras::default() },
            ..Case::plain(Dtype::Fp32, seqlen_q, head_dim)
        }
    };
    let shapes = [(512, 128, 224), (108, 224, 242)];
    unless_one_is_given(
        shapes.into_iter().flat_map(|shape| [15.0, 1.0].map(|softcap| (shape, softcap))).map(of).collect(),
    )
}

/// Points of a grid whose axes have the given numbers of values, so that any two values of
/// different axes meet in some point. Each point starts from the first pair that has not met. On
/// every other axis it takes the value that makes the most new pairs.
fn covering(axes: &[usize]) -> Vec<Vec<usize>> {
    let pair = |one: (usize, usize), other: (usize, usize)| (one.min(other), one.max(other));
    let mut missing = BTreeSet::new();
    for (first, second) in (0..axes.len()).flat_map(|second| (0..second).map(move |first| (first, second))) {
        let values = (0..axes[first]).flat_map(|one| (0..axes[second]).map(move |other| (one, other)));
        missing.extend(values.map(|(one, other)| pair((first, one), (second, other))));
    }
    let mut points: Vec<Vec<usize>> = Vec::new();
    while let Some((one, other)) = missing.first().copied() {
        let mut chosen = vec![one, other];
        for (axis, count) in axes.iter().copied().enumerate() {
            if chosen.iter().any(|(of, _)| *of == axis) {
                continue;
            }
            let anew = |value| chosen.iter().filter(|at| missing.contains(&pair(**at, (axis, value)))).count();
            // Among equally good values, each point prefers another one.
            let best = (0..count).max_by_key(|value| (anew(*value), (value + points.len()) % count));
            chosen.push((axis, best.expect("an axis has values")));
        }
        chosen.sort();
        missing.retain(|(one, other)| !(chosen.contains(one) && chosen.contains(other)));
        points.push(chosen.into_iter().map(|(_, value)| value).collect());
    }
    points
}
