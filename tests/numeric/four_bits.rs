//! int4 k and v: results against the reference on the numbers that rows stand for, what the CPU
//! refuses, and what quantising itself costs.

use crate::gpu::run_forward;
use crate::support::case::{Case, Data};
use crate::support::check::{Prepared, are_right_forward};
use crate::support::error_rule::{FOUR_BIT_BOUNDS, relative_error};
use crate::support::extras::Extras;
use crate::support::reference;
use crate::support::shapes;
use crate::support::subject::Subject;
use flashtune::call::{Call, TensorRef};
use flashtune::problem::{Causal, Dtype, Four, Pass};
use half::f16;

#[test]
fn cpu_is_right_over_int4() {
    are_right_forward(&Subject::cpu(2), &shapes::four_bits());
}

#[test]
fn cpu_is_right_on_random_problems_of_int4() {
    are_right_forward(&Subject::cpu(2), &shapes::random_four_bits(&[Dtype::Bf16, Dtype::Fp16], 30, 300, 4300));
}

#[test]
fn gpu_is_right_over_int4() {
    let Some(subject) = Subject::gpu() else { return };
    let random = shapes::random_four_bits(&[Dtype::Bf16, Dtype::Fp16], 30, 600, 4400);
    let cases: Vec<Case> = shapes::four_bits().into_iter().chain(random).collect();
    let device = subject.backend.device();
    assert!(cases.iter().all(|case| flashtune::family::supported(&case.problem(Pass::Forward), device).is_ok()));
    run_forward(&subject, &cases, 1);
}

/// Rows of a bf16 q that fp16 does not hold, beside rows that it holds.
#[test]
fn gpu_is_right_with_rows_of_q_of_any_size_over_int4() {
    let Some(subject) = Subject::gpu() else { return };
    let plain = Case::plain(Dtype::Bf16, 16, 64);
    let case = Case {
        seqlen_k: 300,
        causal: Causal::BottomRight,
        softmax_scale: plain.softmax_scale / 2f32.powi(119),
        extras: Extras { four: Some(Four::Int4g32), ..plain.extras },
        ..plain
    };
    let mut data = Data::random(&case);
    for (row, q) in data.q.chunks_mut(64).enumerate() {
        q.iter_mut().for_each(|q| *q *= if row % 2 == 0 { 1.0 } else { 2f32.powi(119) });
    }
    let prepared = Prepared::with(&case, data);
    for config in subject.configs(&case, Pass::Forward, 1) {
        prepared.forward(&subject, &config);
    }
}

/// The GPU does not look at scales; the CPU does, at those of the sequences' keys alone: other rows
/// of the buffers hold NaN.
#[test]
fn the_cpu_refuses_scales_and_zeros_of_int4_that_stand_for_nothing() {
    let subject = Subject::cpu(1);
    let four = Four::Int4g32;
    let extras = Extras { four: Some(four), ..Extras::default() };
    let case = Case { extras, ..Case::plain(Dtype::Fp16, 3, 64) };
    let (data, config) = (Data::random(&case), subject.heuristic(&case, Pass::Forward));
    let row_bytes = four.row_bytes(64);
    let of = |[scale, zero]: [f16; 2]| {
        let mut rows = vec![0u8; 3 * row_bytes as usize];
        for row in rows.chunks_mut(row_bytes as usize) {
            four.encode_row(&[0.5; 64], row);
        }
        let last = &mut rows[2 * row_bytes as usize + 32 + 4..];
        last[..2].copy_from_slice(&scale.to_le_bytes());
        last[2..4].copy_from_slice(&zero.to_le_bytes());
        rows
    };
    let run = |halves: [f16; 2]| {
        let rows = of(halves);
        let with_rows = |call: &mut Call| {
            call.v = TensorRef::packed(rows.as_ptr().cast_mut().cast(), 3, 1, row_bytes);
        };
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            subject.forward_with(&case, &data, with_rows, &config)
        }))
    };
    assert!(run([f16::ONE, f16::NEG_ONE]).is_ok());
    let place = "of v, sequence 0, key 2, head 0 and group 1 is";
    for scale in [f16::ZERO, f16::NEG_ONE, f16::INFINITY, f16::NAN] {
        let reason = *run([scale, f16::ONE]).expect_err("refused").downcast::<String>().unwrap();
        assert!(reason.contains(&format!("the scale {place} {scale}; a scale must be finite and above 0")), "{reason}");
    }
    for zero in [f16::INFINITY, f16::NAN] {
        let reason = *run([f16::ONE, zero]).expect_err("refused").downcast::<String>().unwrap();
        assert!(reason.contains(&format!("the zero {place} {zero}; a zero must be finite")), "{reason}");
    }
}

/// What quantising k and v costs, against fp64 attention on the tensors before. Bounds by group
/// stand beside the error rule.
#[test]
fn quantising_to_int4_costs_what_the_rule_says() {
    for (four, bound) in FOUR_BIT_BOUNDS {
        let plain = Case { num_heads_q: 4, num_heads_kv: 2, seqlen_k: 700, ..Case::plain(Dtype::Bf16, 40, 128) };
        let before = Data::random(&plain);
        let mut after = before.clone();
        let mut row = vec![0; four.row_bytes(128) as usize];
        for values in after.k.chunks_mut(128).chain(after.v.chunks_mut(128)) {
            four.encode_row(values, &mut row);
            four.decode_row(&row, values);
        }
        let (exact, quantised) = (reference::exact(&plain, &before), reference::exact(&plain, &after));
        let error = relative_error(&quantised.out, &exact.out);
        assert!(error <= bound && error >= bound / 2.0, "{}: {error}, bound {bound}", four.name());
    }
}
