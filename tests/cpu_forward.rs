//! The CPU's forward pass on generated problems, against the fp64 reference by the error rule.

mod support;

use flashtune::config::{Config, Family};
use flashtune::problem::Pass;
use support::case::Case;
use support::check::Prepared;
use support::shapes;
use support::subject::Subject;

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
fn strides_change_no_bit_of_the_result() {
    let subject = Subject::cpu(2);
    let cases = shapes::of_each_layout(subject.dtypes());
    for of_dtype in cases.chunks(support::case::ALL_STRIDES.len()) {
        let run = |case: &Case| Prepared::new(case).forward(&subject, &blocks(32, 32));
        let packed = run(&of_dtype[0]);
        for case in &of_dtype[1..] {
            assert!(run(case) == packed, "{case}");
        }
    }
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
fn a_case_is_reproduced_from_its_line() {
    for case in shapes::random(Subject::cpu(1).dtypes(), 20, 200, 77) {
        assert_eq!(case.to_string().parse::<Case>().as_ref(), Ok(&case));
    }
}
