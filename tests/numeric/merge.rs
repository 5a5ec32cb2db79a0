//! Merging partial results on the CPU and, if there is one, a GPU, compared with attention over all
//! keys. Partial outputs hold NaN where their LSE is -inf, and canaries surround the output.

use crate::support::buffer::{Array, Buffer, GUARD, encode, upload};
use crate::support::case::{Case, Data, Kind, Random, Strides};
use crate::support::check::Prepared;
use crate::support::subject::{Forward, Subject};
use flashtune::call::TensorRef;
use flashtune::ops::merge::{Merge, MergeClass};
use flashtune::problem::{Causal, Dtype, Layout, Pass};
use rayon::prelude::*;

/// The CPU backend, and the GPU if there is one.
fn subjects() -> Vec<Subject> {
    [Subject::cpu(2)].into_iter().chain(Subject::gpu()).collect()
}

/// Merges partial results that lie one behind the other, each in the case's strides.
fn merged(subject: &Subject, case: &Case, partials: &[Forward], partial_dtype: Dtype) -> Forward {
    let (backend, shape) = (&subject.backend, case.shape(Kind::Out));
    let (stride, size) = ((shape.span() + 8) as i64 / 8 * 8, partial_dtype.bytes());
    let mut bytes = encode(partial_dtype, f32::NAN).repeat(partials.len() * stride as usize + GUARD);
    for (index, partial) in partials.iter().enumerate() {
        for (at, (row, values)) in shape.rows().zip(partial.out.chunks(shape.dim as usize)).enumerate() {
            let (b, s, h) = place(case, at);
            if partial.lse[case.lse_begin(b, h) + s] != f32::NEG_INFINITY {
                let encoded: Vec<u8> = values.iter().flat_map(|value| encode(partial_dtype, *value)).collect();
                bytes[(index * stride as usize + row) * size..][..encoded.len()].copy_from_slice(&encoded);
            }
        }
    }
    let memory = upload(backend, &bytes);
    let partial_out = TensorRef {
        data: memory.address().wrapping_byte_add(shape.lead as usize * size),
        stride_batch: shape.stride_batch,
        stride_seqlen: shape.stride_seqlen,
        stride_head: shape.stride_head,
    };
    let lse_stride = case.lse_len() + 3;
    let with_gap = |partial: &Forward| partial.lse.iter().copied().chain([f32::NAN; 3]).collect::<Vec<_>>();
    let partial_lse = Array::input(backend, &partials.iter().flat_map(with_gap).collect::<Vec<_>>());
    let (out, lse) = (Buffer::output(backend, case, Kind::Out), Array::output(backend, case.lse_len() * 4));
    let quantities = [shape.lead, shape.dim, shape.stride_batch, shape.stride_seqlen, shape.stride_head, stride];
    let layout = Layout::widest(case.dtype, quantities).max(Layout::Vec4);
    let merge = Merge {
        class: MergeClass { dtype: case.dtype, partial_dtype, layout },
        num_partials: partials.len() as i64,
        batch_size: case.batch_size,
        seqlen: case.seqlen_q,
        num_heads: case.num_heads_q,
        head_dim_v: case.head_dim_v,
        partial_out,
        partial_out_stride: stride,
        partial_lse: partial_lse.address().cast_const().cast(),
        partial_lse_stride: lse_stride as i64,
        out: out.view(),
        lse: lse.address().cast(),
    };
    let executable = backend.build_op(&merge).unwrap();
    executable.launch(&merge, backend.stream()).and_then(|()| backend.synchronize()).unwrap();
    Forward { out: out.read_output(backend, "out"), lse: lse.read_output(backend, "lse", None) }
}

/// Batch entry, position and head of a row.
fn place(case: &Case, row: usize) -> (usize, usize, usize) {
    let (heads, seqlen) = (case.num_heads_q as usize, case.seqlen_q as usize);
    (row / heads / seqlen, row / heads % seqlen, row % heads)
}

/// Attention over the keys from `begin` to `end` alone.
fn over(subject: &Subject, case: &Case, data: &Data, begin: i64, end: i64) -> Forward {
    let part = Case { seqlen_k: end - begin, ..case.clone() };
    let of_keys = |values: &[f32], dim: i64| -> Vec<f32> {
        let row = (case.num_heads_kv * dim) as usize;
        let of_entry = |entry: &[f32]| entry[begin as usize * row..end as usize * row].to_vec();
        values.chunks(case.seqlen_k as usize * row).flat_map(of_entry).collect()
    };
    let (k, v) = (of_keys(&data.k, case.head_dim), of_keys(&data.v, case.head_dim_v));
    let data = Data { k, v, ..data.clone() };
    subject.forward(&part, &data, &subject.heuristic(&part, Pass::Forward))
}

#[test]
fn attention_over_parts_of_the_keys_merges_into_attention_over_all_of_them() {
    for subject in subjects() {
        let strides = [Strides::Bshd, Strides::Bhsd, Strides::Gaps, Strides::OddGaps];
        let cases = subject.dtypes().iter().flat_map(|dtype| strides.map(|strides| (*dtype, strides)));
        cases.collect::<Vec<_>>().par_iter().for_each(|(dtype, strides)| {
            let case = Case {
                batch_size: 2,
                num_heads_q: 4,
                num_heads_kv: 2,
                seqlen_k: 300,
                strides: *strides,
                causal: Causal::None,
                ..Case::plain(*dtype, 5, 72)
            };
            let prepared = Prepared::new(&case);
            // The second part has no keys.
            let ends = [0, 100, 100, 190, 300];
            let partials: Vec<Forward> =
                ends.windows(2).map(|ends| over(&subject, &case, &prepared.data, ends[0], ends[1])).collect();
            assert!(partials[1].lse.iter().all(|lse| *lse == f32::NEG_INFINITY));
            for partial_dtype in [*dtype, Dtype::Fp32] {
                let got = merged(&subject, &case, &partials, partial_dtype);
                prepared.judge_forward(false, &got).unwrap_or_else(|reason| panic!("{reason}: {case}"));
            }
        });
    }
}

#[test]
fn rows_that_no_partial_sees_are_zero() {
    for subject in subjects() {
        let case = Case { num_heads_q: 3, num_heads_kv: 3, ..Case::plain(Dtype::Bf16, 70, 40) };
        let nothing = Forward {
            out: vec![f32::NAN; case.shape(Kind::Out).elements()],
            lse: vec![f32::NEG_INFINITY; case.lse_len()],
        };
        let got = merged(&subject, &case, &vec![nothing; 3], Dtype::Fp32);
        assert!(got.out.iter().all(|x| *x == 0.0) && got.lse.iter().all(|lse| *lse == f32::NEG_INFINITY));
    }
}

#[test]
fn many_partials_of_any_weight_merge_right_on_every_backend() {
    let case = Case { batch_size: 2, num_heads_q: 3, num_heads_kv: 3, ..Case::plain(Dtype::Bf16, 9, 33) };
    let mut random = Random::new(8);
    let partials: Vec<Forward> = (0..70)
        .map(|_| Forward {
            out: (0..case.shape(Kind::Out).elements()).map(|_| random.normal()).collect(),
            lse: (0..case.lse_len()).map(|_| random.pick(&[1.0, 20.0, -90.0]) * random.normal()).collect(),
        })
        .collect();
    let results: Vec<Forward> =
        subjects().iter().map(|subject| merged(subject, &case, &partials, Dtype::Fp32)).collect();
    // The expected values, in fp64 by the definition.
    let rows = results.iter().flat_map(|result| result.out.chunks(33).enumerate().map(move |row| (result, row)));
    for (result, (row, got)) in rows {
        let (b, s, h) = place(&case, row);
        let weights: Vec<f64> =
            partials.iter().map(|partial| f64::from(partial.lse[case.lse_begin(b, h) + s]).exp()).collect();
        let sum: f64 = weights.iter().sum();
        for (c, x) in got.iter().enumerate() {
            let of_partial = partials.iter().map(|partial| f64::from(partial.out[row * 33 + c]));
            let exact: f64 = of_partial.zip(&weights).map(|(o, weight)| o * weight / sum).sum();
            assert!((f64::from(*x) - exact).abs() <= 0.005 * exact.abs() + 1e-4, "{x}, exactly {exact}");
        }
        let lse = f64::from(result.lse[case.lse_begin(b, h) + s]);
        assert!((lse - sum.ln()).abs() < 1e-4, "{lse}, exactly {}", sum.ln());
    }
}
