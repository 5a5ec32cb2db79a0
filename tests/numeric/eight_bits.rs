//! 8-bit k and v, and 8-bit q: results against the reference on the same numbers, laws, and what
//! quantising itself costs.

use crate::gpu::run_forward;
use crate::support::buffer::Array;
use crate::support::case::{Case, Data, Kind};
use crate::support::check::{Prepared, are_right_forward};
use crate::support::eight::quantised;
use crate::support::error_rule::{EIGHT_BIT_BOUNDS, relative_error};
use crate::support::extras::Extras;
use crate::support::reference;
use crate::support::scores;
use crate::support::shapes;
use crate::support::subject::Subject;
use flashtune::call::{Call, TensorRef};
use flashtune::problem::{Causal, Dtype, Eight, EightBits, Pass};

#[test]
fn cpu_is_right_over_eight_bits() {
    are_right_forward(&Subject::cpu(2), &shapes::eight_bits());
}

#[test]
fn cpu_is_right_on_random_problems_of_eight_bits() {
    let subject = Subject::cpu(2);
    are_right_forward(&subject, &shapes::random_eight_bits(&[Dtype::Bf16, Dtype::Fp16], 40, 300, 2300));
}

#[test]
fn gpu_is_right_over_eight_bits() {
    let Some(subject) = Subject::gpu() else { return };
    let cases =
        shapes::eight_bits().into_iter().chain(shapes::random_eight_bits(&[Dtype::Bf16, Dtype::Fp16], 60, 600, 2400));
    let device = subject.backend.device();
    let served: Vec<Case> =
        cases.filter(|case| flashtune::family::supported(&case.problem(Pass::Forward), device).is_ok()).collect();
    assert!(served.len() > 40, "{}", served.len());
    run_forward(&subject, &served, 1);
}

/// With scales that are powers of two, numbers times scales are 16-bit numbers, and the 16-bit
/// problem has the same result, bit by bit on the CPU. bf16 has another order of sums there if the
/// processor has AMX, so the numbers are fp16.
#[test]
fn eight_bits_give_what_the_same_numbers_in_16_bits_give() {
    let subject = Subject::cpu(2);
    for eight in Eight::ALL {
        let eight_bits = EightBits { keys: eight, queries: false, keys_per_scale: 0 };
        let plain = Case { num_heads_q: 4, num_heads_kv: 2, seqlen_k: 170, ..Case::plain(Dtype::Fp16, 60, 64) };
        let case = Case { extras: Extras { eight: Some(eight_bits), ..plain.extras }, ..plain.clone() };
        let mut data = Data::random(&plain);
        for values in [&mut data.k, &mut data.v] {
            let ones = vec![1.0; values.len() / 64];
            quantised(eight.into(), values, &ones, 64);
        }
        let expected = subject.forward(&plain, &data, &subject.heuristic(&plain, Pass::Forward));
        // The buffers hold numbers divided by the case's scales, so the call gets scales of 1 for
        // numbers that were multiplied by them.
        let mut scaled = data.clone();
        for (kind, values) in [(Kind::K, &mut scaled.k), (Kind::V, &mut scaled.v)] {
            for (row, scale) in values.chunks_mut(64).zip(case.row_scales(kind)) {
                row.iter_mut().for_each(|x| *x *= scale);
            }
        }
        let one = [1.0f32];
        let with_ones = |call: &mut Call| {
            for view in [&mut call.features.scales.k, &mut call.features.scales.v] {
                view.data = one.as_ptr().cast_mut().cast();
                (view.stride_batch, view.stride_seqlen, view.stride_head) = (0, 0, 0);
            }
        };
        let got = subject.forward_with(&case, &scaled, with_ones, &subject.heuristic(&case, Pass::Forward));
        assert_eq!(got, expected, "{}", eight.name());
    }
}

/// What quantising k and v costs, against fp64 attention on the tensors before. Bounds by format
/// stand beside the error rule.
#[test]
fn quantising_costs_what_the_rule_says() {
    for (eight, keys_per_scale, bound) in EIGHT_BIT_BOUNDS {
        let plain = Case { num_heads_q: 4, num_heads_kv: 2, seqlen_k: 700, ..Case::plain(Dtype::Bf16, 40, 64) };
        let before = Data::random(&plain);
        let mut after = before.clone();
        for values in [&mut after.k, &mut after.v] {
            let largest = |values: &[f32]| values.iter().fold(0f32, |top, x| top.max(x.abs()));
            let of_all = largest(values);
            let scales: Vec<f32> = values
                .chunks(64)
                .map(|row| if keys_per_scale == 1 { largest(row) } else { of_all } / eight.largest())
                .collect();
            quantised(eight.into(), values, &scales, 64);
        }
        let (exact, quantised) = (reference::exact(&plain, &before), reference::exact(&plain, &after));
        let error = relative_error(&quantised.out, &exact.out);
        assert!(error <= bound && error >= bound / 2.0, "{} {keys_per_scale}: {error}, bound {bound}", eight.name());
    }
}

/// e5m2 has the range for scores that outgrow a stale maximum, whose rows are computed again.
#[test]
fn gpu_survives_adversarial_scores_over_eight_bits() {
    let Some(subject) = Subject::gpu() else { return };
    let kinds = [(Dtype::Bf16, 0), (Dtype::Bf16, 1), (Dtype::Bf16, 128), (Dtype::Fp16, 0)];
    kinds.into_iter().for_each(|(dtype, keys_per_scale)| survives_adversarial_scores(&subject, dtype, keys_per_scale));
}

fn survives_adversarial_scores(subject: &Subject, dtype: Dtype, keys_per_scale: i64) {
    let eight_bits = EightBits { keys: Eight::E5m2, queries: false, keys_per_scale };
    let case = Case {
        num_heads_q: 2,
        num_heads_kv: 1,
        seqlen_k: scores::SEQLEN_K,
        causal: Causal::BottomRight,
        extras: Extras { eight: Some(eight_bits), ..Extras::default() },
        ..Case::plain(dtype, 80, 64)
    };
    for (name, case, mut data) in scores::profiled(&case) {
        quantised(case.element(Kind::K), &mut data.k, &case.row_scales(Kind::K), 64);
        let prepared = Prepared::with(&case, data);
        for config in subject.configs(&case, Pass::Forward, 0) {
            let got = subject.forward(&case, &prepared.data, &config);
            prepared
                .judge_forward(prepared.loses_bits(subject), &got)
                .unwrap_or_else(|reason| panic!("{name}: {reason}\n  {case}\n  {config}"));
        }
    }
}

/// Scores that outgrow a row's reference, by more than e4m3's weights and by more than fp32's.
#[test]
fn gpu_survives_adversarial_scores_of_e4m3() {
    let Some(subject) = Subject::gpu() else { return };
    for (causal, softmax_scale) in [(Causal::None, 30.0), (Causal::BottomRight, -30.0)] {
        let eight_bits = EightBits { keys: Eight::E4m3, queries: true, keys_per_scale: 0 };
        let case = Case {
            num_heads_q: 2,
            num_heads_kv: 1,
            seqlen_k: scores::SEQLEN_K,
            causal,
            softmax_scale,
            extras: Extras { eight: Some(eight_bits), ..Extras::default() },
            ..Case::plain(Dtype::Bf16, 80, 64)
        };
        for (name, case, mut data) in scores::profiled(&case) {
            // Random scores shall not hide the profile. `wgmma` drops the bits of a product that
            // lie 13 below the largest one of its step. The rule for LSE allows for one such
            // product.
            for (index, q) in data.q.iter_mut().enumerate().filter(|(index, _)| index % 64 != 0) {
                *q *= if index % 64 == 1 { 1.0 / 128.0 } else { 0.0 };
            }
            for (kind, values) in [(Kind::Q, &mut data.q), (Kind::K, &mut data.k), (Kind::V, &mut data.v)] {
                quantised(case.element(kind), values, &case.row_scales(kind), 64);
            }
            let prepared = Prepared::with(&case, data);
            for config in subject.configs(&case, Pass::Forward, 2) {
                let got = subject.forward(&case, &prepared.data, &config);
                prepared
                    .judge_forward(prepared.loses_bits(&subject), &got)
                    .unwrap_or_else(|reason| panic!("{name}: {reason}\n  {case}\n  {config}"));
            }
        }
    }
}

/// Rows of a bf16 q that fp16 does not hold, beside rows that it holds.
#[test]
fn gpu_is_right_with_rows_of_q_of_any_size_over_eight_bits() {
    let Some(subject) = Subject::gpu() else { return };
    for (keys_per_scale, sizes) in [(0, [1.0, 2f32.powi(20)]), (1, [1.0, 2f32.powi(20)]), (1, [0.0, 2f32.powi(-20)])] {
        let plain = Case::plain(Dtype::Bf16, 80, 64);
        let case = Case {
            seqlen_k: 300,
            causal: Causal::BottomRight,
            softmax_scale: plain.softmax_scale / sizes[1],
            extras: Extras {
                eight: Some(EightBits { keys: Eight::E4m3, queries: false, keys_per_scale }),
                ..plain.extras
            },
            ..plain
        };
        let mut data = Data::random(&case);
        for (row, q) in data.q.chunks_mut(64).enumerate() {
            q.iter_mut().for_each(|q| *q *= sizes[row % 2]);
        }
        let prepared = Prepared::with(&case, data);
        for config in subject.configs(&case, Pass::Forward, 1) {
            prepared.forward(&subject, &config);
        }
    }
}

/// Rows of Q far below fp16, beside a small scale of K: the factor of their scores must not round
/// to 0, which would turn the masked ones, -inf, to NaN.
#[test]
fn gpu_is_finite_with_tiny_rows_of_q_over_eight_bits() {
    let Some(subject) = Subject::gpu() else { return };
    let eight = EightBits { keys: Eight::E4m3, queries: false, keys_per_scale: 0 };
    let case = Case {
        seqlen_k: 300,
        causal: Causal::BottomRight,
        extras: Extras { eight: Some(eight), ..Extras::default() },
        ..Case::plain(Dtype::Bf16, 80, 64)
    };
    let mut data = Data::random(&case);
    data.q.iter_mut().for_each(|q| *q *= 2f32.powi(-115));
    let scales = Array::input(&subject.backend, &[2f32.powi(-22)]);
    let of_k = TensorRef { data: scales.address(), ..TensorRef::NULL };
    for config in subject.configs(&case, Pass::Forward, 0) {
        let result = subject.forward_with(&case, &data, |call: &mut Call| call.features.scales.k = of_k, &config);
        assert!(result.out.iter().chain(&result.lse).all(|x| x.is_finite()), "{case} {config}");
    }
}

/// A factor of all scales of v is a factor of out, however small, and 0 gives zeros: weights times
/// scales keep their bits, and nothing is divided by a scale of 0.
#[test]
fn gpu_is_right_with_tiny_scales_of_v_and_with_0() {
    let Some(subject) = Subject::gpu() else { return };
    let of = |dtype, queries, keys_per_scale| Case {
        seqlen_k: 200,
        extras: Extras { eight: Some(EightBits { keys: Eight::E4m3, queries, keys_per_scale }), ..Extras::default() },
        ..Case::plain(dtype, 70, 64)
    };
    let cases = [
        of(Dtype::Fp16, false, 0),
        of(Dtype::Fp16, false, 1),
        of(Dtype::Fp16, false, 128),
        of(Dtype::Bf16, false, 1),
        of(Dtype::Bf16, true, 128),
    ];
    let device = subject.backend.device();
    for case in cases.iter().filter(|case| flashtune::family::supported(&case.problem(Pass::Forward), device).is_ok()) {
        let data = Data::random(case);
        for config in subject.configs(case, Pass::Forward, 0) {
            let with_scale = |scale: f32| {
                let scales = Array::input(&subject.backend, &[scale]);
                let of_v = TensorRef { data: scales.address(), ..TensorRef::NULL };
                subject.forward_with(case, &data, |call: &mut Call| call.features.scales.v = of_v, &config)
            };
            let (one, tiny, zero) = (with_scale(1.0), with_scale(0.5f32.powi(20)), with_scale(0.0));
            assert!(zero.out.iter().all(|x| *x == 0.0), "{case} {config}");
            assert_eq!((&zero.lse, &tiny.lse), (&one.lse, &one.lse), "{case} {config}");
            for (tiny, one) in tiny.out.iter().zip(&one.out) {
                let expected = one * 0.5f32.powi(20);
                // fp16 has no numbers between multiples of 2^-24.
                let allowed = expected.abs() * 0.5f32.powi(7) + 0.5f32.powi(24);
                assert!((tiny - expected).abs() <= allowed, "{tiny} {expected}: {case} {config}");
            }
        }
    }
}

/// Scales of single keys of v that grow or shrink by 2^37 over a sequence, on the way from its last
/// key to its first: what weights lack changes with them.
#[test]
fn gpu_is_right_with_scales_of_v_that_grow_and_shrink() {
    let Some(subject) = Subject::gpu() else { return };
    for (dtype, keys, step) in
        [(Dtype::Bf16, Eight::E4m3, -0.125), (Dtype::Fp16, Eight::E5m2, -0.04), (Dtype::Bf16, Eight::Int8, 0.125)]
    {
        let eight = EightBits { keys, queries: false, keys_per_scale: 1 };
        let case = Case {
            seqlen_k: 300,
            causal: Causal::BottomRight,
            extras: Extras { eight: Some(eight), ..Extras::default() },
            ..Case::plain(dtype, 80, 128)
        };
        let (data, rows) = (Data::random(&case), case.row_scales(Kind::V));
        let scales: Vec<f32> = (0..rows.len()).map(|row| (step * (row as f32 - 150.0)).exp2()).collect();
        // Buffers hold numbers divided by the case's scales.
        let mut scaled = data.clone();
        for ((row, scale), given) in scaled.v.chunks_mut(128).zip(&scales).zip(&rows) {
            row.iter_mut().for_each(|x| *x *= scale / given);
        }
        let prepared = Prepared::with(&case, scaled);
        let given = Array::input(&subject.backend, &scales);
        let of_v = TensorRef { data: given.address(), stride_seqlen: 1, ..TensorRef::NULL };
        for config in subject.configs(&case, Pass::Forward, 1) {
            let got = subject.forward_with(&case, &data, |call: &mut Call| call.features.scales.v = of_v, &config);
            prepared
                .judge_forward(prepared.loses_bits(&subject), &got)
                .unwrap_or_else(|reason| panic!("{reason}\n  {case}\n  {config}"));
        }
    }
}

/// The CPU backend looks at scales; the GPU cannot.
#[test]
fn the_cpu_refuses_scales_that_are_not_positive_and_finite() {
    let subject = Subject::cpu(1);
    let eight_bits = EightBits { keys: Eight::Int8, queries: false, keys_per_scale: 0 };
    let case =
        Case { extras: Extras { eight: Some(eight_bits), ..Extras::default() }, ..Case::plain(Dtype::Fp16, 3, 16) };
    let data = Data::random(&case);
    for scale in [0.0, -1.0, f32::INFINITY, f32::NAN] {
        let scales = [scale];
        let with_scale = |call: &mut Call| call.features.scales.v.data = scales.as_ptr().cast_mut().cast();
        let config = subject.heuristic(&case, Pass::Forward);
        let failed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            subject.forward_with(&case, &data, with_scale, &config)
        }));
        let reason = *failed.expect_err("refused").downcast::<String>().unwrap();
        assert!(reason.contains("v_descale of sequence 0, key 0 and head 0 is"), "{reason}");
    }
}
