//! Forward tiles with one Q slot whose O is stored by TMA from a buffer, on a GPU of compute
//! capability 9.0: tiles without keys, warpgroups without keys, packed sequences, and a buffer that
//! holds half of O or a third.

use crate::support::case::Case;
use crate::support::check::Prepared;
use crate::support::extras::{Extras, Sides};
use crate::support::subject::Subject;
use flashtune::config::{Config, Family};
use flashtune::family;
use flashtune::problem::{Causal, Dtype, Pass, Window};

/// The sm90 family's config with such a tile, if the GPU has it.
fn config(subject: &Subject, case: &Case, stages: u32) -> Option<Config> {
    let (problem, device) = (case.problem(Pass::Forward), subject.backend.device());
    let own = family::heuristics(&problem, device).into_iter().find(|config| config.family == Family::Sm90)?;
    let tile = [("block_m", 128), ("block_n", 64), ("k_stages", stages), ("v_stages", stages)];
    let stored = tile.into_iter().chain([("q_stages", 1), ("tma_store", 1)]);
    Some(stored.fold(own, |config, (knob, value)| config.with(knob, value)))
}

#[test]
fn gpu_is_right_with_a_buffer_for_the_output() {
    let Some(subject) = Subject::gpu() else { return };
    let none = Extras::default();
    let window = Extras { window: Window { left: Some(70), ..Window::default() }, ..none };
    let packed = Extras { cu_seqlens: Sides::BOTH, ..none };
    for (stages, head_dim, seqlen_q, seqlen_k, causal, extras, batch_size) in [
        (2, 256, 333, 333, Causal::BottomRight, none, 2),
        (2, 232, 300, 130, Causal::BottomRight, none, 1),
        (2, 256, 300, 333, Causal::None, window, 1),
        (2, 256, 150, 200, Causal::BottomRight, packed, 4),
        (3, 192, 200, 200, Causal::None, none, 1),
    ] {
        let shape = Case {
            num_heads_q: 4,
            num_heads_kv: 2,
            seqlen_k,
            batch_size,
            causal,
            extras,
            seed: 7,
            ..Case::plain(Dtype::Bf16, seqlen_q, head_dim)
        };
        let Some(config) = config(&subject, &shape, stages) else {
            eprintln!("SKIPPED: the GPU has no kernels of sm90");
            return;
        };
        let prepared = Prepared::new(&shape);
        let first = prepared.forward(&subject, &config);
        assert!(subject.forward(&shape, &prepared.data, &config) == first, "the second run differs: {shape}, {config}");
    }
}
