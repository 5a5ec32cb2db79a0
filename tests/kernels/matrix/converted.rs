//! sm90's forward kernels of keys of 8 bits, which the producer converts: each format with each
//! kind of scales, at each width of a head, over rows and pages, with few features and with many.

use super::*;
use flashtune::problem::{Eight, EightBits, Four};

/// Consumers beside a producer that takes more registers than one that copies. They keep numbers on
/// the stack that a tile's ends and rows of a stale maximum read. Between two blocks without a mask
/// they read at most two numbers, at head dim 256.
const CONVERTED: &MaySpill = &[
    (Arch::Sm(9, 0), Pass::Forward, (16, 160), 56),
    (Arch::Sm(9, 0), Pass::Forward, (64, 64), 12),
    (Arch::Sm(9, 0), Pass::Forward, (80, 80), 8),
    (Arch::Sm(9, 0), Pass::Forward, (128, 128), 240),
    (Arch::Sm(9, 0), Pass::Forward, (256, 256), 600),
];

/// Whether the next tile's scores are there, which consumers read once a tile.
const WIDENED: &MaySpill =
    &[(Arch::Sm(9, 0), Pass::Forward, (64, 64), 8), (Arch::Sm(9, 0), Pass::Forward, (128, 128), 8)];

fn converted(index: usize, dims: (i64, i64)) -> Problem {
    let keys_per_scale = [0, 1, 128][index % 3];
    let eight_bits = Some(EightBits { keys: Eight::ALL[index / 2 % 3], queries: false, keys_per_scale });
    let window = Window { left: Some(100), ..Window::default() };
    let varlen = Some(Varlen::default());
    let none = Features { eight_bits, ..Features::NONE };
    let features = match index % 5 {
        0 => none,
        1 => Features { varlen, paged: Some(16), ..none },
        2 => Features { softcap: true, sinks: true, ..none },
        3 => Features { varlen, window, alibi: true, ..none },
        _ => Features { paged: Some(12), ..none },
    };
    let causal = if index.is_multiple_of(2) { Causal::BottomRight } else { Causal::None };
    let seqlen_q = if index % 7 == 6 { FEW } else { MANY };
    let own = problem(Pass::Forward, DTYPES[index / 3 % 2], dims, Layout::Vec8);
    Problem { batch_size: SEQUENCES, causal, features, seqlen_q, ..own }
}

/// More keys than a workspace holds in 16 bits.
const SEQUENCES: i64 = 100_000;

/// Caches in e4m3 with scales of the tensor or of heads, as serving engines have them.
fn commonest() -> impl Iterator<Item = Problem> {
    let eight_bits = Some(EightBits { keys: Eight::E4m3, queries: false, keys_per_scale: 0 });
    let none = Features { eight_bits, ..Features::NONE };
    let pages = Features { varlen: Some(Varlen::default()), paged: Some(16), ..none };
    let forms = [(Causal::None, none), (Causal::BottomRight, none), (Causal::BottomRight, pages)];
    [64, 128, 256].into_iter().flat_map(move |dim| {
        forms.map(|(causal, features)| Problem {
            batch_size: SEQUENCES,
            causal,
            features,
            ..problem(Pass::Forward, Dtype::Bf16, (dim, dim), Layout::Vec8)
        })
    })
}

/// One or two heads, whose keys are split.
fn split(problem: Problem, device: &Device) -> (Problem, Config) {
    let few = Problem { batch_size: 1, num_heads_q: 2, num_heads_kv: 2, ..problem };
    (few, of_sm90(&few, device).with("num_splits", 3).with("tma_store", 0))
}

/// sm90 is not the preferred family over some keys of 8 bits.
fn of_sm90(problem: &Problem, device: &Device) -> Config {
    let config = heuristics(problem, device).into_iter().find(|config| config.family == Family::Sm90);
    config.unwrap_or_else(|| panic!("sm90 does not serve {problem:?}"))
}

/// Prompts over int4, which sm90 widens in any case.
fn prompts_of_int4() -> impl Iterator<Item = Problem> {
    let varlen = Some(Varlen::default());
    let forms = [
        (Four::Int4g32, (128, 128), Features::NONE),
        (Four::Int4g64, (256, 256), Features { varlen, paged: Some(16), ..Features::NONE }),
        (Four::Int4g32, (96, 64), Features { softcap: true, sinks: true, ..Features::NONE }),
        (Four::Int4g64, (64, 64), Features { varlen, ..Features::NONE }),
        (Four::Int4g32, (160, 32), Features { paged: Some(12), ..Features::NONE }),
    ];
    forms.into_iter().map(|(four, dims, features)| Problem {
        causal: Causal::BottomRight,
        features: Features { four_bits: Some(four), ..features },
        ..problem(Pass::Forward, Dtype::Bf16, dims, Layout::Vec8)
    })
}

/// The config with which a kernel before widens the keys of fewer sequences, if it may.
fn widened(problem: Problem, device: &Device) -> Option<(Problem, Config)> {
    let Features { eight_bits, four_bits, .. } = problem.features;
    let fewer = Problem { batch_size: 2, num_heads_q: 8, num_heads_kv: 2, seqlen_q: MANY, seqlen_k: MANY, ..problem };
    let plain =
        Problem { features: Features { eight_bits: None, four_bits: None, paged: None, ..fewer.features }, ..fewer };
    let own = [("decode_rows", 0), ("decode_splits", 0), ("widens", 1)];
    let config = own.into_iter().fold(heuristic(&plain, device), |config, (knob, value)| config.with(knob, value));
    let fits = |config: &Config| check(&fewer, config, device).is_ok();
    let slots = [("k_stages", 2), ("v_stages", 2), ("block_n", 64), ("tma_store", 0)];
    let smaller = slots.into_iter().fold(config.clone(), |config, (knob, value)| config.with(knob, value));
    let has_bits = eight_bits.is_some() || four_bits.is_some();
    [config, smaller].into_iter().find(fits).filter(|_| has_bits).map(|config| (fewer, config))
}

#[test]
fn kernels_that_widen_keys_compile() {
    let Some(nvrtc) = nvrtc() else { return };
    let arch = Arch::Sm(9, 0);
    let device = typical(arch);
    let dims = [(64, 64), (128, 128), (128, 128), (256, 256), (80, 80), (192, 128), (16, 160)];
    let mixed = dims.into_iter().flat_map(|dims| [dims; 2]).enumerate().map(|(index, dims)| converted(index, dims));
    let of_int4: Vec<_> = prompts_of_int4().filter_map(|problem| widened(problem, &device)).collect();
    assert_eq!(of_int4.len(), prompts_of_int4().count());
    let of_eight = mixed.chain(commonest()).filter_map(|problem| widened(problem, &device));
    let chosen: Vec<_> = of_eight.chain(of_int4).collect();
    assert!(chosen.len() > 20, "{}", chosen.len());
    let of = |(problem, config): (Problem, Config)| {
        let may_spill = may_spill(WIDENED, arch, &problem);
        Kernel::of(&problem, &config, &device, may_spill).into_iter()
    };
    all_compile(&chosen.into_iter().flat_map(of).collect(), nvrtc, arch);
}

#[test]
fn kernels_that_convert_keys_compile() {
    let Some(nvrtc) = nvrtc() else { return };
    let arch = Arch::Sm(9, 0);
    let device = typical(arch);
    let common = [(64, 64), (128, 128)].into_iter().flat_map(|dims| [dims; 3]);
    let others = [(256, 256), (80, 80), (192, 128), (16, 160)].into_iter().flat_map(|dims| [dims; 2]);
    let mixed = common.chain(others).enumerate().map(|(index, dims)| converted(index, dims));
    let chosen = mixed.chain(commonest()).map(|problem| (problem, of_sm90(&problem, &device)));
    let split = commonest().filter(|problem| problem.head_dim == 128).map(|problem| split(problem, &device));
    let of = |(problem, config): (Problem, Config)| {
        check(&problem, &config, &device).unwrap();
        let kernels = Kernel::of(&problem, &config, &device, may_spill(CONVERTED, arch, &problem));
        kernels.into_iter().filter(|(_, kernel)| kernel.spec.is_main)
    };
    all_compile(&chosen.chain(split).flat_map(of).collect(), nvrtc, arch);
}
