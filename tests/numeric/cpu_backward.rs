//! The CPU backend's backward pass on generated problems, judged by the error rule against fp64.

use crate::support::case::Case;
use crate::support::check::Prepared;
use crate::support::grid;
use crate::support::shapes;
use crate::support::subject::Subject;
use flashtune::config::{Config, Family};
use flashtune::problem::{Dtype, Pass};

fn blocks(block_m: u32, block_n: u32) -> Config {
    Config::new(Family::Cpu, [("block_m", block_m), ("block_n", block_n)])
}

#[test]
fn gradients_are_right_at_every_tile_boundary() {
    // Both schedules: one thread takes whole heads, eleven threads split them.
    for (subject, block_m, block_n) in [(Subject::cpu(1), 32, 32), (Subject::cpu(11), 32, 48)] {
        for case in shapes::boundaries(subject.dtypes(), 32) {
            let prepared = Prepared::new(&case);
            let forward = prepared.forward(&subject, &blocks(32, 32));
            prepared.backward(&subject, &forward, &blocks(block_m, block_n));
        }
    }
}

#[test]
fn gradients_are_right_on_random_problems_with_the_heuristic_and_with_other_configs() {
    let subject = Subject::cpu(2);
    for case in shapes::random(subject.dtypes(), 60, 200, 500) {
        let prepared = Prepared::new(&case);
        let forward = prepared.forward(&subject, &subject.heuristic(&case, Pass::Forward));
        for config in subject.configs(&case, Pass::Backward, 2) {
            prepared.backward(&subject, &forward, &config);
        }
    }
}

/// Runs both passes in small tiles, so that each case has several, and alternates the two
/// schedules.
fn run(cases: Vec<Case>) {
    let subjects = [Subject::cpu(1), Subject::cpu(11)];
    for (index, case) in cases.iter().enumerate() {
        let (subject, prepared) = (&subjects[index % 2], Prepared::new(case));
        let forward = prepared.forward(subject, &blocks(48, 32));
        prepared.backward(subject, &forward, &blocks(32, 48));
    }
}

#[test]
fn gradients_are_right_with_random_extras() {
    run(shapes::with_extras(Subject::cpu(1).dtypes(), 300, 150, 300));
}

#[test]
fn gradients_are_right_on_the_flash_attention_grid() {
    run(grid::thinned(Subject::cpu(1).dtypes(), &grid::LENGTHS[..4], &grid::HEAD_DIMS));
}

#[test]
fn gradients_are_right_where_scores_are_far_below_0() {
    run(grid::far_below());
}

#[test]
fn gradients_are_right_for_varlen_batches() {
    run(shapes::varlen(Subject::cpu(1).dtypes()));
}

#[test]
fn both_passes_are_right_under_block_masks() {
    run(shapes::block_masks(Subject::cpu(1).dtypes()));
}

#[test]
fn gradients_are_right_on_long_sequences() {
    let subject = Subject::cpu(2);
    for case in shapes::long(&[Dtype::Fp32]) {
        let prepared = Prepared::new(&case);
        let forward = prepared.forward(&subject, &subject.heuristic(&case, Pass::Forward));
        prepared.backward(&subject, &forward, &subject.heuristic(&case, Pass::Backward));
    }
}

#[test]
fn deterministic_gradients_do_not_depend_on_the_number_of_threads() {
    // One thread takes whole heads; three and eleven threads split them.
    let subjects = [1, 3, 11].map(Subject::cpu);
    let of = |case: Case| Case { deterministic: true, ..case };
    for case in shapes::long(subjects[0].dtypes()).into_iter().map(of) {
        let prepared = Prepared::new(&case);
        let forward = subjects[0].forward(&case, &prepared.data, &subjects[0].heuristic(&case, Pass::Forward));
        let [first, others @ ..] = subjects
            .each_ref()
            .map(|subject| prepared.backward(subject, &forward, &subject.heuristic(&case, Pass::Backward)));
        assert!(others.iter().all(|other| *other == first), "{case}");
    }
}
