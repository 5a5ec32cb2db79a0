//! Tiny problems on a GPU: every feature and each kind of kernel, in a second. tests/emulator runs
//! them without a GPU (`emulated.rs`).

use crate::gpu::run;
use crate::support::buffer::Array;
use crate::support::case::{Case, Data};
use crate::support::check::Prepared;
use crate::support::lengths::Side;
use crate::support::shapes;
use crate::support::subject::Subject;
use flashtune::call::Call;
use flashtune::config::Config;
use flashtune::device::Arch;
use flashtune::family;
use flashtune::problem::Pass;
use std::collections::BTreeSet;

#[test]
fn gpu_is_right_on_tiny_problems() {
    let Some(subject) = Subject::gpu() else { return };
    run(&subject, &shapes::tiny(), 1);
}

fn forward_of_each_family(subject: &Subject, cases: &[Case], splits: &[u32]) {
    for case in cases {
        let (prepared, problem) = (Prepared::new(case), case.problem(Pass::Forward));
        for config in subject.configs(case, Pass::Forward, 0) {
            let split = splits.iter().map(|splits| config.clone().with("num_splits", *splits));
            let split =
                split.map(|split| if split.get("tma_store").is_some() { split.with("tma_store", 0) } else { split });
            let served = split.filter(|split| {
                config.get("num_splits").is_some() && family::check(&problem, split, subject.backend.device()).is_ok()
            });
            let served: Vec<_> = served.collect();
            for config in [config].iter().chain(&served) {
                prepared.forward(subject, config);
            }
        }
    }
}

#[test]
fn gpu_is_right_on_tiny_decoding_problems() {
    let Some(subject) = Subject::gpu() else { return };
    forward_of_each_family(&subject, &shapes::tiny_decode(), &[1, 3]);
}

/// A range decodes unsplit with the kernel that it has for splits.
#[test]
fn gpu_has_the_same_bits_unsplit_with_a_kernel_that_may_split() {
    let Some(subject) = Subject::gpu() else { return };
    let mut compared = 0;
    for case in shapes::tiny_decode().iter().chain(&shapes::tiny_eight_bits()) {
        let config = subject.heuristic(case, Pass::Forward).with("num_splits", 1);
        if config.get("splittable").is_none() || case.extras.batch_invariant {
            continue;
        }
        let (data, splittable) = (Data::random(case), config.clone().with("splittable", 1));
        let [unsplit, shared] = [&config, &splittable].map(|config| subject.forward(case, &data, config));
        assert!(unsplit == shared, "{case}, {config}");
        compared += 1;
    }
    assert!(compared > 5, "{compared}");
}

#[test]
fn gpu_is_right_on_tiny_decoding_problems_of_eight_bits() {
    let Some(subject) = Subject::gpu() else { return };
    forward_of_each_family(&subject, &shapes::tiny_eight_bits(), &[1, 3]);
}

#[test]
fn gpu_is_right_on_tiny_problems_of_int4() {
    let Some(subject) = Subject::gpu() else { return };
    forward_of_each_family(&subject, &shapes::tiny_four_bits(), &[1, 3]);
}

#[test]
fn gpu_is_right_on_tiny_problems_of_int4_whose_heads_share_copies() {
    let Some(subject) = Subject::gpu() else { return };
    let served = forward_of_shared_heads(&subject, &shapes::tiny_four_bits());
    assert!(served >= 10, "{served}");
}

#[test]
fn gpu_is_right_on_tiny_problems_of_eight_bits_whose_heads_share_copies() {
    let Some(subject) = Subject::gpu() else { return };
    let served = forward_of_shared_heads(&subject, &shapes::tiny_eight_bits());
    assert!(served >= 10, "{served}");
}

/// Fewer heads than a CTA has, as many, and heads that do not lie one after the other, with two to
/// four stages. Returns the number of configs that serve a case.
fn forward_of_shared_heads(subject: &Subject, cases: &[Case]) -> usize {
    let mut served = 0;
    for case in cases {
        let (prepared, problem) = (Prepared::new(case), case.problem(Pass::Forward));
        let by_threads = [(2, 1, 32, 2, 0), (2, 3, 32, 2, 0), (4, 1, 32, 3, 0), (8, 1, 32, 2, 0), (8, 3, 32, 4, 0)];
        let by_tma = [(2, 1, 16, 2, 1), (4, 3, 32, 3, 1), (8, 1, 32, 2, 1), (8, 1, 16, 4, 1), (8, 3, 16, 3, 1)];
        for (heads, splits, block_n, stages, tma) in by_threads.into_iter().chain(by_tma) {
            let knobs = [
                ("heads", heads),
                ("num_warps", 8),
                ("warps_m", 1),
                ("block_n", block_n),
                ("num_stages", stages),
                ("ctas_per_sm", 1),
                ("tma", tma),
                ("num_splits", splits),
            ];
            let config = subject.heuristic(case, Pass::Forward);
            let config = knobs.iter().fold(config, |config, (knob, value)| config.with(knob, *value));
            if family::check(&problem, &config, subject.backend.device()).is_ok() {
                prepared.forward(subject, &config);
                served += 1;
            }
        }
    }
    served
}

#[test]
fn gpu_is_right_on_tiny_problems_of_eight_bits() {
    let Some(subject) = Subject::gpu() else { return };
    forward_of_each_family(&subject, &shapes::tiny_eight_bits_prefill(), &[]);
}

#[test]
fn gpu_is_right_on_tiny_problems_of_converted_keys() {
    let Some(subject) = Subject::gpu() else { return };
    forward_of_each_family(&subject, &shapes::tiny_converted_keys(), &[2]);
}

#[test]
fn gpu_is_right_on_tiny_problems_of_e4m3() {
    let Some(subject) = Subject::gpu() else { return };
    let device = subject.backend.device();
    let cases = shapes::tiny_e4m3();
    let served: Vec<Case> =
        cases.into_iter().filter(|case| family::supported(&case.problem(Pass::Forward), device).is_ok()).collect();
    assert!(!served.is_empty() || device.arch != Arch::Sm(9, 0));
    forward_of_each_family(&subject, &served, &[2]);
}

/// Blocks whose images have each kind of box: 128 keys, 64 or 32, and all of them. The second of
/// two splits begins behind the first image.
#[test]
fn gpu_is_right_on_tiny_problems_whose_v_is_transposed_before() {
    let Some(subject) = Subject::gpu() else { return };
    let device = subject.backend.device();
    let blocks: [&[u32]; 5] = [&[96, 224], &[128], &[160], &[64], &[96]];
    for (case, blocks) in shapes::tiny_transposed_v().into_iter().zip(blocks) {
        let (prepared, problem) = (Prepared::new(&case), case.problem(Pass::Forward));
        let heuristics = family::heuristics(&problem, device);
        let served: Vec<_> = heuristics.into_iter().filter(|config| config.get("vt_stages").is_some()).collect();
        // A consumer holds O past 128 columns beside a second one.
        let block_m = if case.head_dim > 128 { 128 } else { 64 };
        assert!(!served.is_empty() || device.arch != Arch::Sm(9, 0));
        for (config, block_n) in served.iter().flat_map(|config| blocks.iter().map(move |block_n| (config, *block_n))) {
            let knobs = [
                ("block_m", block_m),
                ("block_n", block_n),
                ("k_stages", 2),
                ("v_stages", 0),
                ("vt_stages", 2),
                ("q_stages", 1),
            ];
            let config = knobs.iter().fold(config.clone(), |config, (knob, value)| config.with(knob, *value));
            for (splits, tma_store) in [(1, 0), (1, 1), (2, 0)] {
                prepared.forward(&subject, &config.clone().with("num_splits", splits).with("tma_store", tma_store));
            }
        }
    }
}

/// Each kind of scales and each way in which keys lie, with the tile for which the producer
/// converts.
#[test]
fn gpu_is_right_on_tiny_problems_whose_keys_are_widened_before() {
    forward_of_widened_keys(&shapes::tiny_widened_keys());
}

/// Both groups, and each way in which keys lie.
#[test]
fn gpu_is_right_on_tiny_prompts_whose_int4_keys_are_widened_before() {
    forward_of_widened_keys(&shapes::tiny_widened_four_bits());
}

fn forward_of_widened_keys(cases: &[Case]) {
    let Some(subject) = Subject::gpu() else { return };
    let device = subject.backend.device();
    let mut split_seen = false;
    for case in cases {
        let problem = case.problem(Pass::Forward);
        let widening = subject.heuristic(case, Pass::Forward).with("widens", 1);
        let fits = |config: &Config| family::check(&problem, config, device).is_ok();
        // fp16 has no range for a stale maximum.
        let unsplit = [widening.clone(), widening.clone().with("stale_max", 0)].into_iter().find(fits);
        let split = unsplit.clone().map(|config| config.with("num_splits", 2).with("tma_store", 0)).filter(fits);
        assert!(
            unsplit.is_some() || device.arch != Arch::Sm(9, 0),
            "{case}: {:?}",
            family::check(&problem, &widening, device)
        );
        split_seen |= split.is_some();
        let prepared = Prepared::new(case);
        for config in unsplit.iter().chain(&split) {
            prepared.forward(&subject, config);
        }
    }
    assert!(split_seen || device.arch != Arch::Sm(9, 0));
}

#[test]
fn gpu_is_right_on_tiny_problems_over_pages() {
    let Some(subject) = Subject::gpu() else { return };
    forward_of_each_family(&subject, &shapes::tiny_pages(), &[2]);
}

/// One workspace serves all lengths, as in a graph whose lengths change: each run finds the states
/// of the one before. Every number of splits is right, and the runs of one have the same bits.
#[test]
fn gpu_is_right_on_tiny_mixed_batches_with_split_keys() {
    let Some(subject) = Subject::gpu() else { return };
    for case in shapes::tiny_mixed() {
        let problem = case.problem(Pass::Forward);
        let config = subject.heuristic(&case, Pass::Forward);
        if config.get("decode_splits").is_none() {
            continue;
        }
        assert!(config.get("decode_splits") == Some(1) && problem.max_short_splits(16) > 2, "{case}: {config}");
        let workspace = Array::output(&subject.backend, problem.workspace_bytes());
        for (replayed, most_splits) in replays(&case).into_iter().zip([0, 0, 2, 1]) {
            let prepared = Prepared::new(&replayed);
            let replay = |call: &mut Call| (call.workspace, call.most_splits) = (workspace.address(), most_splits);
            let got = subject.forward_runs(&prepared.case, &prepared.data, replay, &config, 2);
            let judged = prepared.judge_forward_with(false, &config, &got);
            judged.unwrap_or_else(|reason| panic!("{reason}\n  {}\n  {config}", prepared.case));
            workspace.check_guards(&subject.backend, "workspace");
        }
    }
}

/// The same call with other lengths, which the host does not see.
fn replays(case: &Case) -> [Case; 4] {
    [0, 1, 2, 3].map(|more| Case { seed: case.seed + more, ..case.clone() })
}

#[test]
fn short_sequences_of_tiny_mixed_batches_have_no_key_fewer_than_splits_and_all() {
    let keys_of_short = |case: Case| {
        let (group, rows) = (case.num_heads_q / case.num_heads_kv, case.problem(Pass::Forward).short_rows().unwrap());
        let lengths = case.rows(Side::Q).into_iter().zip(case.rows(Side::K));
        let is_short = move |queries: usize| queries > 0 && queries as i64 * group <= rows;
        lengths.filter(move |(q, _)| is_short(q.used)).map(|(_, k)| k.used)
    };
    let keys: BTreeSet<usize> = shapes::tiny_mixed().iter().flat_map(replays).flat_map(keys_of_short).collect();
    for met in [0..1, 1..4, 100..600, 1100..1101] {
        assert!(keys.range(met.clone()).next().is_some(), "{met:?}: {keys:?}");
    }
}

#[test]
fn gpu_is_right_on_tiny_problems_with_split_keys() {
    let Some(subject) = Subject::gpu() else { return };
    forward_of_each_family(&subject, &shapes::tiny_splits(), &[2, 3]);
}

#[test]
fn gpu_is_right_on_tiny_problems_whose_ctas_share_an_sm() {
    let Some(subject) = Subject::gpu() else { return };
    let device = subject.backend.device();
    let mut reached = BTreeSet::new();
    for case in shapes::tiny_short() {
        let (prepared, problem) = (Prepared::new(&case), case.problem(Pass::Forward));
        let alternatives = family::alternatives(&problem, device);
        let shared: Vec<_> = alternatives.iter().filter(|config| config.get("ctas_per_sm") > Some(1)).collect();
        assert!(!shared.is_empty() || device.arch != Arch::Sm(9, 0));
        for config in shared {
            prepared.forward(&subject, config);
            reached.insert(["ctas_per_sm", "block_m"].map(|knob| config.get(knob).unwrap()));
        }
    }
    let all = BTreeSet::from([[2, 64], [2, 128], [3, 64]]);
    let is_one_given = std::env::var_os("FLASHTUNE_TEST_CASE").is_some();
    assert!(reached == all || is_one_given || device.arch != Arch::Sm(9, 0), "{reached:?}");
}

#[test]
fn gpu_is_right_backward_on_tiny_problems_of_few_tiles() {
    let Some(subject) = Subject::gpu() else { return };
    run(&subject, &shapes::tiny_splits(), 0);
}

#[test]
fn gpu_is_right_backward_on_tiny_problems_of_few_keys() {
    let Some(subject) = Subject::gpu() else { return };
    for case in shapes::tiny_few_keys() {
        let (prepared, problem) = (Prepared::new(&case), case.problem(Pass::Backward));
        let forward = prepared.forward(&subject, &subject.heuristic(&case, Pass::Forward));
        let config = subject.heuristic(&case, Pass::Backward);
        let few_keys = config.clone().with("block_n", 64).with("block_m", 64);
        // A pair of CTAs for a tile, which from head dim 136 to 192 is a choice.
        let pairs = config.clone().with("block_n", 128).with("num_stages", 1);
        let kinds = [&config, &few_keys, &pairs];
        let all = [0, 1, 2, 3, 4].map(|tiles| kinds.map(|of| of.clone().with("direct_dq", tiles)));
        let all: BTreeSet<_> = all.into_iter().flatten().map(|config| config.with("split_waves", 0)).collect();
        let served = all.iter().filter(|config| family::check(&problem, config, subject.backend.device()).is_ok());
        for config in served.chain([&config]) {
            prepared.backward(&subject, &forward, config);
        }
    }
}

/// A CTA, or a pair of them, does both tiles of a head for a part of the queries.
#[test]
fn gpu_is_right_backward_on_tiny_problems_whose_pairs_of_tiles_share_walks() {
    let Some(subject) = Subject::gpu() else { return };
    let device = subject.backend.device();
    for case in shapes::tiny_pairs_of_tiles() {
        let (prepared, problem) = (Prepared::new(&case), case.problem(Pass::Backward));
        let forward = prepared.forward(&subject, &subject.heuristic(&case, Pass::Forward));
        let config = subject.heuristic(&case, Pass::Backward).with("direct_dq", 2);
        let split = [1, 2, 4, 16].map(|waves| config.clone().with("split_waves", waves));
        let lower = split.clone().map(|config| config.with("block_m", 64));
        let all: Vec<_> = split.into_iter().chain(lower).collect();
        let served: Vec<_> = all.iter().filter(|config| family::check(&problem, config, device).is_ok()).collect();
        assert!(!served.is_empty() || device.arch != Arch::Sm(9, 0), "{case}");
        for config in served.into_iter().take(2) {
            prepared.backward(&subject, &forward, config);
        }
    }
}

/// Tiles past whole waves are split, and the others are whole. On few SMs a tiny problem has more
/// than one wave.
#[test]
fn gpu_is_right_backward_on_tiny_problems_whose_last_tiles_are_split() {
    let Some(subject) = Subject::gpu() else { return };
    let device = subject.backend.device();
    let mut split = BTreeSet::new();
    for case in shapes::tiny_waves() {
        let (prepared, problem) = (Prepared::new(&case), case.problem(Pass::Backward));
        let forward = prepared.forward(&subject, &subject.heuristic(&case, Pass::Forward));
        let config = subject.heuristic(&case, Pass::Backward).with("direct_dq", 0).with("split_waves", 0);
        let pairs = config.clone().with("block_n", 128).with("num_stages", 1);
        for config in [config, pairs] {
            for parts in [2, 3] {
                let config = config.clone().with("splits_rest", parts);
                if family::check(&problem, &config, device).is_ok() {
                    prepared.backward(&subject, &forward, &config);
                    split.insert((case.head_dim, config.get("block_n"), parts));
                }
            }
        }
    }
    let is_one_given = std::env::var_os("FLASHTUNE_TEST_CASE").is_some();
    // The emulator test has four SMs.
    assert!(split.len() > 4 || is_one_given || device.sm_count != 4 || device.arch != Arch::Sm(9, 0), "{split:?}");
}

#[test]
fn gpu_is_right_backward_on_tiny_problems_of_many_groups() {
    let Some(subject) = Subject::gpu() else { return };
    for case in shapes::tiny_groups() {
        let prepared = Prepared::new(&case);
        let forward = prepared.forward(&subject, &subject.heuristic(&case, Pass::Forward));
        let config = subject.heuristic(&case, Pass::Backward).with("group_mb", 1);
        prepared.backward(&subject, &forward, &config.with("direct_dq", 0).with("split_waves", 0));
    }
}

#[test]
fn gpu_is_right_forward_on_one_tiny_problem() {
    let Some(subject) = Subject::gpu() else { return };
    forward_of_each_family(&subject, &shapes::one(), &[]);
}
