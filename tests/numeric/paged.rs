//! The paged K/V cache on the CPU and, if there is one, a GPU: against the reference and against
//! the same keys without pages. Every row of a page that holds no key is a trap.

use crate::support::buffer::Array;
use crate::support::case::{Case, Data};
use crate::support::check::Prepared;
use crate::support::extras::{Extras, Sides, Spread};
use crate::support::shapes;
use crate::support::subject::Subject;
use flashtune::call::Call;
use flashtune::problem::{Causal, Dtype, Pass, Window};
use rayon::prelude::*;

/// The CPU backend, and the GPU if there is one.
fn subjects() -> Vec<Subject> {
    [Subject::cpu(2)].into_iter().chain(Subject::gpu()).collect()
}

fn without_pages(case: &Case) -> Case {
    Case { extras: Extras { page_size: None, ..case.extras }, ..case.clone() }
}

/// A decode step with one K/V head for four query heads and a K/V length for each sequence.
fn decode(dtype: Dtype, page_size: i64) -> Case {
    Case {
        batch_size: 3,
        num_heads_q: 8,
        num_heads_kv: 2,
        seqlen_k: 700,
        extras: Extras { seqused: Sides { q: false, k: true }, page_size: Some(page_size), ..Extras::default() },
        ..Case::plain(dtype, 1, 64)
    }
}

/// Several queries that see different keys, with other features that paging combines with.
fn several(dtype: Dtype) -> [Case; 2] {
    let of = |causal, seqlen_q, page_size, extras: Extras| {
        let decode = decode(dtype, page_size);
        let extras = Extras { seqused: Sides { q: false, k: true }, page_size: Some(page_size), ..extras };
        Case { causal, seqlen_q, extras, ..decode }
    };
    let window = Window { left: Some(150), ..Window::default() };
    let of_scores = Extras { window, softcap: 15.0, alibi: Some(Spread::of("h")), ..Extras::default() };
    let bias = Some(Spread::of("hk"));
    [of(Causal::BottomRight, 5, 16, of_scores), of(Causal::None, 70, 100, Extras { bias, sinks: true, ..of_scores })]
}

/// A prompt's chunk of many queries.
fn prefill(dtype: Dtype, page_size: i64, head_dim: i64) -> Case {
    let softmax_scale = (head_dim as f32).powf(-0.5);
    let dims = Case { head_dim, head_dim_v: head_dim, softmax_scale, ..decode(dtype, page_size) };
    Case { causal: Causal::BottomRight, seqlen_q: 100, seqlen_k: 300, ..dims }
}

fn agree_with_the_reference(cases: impl Fn(&Subject) -> Vec<Case>, extra: usize) {
    for subject in subjects() {
        cases(&subject).par_iter().for_each(|case| {
            let prepared = Prepared::new(case);
            for config in subject.configs(case, Pass::Forward, extra) {
                prepared.forward(&subject, &config);
            }
        });
    }
}

#[test]
fn paged_keys_agree_with_the_reference() {
    agree_with_the_reference(|subject| shapes::paged(subject.dtypes(), 60, 300, 4000), 1);
}

#[test]
fn many_queries_over_pages_agree_with_the_reference() {
    agree_with_the_reference(|subject| shapes::paged_prefill(subject.dtypes()), 1);
}

/// Chunks of prompts and single tokens in one call, with lengths that the device alone knows.
fn mixed(dtype: Dtype, page_size: i64, head_dim: i64) -> Case {
    let of_sequences = Sides { q: true, k: false };
    let prefill = prefill(dtype, page_size, head_dim);
    Case { batch_size: 9, extras: Extras { cu_seqlens: of_sequences, ..prefill.extras }, ..prefill }
}

#[test]
fn batches_of_long_and_short_sequences_agree_with_the_reference() {
    let window = Window { left: Some(20), ..Window::default() };
    let cases = |subject: &Subject| {
        let of = |(index, dtype): (usize, &Dtype)| {
            let [first, second] = [(16, 64), (64, 128)].map(|(page_size, dim)| mixed(*dtype, page_size, dim));
            let extras = Extras { window, sinks: true, softcap: 9.0, ..second.extras };
            // Only short sequences, more than the walk past them looks at side by side.
            let short = Extras { alone: Some([2, 150]), ..first.extras };
            let all_short = Case { batch_size: 21, extras: short, ..first.clone() };
            let second = Case { num_heads_kv: [1, 2][index % 2], extras, ..second };
            [Case { num_heads_kv: 8, ..first }, all_short, second]
        };
        subject.dtypes().iter().enumerate().flat_map(of).collect()
    };
    agree_with_the_reference(cases, 0);
}

#[test]
fn pages_do_not_change_the_bits_of_the_result() {
    const PAGE_SIZES: [i64; 9] = [1, 3, 8, 16, 24, 48, 64, 100, 1000];
    for subject in subjects() {
        let one = PAGE_SIZES.map(|page_size| decode(subject.dtypes()[0], page_size));
        let several = subject.dtypes().iter().flat_map(|dtype| several(*dtype));
        let many = PAGE_SIZES.iter().enumerate().map(|(index, page_size)| {
            prefill(subject.dtypes()[index % subject.dtypes().len()], *page_size, [64, 128][index % 2])
        });
        for case in one.into_iter().chain(several).chain(many) {
            let (data, contiguous) = (Data::random(&case), without_pages(&case));
            for config in subject.configs(&case, Pass::Forward, 0) {
                // Another kernel takes few queries over pages, and sums in another order.
                let config = match config.get("decode_rows") {
                    Some(_) => config.with("decode_rows", 0).with("decode_splits", 0),
                    None => config,
                };
                let expected = subject.forward(&contiguous, &data, &config);
                assert!(subject.forward(&case, &data, &config) == expected, "{case}, {config}");
            }
        }
    }
}

#[test]
fn any_number_of_splits_agrees_with_the_reference() {
    let Some(subject) = Subject::gpu() else { return };
    for dtype in [Dtype::Fp16, Dtype::Bf16] {
        let prepared = Prepared::new(&decode(dtype, 16));
        let config = subject.heuristic(&prepared.case, Pass::Forward);
        for num_splits in [1, 2, 3, 5, 8, 10] {
            prepared.forward(&subject, &config.clone().with("num_splits", num_splits));
        }
    }
}

/// The host cannot check the block table. An invalid entry must not make the kernel read outside of
/// the pages.
#[test]
fn block_table_entry_out_of_range_reads_the_last_page() {
    let Some(subject) = Subject::gpu() else { return };
    for paged in [decode(Dtype::Bf16, 16), prefill(Dtype::Bf16, 16, 64), prefill(Dtype::Bf16, 12, 64)] {
        let no_lengths = Extras { seqused: Sides::default(), ..paged.extras };
        let case = Case { causal: Causal::None, extras: no_lengths, ..paged };
        let data = Data::random(&case);
        let configs = subject.configs(&case, Pass::Forward, 0);
        for (config, wrong) in configs.iter().flat_map(|config| [(config, i32::MAX), (config, -1)]) {
            let mut table = case.block_table();
            table[0] = wrong;
            let table = Array::input_int32(&subject.backend, &table);
            let with_table = |call: &mut Call| call.features.block_table = table.address().cast_const().cast();
            let got = subject.forward_with(&case, &data, with_table, config);
            let (first, others) = got.out.split_at((case.seqlen_q * case.num_heads_q * case.head_dim_v) as usize);
            // No sequence uses the last page, so it holds NaN.
            assert!(first.iter().all(|x| x.is_nan()) && others.iter().all(|x| x.is_finite()), "{wrong}: {config}");
        }
    }
}
