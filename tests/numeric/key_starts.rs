//! A K/V cache whose entries an array names, with padding before each sequence's first key: on the
//! CPU and, if there is one, a GPU. Each row that holds no key of a sequence is a trap.

use crate::support::case::{Case, Data, Random, Strides};
use crate::support::check::Prepared;
use crate::support::extras::{Extras, Sides, Spread};
use crate::support::subject::Subject;
use flashtune::problem::{Causal, Dtype, Pass, Window};
use rayon::prelude::*;

/// The CPU backend, and the GPU if there is one.
fn subjects() -> Vec<Subject> {
    [Subject::cpu(2)].into_iter().chain(Subject::gpu()).collect()
}

/// Few and many queries, with features that count keys from the sequence's first.
fn cases(dtype: Dtype) -> Vec<Case> {
    let mut random = Random::new(77);
    let mut cases = Vec::new();
    let window = Window { left: Some(40), ..Window::default() };
    let bias = Some(Spread::of("hqk"));
    for (seed, seqlen_q) in [1, 1, 3, 16, 70, 130].into_iter().enumerate() {
        for extras in [
            Extras::default(),
            Extras { window, alibi: Some(Spread::of("h")), ..Extras::default() },
            Extras { bias, sinks: true, softcap: 20.0, ..Extras::default() },
            Extras { mask: Some(Spread::of("bk")), ..Extras::default() },
        ] {
            let (seed, dim) = (seed as u64 * 10 + cases.len() as u64, random.pick(&[64, 128, 40]));
            cases.push(Case {
                batch_size: random.between(1, 5),
                num_heads_q: 4,
                num_heads_kv: random.pick(&[1, 2, 4]),
                seqlen_q,
                seqlen_k: random.pick(&[1, 130, 400, 700]),
                causal: random.pick(&[Causal::None, Causal::BottomRight]),
                strides: random.pick(&[Strides::Bshd, Strides::Gaps, Strides::OddGaps]),
                extras: Extras { key_starts: true, seqused: Sides { q: false, k: true }, ..extras },
                seed,
                ..Case::plain(dtype, 1, dim)
            });
        }
    }
    cases
}

#[test]
fn keys_from_a_start_of_their_own_agree_with_the_reference() {
    for subject in subjects() {
        for dtype in [Dtype::Bf16, Dtype::Fp16, Dtype::Fp32] {
            cases(dtype).par_iter().for_each(|case| {
                Prepared::new(case).forward(&subject, &subject.heuristic(case, Pass::Forward));
            });
        }
    }
}

#[test]
fn the_bits_are_those_of_the_same_keys_in_a_cache_of_their_own() {
    let subject = Subject::cpu(2);
    for case in cases(Dtype::Bf16) {
        let (data, config) = (Data::random(&case), subject.heuristic(&case, Pass::Forward));
        let own = Case { extras: Extras { key_starts: false, ..case.extras }, ..case.clone() };
        assert!(subject.forward(&case, &data, &config) == subject.forward(&own, &data, &config), "{case}");
    }
}
