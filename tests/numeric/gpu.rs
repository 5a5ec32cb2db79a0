//! The GPU against the fp64 reference, the laws and the CPU backend. Without a GPU the tests are
//! skipped and say so; `FLASHTUNE_REQUIRE_GPU=1` makes the skip a failure.
//!
//! Each test runs many small cases and first compiles their kernels in parallel.

use crate::support::case::{Case, Data};
use crate::support::check::Prepared;
use crate::support::grid;
use crate::support::laws;
use crate::support::scores;
use crate::support::shapes;
use crate::support::subject::{Forward, Subject};
use flashtune::config::Config;
use flashtune::family;
use flashtune::problem::{Pass, Problem};
use flashtune::tune::candidates;
use rayon::prelude::*;
use std::panic::AssertUnwindSafe;
use std::sync::OnceLock;

/// The one GPU of all tests in this file; its kernels are shared.
fn subject() -> Option<&'static Subject> {
    static SUBJECT: OnceLock<Option<Subject>> = OnceLock::new();
    SUBJECT.get_or_init(Subject::gpu).as_ref()
}

/// The heuristic config of each family and `extra` seeded others, for both passes.
fn configs(subject: &Subject, case: &Case, extra: usize) -> [Vec<Config>; 2] {
    [Pass::Forward, Pass::Backward].map(|pass| subject.configs(case, pass, extra))
}

/// The first forward candidate of each family that serves the case, and its variants that choose
/// the running maximum in another way.
fn one_of_each_family(subject: &Subject, case: &Case) -> Vec<Config> {
    let (problem, device) = (case.problem(Pass::Forward), subject.backend.device());
    let candidates = candidates::all(&problem, device);
    let mut chosen: Vec<Config> = Vec::new();
    for config in candidates {
        if !chosen.iter().any(|other| other.family == config.family) {
            chosen.push(config);
        }
    }
    let other_maximum = |config: &Config| {
        let flipped = [("stale_max", 1), ("lazy_log2", 8)].map(|(knob, most)| Some((knob, most - config.get(knob)?)));
        flipped.into_iter().flatten().map(|(knob, value)| config.clone().with(knob, value)).collect::<Vec<_>>()
    };
    let others: Vec<Config> = chosen.iter().flat_map(other_maximum).collect();
    chosen.extend(others.into_iter().filter(|config| family::check(&problem, config, device).is_ok()));
    chosen
}

pub fn run(subject: &Subject, cases: &[Case], extra: usize) {
    let needed: Vec<(Problem, Config)> = cases
        .iter()
        .flat_map(|case| {
            let [forward, backward] = configs(subject, case, extra);
            let of = |pass, configs: Vec<Config>| configs.into_iter().map(move |config| (case.problem(pass), config));
            of(Pass::Forward, forward).chain(of(Pass::Backward, backward)).collect::<Vec<_>>()
        })
        .collect();
    subject.build_all(&needed);
    cases.par_iter().for_each(|case| {
        let prepared = Prepared::new(case);
        let [forward_configs, backward_configs] = configs(subject, case, extra);
        let mut results = forward_configs.iter().map(|config| prepared.forward(subject, config));
        let first = results.next().expect("configs include the heuristic's");
        results.for_each(drop);
        backward_configs.iter().for_each(|config| {
            prepared.backward(subject, &first, config);
        });
    });
}

/// The same for the forward pass alone.
pub fn run_forward(subject: &Subject, cases: &[Case], extra: usize) {
    // Nearly every case of 8 bits or int4 has kernels of its own, three on average.
    let with_configs: Vec<(&Case, Vec<Config>)> =
        cases.par_iter().map(|case| (case, subject.configs(case, Pass::Forward, extra))).collect();
    let needed: Vec<(Problem, Config)> = with_configs
        .iter()
        .flat_map(|(case, configs)| configs.iter().map(|config| (case.problem(Pass::Forward), config.clone())))
        .collect();
    subject.build_all(&needed);
    with_configs.par_iter().for_each(|(case, configs)| {
        let prepared = Prepared::new(case);
        for config in configs {
            prepared.forward(subject, config);
        }
    });
}

#[test]
fn gpu_is_right_at_every_tile_boundary() {
    let Some(subject) = subject() else { return };
    for tile in [64, 80, 128] {
        run(subject, &shapes::boundaries(subject.dtypes(), tile), 1);
    }
}

#[test]
fn gpu_is_right_on_random_problems_with_the_heuristic_and_with_other_configs() {
    let Some(subject) = subject() else { return };
    run(subject, &shapes::random(subject.dtypes(), 40, 300, 9000), 1);
}

#[test]
fn gpu_is_right_with_random_extras() {
    let Some(subject) = subject() else { return };
    run(subject, &shapes::with_extras(subject.dtypes(), 60, 300, 700), 0);
}

#[test]
fn gpu_is_right_on_the_flash_attention_grid() {
    let Some(subject) = subject() else { return };
    run(subject, &grid::thinned(subject.dtypes(), &grid::LENGTHS, &grid::HEAD_DIMS), 0);
}

#[test]
fn gpu_is_right_where_scores_are_far_below_0() {
    let Some(subject) = subject() else { return };
    run(subject, &grid::far_below(), 0);
}

#[test]
fn gpu_is_right_on_the_long_lengths_of_the_flash_attention_grid() {
    let Some(subject) = subject() else { return };
    run(subject, &grid::thinned(subject.dtypes(), &grid::LONG, &grid::HEAD_DIMS), 0);
}

#[test]
fn gpu_is_right_for_varlen_batches() {
    let Some(subject) = subject() else { return };
    run(subject, &shapes::varlen(subject.dtypes()), 1);
}

#[test]
fn gpu_is_right_on_head_dims_of_three_64_column_boxes() {
    let Some(subject) = subject() else { return };
    run(subject, &shapes::three_boxes(subject.dtypes()), 3);
}

#[test]
fn gpu_is_right_under_block_masks() {
    let Some(subject) = subject() else { return };
    run(subject, &shapes::block_masks(subject.dtypes()), 1);
}

#[test]
fn gpu_is_right_on_long_sequences() {
    let Some(subject) = subject() else { return };
    run(subject, &shapes::long(subject.dtypes()), 1);
}

/// Forward alone, because the reference takes most of the time with so many heads.
#[test]
fn gpu_is_right_forward_on_more_tiles_than_it_holds_at_once() {
    let Some(subject) = subject() else { return };
    shapes::many_tiles(subject.dtypes()).par_iter().for_each(|case| {
        let prepared = Prepared::new(case);
        let preferred = family::heuristics(&case.problem(Pass::Forward), subject.backend.device());
        for config in one_of_each_family(subject, case) {
            let judged = prepared.forward(subject, &config);
            let runs = if preferred.contains(&config) { 200 } else { 20 };
            let again = subject.forward_runs(case, &prepared.data, |_| (), &config, runs);
            assert!(again == judged, "the second run differs: {case}, {config}");
        }
    });
}

#[test]
fn gpu_is_right_backward_on_more_tiles_than_it_holds_at_once() {
    let Some(subject) = subject() else { return };
    shapes::many_key_tiles(subject.dtypes()).par_iter().for_each(|case| {
        let prepared = Prepared::new(case);
        let forward = subject.forward(case, &prepared.data, &subject.heuristic(case, Pass::Forward));
        for config in family::heuristics(&case.problem(Pass::Backward), subject.backend.device()) {
            let first = prepared.backward(subject, &forward, &config);
            for run in 1..20 {
                let again = subject.backward(case, &prepared.data, &forward, &config);
                // Tiles of keys add to dQ in any order, unless the pass is deterministic.
                let is_same = (&again.dk, &again.dv) == (&first.dk, &first.dv);
                let is_same = is_same && (!case.deterministic || again.dq == first.dq);
                assert!(is_same, "run {run} differs: {case}, {config}");
            }
        }
    });
}

/// Runs every family that serves the case, also where it is not the preferred one.
fn assert_deterministic(subject: &Subject, case: &Case, data: &Data, forward: &Forward, runs: usize) {
    for config in family::heuristics(&case.problem(Pass::Backward), subject.backend.device()) {
        let first = subject.backward(case, data, forward, &config);
        for run in 1..runs {
            assert!(subject.backward(case, data, forward, &config) == first, "run {run} differs: {case}, {config}");
        }
    }
}

#[test]
fn gpu_gives_the_same_bits_at_every_run_of_a_deterministic_backward_pass() {
    let Some(subject) = subject() else { return };
    shapes::deterministic(subject.dtypes()).par_iter().for_each(|case| {
        let prepared = Prepared::new(case);
        let forward = subject.forward(case, &prepared.data, &subject.heuristic(case, Pass::Forward));
        for config in family::heuristics(&case.problem(Pass::Backward), subject.backend.device()) {
            prepared.backward(subject, &forward, &config);
        }
        assert_deterministic(subject, case, &prepared.data, &forward, 200);
    });
}

/// No reference is computed; it would take most of the time.
#[test]
fn gpu_gives_the_same_bits_at_every_run_of_a_long_deterministic_backward_pass() {
    let Some(subject) = subject() else { return };
    for case in shapes::long_deterministic(subject.dtypes()) {
        let data = Data::random(&case);
        let forward = subject.forward(&case, &data, &subject.heuristic(&case, Pass::Forward));
        assert_deterministic(subject, &case, &data, &forward, 20);
    }
}

/// Covers kernels that keep a stale maximum and kernels that search every block.
#[test]
fn gpu_survives_adversarial_scores() {
    let Some(subject) = subject() else { return };
    let cases: Vec<_> = subject.dtypes().iter().flat_map(|dtype| scores::adversarial(*dtype)).collect();
    cases.into_par_iter().for_each(|(name, case, data)| {
        let prepared = Prepared::with(&case, data);
        for config in one_of_each_family(subject, &case) {
            let got = subject.forward(&case, &prepared.data, &config);
            prepared
                .judge_forward(prepared.loses_bits(subject), &got)
                .unwrap_or_else(|reason| panic!("{name}: {reason}\n  {case}\n  {config}"));
        }
    });
}

#[test]
fn gpu_reads_every_layout() {
    let Some(subject) = subject() else { return };
    run(subject, &shapes::each_layout(subject.dtypes()), 0);
}

#[test]
fn gpu_obeys_every_law() {
    let Some(subject) = subject() else { return };
    // In parallel, because each law compiles its kernels on the way.
    let broken = |(name, law): &(&'static str, laws::Law)| {
        let run = || subject.dtypes().iter().for_each(|dtype| law(subject, *dtype));
        std::panic::catch_unwind(AssertUnwindSafe(run)).is_err().then_some(*name)
    };
    let broken: Vec<_> = laws::ALL.par_iter().filter_map(broken).collect();
    assert!(broken.is_empty(), "laws broken: {broken:?}; the messages are above");
}

/// Both backends make the same dropout mask: one runs forward, the other backward.
#[test]
fn gpu_and_cpu_continue_each_other_with_dropout() {
    let Some(gpu) = subject() else { return };
    let cpu = Subject::cpu(0);
    for dtype in gpu.dtypes() {
        let case = Case { dropout_p: 0.2, num_heads_q: 3, seqlen_k: 133, seed: 5, ..Case::plain(*dtype, 91, 64) };
        let prepared = Prepared::with(&case, Data::random(&case));
        for (one, other) in [(gpu, &cpu), (&cpu, gpu)] {
            let forward = prepared.forward(one, &one.heuristic(&case, Pass::Forward));
            prepared.backward(other, &forward, &other.heuristic(&case, Pass::Backward));
        }
    }
}
