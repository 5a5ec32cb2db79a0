//! Forward passes whose keys are split among CTAs although queries are many, on a GPU of compute
//! capability 9.0: every feature with several numbers of splits, against the reference. Tiles have
//! pieces without blocks, and rows see none of a piece's keys.

use crate::support::case::Case;
use crate::support::check::Prepared;
use crate::support::extras::{Extras, Sides, Spread};
use crate::support::scores;
use crate::support::subject::Subject;
use flashtune::config::{Config, Family};
use flashtune::family;
use flashtune::problem::{Causal, Dtype, Pass, Window};
use rayon::prelude::*;

/// The GPU, if it has the kernels that split.
fn subject() -> Option<Subject> {
    let subject = Subject::gpu()?;
    let is_served = !configs(&subject, &plain(Dtype::Bf16, 64)).is_empty();
    if !is_served {
        eprintln!("SKIPPED: the GPU has no kernels that split the keys of many queries");
    }
    is_served.then_some(subject)
}

/// Lengths of keys on the device.
const LENGTHS: Sides = Sides { q: false, k: true };

/// Eight splits of at least 256 keys at most. The last tiles of queries and keys are ragged.
fn plain(dtype: Dtype, head_dim: i64) -> Case {
    Case { num_heads_q: 4, num_heads_kv: 2, seqlen_k: 2071, seed: 77, ..Case::plain(dtype, 333, head_dim) }
}

/// Configs of the sm90 family with keys split and with other tiles.
fn configs(subject: &Subject, case: &Case) -> Vec<Config> {
    let (problem, device) = (case.problem(Pass::Forward), subject.backend.device());
    let own = family::heuristics(&problem, device).into_iter().filter(|config| config.family == Family::Sm90);
    let of_splits = |config: Config| {
        [2, 3, 5, 8].map(|num_splits| config.clone().with("num_splits", num_splits).with("tma_store", 0))
    };
    let of_rows = |config: Config| [64, 128].map(|block_m| config.clone().with("block_m", block_m));
    let all = own.flat_map(of_splits).flat_map(of_rows);
    all.filter(|config| family::check(&problem, config, device).is_ok()).collect()
}

fn agree(cases: Vec<Case>) {
    let Some(subject) = subject() else { return };
    cases.par_iter().for_each(|case| {
        let configs = configs(&subject, case);
        assert!(configs.len() >= 3, "{case}: {} configs split the keys", configs.len());
        let prepared = Prepared::new(case);
        for config in configs {
            let first = prepared.forward(&subject, &config);
            let again = subject.forward(case, &prepared.data, &config);
            assert!(again == first, "the second run differs: {case}, {config}");
        }
    });
}

fn both_dtypes(of: impl Fn(Dtype) -> Vec<Case>) -> Vec<Case> {
    [Dtype::Bf16, Dtype::Fp16].into_iter().flat_map(of).collect()
}

#[test]
fn prefill_splits_agree_at_every_kind_of_head_dim() {
    agree(both_dtypes(|dtype| {
        let dims = [(40, 40), (64, 64), (72, 72), (128, 128), (192, 128), (64, 160), (256, 256)];
        let of = |((head_dim, head_dim_v), causal)| Case { head_dim_v, causal, ..plain(dtype, head_dim) };
        dims.into_iter()
            .flat_map(|dims| [Causal::None, Causal::BottomRight].map(|causal| (dims, causal)))
            .map(of)
            .collect()
    }));
}

/// With top-left causality, and with more queries than keys, many rows see no key of most pieces.
#[test]
fn prefill_splits_agree_where_rows_see_none_of_a_piece() {
    agree(both_dtypes(|dtype| {
        let square = Case { num_heads_q: 1, num_heads_kv: 1, seqlen_q: 2071, ..plain(dtype, 64) };
        let more_queries = Case { seqlen_q: 2500, seqlen_k: 1300, ..square.clone() };
        let window = Extras { window: Window { left: Some(200), ..Window::default() }, ..Extras::default() };
        let both = Extras { window: Window { left: Some(300), right: Some(90), top_left: true }, ..Extras::default() };
        vec![
            Case { causal: Causal::TopLeft, ..plain(dtype, 128) },
            Case { causal: Causal::BottomRight, ..square.clone() },
            Case { causal: Causal::BottomRight, ..more_queries.clone() },
            Case { causal: Causal::BottomRight, extras: window, ..square },
            Case { extras: both, ..more_queries },
        ]
    }));
}

#[test]
fn prefill_splits_agree_with_every_feature() {
    agree(both_dtypes(|dtype| {
        let none = Extras::default();
        let window = Window { left: Some(700), ..Window::default() };
        let extras = [
            Extras { sinks: true, ..none },
            Extras { softcap: 15.0, alibi: Some(Spread::of("h")), ..none },
            Extras { bias: Some(Spread::of("hqk")), sinks: true, ..none },
            Extras { mask: Some(Spread::of("bqk")), ..none },
            Extras { mask: Some(Spread::of("bqk")), mask_bits: true, window, ..none },
            Extras { cu_seqlens: Sides::BOTH, ..none },
            Extras { seqused: Sides::BOTH, window, sinks: true, ..none },
            Extras { seqused: LENGTHS, ..none },
            Extras { seqused: LENGTHS, page_size: Some(16), ..none },
            Extras { seqused: LENGTHS, page_size: Some(5), window, ..none },
        ];
        let of = |causal, dropout_p, extras: Extras| {
            let is_varlen = extras.cu_seqlens.k || extras.seqused.k;
            let batch_size = if is_varlen { 5 } else { 1 };
            Case { causal, dropout_p, batch_size, extras, ..plain(dtype, 64) }
        };
        let alone = extras.map(|extras| of(Causal::BottomRight, 0.0, extras));
        let dropped = [none, extras[0], extras[2]].map(|extras| of(Causal::None, 0.2, extras));
        alone.into_iter().chain(dropped).collect()
    }));
}

/// The recomputation of rows whose stale maximum failed sees the keys of its own piece alone.
#[test]
fn prefill_splits_survive_adversarial_scores() {
    let Some(subject) = subject() else { return };
    let plain = plain(Dtype::Bf16, 64);
    let shapes = [
        plain.clone(),
        Case { causal: Causal::BottomRight, ..plain.clone() },
        Case { causal: Causal::TopLeft, seqlen_q: 1500, ..plain.clone() },
        Case { softmax_scale: -0.1, ..plain },
    ];
    let cases: Vec<_> = shapes.iter().flat_map(scores::profiled).collect();
    cases.into_par_iter().for_each(|(name, case, data)| {
        let prepared = Prepared::with(&case, data);
        for config in configs(&subject, &case) {
            let got = subject.forward(&case, &prepared.data, &config);
            prepared
                .judge_forward(false, &got)
                .unwrap_or_else(|reason| panic!("{name}: {reason}\n  {case}\n  {config}"));
        }
    });
}

/// A launch with room for one split takes the kernel's own epilogue.
#[test]
fn prefill_splits_of_a_config_give_way_to_a_short_problem() {
    let Some(subject) = subject() else { return };
    let extras = Extras { sinks: true, ..Extras::default() };
    let long = Case { causal: Causal::BottomRight, extras, ..plain(Dtype::Bf16, 64) };
    let config = configs(&subject, &long).pop().expect("the long case has configs that split");
    for (seqlen_k, max_splits) in [(200, 1), (600, 2), (1000, 3)] {
        let case = Case { seqlen_k, ..long.clone() };
        assert_eq!(case.problem(Pass::Forward).max_splits(), max_splits);
        Prepared::new(&case).forward(&subject, &config);
    }
}

/// Configs that split some tiles of a head and leave others whole, which need more tiles than the
/// GPU has SMs. The last ones are ragged.
fn agree_on_some_tiles(causal: Causal, head_dims: [i64; 3], extras: Extras) {
    let Some(subject) = subject() else { return };
    let device = subject.backend.device();
    // The workspace has room for the states of heads with 134 tiles of 64 rows or more.
    let seqlen_q = (64 * 67 - 9).max(64 * (i64::from(device.sm_count) + 3) / 2);
    let seqlen_k = if causal == Causal::None { 523 } else { seqlen_q };
    for head_dim in head_dims {
        let plain = Case::plain(Dtype::Bf16, seqlen_q, head_dim);
        // Sequences may have fewer keys than the host assumes.
        let (batch_size, num_heads_q) = if extras.seqused.k { (2, 1) } else { (1, 2) };
        let case = Case { batch_size, num_heads_q, num_heads_kv: 1, seqlen_k, causal, extras, ..plain };
        let problem = case.problem(Pass::Forward);
        let own = family::heuristics(&problem, device).into_iter().filter(|config| config.family == Family::Sm90);
        let of_rows = |config: Config| [64, 128, 256].map(|block_m| config.clone().with("block_m", block_m));
        let of_splits = |config: Config| [2, 3, 5].map(|splits| config.clone().with("num_splits", splits));
        let some = |config: Config| config.with("splits_rest", 1).with("tma_store", 0);
        let configs: Vec<Config> = own.flat_map(of_rows).flat_map(of_splits).map(some).collect();
        let fits = |config: &&Config| family::check(&problem, config, device).is_ok();
        let fitting: Vec<&Config> = configs.iter().filter(fits).take(3).collect();
        assert!(!fitting.is_empty(), "{case}");
        let prepared = Prepared::new(&case);
        for config in fitting {
            let first = prepared.forward(&subject, config);
            let again = subject.forward(&case, &prepared.data, config);
            assert!(again == first, "the second run differs: {case}, {config}");
        }
    }
}

#[test]
fn prefill_splits_of_the_last_tiles_agree() {
    agree_on_some_tiles(Causal::None, [64, 96, 256], Extras::default());
}

#[test]
fn prefill_splits_of_the_longest_tiles_agree() {
    agree_on_some_tiles(Causal::BottomRight, [64, 128, 192], Extras::default());
}

#[test]
fn prefill_splits_of_some_tiles_agree_with_lengths_on_the_device() {
    let lengths = Extras { seqused: LENGTHS, ..Extras::default() };
    agree_on_some_tiles(Causal::BottomRight, [64, 128, 256], lengths);
    agree_on_some_tiles(Causal::None, [64, 128, 192], lengths);
}

#[test]
fn prefill_splits_of_some_tiles_agree_over_pages() {
    let pages = |page_size| Extras { seqused: LENGTHS, page_size: Some(page_size), ..Extras::default() };
    agree_on_some_tiles(Causal::BottomRight, [64, 128, 256], pages(16));
    agree_on_some_tiles(Causal::None, [48, 128, 192], pages(64));
}
