//! The laws of attention on the CPU backend, and those that hold only for the CPU or the reference.

use crate::support::case::{Case, Data};
use crate::support::check::Prepared;
use crate::support::extras::{Extras, Sides, Spread};
use crate::support::laws;
use crate::support::reference;
use crate::support::subject::Subject;
use flashtune::config::{Config, Family};
use flashtune::problem::{Causal, Dtype, Pass, Window};

macro_rules! on_the_cpu {
    ($($law:ident),* $(,)?) => {
        $(#[test]
        fn $law() {
            let subject = Subject::cpu(2);
            subject.dtypes().iter().for_each(|dtype| laws::$law(&subject, *dtype));
        })*

        #[test]
        fn no_law_is_left_out() {
            let here = [$(stringify!($law)),*];
            assert_eq!(laws::ALL.iter().map(|(name, _)| *name).collect::<Vec<_>>(), here);
        }
    };
}

on_the_cpu! {
    ones_in_v_give_ones_out,
    output_is_linear_in_v,
    permuting_keys_changes_nothing_unmasked,
    a_causal_row_is_the_unmasked_row_of_its_prefix,
    gqa_is_mha_with_repeated_heads,
    broadcast_keys_equal_repeated_keys,
    the_dropout_mask_shows_in_both_passes,
    rows_without_keys_are_zero_and_have_no_gradient,
    no_keys_at_all_is_an_empty_softmax,
    nan_reaches_exactly_what_depends_on_it,
    configs_agree_within_rounding,
    extras_that_change_nothing_change_nothing,
    a_bias_that_says_causal_is_causal,
    a_sink_is_a_key_of_no_value,
    packed_sequences_equal_one_call_each,
}

/// The number of threads selects one of two backward schedules and assigns the work to threads.
#[test]
fn results_are_bit_equal_for_any_number_of_threads_and_from_run_to_run() {
    let config = |m, n| Config::new(Family::Cpu, [("block_m", m), ("block_n", n)]);
    for dtype in [Dtype::Fp32, Dtype::Bf16] {
        // This bias is shared by all rows and batch entries, so tiles of many tasks add to one
        // element.
        let extras = Extras {
            window: Window { left: Some(70), ..Window::default() },
            bias: Some(Spread::of("hk")),
            dbias: true,
            sinks: true,
            cu_seqlens: Sides::BOTH,
            ..Extras::default()
        };
        for (causal, extras) in
            [(Causal::None, Extras::default()), (Causal::BottomRight, Extras::default()), (Causal::BottomRight, extras)]
        {
            let case = Case {
                batch_size: if extras.is_varlen() { 3 } else { 1 },
                extras,
                num_heads_q: 6,
                num_heads_kv: 3,
                seqlen_q: 170,
                seqlen_k: 200,
                head_dim_v: 33,
                causal,
                dropout_p: 0.1,
                ..Case::plain(dtype, 1, 40)
            };
            let data = Data::random(&case);
            let run = |threads| {
                let subject = Subject::cpu(threads);
                let forward = subject.forward(&case, &data, &config(48, 64));
                let gradients = subject.backward(&case, &data, &forward, &config(32, 48));
                (forward, gradients)
            };
            let alone = run(1);
            for threads in [1, 2, 3, 8, 16] {
                assert!(run(threads) == alone, "{threads} threads, {case}");
            }
        }
    }
}

/// Checks the reference against its definition, the derivative of sum(O * dout) + sum(LSE * dlse),
/// then the CPU backend against the reference.
#[test]
fn gradients_are_the_finite_differences_of_the_output() {
    let all_extras = Extras {
        window: Window { left: Some(3), ..Window::default() },
        softcap: 2.0,
        alibi: Some(Spread::of("h")),
        bias: Some(Spread::of("qk")),
        dbias: true,
        mask: Some(Spread::of("hqk")),
        sinks: true,
        dlse: true,
        ..Extras::default()
    };
    let masks = [Causal::None, Causal::TopLeft, Causal::BottomRight];
    let plain = masks.into_iter().map(|causal| (causal, Extras::default()));
    let with_extras = [Causal::None, Causal::BottomRight].map(|causal| (causal, all_extras));
    for (causal, extras) in plain.chain(with_extras) {
        for dropout_p in [0.0, 0.3] {
            let case = Case {
                num_heads_q: 2,
                seqlen_k: 7,
                head_dim_v: 4,
                causal,
                dropout_p,
                softmax_scale: 0.7,
                extras,
                seed: 6,
                ..Case::plain(Dtype::Fp32, 5, 3)
            };
            is_the_finite_difference(&case);
        }
    }
}

fn is_the_finite_difference(case: &Case) {
    let mut data = Data::random(case);
    // A hidden key or a sink of -inf has no finite difference.
    let finite = |value: &mut f32| *value = if value.is_finite() { *value } else { 0.5 };
    data.bias.iter_mut().chain(&mut data.sinks).for_each(finite);
    data.dbias.fill(0.0);
    let exact = reference::exact(case, &data);
    let loss = |data: &Data| -> f64 {
        let results = reference::exact(case, data);
        let dot = |values: &[f64], factors: &[f32]| -> f64 {
            let finite = values.iter().zip(factors).filter(|(value, _)| value.is_finite());
            finite.map(|(value, factor)| value * f64::from(*factor)).sum()
        };
        dot(&results.out, &data.dout) + dot(&results.lse, &data.dlse)
    };
    let subject = Subject::cpu(1);
    let forward = subject.forward(case, &data, &subject.heuristic(case, Pass::Forward));
    let on_cpu = subject.backward(case, &data, &forward, &subject.heuristic(case, Pass::Backward));
    type Values = fn(&mut Data) -> &mut Vec<f32>;
    let tensors: [(&str, Values, &[f64], &[f32]); 5] = [
        ("q", |data| &mut data.q, &exact.dq, &on_cpu.dq),
        ("k", |data| &mut data.k, &exact.dk, &on_cpu.dk),
        ("v", |data| &mut data.v, &exact.dv, &on_cpu.dv),
        ("bias", |data| &mut data.bias, &exact.dbias, &on_cpu.dbias),
        ("sinks", |data| &mut data.sinks, &exact.dsinks, &on_cpu.dsinks),
    ];
    for (name, values, gradient, on_cpu) in tensors {
        for at in 0..gradient.len() {
            let moved = |by: f32| {
                let mut data = data.clone();
                values(&mut data)[at] += by;
                (f64::from(values(&mut data)[at]), loss(&data))
            };
            // The truncation error of a central difference is the step's square: 1e-6 for values
            // about 1.
            let ((right, above), (left, below)) = (moved(1.0 / 1024.0), moved(-1.0 / 1024.0));
            let difference = (above - below) / (right - left);
            assert!((gradient[at] - difference).abs() < 1e-5, "d{name}[{at}]: {} and {difference}", gradient[at]);
            // The tolerance adds the rounding of fp32 arithmetic on a few terms about 1.
            assert!((f64::from(on_cpu[at]) - difference).abs() < 2e-5, "CPU d{name}[{at}], {case}");
        }
    }
}

/// A bias hides keys by -inf, so a row whose visible scores are all -inf counts as a row without
/// keys.
#[test]
fn a_row_of_minus_infinite_scores_is_empty() {
    let subject = Subject::cpu(2);
    let case = Case { causal: Causal::TopLeft, ..Case::plain(Dtype::Fp32, 40, 16) };
    let mut data = Data::random(&case);
    let row = 21;
    data.q[row * 16..][..16].fill(0.0);
    data.q[row * 16] = 1.0;
    (0..40).for_each(|key| data.k[key * 16] = f32::NEG_INFINITY);
    // The other rows must not multiply these keys by 0, which gives NaN; they get a small factor.
    (0..40).filter(|other| *other != row).for_each(|other| data.q[other * 16] = -1e-30);
    let got = subject.forward(&case, &data, &subject.heuristic(&case, Pass::Forward));
    assert!(got.out[row * 16..][..16].iter().all(|x| *x == 0.0));
    assert_eq!(got.lse[row], f32::NEG_INFINITY);
    // The other rows have +inf scores, and inf - inf is NaN.
    assert!(got.out[..16].iter().all(|x| x.is_nan()) && got.lse[0].is_nan());
}

/// One score of -inf among finite ones gives its key a weight of 0.
#[test]
fn a_minus_infinite_score_is_a_weight_of_zero() {
    let subject = Subject::cpu(2);
    let case = Case::plain(Dtype::Fp32, 70, 16);
    let mut data = Data::random(&case);
    for row in 0..70 {
        data.q[row * 16] = data.q[row * 16].abs();
    }
    let without = Case { seqlen_k: 69, ..case.clone() };
    let shorter = Data { k: data.k[16..].to_vec(), v: data.v[16..].to_vec(), ..data.clone() };
    data.k[0] = f32::NEG_INFINITY;
    let prepared = Prepared::with(&without, shorter);
    let got = subject.forward(&case, &data, &subject.heuristic(&case, Pass::Forward));
    prepared.judge_forward(false, &got).unwrap();
}
