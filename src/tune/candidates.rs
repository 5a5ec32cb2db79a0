//! Candidates: the configs that a search tries, in a fixed order.
//!
//! The kernel families decide which configs pass and estimate the cost of each (`family`). This
//! file holds the order, the first selection and the steps from one config to the next. It measures
//! and remembers nothing.

use crate::config::{Config, Family};
use crate::device::Device;
use crate::family;
use crate::problem::Problem;

/// The most candidates that are compiled before anything is measured. A compilation takes about a
/// second per core, so 16 cores build this many in four or five seconds. The search then continues
/// from the best of them (`neighbours`).
pub const MAX_CANDIDATES: usize = 64;

/// Every config that passes `check`, in a fixed order: the heuristic's first, then family after
/// family with the most promising first.
pub fn all(problem: &Problem, device: &Device) -> Vec<Config> {
    family::families(problem, device).iter().flat_map(|family| of_family(*family, problem, device)).collect()
}

/// A family's configs that pass `check`, its heuristic's first.
fn of_family(family: Family, problem: &Problem, device: &Device) -> Vec<Config> {
    let heuristic = family::heuristic_of(family, problem, device);
    let mut ranked = family::passing(family, problem, device);
    ranked.retain(|(_, config)| heuristic.as_ref() != Some(config));
    heuristic.into_iter().chain(by_cost(ranked)).collect()
}

/// Sorts by cost. Configs of equal cost keep their order.
fn by_cost(mut ranked: Vec<(f64, Config)>) -> impl Iterator<Item = Config> {
    ranked.sort_by(|a, b| a.0.total_cmp(&b.0).then_with(|| a.1.cmp(&b.1)));
    ranked.into_iter().map(|(_, config)| config)
}

/// The most promising configs that differ from one another in more than one knob. Among configs
/// that differ in a single knob, the first stands for the others, which are its `neighbours`. The
/// preferred family gets three candidates for each one of another family.
pub fn first(problem: &Problem, device: &Device) -> Vec<Config> {
    let mut queues: Vec<_> = family::families(problem, device)
        .iter()
        .map(|family| spread(of_family(*family, problem, device)).into_iter())
        .collect();
    let mut chosen = Vec::new();
    while chosen.len() < MAX_CANDIDATES {
        let before = chosen.len();
        for (index, queue) in queues.iter_mut().enumerate() {
            chosen.extend(queue.take(if index == 0 { 3 } else { 1 }));
        }
        if chosen.len() == before {
            break;
        }
    }
    chosen.truncate(MAX_CANDIDATES);
    chosen
}

/// At most MAX_CANDIDATES configs of one family. Configs that differ in more than one knob come
/// first.
fn spread(all: Vec<Config>) -> Vec<Config> {
    let mut chosen: Vec<Config> = Vec::new();
    for config in &all {
        if chosen.len() == MAX_CANDIDATES {
            break;
        }
        if chosen.iter().all(|other| differences(config, other) > 1) {
            chosen.push(config.clone());
        }
    }
    // A small space is tried as a whole.
    for config in all {
        if chosen.len() < MAX_CANDIDATES && !chosen.contains(&config) {
            chosen.push(config);
        }
    }
    chosen
}

/// The configs one step away, with one knob at the value before or after its own. The most
/// promising come first.
pub fn neighbours(problem: &Problem, config: &Config, device: &Device) -> Vec<Config> {
    let ranked: Vec<(f64, Config)> = family::knobs(config.family, problem.pass)
        .iter()
        .flat_map(|knob| {
            let at = knob.values.iter().position(|value| Some(*value) == config.get(knob.name));
            let beside = at.map(|at| [at.checked_sub(1), Some(at + 1)]).into_iter().flatten().flatten();
            beside.filter_map(|at| Some(config.clone().with(knob.name, *knob.values.get(at)?)))
        })
        .filter_map(|neighbour| Some((family::cost(problem, &neighbour, device)?, neighbour)))
        .collect();
    by_cost(ranked).collect()
}

fn differences(a: &Config, b: &Config) -> usize {
    a.knobs.iter().zip(b.knobs.iter()).filter(|(a, b)| a != b).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Arch;
    use crate::problem::{Causal, Dtype, Layout, MAX_SPLITS, Pass};
    use std::collections::BTreeSet;

    fn h200() -> Device {
        Device::typical(Arch::Sm(9, 0)).unwrap()
    }

    fn decoding(batch_size: i64, seqlen_k: i64) -> Problem {
        let problem = Problem::dense(Pass::Forward, Dtype::Bf16, batch_size, 32, 1, 128);
        Problem { num_heads_kv: 8, seqlen_k, causal: Causal::BottomRight, ..problem }
    }

    #[test]
    fn candidates_begin_with_the_heuristic_and_name_none_twice() {
        let cpu = Device { arch: Arch::Cpu, sm_count: 2, l2_bytes: 1 << 25, ..h200() };
        let problem = Problem::dense(Pass::Forward, Dtype::Fp32, 1, 2, 1024, 64);
        let candidates = all(&problem, &cpu);
        assert_eq!(candidates[0], family::heuristic(&problem, &cpu));
        assert!(candidates.len() > 20);
        let distinct: BTreeSet<_> = candidates.iter().collect();
        assert_eq!(distinct.len(), candidates.len());
    }

    #[test]
    fn sm80_configs_that_won_on_an_h200_are_among_the_first_candidates() {
        let h200 = h200();
        let won = [
            (Pass::Forward, 64, "block_m=128 block_n=64 num_warps=4 num_stages=3 q_in_regs=1 ctas_per_sm=2"),
            (Pass::Forward, 128, "block_m=128 block_n=48 num_warps=4 num_stages=1 q_in_regs=0 ctas_per_sm=2"),
            (Pass::Forward, 256, "block_m=128 block_n=64 num_warps=8 num_stages=2 q_in_regs=0 ctas_per_sm=1"),
            (
                Pass::Backward,
                64,
                "block_m=64 block_n=96 num_warps=4 num_stages=1 sdp_warps_m=2 dkv_warps_n=2 dq_warps_m=2",
            ),
            (
                Pass::Backward,
                128,
                "block_m=64 block_n=128 num_warps=8 num_stages=2 sdp_warps_m=2 dkv_warps_n=2 dq_warps_m=4",
            ),
            (
                Pass::Backward,
                256,
                "block_m=64 block_n=64 num_warps=8 num_stages=2 sdp_warps_m=2 dkv_warps_n=2 dq_warps_m=1",
            ),
        ];
        for (pass, head_dim, knobs) in won {
            let problem = Problem { layout: Layout::Vec1, ..Problem::dense(pass, Dtype::Bf16, 1, 8, 1000, head_dim) };
            let problem = Problem { num_heads_kv: 2, ..problem };
            let candidates = of_family(Family::Sm80, &problem, &h200);
            let wanted =
                |config: &Config| knobs.split(' ').all(|knob| config.to_string().split(' ').any(|has| has == knob));
            let rank = candidates.iter().position(wanted);
            assert!(rank.is_some_and(|rank| rank < MAX_CANDIDATES), "{head_dim} {knobs}: rank {rank:?}");
            // The search begins with scattered configs and continues around the best of them.
            let first = first(&problem, &h200);
            let near = first.iter().map(|other| differences(other, &candidates[rank.unwrap()])).min();
            assert!(
                near.is_some_and(|steps| steps <= 1),
                "{head_dim} {knobs}: {near:?} steps from the first candidates"
            );
        }
    }

    #[test]
    fn both_families_are_among_the_first_candidates_sm90_first() {
        let h200 = h200();
        for pass in [Pass::Forward, Pass::Backward] {
            let problem = Problem::dense(pass, Dtype::Bf16, 4, 16, 4096, 128);
            let first = first(&problem, &h200);
            assert_eq!(first.len(), MAX_CANDIDATES);
            assert_eq!(first[0], family::heuristic(&problem, &h200));
            let families: Vec<Family> = first.iter().map(|config| config.family).collect();
            let round = [Family::Sm90, Family::Sm90, Family::Sm90, Family::Sm80];
            assert!(families.chunks(4).all(|chunk| chunk == round), "{pass:?}: {families:?}");
            assert_eq!(first.iter().collect::<BTreeSet<_>>().len(), first.len());
        }
    }

    #[test]
    fn the_heuristics_config_is_the_first_of_several_of_decode() {
        let h200 = h200();
        let problem = decoding(1, 8192);
        let first = first(&problem, &h200);
        assert_eq!(first[0], family::heuristic(&problem, &h200));
        assert!(first.iter().filter(|config| config.family == Family::Decode).count() > 8);
    }

    #[test]
    fn no_candidate_has_more_splits_than_the_workspace_has_room_for() {
        let h200 = h200();
        for (batch_size, seqlen_k) in [(1, 100), (1, 100_000), (8, 4096), (200, 4096), (300, 4096)] {
            let problem = decoding(batch_size, seqlen_k);
            let most = all(&problem, &h200).iter().map(|config| i64::from(config.get("num_splits").unwrap_or(1))).max();
            assert!(most.unwrap().max(1) <= problem.max_splits() && problem.max_splits() <= MAX_SPLITS);
            assert_eq!(problem.workspace_bytes() == 0, problem.max_splits() == 1);
        }
    }
}
