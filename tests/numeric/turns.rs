//! Forward tiles of sm90 whose consumer warpgroups issue products in turns: tiles without rows for
//! some warpgroups, rows that see none of a tile's keys, split keys, pages and few blocks. A
//! warpgroup that takes too few turns would make the others wait for ever.

use crate::support::case::Case;
use crate::support::check::Prepared;
use crate::support::extras::{Extras, Sides};
use crate::support::subject::Subject;
use flashtune::config::{Config, Family};
use flashtune::family;
use flashtune::problem::{Causal, Dtype, Pass};

/// The sm90 family's config with two, three and four consumers, unsplit and split.
fn configs(subject: &Subject, case: &Case) -> Vec<Config> {
    let (problem, device) = (case.problem(Pass::Forward), subject.backend.device());
    let own = family::heuristics(&problem, device).into_iter().find(|config| config.family == Family::Sm90);
    let of_tile = |[block_m, block_n]: [u32; 2]| {
        let stages = [("k_stages", 3), ("v_stages", 3), ("q_stages", 2), ("tma_store", 0)];
        let tile = [("block_m", block_m), ("block_n", block_n)].into_iter().chain(stages);
        own.clone().map(|own| tile.fold(own, |config, (knob, value)| config.with(knob, value)))
    };
    let tiles = [[128, 64], [192, 96], [192, 128], [256, 64]].into_iter().filter_map(of_tile);
    let all = tiles.flat_map(|config| [1, 2].map(|splits| config.clone().with("num_splits", splits)));
    all.filter(|config| family::check(&problem, config, device).is_ok()).collect()
}

#[test]
fn gpu_is_right_where_consumers_take_turns() {
    let Some(subject) = Subject::gpu() else { return };
    let none = Extras::default();
    // Kernels of packed sequences take no turns.
    let packed = Extras { cu_seqlens: Sides::BOTH, ..none };
    let in_pages = Extras { page_size: Some(16), seqused: Sides { q: false, k: true }, ..none };
    let mut tried = 0;
    for (dtype, head_dim, [seqlen_q, seqlen_k], causal, extras, batch_size) in [
        (Dtype::Bf16, 64, [450, 700], Causal::None, none, 1),
        (Dtype::Bf16, 64, [450, 700], Causal::BottomRight, none, 1),
        (Dtype::Bf16, 40, [700, 400], Causal::BottomRight, none, 1),
        (Dtype::Fp16, 64, [300, 600], Causal::TopLeft, none, 1),
        (Dtype::Fp16, 56, [200, 64], Causal::None, none, 2),
        (Dtype::Bf16, 64, [300, 520], Causal::BottomRight, packed, 5),
        (Dtype::Bf16, 64, [300, 520], Causal::BottomRight, in_pages, 2),
    ] {
        let plain = Case { num_heads_q: 2, num_heads_kv: 1, ..Case::plain(dtype, seqlen_q, head_dim) };
        let case = Case { seqlen_k, batch_size, causal, extras, seed: 5, ..plain };
        let prepared = Prepared::new(&case);
        for config in configs(&subject, &case) {
            let first = prepared.forward(&subject, &config);
            let again = subject.forward(&case, &prepared.data, &config);
            assert!(again == first, "the second run differs: {case}, {config}");
            tried += 1;
        }
    }
    if tried == 0 {
        eprintln!("SKIPPED: the GPU has no kernels of sm90");
    }
}
