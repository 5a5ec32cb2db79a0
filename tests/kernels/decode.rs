//! The decode family's kernels, compiled by NVRTC without a GPU. The heuristic's kernels must
//! compile with every feature, use no stack, and fit the launch's shared memory (their static
//! asserts). Without NVRTC the tests say so and pass.

use crate::nvrtc::{compile, nvrtc};
use flashtune::config::{Config, Family};
use flashtune::device::{Arch, Device};
use flashtune::family::heuristic;
use flashtune::kernel::compile::target;
use flashtune::kernel::render_pass;
use flashtune::plan::key::canonical;
use flashtune::problem::{Causal, Dtype, Eight, EightBits, Features, Four, Layout, Pass, Problem, Varlen, Window};
use rayon::prelude::*;

fn problem(head_dim: i64, group_size: i64, features: Features) -> Problem {
    Problem {
        num_heads_kv: 2,
        seqlen_k: 8192,
        causal: Causal::BottomRight,
        features,
        layout: Layout::widest(Dtype::Bf16, [head_dim]),
        ..Problem::dense(Pass::Forward, Dtype::Bf16, 2, 2 * group_size, 1, head_dim)
    }
}

const PAGED: Features = Features { paged: Some(16), varlen: Some(VARLEN), ..Features::NONE };
/// Lengths in `seqused` only: queries and keys have a batch dimension.
const VARLEN: Varlen = Varlen { total_q: None, total_k: None, padded_q: false };
const KEY_STARTS: Features = Features { key_starts: true, paged: None, ..PAGED };
const ALL: Features = Features {
    window: Window { left: Some(100), right: None, top_left: false },
    softcap: true,
    alibi: true,
    bias: true,
    mask: true,
    sinks: true,
    ..PAGED
};

/// Bytes at head dim 256, where O takes half of the registers. One or two bounds lie on the stack,
/// which costs less than sharing V's columns between two warps.
const MAY_SPILL: u32 = 8;

/// Bytes where TMA copies the keys of several heads over pages: a warp reads them once a block or
/// less. Two such CTAs an SM were faster on an H100 than one that spills nothing.
const MAY_SPILL_OF_PAGES: u32 = 64;

/// Each problem on sm_90 and, in turns, on one of two other architectures.
fn all_compile(problems: Vec<Problem>) {
    let Some(nvrtc) = nvrtc() else { return };
    let others = [Arch::Sm(8, 0), Arch::Sm(12, 0)].into_iter().cycle();
    let cases: Vec<(Problem, Config, Arch)> = problems
        .iter()
        .zip(others)
        .flat_map(|(problem, other)| [Arch::Sm(9, 0), other].map(|arch| (problem, arch)))
        .map(|(problem, arch)| (*problem, heuristic(problem, &Device::typical(arch).unwrap()), arch))
        .collect();
    cases.par_iter().for_each(|(problem, config, arch)| {
        assert_eq!(config.family, Family::Decode, "{problem:?}");
        let target = target(*arch, config.family, nvrtc).unwrap();
        for (spec, text) in render_pass(problem, config, *arch).unwrap() {
            let compiled = compile(nvrtc, spec.template, &text, &target).unwrap();
            let spills = compiled.resources[spec.entry].spill_bytes;
            let shares_copies = config.get("heads") > Some(1) && config.get("tma") == Some(1);
            let tolerated = match problem.features.paged {
                Some(_) if shares_copies => MAY_SPILL_OF_PAGES,
                _ if problem.head_dim == 256 => MAY_SPILL,
                _ => 0,
            };
            assert!(spills <= tolerated, "{spills} bytes: {} of {config} for {arch}: {problem:?}", spec.entry);
            assert_eq!(compiled.log, "", "{} of {config} for {arch}: {problem:?}", spec.entry);
        }
    });
}

#[test]
fn common_head_dims_compile_with_every_group_size() {
    let dims = [64, 128, 256].into_iter();
    all_compile(dims.flat_map(|dim| [1, 4, 8, 32].map(|group| problem(dim, group, Features::NONE))).collect());
}

/// Each format, each kind of scales, rows and pages, in tiles of 8 rows and of 16.
#[test]
fn eight_bits_compile_in_both_dtypes() {
    let of = |(keys, keys_per_scale, features): (Eight, i64, Features)| {
        let eight_bits = Some(EightBits { keys, queries: false, keys_per_scale });
        problem(128, 4, Features { eight_bits, ..features })
    };
    let forms = [(Eight::E4m3, 1, PAGED), (Eight::E5m2, 0, Features::NONE), (Eight::Int8, 128, Features::NONE)];
    let fp16 = Problem { dtype: Dtype::Fp16, ..of((Eight::Int8, 1, PAGED)) };
    let of_dim = |head_dim, form| Problem { head_dim, head_dim_v: head_dim, ..of(form) };
    let narrow = forms.map(|form| of_dim(64, form));
    let wide = [of_dim(256, (Eight::Int8, 1, PAGED)), of_dim(512, (Eight::E4m3, 0, Features::NONE))];
    // Tiles of 16 rows.
    let tall = forms.map(|form| Problem { num_heads_q: 4 * of(form).num_heads_q, ..of(form) });
    all_compile(forms.map(of).into_iter().chain(narrow).chain(wide).chain(tall).chain([fp16]).collect());
}

/// Both groups, rows and pages, every number of rows of a tile, and the widest rows.
#[test]
fn int4_compiles_in_both_dtypes() {
    let of = |four, head_dim, group_size, features: Features| {
        problem(head_dim, group_size, Features { four_bits: Some(four), ..features })
    };
    let (g32, g64) = (Four::Int4g32, Four::Int4g64);
    let fp16 = Problem { dtype: Dtype::Fp16, ..of(g64, 128, 4, PAGED) };
    // With more queries, sm90 comes first on Hopper.
    let prompt = Problem { seqlen_q: 80, seqlen_k: 4096, ..of(g32, 128, 4, PAGED) };
    let narrow_v = Problem { head_dim_v: 64, ..of(g64, 192, 8, Features::NONE) };
    let wide = [of(g32, 256, 4, Features::NONE), of(g64, 256, 32, PAGED)];
    let others =
        [of(g32, 32, 1, PAGED), of(g32, 64, 4, KEY_STARTS), of(g32, 128, 4, Features::NONE), of(g32, 128, 8, ALL)];
    all_compile(others.into_iter().chain(wide).chain([fp16, prompt, narrow_v]).collect());
}

/// Eight K/V heads whose keys are copied together, by TMA on sm_90, with long keys and with short.
#[test]
fn heads_that_share_copies_compile() {
    let of = |(head_dim, batch_size, features)| {
        let plain = problem(head_dim, 4, features);
        let of_heads = Problem { batch_size, num_heads_q: 32, num_heads_kv: 8, ..plain };
        Problem { layout: of_heads.widest_layout(), ..of_heads }
    };
    let int4 = |four, features| Features { four_bits: Some(four), ..features };
    let (g32, g64) = (int4(Four::Int4g32, Features::NONE), int4(Four::Int4g64, PAGED));
    let eight_bits = Some(EightBits { keys: Eight::E4m3, queries: false, keys_per_scale: 0 });
    let of_keys = Some(EightBits { keys: Eight::Int8, queries: false, keys_per_scale: 1 });
    let (e4m3, int8) = (Features { eight_bits, ..Features::NONE }, Features { eight_bits: of_keys, ..PAGED });
    let problems = [
        (64, 2, g32),
        (128, 64, g32),
        (128, 64, int4(Four::Int4g32, PAGED)),
        (256, 64, g32),
        (64, 2, g64),
        (128, 64, g64),
        (256, 64, g64),
        (64, 128, e4m3),
        (64, 64, e4m3),
        (192, 64, e4m3),
        (64, 2, int8),
        (96, 64, int8),
    ]
    .map(of);
    for problem in &problems {
        let config = heuristic(problem, &Device::typical(Arch::Sm(9, 0)).unwrap());
        assert!(config.get("heads") > Some(1) && config.get("tma") == Some(1), "{config}: {problem:?}");
    }
    all_compile(problems.into());
}

#[test]
fn batch_invariant_kernels_compile_for_few_queries() {
    let of = |head_dim, features: Features, seqlen_q| {
        *canonical(&Problem { batch_invariant: true, seqlen_q, ..problem(head_dim, 4, features) })
    };
    let narrow = [of(64, Features::NONE, 1), of(72, PAGED, 1)];
    let wide = [of(128, Features::NONE, 1), of(128, PAGED, 16), of(256, Features::NONE, 1)];
    all_compile(narrow.into_iter().chain(wide).collect());
}

#[test]
fn key_starts_compile_alone_and_with_every_other_feature() {
    let features = [KEY_STARTS, Features { key_starts: true, paged: None, ..ALL }];
    all_compile(features.into_iter().flat_map(|features| [64, 128].map(|dim| problem(dim, 4, features))).collect());
}

#[test]
fn every_feature_compiles_with_pages_of_any_size() {
    let pages = [1, 8, 16, 256].map(|page_size| Features { paged: Some(page_size), ..PAGED });
    let bits = Features { mask_bits: true, ..ALL };
    let features = pages.into_iter().chain([ALL, bits, Features { varlen: None, paged: None, ..ALL }]);
    all_compile(features.flat_map(|features| [64, 128, 256].map(|dim| problem(dim, 4, features))).collect());
}

#[test]
fn odd_head_dims_compile_in_every_layout() {
    let dims = [(33, 33), (36, 36), (50, 50), (72, 72), (96, 96), (192, 128), (512, 512)];
    let plain = |(head_dim, head_dim_v)| Problem { head_dim_v, ..problem(head_dim, 4, Features::NONE) };
    all_compile(dims.map(plain).into());
}
