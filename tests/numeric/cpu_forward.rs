//! The CPU backend's forward pass on generated problems, judged by the error rule against fp64.

use crate::support::case::{ALL_STRIDES, Case, Data};
use crate::support::check::Prepared;
use crate::support::grid;
use crate::support::scores;
use crate::support::shapes;
use crate::support::subject::Subject;
use flashtune::call::TensorRef;
use flashtune::config::{Config, Family};
use flashtune::problem::{Dtype, Pass};

fn blocks(block_m: u32, block_n: u32) -> Config {
    Config::new(Family::Cpu, [("block_m", block_m), ("block_n", block_n)])
}

#[test]
fn forward_is_right_at_every_tile_boundary() {
    let subject = Subject::cpu(2);
    for case in shapes::boundaries(subject.dtypes(), 32) {
        Prepared::new(&case).forward(&subject, &blocks(32, 32));
    }
    for case in shapes::boundaries(subject.dtypes(), 48) {
        Prepared::new(&case).forward(&subject, &blocks(48, 16));
    }
}

#[test]
fn forward_is_right_on_random_problems_with_the_heuristic_and_with_other_configs() {
    let subject = Subject::cpu(2);
    for case in shapes::random(subject.dtypes(), 60, 200, 1) {
        let prepared = Prepared::new(&case);
        for config in subject.configs(&case, Pass::Forward, 2) {
            prepared.forward(&subject, &config);
        }
    }
}

#[test]
fn forward_is_right_on_long_sequences() {
    let subject = Subject::cpu(2);
    for case in shapes::long(&[Dtype::Fp32]) {
        Prepared::new(&case).forward(&subject, &subject.heuristic(&case, Pass::Forward));
    }
}

#[test]
fn forward_is_right_with_random_extras() {
    let subject = Subject::cpu(2);
    for case in shapes::with_extras(subject.dtypes(), 200, 150, 300) {
        let prepared = Prepared::new(&case);
        for config in subject.configs(&case, Pass::Forward, 1) {
            prepared.forward(&subject, &config);
        }
    }
}

#[test]
fn forward_survives_adversarial_scores() {
    let subject = Subject::cpu(2);
    for (name, case, data) in subject.dtypes().iter().flat_map(|dtype| scores::adversarial(*dtype)) {
        let prepared = Prepared::with(&case, data);
        let got = subject.forward(&case, &prepared.data, &subject.heuristic(&case, Pass::Forward));
        prepared.judge_forward(false, &got).unwrap_or_else(|reason| panic!("{name}: {reason}\n  {case}"));
    }
}

#[test]
fn strides_change_no_bit_of_the_result() {
    let subject = Subject::cpu(2);
    let cases = shapes::each_layout(subject.dtypes());
    for of_dtype in cases.chunks(ALL_STRIDES.len()) {
        let run = |case: &Case| Prepared::new(case).forward(&subject, &blocks(32, 32));
        let packed = run(&of_dtype[0]);
        for case in &of_dtype[1..] {
            assert!(run(case) == packed, "{case}");
        }
    }
}

/// Keys lie 2^30 elements apart, so the third starts at 2^31 and a 32-bit index would wrap. Most of
/// the buffer is never touched and takes no memory.
#[test]
fn strides_may_pass_two_to_the_31_elements() {
    let subject = Subject::cpu(1);
    let case = Case { seqlen_k: 3, ..Case::plain(Dtype::Bf16, 2, 8) };
    let data = Data::random(&case);
    let expected = Prepared::with(&case, data.clone());
    let stride = 1i64 << 30;
    let memory = subject.backend.allocate(2 * (2 * stride as usize + 8)).expect("4 GiB of address space");
    for (key, row) in data.k.chunks(8).enumerate() {
        for (c, value) in row.iter().enumerate() {
            let at = memory.address().cast::<half::bf16>().wrapping_add(key * stride as usize + c);
            // SAFETY: the address lies within the allocation just made, which nothing else uses
            // yet.
            unsafe { at.write(half::bf16::from_f32(*value)) };
        }
    }
    let k = TensorRef { data: memory.address(), stride_batch: 0, stride_seqlen: stride, stride_head: 0 };
    let got = subject.forward_with(&case, &data, |call| call.k = k, &blocks(32, 32));
    expected.judge_forward(false, &got).unwrap();
}

#[test]
fn lse_may_be_null() {
    let subject = Subject::cpu(2);
    let case = Case { seed: 2, ..Case::plain(subject.dtypes()[0], 40, 24) };
    let prepared = Prepared::new(&case);
    let with_lse = prepared.forward(&subject, &blocks(32, 32));
    assert_eq!(subject.forward_without_lse(&case, &prepared.data, &blocks(32, 32)), with_lse.out);
}

#[test]
fn case_round_trips_through_its_line() {
    let dtypes = Subject::cpu(1).dtypes();
    for case in shapes::random(dtypes, 20, 200, 77).into_iter().chain(shapes::with_extras(dtypes, 60, 200, 77)) {
        assert_eq!(case.to_string().parse::<Case>().as_ref(), Ok(&case));
    }
}

#[test]
fn each_head_dim_of_the_grid_meets_all_lengths_and_both_states_of_each_switch() {
    let cases = grid::thinned(Subject::cpu(1).dtypes(), &grid::LENGTHS, &grid::HEAD_DIMS);
    let meets = |dim: i64, other: &dyn Fn(&Case) -> bool| cases.iter().any(|case| case.head_dim == dim && other(case));
    for dim in grid::HEAD_DIMS {
        for lengths in grid::LENGTHS {
            assert!(meets(dim, &|case| (case.seqlen_q, case.seqlen_k) == lengths), "{dim}, {lengths:?}");
        }
        for state in [false, true] {
            assert!(meets(dim, &|case| (case.extras.softcap != 0.0) == state), "{dim}, softcap {state}");
            assert!(meets(dim, &|case| (case.extras.window.left.is_some()) == state), "{dim}, window {state}");
            assert!(meets(dim, &|case| case.extras.alibi.is_some() == state), "{dim}, ALiBi {state}");
            assert!(meets(dim, &|case| case.deterministic == state), "{dim}, deterministic {state}");
        }
    }
}
