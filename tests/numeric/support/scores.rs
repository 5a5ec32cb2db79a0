//! Scores that are hard on an online softmax: they rise, fall, jump and alternate by far more than
//! a block's maximum can follow. The first column of Q is 1, so the first column of K adds a chosen
//! score to the random ones.

use super::case::{Case, Data, round_to};
use flashtune::problem::{Causal, Dtype};

pub const SEQLEN_K: i64 = 700;

/// The score of a key in powers of two.
type Profile = fn(i64) -> f32;

const PROFILES: &[(&str, Profile)] = &[
    ("rising by 1 a key", |key| key as f32),
    ("falling by 1 a key", |key| -(key as f32)),
    ("rising by 2^40 a block of 64", |key| (key / 64 * 40) as f32),
    ("falling by 2^40 a block of 64", |key| -(key / 64 * 40) as f32),
    ("one key far above the rest", |key| if key == 123 { 250.0 } else { 0.0 }),
    ("one block far above the rest", |key| if key / 64 == 5 { 150.0 } else { -150.0 }),
    ("alternating by 2^60 up and down", |key| if key % 2 == 0 { 60.0 } else { -60.0 }),
    ("blocks alternating by 2^60 up and down", |key| if key / 64 % 2 == 0 { 60.0 } else { -60.0 }),
    ("low everywhere", |_| -300.0),
    ("near the least exponent everywhere", |_| -125.0),
    ("-inf in every other key", |key| if key % 2 == 0 { f32::NEG_INFINITY } else { 0.0 }),
    ("-inf in all of the last 300 keys", |key| if key >= SEQLEN_K - 300 { f32::NEG_INFINITY } else { key as f32 }),
    ("-inf everywhere but in key 0", |key| if key == 0 { 5.0 } else { f32::NEG_INFINITY }),
];

/// Shapes that reach each special case of a backend: rows whose last key ends a block of 64, GQA, a
/// head dim of half a k-step, a negative scale, dropout.
fn shapes(dtype: Dtype) -> Vec<Case> {
    let plain = Case { num_heads_q: 2, seqlen_k: SEQLEN_K, ..Case::plain(dtype, 150, 64) };
    vec![
        Case { causal: Causal::BottomRight, ..plain.clone() },
        Case { causal: Causal::BottomRight, seqlen_q: 125, ..plain.clone() },
        Case { num_heads_kv: 1, head_dim: 72, head_dim_v: 40, softmax_scale: -0.1, seqlen_q: 70, ..plain.clone() },
        Case { causal: Causal::BottomRight, dropout_p: 0.2, seqlen_q: 70, ..plain },
    ]
}

/// Each profile in each shape, with the profile's name for messages.
pub fn adversarial(dtype: Dtype) -> Vec<(&'static str, Case, Data)> {
    shapes(dtype).iter().flat_map(profiled).collect()
}

/// A case with each profile.
pub fn profiled(case: &Case) -> Vec<(&'static str, Case, Data)> {
    let of = |(name, profile): &(&'static str, Profile)| {
        let mut data = Data::random(case);
        let (dim, heads) = (case.head_dim as usize, case.num_heads_kv as usize);
        data.q.iter_mut().step_by(dim).for_each(|q| *q = 1.0);
        for (row, k) in data.k.iter_mut().step_by(dim).enumerate() {
            let score = profile((row / heads) as i64) * std::f32::consts::LN_2 / case.softmax_scale;
            *k = round_to(case.dtype, score);
        }
        (*name, case.clone(), data)
    };
    PROFILES.iter().map(of).collect()
}
