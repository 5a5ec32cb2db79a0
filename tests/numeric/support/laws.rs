//! Laws of attention that need no reference. Each takes the backend under test and a dtype.

use super::buffer::Buffer;
use super::case::{Case, Data, Kind, Random, Strides};
use super::check::Prepared;
use super::error_rule::agree;
use super::extras::{Extras, Sides, Spread};
use super::lengths::{Rows, Side};
use super::subject::{Forward, Subject};
use flashtune::backend::Backend;
use flashtune::call::TensorRef;
use flashtune::problem::{Causal, Dtype, Pass, Window};

pub type Law = fn(&Subject, Dtype);

/// Every law with its name, for callers that run them all.
pub const ALL: &[(&str, Law)] = &[
    ("ones_in_v_give_ones_out", ones_in_v_give_ones_out),
    ("output_is_linear_in_v", output_is_linear_in_v),
    ("permuting_keys_changes_nothing_unmasked", permuting_keys_changes_nothing_unmasked),
    ("a_causal_row_is_the_unmasked_row_of_its_prefix", a_causal_row_is_the_unmasked_row_of_its_prefix),
    ("gqa_is_mha_with_repeated_heads", gqa_is_mha_with_repeated_heads),
    ("broadcast_keys_equal_repeated_keys", broadcast_keys_equal_repeated_keys),
    ("the_dropout_mask_shows_in_both_passes", the_dropout_mask_shows_in_both_passes),
    ("rows_without_keys_are_zero_and_have_no_gradient", rows_without_keys_are_zero_and_have_no_gradient),
    ("no_keys_at_all_is_an_empty_softmax", no_keys_at_all_is_an_empty_softmax),
    ("nan_reaches_exactly_what_depends_on_it", nan_reaches_exactly_what_depends_on_it),
    ("configs_agree_within_rounding", configs_agree_within_rounding),
    ("extras_that_change_nothing_change_nothing", extras_that_change_nothing_change_nothing),
    ("a_bias_that_says_causal_is_causal", a_bias_that_says_causal_is_causal),
    ("a_sink_is_a_key_of_no_value", a_sink_is_a_key_of_no_value),
    ("packed_sequences_equal_one_call_each", packed_sequences_equal_one_call_each),
];

/// A masked GQA problem with tails in every dimension.
fn usual(dtype: Dtype) -> Case {
    Case {
        batch_size: 2,
        num_heads_q: 4,
        num_heads_kv: 2,
        seqlen_q: 75,
        seqlen_k: 141,
        strides: Strides::Gaps,
        ..Case::plain(dtype, 75, 64)
    }
}

fn forward(subject: &Subject, case: &Case, data: &Data) -> Forward {
    subject.forward(case, data, &subject.heuristic(case, Pass::Forward))
}

pub fn ones_in_v_give_ones_out(subject: &Subject, dtype: Dtype) {
    for causal in [Causal::None, Causal::TopLeft, Causal::BottomRight] {
        let case = Case { causal, ..usual(dtype) };
        let mut data = Data::random(&case);
        data.v.fill(1.0);
        let ones = vec![1.0; data.dout.len()];
        // Weights are rounded to the dtype but their sum is not. The error is half a step each, in
        // the worst case all in one direction.
        agree("out", &forward(subject, &case, &data).out, &ones, dtype, 1.0);
    }
}

pub fn output_is_linear_in_v(subject: &Subject, dtype: Dtype) {
    let case = Case { causal: Causal::BottomRight, ..usual(dtype) };
    let data = Data::random(&case);
    let mut random = Random::new(9);
    // Small integers make the combination exact in every dtype.
    let mut integers = || data.v.iter().map(|_| random.between(-8, 8) as f32).collect::<Vec<_>>();
    let (first, second) = (integers(), integers());
    let combine = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| 2.0 * a - b).collect::<Vec<_>>();
    let of = |v: Vec<f32>| forward(subject, &case, &Data { v, ..data.clone() }).out;
    let combined = of(combine(&first, &second));
    // Three outputs round, and one of them is doubled. The weights round the same in all.
    agree("out", &combine(&of(first), &of(second)), &combined, dtype, 2.0);
}

pub fn permuting_keys_changes_nothing_unmasked(subject: &Subject, dtype: Dtype) {
    let case = Case { batch_size: 1, num_heads_kv: 1, strides: Strides::Bshd, ..usual(dtype) };
    let data = Data::random(&case);
    let mut order: Vec<usize> = (0..case.seqlen_k as usize).collect();
    let mut random = Random::new(4);
    (1..order.len()).rev().for_each(|i| order.swap(i, random.between(0, i as i64) as usize));
    let permuted = |rows: &[f32], dim: i64| -> Vec<f32> {
        order.iter().flat_map(|row| rows[row * dim as usize..][..dim as usize].to_vec()).collect()
    };
    let other = Data { k: permuted(&data.k, case.head_dim), v: permuted(&data.v, case.head_dim_v), ..data.clone() };
    let (one, two) = (forward(subject, &case, &data), forward(subject, &case, &other));
    // Another order of keys has other running maxima, so the weights round differently.
    agree("out", &one.out, &two.out, dtype, 2.0);
    agree("lse", &one.lse, &two.lse, Dtype::Fp32, 1.0);
}

pub fn a_causal_row_is_the_unmasked_row_of_its_prefix(subject: &Subject, dtype: Dtype) {
    let causal = Case { causal: Causal::TopLeft, strides: Strides::Bshd, ..Case::plain(dtype, 130, 48) };
    let data = Data::random(&causal);
    let whole = forward(subject, &causal, &data);
    for row in [0, 1, 15, 16, 63, 64, 100, 127, 128, 129] {
        let prefix = Case { causal: Causal::None, seqlen_q: 1, seqlen_k: row as i64 + 1, ..causal.clone() };
        let of = |values: &[f32]| values[..(row + 1) * 48].to_vec();
        let own = data.q[row * 48..][..48].to_vec();
        let of_prefix = Data { q: own, k: of(&data.k), v: of(&data.v), ..Data::random(&prefix) };
        let alone = forward(subject, &prefix, &of_prefix);
        agree(&format!("row {row}"), &whole.out[row * 48..][..48], &alone.out, dtype, 2.0);
        agree(&format!("lse {row}"), &whole.lse[row..][..1], &alone.lse, Dtype::Fp32, 1.0);
    }
}

pub fn gqa_is_mha_with_repeated_heads(subject: &Subject, dtype: Dtype) {
    let grouped = Case { num_heads_q: 6, causal: Causal::BottomRight, strides: Strides::Bshd, ..usual(dtype) };
    let repeated = Case { num_heads_kv: 6, ..grouped.clone() };
    let data = Data::random(&grouped);
    let repeat =
        |values: &[f32], dim: i64| -> Vec<f32> { values.chunks(dim as usize).flat_map(|row| row.repeat(3)).collect() };
    let (k, v) = (repeat(&data.k, grouped.head_dim), repeat(&data.v, grouped.head_dim_v));
    let data_repeated = Data { k, v, ..data.clone() };
    let one = forward(subject, &grouped, &data);
    let many = forward(subject, &repeated, &data_repeated);
    agree("out", &one.out, &many.out, dtype, 1.0);
    let config = |case| subject.heuristic(case, Pass::Backward);
    let gradients = subject.backward(&grouped, &data, &one, &config(&grouped));
    let of_repeated = subject.backward(&repeated, &data_repeated, &many, &config(&repeated));
    agree("dq", &gradients.dq, &of_repeated.dq, dtype, 1.0);
    for (name, one, many, dim) in [
        ("dk", &gradients.dk, &of_repeated.dk, grouped.head_dim as usize),
        ("dv", &gradients.dv, &of_repeated.dv, grouped.head_dim_v as usize),
    ] {
        let group_sum =
            |group: &[f32]| (0..dim).map(|c| (0..3).map(|g| group[g * dim + c]).sum()).collect::<Vec<f32>>();
        let summed: Vec<f32> = many.chunks(3 * dim).flat_map(group_sum).collect();
        // Here three rounded heads are added; there the sum is rounded once.
        agree(name, one, &summed, dtype, 3.0);
    }
}

/// One K/V head may be broadcast to all heads and batch entries by strides of 0. The bits are the
/// same, because the work is.
pub fn broadcast_keys_equal_repeated_keys(subject: &Subject, dtype: Dtype) {
    let one = Case::plain(dtype, 150, 64);
    let case = Case { batch_size: 2, num_heads_q: 4, num_heads_kv: 2, ..one.clone() };
    let keys = Data::random(&one).k;
    let repeated: Vec<f32> = keys.chunks(64).flat_map(|row| row.repeat(2)).collect();
    let data = Data { k: repeated.repeat(2), ..Data::random(&case) };
    let buffer = Buffer::input(&subject.backend, &one, Kind::K, &keys);
    let view = TensorRef { stride_batch: 0, stride_head: 0, ..buffer.view() };
    let config = subject.heuristic(&case, Pass::Forward);
    let (broadcast, copied) =
        (subject.forward_with(&case, &data, |call| call.k = view, &config), subject.forward(&case, &data, &config));
    assert!(broadcast.out == copied.out && broadcast.lse == copied.lse);
}

/// With Q = K = 0 all weights are 1/seqlen_k. Then V = I makes O the mask itself, and dout = I
/// makes dV its transpose.
pub fn the_dropout_mask_shows_in_both_passes(subject: &Subject, dtype: Dtype) {
    let length = 141;
    for dropout_p in [0.1, 0.5] {
        let case = Case {
            batch_size: 2,
            num_heads_q: 2,
            num_heads_kv: 2,
            dropout_p,
            strides: Strides::Bshd,
            seed: 11,
            ..Case::plain(dtype, length, length)
        };
        let mut data = Data::random(&case);
        data.q.fill(0.0);
        data.k.fill(0.0);
        let size = length as usize;
        let identity = |kind| -> Vec<f32> {
            let heads = case.shape(kind).heads as usize;
            let element = |at: usize| f32::from(u8::from(at / (heads * size) % size == at % size));
            (0..case.shape(kind).elements()).map(element).collect()
        };
        (data.v, data.dout) = (identity(Kind::V), identity(Kind::Dout));
        let kept_weight = case.dropout().keep_scale() / length as f32;
        let expected = |transposed: bool| -> Vec<f32> {
            let at = |at: usize| {
                let (batch, position, head, c) = (at / size / 2 / size, at / size / 2 % size, at / size % 2, at % size);
                let (row, key) = if transposed { (c, position) } else { (position, c) };
                let keeps = case.dropout_mask(batch, head).keeps(row as u32, key as u32);
                if keeps { kept_weight } else { 0.0 }
            };
            (0..case.shape(Kind::Out).elements()).map(at).collect()
        };
        let same_mask = |name: &str, got: &[f32], expected: &[f32]| {
            let differing = got.iter().zip(expected).filter(|(a, b)| (**a == 0.0) != (**b == 0.0)).count();
            assert_eq!(differing, 0, "{name}: bits of the dropout mask differ");
            agree(name, got, expected, dtype, 2.0);
        };
        let mut results = Vec::new();
        for config in subject.configs(&case, Pass::Forward, 2) {
            let result = subject.forward(&case, &data, &config);
            same_mask(&format!("out, {config}"), &result.out, &expected(false));
            results.push(result);
        }
        for config in subject.configs(&case, Pass::Backward, 2) {
            let gradients = subject.backward(&case, &data, &results[0], &config);
            same_mask(&format!("dv, {config}"), &gradients.dv, &expected(true));
        }
    }
}

/// With a bottom-right causal mask and more queries than keys, the first rows see nothing.
pub fn rows_without_keys_are_zero_and_have_no_gradient(subject: &Subject, dtype: Dtype) {
    let case =
        Case { causal: Causal::BottomRight, seqlen_k: 20, strides: Strides::Bshd, ..Case::plain(dtype, 150, 40) };
    let data = Data::random(&case);
    let empty = 130;
    let dim = case.head_dim as usize;
    let result = forward(subject, &case, &data);
    assert!(result.out[..empty * dim].iter().all(|x| *x == 0.0), "O of rows without keys");
    assert!(result.lse[..empty].iter().all(|x| *x == f32::NEG_INFINITY), "LSE of rows without keys");
    assert!(result.lse[empty..].iter().all(|x| x.is_finite()));
    let config = subject.heuristic(&case, Pass::Backward);
    let gradients = subject.backward(&case, &data, &result, &config);
    assert!(gradients.dq[..empty * dim].iter().all(|x| *x == 0.0), "dQ of rows without keys");
    // The values of those rows affect no other result.
    let mut other = data.clone();
    other.q[..empty * dim].fill(3.0);
    other.dout[..empty * dim].fill(-2.0);
    let again = subject.backward(&case, &other, &result, &config);
    agree("dk", &gradients.dk, &again.dk, dtype, 1.0);
    agree("dv", &gradients.dv, &again.dv, dtype, 1.0);
}

pub fn no_keys_at_all_is_an_empty_softmax(subject: &Subject, dtype: Dtype) {
    let case = Case { seqlen_k: 0, ..usual(dtype) };
    let data = Data::random(&case);
    let result = forward(subject, &case, &data);
    assert!(result.out.iter().all(|x| *x == 0.0));
    assert!(result.lse.iter().all(|x| *x == f32::NEG_INFINITY));
    let gradients = subject.backward(&case, &data, &result, &subject.heuristic(&case, Pass::Backward));
    assert!(gradients.dq.iter().all(|x| *x == 0.0));
    let case = Case { seqlen_q: 0, ..usual(dtype) };
    let data = Data::random(&case);
    let result = forward(subject, &case, &data);
    let gradients = subject.backward(&case, &data, &result, &subject.heuristic(&case, Pass::Backward));
    assert!(gradients.dk.iter().chain(&gradients.dv).all(|x| *x == 0.0));
}

/// One NaN in each input of a causal problem shows in the rows that see it and nowhere else. V of a
/// hidden key is left out: the product of a tile multiplies it by a weight of 0, which gives NaN in
/// any tiled implementation.
pub fn nan_reaches_exactly_what_depends_on_it(subject: &Subject, dtype: Dtype) {
    let case = Case { causal: Causal::TopLeft, strides: Strides::Bshd, ..Case::plain(dtype, 150, 32) };
    let (dim, position, column) = (32, 70, 5);
    let clean = Data::random(&case);
    let run = |spoil: fn(&mut Data) -> &mut Vec<f32>| {
        let mut data = clean.clone();
        spoil(&mut data)[position * dim + column] = f32::NAN;
        let result = forward(subject, &case, &data);
        let gradients = subject.backward(&case, &data, &result, &subject.heuristic(&case, Pass::Backward));
        (result, gradients)
    };
    let is_nan = |values: &[f32], row: usize, c: usize| values[row * dim + c].is_nan();

    let (result, gradients) = run(|data| &mut data.q);
    for row in 0..150 {
        assert_eq!(is_nan(&result.out, row, 0), row == position, "NaN in Q: O of row {row}");
        assert_eq!(result.lse[row].is_nan(), row == position, "NaN in Q: LSE of row {row}");
        assert_eq!(is_nan(&gradients.dq, row, 0), row == position, "NaN in Q: dQ of row {row}");
        // Key `row` gets gradients from query `position` if that query sees it.
        if row <= position {
            assert!(is_nan(&gradients.dk, row, 0) && is_nan(&gradients.dv, row, 0), "NaN in Q: dK, dV of key {row}");
        }
    }
    let (result, gradients) = run(|data| &mut data.k);
    for row in 0..150 {
        assert_eq!(is_nan(&result.out, row, 0), row >= position, "NaN in K: O of row {row}");
        assert_eq!(result.lse[row].is_nan(), row >= position, "NaN in K: LSE of row {row}");
        if row >= position {
            assert!(is_nan(&gradients.dq, row, 0), "NaN in K: dQ of row {row}");
        }
    }
    let (result, _) = run(|data| &mut data.v);
    for row in 0..150 {
        if row >= position {
            assert!(is_nan(&result.out, row, column), "NaN in V: O of row {row}");
        }
        assert!(!is_nan(&result.out, row, column + 1), "NaN in V: another column of row {row}");
        assert!(result.lse[row].is_finite(), "NaN in V: LSE of row {row}");
    }
    let (_, gradients) = run(|data| &mut data.dout);
    assert!(is_nan(&gradients.dq, position, 0) && !is_nan(&gradients.dq, position + 1, 0), "NaN in dout: dQ");
}

pub fn configs_agree_within_rounding(subject: &Subject, dtype: Dtype) {
    for dropout_p in [0.0, 0.2] {
        let case = Case { causal: Causal::BottomRight, dropout_p, ..usual(dtype) };
        let data = Data::random(&case);
        let result = forward(subject, &case, &data);
        for config in subject.configs(&case, Pass::Forward, 3) {
            let other = subject.forward(&case, &data, &config);
            agree(&format!("out, {config}"), &result.out, &other.out, dtype, 2.0);
            agree(&format!("lse, {config}"), &result.lse, &other.lse, Dtype::Fp32, 1.0);
        }
        let gradients = subject.backward(&case, &data, &result, &subject.heuristic(&case, Pass::Backward));
        for config in subject.configs(&case, Pass::Backward, 3) {
            let other = subject.backward(&case, &data, &result, &config);
            agree(&format!("dq, {config}"), &gradients.dq, &other.dq, dtype, 2.0);
            agree(&format!("dk, {config}"), &gradients.dk, &other.dk, dtype, 2.0);
            agree(&format!("dv, {config}"), &gradients.dv, &other.dv, dtype, 2.0);
        }
    }
}

/// A window as wide as the keys, a softcap far above the scores, slopes and biases of 0, a mask of
/// ones, sinks of -inf.
pub fn extras_that_change_nothing_change_nothing(subject: &Subject, dtype: Dtype) {
    // A GPU's tanh is off by 2^-23 of the cap, and the cap changes a score of 5 by 5^3 / 3 cap^2.
    let softcap = if dtype == Dtype::Fp32 { 1e5 } else { 1e3 };
    let all = Some(500);
    let of_scores = Some(Spread::of("hqk"));
    let idle = [
        Extras { window: Window { left: all, right: all, top_left: false }, ..Extras::default() },
        Extras { softcap, ..Extras::default() },
        Extras { alibi: Some(Spread::of("h")), ..Extras::default() },
        Extras { bias: of_scores, dbias: true, ..Extras::default() },
        Extras { mask: of_scores, ..Extras::default() },
        Extras { mask: of_scores, mask_bits: true, ..Extras::default() },
        Extras { sinks: true, ..Extras::default() },
    ];
    let plain = usual(dtype);
    let of_plain = Data::random(&plain);
    let expected = forward(subject, &plain, &of_plain);
    let config = |case: &Case| subject.heuristic(case, Pass::Backward);
    let gradients = subject.backward(&plain, &of_plain, &expected, &config(&plain));
    for extras in idle {
        let case = Case { extras, ..plain.clone() };
        let mut data = Data::random(&case);
        data.alibi.fill(0.0);
        data.bias.fill(0.0);
        data.mask.fill(1);
        data.sinks.fill(f32::NEG_INFINITY);
        let got = forward(subject, &case, &data);
        let name = |tensor| format!("{tensor}, {case}");
        agree(&name("out"), &got.out, &expected.out, dtype, 2.0);
        agree(&name("lse"), &got.lse, &expected.lse, Dtype::Fp32, 2.0);
        let others = subject.backward(&case, &data, &got, &config(&case));
        agree(&name("dq"), &others.dq, &gradients.dq, dtype, 2.0);
        agree(&name("dk"), &others.dk, &gradients.dk, dtype, 2.0);
        agree(&name("dv"), &others.dv, &gradients.dv, dtype, 2.0);
        assert!(others.dsinks.iter().all(|dsink| *dsink == 0.0), "{}", name("dsinks"));
    }
}

pub fn a_bias_that_says_causal_is_causal(subject: &Subject, dtype: Dtype) {
    for causal in [Causal::TopLeft, Causal::BottomRight] {
        let causal = Case { causal, seqlen_q: 141, seqlen_k: 75, ..usual(dtype) };
        let extras = Extras { bias: Some(Spread::of("qk")), ..Extras::default() };
        let case = Case { causal: Causal::None, extras, ..causal.clone() };
        let mut data = Data::random(&case);
        for (at, bias) in data.bias.iter_mut().enumerate() {
            let is_seen = causal.sees([141, 75], at / 75, at % 75);
            *bias = if is_seen { 0.0 } else { f32::NEG_INFINITY };
        }
        let prepared = Prepared::with(&causal, data.clone());
        let got = forward(subject, &case, &data);
        prepared.judge_forward(false, &got).unwrap_or_else(|reason| panic!("{reason}\n  {case}"));
        let gradients = subject.backward(&case, &data, &got, &subject.heuristic(&case, Pass::Backward));
        prepared.judge_backward(false, &gradients).unwrap_or_else(|reason| panic!("{reason}\n  {case}"));
    }
}

/// The key has V = 0 and the sink's score in every row, because the first column of Q is 1.
pub fn a_sink_is_a_key_of_no_value(subject: &Subject, dtype: Dtype) {
    let sink = 1.5;
    let with_key = Case { strides: Strides::Bshd, softmax_scale: 0.125, ..Case::plain(dtype, 130, 64) };
    let case = Case { seqlen_k: 129, extras: Extras { sinks: true, ..Extras::default() }, ..with_key.clone() };
    let mut of_key = Data::random(&with_key);
    of_key.q.iter_mut().step_by(64).for_each(|q| *q = 1.0);
    of_key.k[129 * 64..].fill(0.0);
    of_key.k[129 * 64] = sink / case.softmax_scale;
    of_key.v[129 * 64..].fill(0.0);
    let data = Data {
        k: of_key.k[..129 * 64].to_vec(),
        v: of_key.v[..129 * 64].to_vec(),
        sinks: vec![sink],
        ..of_key.clone()
    };
    let (one, other) = (forward(subject, &case, &data), forward(subject, &with_key, &of_key));
    agree("out", &one.out, &other.out, dtype, 2.0);
    agree("lse", &one.lse, &other.lse, Dtype::Fp32, 2.0);
    let gradients = subject.backward(&case, &data, &one, &subject.heuristic(&case, Pass::Backward));
    let of_key = subject.backward(&with_key, &of_key, &other, &subject.heuristic(&with_key, Pass::Backward));
    agree("dk", &gradients.dk, &of_key.dk[..129 * 64], dtype, 2.0);
    agree("dv", &gradients.dv, &of_key.dv[..129 * 64], dtype, 2.0);
    assert!(gradients.dsinks[0] != 0.0, "the case must give its sink a gradient");
}

/// The bits are equal on the CPU and agree within rounding on a GPU.
pub fn packed_sequences_equal_one_call_each(subject: &Subject, dtype: Dtype) {
    let is_exact = matches!(subject.backend, Backend::Cpu(_));
    for (causal, window) in [(Causal::None, None), (Causal::BottomRight, Some(40)), (Causal::TopLeft, None)] {
        let case = Case {
            batch_size: 6,
            causal,
            seed: 3,
            strides: Strides::Bshd,
            extras: Extras {
                window: Window { left: window, ..Window::default() },
                cu_seqlens: Sides::BOTH,
                seqused: Sides { q: false, k: true },
                alibi: Some(Spread::of("h")),
                ..Extras::default()
            },
            ..usual(dtype)
        };
        let data = Data::random(&case);
        let configs = [Pass::Forward, Pass::Backward].map(|pass| subject.heuristic(&case, pass));
        let whole = subject.forward(&case, &data, &configs[0]);
        let gradients = subject.backward(&case, &data, &whole, &configs[1]);
        for (batch, (q, k)) in case.rows(Side::Q).into_iter().zip(case.rows(Side::K)).enumerate() {
            if q.used == 0 {
                continue;
            }
            let of = |values: &[f32], heads: i64, dim: i64, rows: Rows| {
                let row = (heads * dim) as usize;
                values[rows.begin * row..(rows.begin + rows.used) * row].to_vec()
            };
            let (heads_q, heads_kv, dim) = (case.num_heads_q, case.num_heads_kv, case.head_dim);
            let alone = Case {
                batch_size: 1,
                seqlen_q: q.used as i64,
                seqlen_k: k.used as i64,
                extras: Extras { cu_seqlens: Sides::default(), seqused: Sides::default(), ..case.extras },
                ..case.clone()
            };
            let of_alone = Data {
                q: of(&data.q, heads_q, dim, q),
                k: of(&data.k, heads_kv, dim, k),
                v: of(&data.v, heads_kv, dim, k),
                dout: of(&data.dout, heads_q, dim, q),
                ..data.clone()
            };
            let got = subject.forward(&alone, &of_alone, &configs[0]);
            let lse: Vec<f32> = (0..heads_q as usize)
                .flat_map(|head| whole.lse[case.lse_begin(batch, head)..][..q.used].to_vec())
                .collect();
            let same = |name: &str, one: &[f32], other: &[f32], dtype| match is_exact {
                true => assert!(one == other, "{name} of sequence {batch}, {case}"),
                false => agree(name, one, other, dtype, 2.0),
            };
            same("out", &got.out, &of(&whole.out, heads_q, dim, q), dtype);
            same("lse", &got.lse, &lse, Dtype::Fp32);
            let alone = subject.backward(&alone, &of_alone, &got, &configs[1]);
            same("dq", &alone.dq, &of(&gradients.dq, heads_q, dim, q), dtype);
            same("dk", &alone.dk, &of(&gradients.dk, heads_kv, dim, k), dtype);
            same("dv", &alone.dv, &of(&gradients.dv, heads_kv, dim, k), dtype);
        }
    }
}
