//! Kernels beside the matrix: of the configs that a lookup may choose by predicted time, and with
//! split keys, both mostly where tiles are few.

use super::*;
use flashtune::family::{alternatives, check};

/// More bytes of consumers at a tile's ends, where keys are split and weights are dropped.
const SPLIT_WITH_DROPOUT_MAY_SPILL: u32 = 64;

/// Bytes of consumers at a tile's ends, over pages with blocks of 128 keys: 124 now, and a margin
/// of 16. On an H100 such tiles were faster than those of 64 keys, which spill none
/// (docs/tuning/pages.md).
const BLOCKS_OF_PAGES_MAY_SPILL: u32 = 140;

/// The same of tiles of 192 rows whose keys are split over pages: 188 now. They gain more than that
/// where SMs have few tiles (docs/tuning/pages.md#splits-of-tall-tiles).
const TALL_SPLITS_OVER_PAGES_MAY_SPILL: u32 = 204;

/// The same of unsplit tiles of 192 rows with lengths on the device, as in the matrix: 8 now.
const TALL_TILES_OF_LENGTHS_MAY_SPILL: u32 = 24;

/// Spilled bytes of consumers at the ends of segments and groups where keys are split at them:
/// 844 now in an unsplit kernel of 128 rows at head dim 256, 752 with 128 rows over pages at head
/// dim 192, and a margin of 16.
const RUNS_MAY_SPILL: u32 = 860;

/// Bytes of a thread's stack there: the rows' merged references and sums, pieces of a group's
/// merged O for which shared memory has no room, and the state of all groups.
const MERGED_IN_MEMORY: u32 = 16 + 24 * 16 + 16 + 32 * 16;

/// Bytes of the score consumers of pairs of CTAs from head dim 136 to 192: 288 with dropout and
/// 72 without, as past 192.
const PAIRS_MAY_SPILL: u32 = 288;

/// The configs that a lookup may choose by predicted time, beside the heuristic's and those of
/// records: one in `one_in` of each problem's, in turns.
fn alternatives_of(problems: impl Iterator<Item = Problem>, one_in: usize) -> BTreeMap<String, Kernel> {
    let (arch, device) = (Arch::Sm(9, 0), typical(Arch::Sm(9, 0)));
    let of = |(turn, problem): (usize, Problem)| {
        let may_spill = may_spill(CONSUMERS, arch, &problem);
        let configs = alternatives(&problem, &device).into_iter().skip(turn % one_in).step_by(one_in);
        configs.flat_map(|config| Kernel::of(&problem, &config, &device, may_spill)).collect::<Vec<_>>()
    };
    problems.enumerate().flat_map(of).collect()
}

/// Passes, head dims and the switches of a template, in bf16.
fn with_switches<'a>(dims: &'a [i64], switches: &'a [(Causal, bool)]) -> impl Iterator<Item = Problem> + 'a {
    let of = |pass, dim| problem(pass, Dtype::Bf16, (dim, dim), Layout::Vec8);
    let plain =
        [Pass::Forward, Pass::Backward].into_iter().flat_map(move |pass| dims.iter().map(move |dim| of(pass, *dim)));
    plain.flat_map(|plain| switches.iter().map(move |&(causal, dropout)| Problem { causal, dropout, ..plain }))
}

#[test]
fn alternatives_compile_and_spill_no_more_than_allowed() {
    let Some(nvrtc) = nvrtc() else { return };
    let full = with_switches(&[128], &[(Causal::None, false)]);
    let causal = with_switches(&[64, 128], &[(Causal::BottomRight, false)]);
    let short = with_switches(&[64, 192], &[(Causal::BottomRight, false)]).filter(|p| p.pass == Pass::Forward);
    let short = short.map(|problem| Problem { seqlen_q: 60, seqlen_k: 100, ..problem });
    let narrow = with_switches(&[64], &[(Causal::None, false)]).filter(|p| p.pass == Pass::Forward);
    let narrow = narrow.flat_map(|p| [p, Problem { seqlen_q: 100, seqlen_k: 128, ..p }]);
    let narrow: Vec<_> = narrow.collect();
    let in_fp16 = narrow.iter().map(|problem| Problem { dtype: Dtype::Fp16, ..*problem });
    let wide = with_switches(&[256], &[(Causal::None, false)]).filter(|p| p.pass == Pass::Forward);
    let few_keys = wide.map(|problem| Problem { seqlen_k: 70, ..problem });
    let paged = with_switches(&[128], &[(Causal::BottomRight, false)]).filter(|p| p.pass == Pass::Forward);
    let of_pages = Features { paged: Some(64), varlen: Some(Varlen::default()), ..Features::NONE };
    let of_lengths = Features { varlen: Some(Varlen::default()), ..Features::NONE };
    let chunk = paged.flat_map(|problem| {
        [of_pages, of_lengths].map(|features| Problem { seqlen_q: 512, seqlen_k: 8192, features, ..problem })
    });
    let narrow_chunk = with_switches(&[64], &[(Causal::BottomRight, false)]).filter(|p| p.pass == Pass::Forward);
    let narrow_chunk = narrow_chunk.map(|problem| Problem { seqlen_q: 2048, features: of_pages, ..problem });
    let added = with_switches(&[256], &[(Causal::None, false)]).filter(|p| p.pass == Pass::Backward);
    let added = added.map(|problem| Problem { seqlen_q: 300, seqlen_k: 154, ..problem });
    let mut kernels = alternatives_of(full.chain(causal), 10);
    kernels.extend(alternatives_of(in_fp16, 10));
    kernels.extend(alternatives_of(short.chain(few_keys), 6));
    kernels.extend(alternatives_of(narrow.into_iter().chain(added).chain(chunk).chain(narrow_chunk), 1));
    let adds_tiles_of_few_keys = |text: &&String| text.contains("kBlockN = 64;") && text.contains("kDirectTiles = 0;");
    assert_eq!(kernels.keys().filter(adds_tiles_of_few_keys).count(), 2, "split and unsplit");
    let has_large_blocks = |text: &str| text.contains("kPageSize = 64;") && text.contains("kBlockN = 128;");
    let large = kernels.iter_mut().filter(|(text, _)| has_large_blocks(text)).map(|(_, kernel)| kernel);
    assert_eq!(large.map(|kernel| kernel.may_spill = BLOCKS_OF_PAGES_MAY_SPILL).count(), 2, "split and unsplit");
    let is_tall = |text: &str| text.contains("kBlockM = 192;") && text.contains("kHeadDim = 128;");
    for (text, kernel) in kernels.iter_mut().filter(|(text, _)| is_tall(text) && text.contains("kIsVarlen = true;")) {
        kernel.may_spill = match (text.contains("kPageSize = 64;"), text.contains("kMaySplit = true;")) {
            (true, true) => TALL_SPLITS_OVER_PAGES_MAY_SPILL,
            (false, false) => TALL_TILES_OF_LENGTHS_MAY_SPILL,
            _ => continue,
        };
    }
    let share_an_sm = |ctas: u32| kernels.keys().filter(|text| text.contains(&format!("kCtasPerSm = {ctas};"))).count();
    assert!(share_an_sm(2) >= 3 && share_an_sm(3) >= 1);
    let are_tall = |text: &&String| text.contains("kCtasPerSm = 2;") && text.contains("kBlockM = 128;");
    assert_eq!(kernels.keys().filter(are_tall).count(), 1);
    let has_80_keys = |text: &str| text.contains("kBlockM = 256;") && text.contains("kBlockN = 80;");
    let of_few_columns = with_switches(&[40], &[(Causal::None, false)]).filter(|p| p.pass == Pass::Forward);
    kernels.extend(alternatives_of(of_few_columns, 1).into_iter().filter(|(text, _)| has_80_keys(text)));
    assert!(kernels.keys().any(|text| has_80_keys(text)));
    all_compile(&kernels, nvrtc, Arch::Sm(9, 0));
}

#[test]
#[ignore = "compiles for a quarter of an hour on two cores"]
fn alternatives_compile_for_all_head_dims_of_the_matrix() {
    let Some(nvrtc) = nvrtc() else { return };
    let switches = [Causal::None, Causal::BottomRight].map(|causal| [(causal, false), (causal, true)]).concat();
    let dims = [40, 64, 72, 80, 96, 112, 128, 160, 192, 256];
    all_compile(&alternatives_of(with_switches(&dims, &switches), 1), nvrtc, Arch::Sm(9, 0));
}

/// sm90's forward kernels with split keys: at every head dim with one of the switches each,
/// and with combined features.
#[test]
fn kernels_that_split_keys_compile() {
    let Some(nvrtc) = nvrtc() else { return };
    let arch = Arch::Sm(9, 0);
    let device = typical(arch);
    let of_one = |problem: Problem| Problem {
        pass: Pass::Forward,
        batch_size: 1,
        num_heads_q: 2,
        num_heads_kv: 2,
        features: Features { dbias: false, dlse: false, ..problem.features },
        ..problem
    };
    let switched =
        combinations().filter(|(d, f, t)| (d + f) % 6 == 0 && (d + f / 4) % 2 == *t).filter_map(|(d, f, t)| {
            let ((dims, layout), (causal, dropout, deterministic)) = (HEAD_DIMS[d], FEATURES[f]);
            let problem = Problem { causal, dropout, ..problem(Pass::Forward, DTYPES[t], dims, layout) };
            (layout == Layout::Vec8 && dims.0 <= 256 && !deterministic).then_some(problem)
        });
    let combined = combined_features().map(|(problem, _)| problem);
    let combined = combined.into_iter().filter(|p| p.features.block_mask.is_none() && p.layout == Layout::Vec8);
    let of = |problem: Problem| {
        let config = heuristic(&problem, &device).with("num_splits", 3).with("tma_store", 0);
        check(&problem, &config, &device).unwrap();
        let of_dropout = if problem.dropout { SPLIT_WITH_DROPOUT_MAY_SPILL } else { 0 };
        Kernel::of(&problem, &config, &device, may_spill(CONSUMERS, arch, &problem) + of_dropout)
    };
    all_compile(&switched.chain(combined).map(of_one).flat_map(of).collect(), nvrtc, arch);
}

/// Their batch-invariant ones, whose splits are runs of segments, and what merges the runs: every
/// fifth config of each problem, in turns.
#[test]
fn batch_invariant_kernels_that_split_keys_compile() {
    let Some(nvrtc) = nvrtc() else { return };
    let (arch, device) = (Arch::Sm(9, 0), typical(Arch::Sm(9, 0)));
    let pages = Features { paged: Some(64), varlen: Some(Varlen::default()), ..Features::NONE };
    let of = |(turn, (dim, dtype, features)): (usize, (i64, Dtype, Features))| {
        let plain = problem(Pass::Forward, dtype, (dim, dim), Layout::Vec8);
        let sizes = Problem { batch_size: 1, num_heads_q: 8, num_heads_kv: 2, seqlen_q: 256, seqlen_k: 8192, ..plain };
        let problem = Problem { causal: Causal::BottomRight, batch_invariant: true, features, ..sizes };
        let configs = alternatives(&problem, &device).into_iter().filter(|config| config.get("num_splits") > Some(1));
        let taken = configs.skip(turn % 5).step_by(5);
        taken.flat_map(|config| Kernel::of(&problem, &config, &device, 0)).collect::<Vec<_>>()
    };
    let none = Features::NONE;
    let problems = [
        (64, Dtype::Bf16, none),
        (96, Dtype::Fp16, none),
        (128, Dtype::Bf16, none),
        (128, Dtype::Fp16, pages),
        (192, Dtype::Bf16, pages),
        (256, Dtype::Bf16, none),
    ];
    let mut kernels: BTreeMap<_, _> = problems.into_iter().enumerate().flat_map(of).collect();
    let mut of_runs = 0;
    for kernel in kernels.values_mut().filter(|kernel| kernel.spec.template == "sm90_forward") {
        (kernel.may_spill, kernel.stack, of_runs) = (RUNS_MAY_SPILL, MERGED_IN_MEMORY, of_runs + 1);
    }
    assert!(of_runs >= problems.len(), "{of_runs}");
    assert!(kernels.values().any(|kernel| kernel.spec.template == "combine_runs"));
    all_compile(&kernels, nvrtc, arch);
}

/// sm90's backward kernels in which only the tiles past whole waves share walks.
#[test]
fn backward_kernels_that_split_the_last_tiles_compile_and_do_not_spill() {
    let Some(nvrtc) = nvrtc() else { return };
    let device = typical(Arch::Sm(9, 0));
    let of = |head_dim: i64| {
        let heads = Problem {
            batch_size: 4,
            seqlen_q: 2304,
            ..problem(Pass::Backward, Dtype::Bf16, (head_dim, head_dim), Layout::Vec8)
        };
        let problem = Problem { num_heads_q: 20, num_heads_kv: 20, seqlen_k: 600, ..heads };
        // Whole tiles that add to dQ, of which the last ones may be split.
        let knobs = ["direct_dq", "split_waves", "splits_rest"];
        let is_whole = |config: &Config| knobs.iter().all(|knob| config.get(knob) == Some(0));
        let whole = alternatives(&problem, &device).into_iter().filter(is_whole);
        let split = whole.map(|config| config.with("splits_rest", 2));
        let split: Vec<_> = split.filter(|config| check(&problem, config, &device).is_ok()).take(2).collect();
        assert!(!split.is_empty(), "{head_dim}");
        let most = may_spill(CONSUMERS, Arch::Sm(9, 0), &problem);
        split.iter().flat_map(|config| Kernel::of(&problem, config, &device, most)).collect::<Vec<_>>()
    };
    let kernels: BTreeMap<String, Kernel> = [40, 64, 80, 96, 112, 128, 192, 256].into_iter().flat_map(of).collect();
    assert!(kernels.keys().filter(|text| text.contains("kSplitsLast = true;")).count() > 10);
    all_compile(&kernels, nvrtc, Arch::Sm(9, 0));
}

/// sm90's backward kernels that write dQ, with one tile and, up to head dim 192, with two tiles of
/// keys a head: at every head dim with a part of the switches; those of three and four causal
/// tiles; and pairs of CTAs with one and two tiles past head dim 128.
#[test]
fn kernels_that_write_dq_compile_and_do_not_spill() {
    let Some(nvrtc) = nvrtc() else { return };
    let arch = Arch::Sm(9, 0);
    let device = typical(arch);
    let of = |(d, f, t): (usize, usize, usize)| {
        let ((dims, layout), (causal, dropout, deterministic)) = (HEAD_DIMS[d], FEATURES[f]);
        let plain = Problem { causal, dropout, deterministic, ..problem(Pass::Backward, DTYPES[t], dims, layout) };
        let seqlen = match (dims.0.max(dims.1), (d + f / 2) % 2) {
            (193.., _) => 60,
            (_, 0) => 120,
            _ => 250,
        };
        let few = Problem { batch_size: 64, seqlen_q: seqlen, seqlen_k: seqlen, ..plain };
        let config = heuristic(&few, &device);
        let writes_dq = config.get("direct_dq").is_some_and(|tiles| tiles > 0);
        writes_dq.then(|| Kernel::of(&few, &config, &device, may_spill(CONSUMERS, arch, &few)))
    };
    let a_part = || combinations().filter(|(d, f, t)| (d + f) % 4 == 0 && (d + f / 4) % 2 == *t);
    let more_tiles = |(d, f, t): (usize, usize, usize)| {
        let ((dims, layout), (causal, dropout, deterministic)) = (HEAD_DIMS[d], FEATURES[f]);
        let plain = Problem { causal, dropout, deterministic, ..problem(Pass::Backward, DTYPES[t], dims, layout) };
        let with_tiles = |(tiles, seqlen)| {
            let problem = Problem { batch_size: 64, seqlen_q: seqlen, seqlen_k: seqlen, ..plain };
            let config = heuristic(&problem, &device).with("direct_dq", tiles).with("split_waves", 0);
            let config = if tiles < 3 { config.with("block_n", 128).with("num_stages", 1) } else { config };
            let takes = check(&problem, &config, &device).is_ok();
            let is_pair_of_three_boxes = matches!(dims.0.max(dims.1), 129..=192);
            let most = if is_pair_of_three_boxes { PAIRS_MAY_SPILL } else { may_spill(CONSUMERS, arch, &problem) };
            takes.then(|| Kernel::of(&problem, &config, &device, most))
        };
        let tiles = if dims.0.max(dims.1) > 128 { [(1, 120), (2, 250)] } else { [(3, 380), (4, 500)] };
        tiles.map(with_tiles).into_iter().flatten().flatten().collect::<Vec<_>>()
    };
    let of_more = a_part().flat_map(more_tiles);
    let kernels: BTreeMap<String, Kernel> = a_part().filter_map(of).flatten().chain(of_more).collect();
    let tiles = |number: &str| kernels.keys().filter(|text| text.contains(number)).count();
    assert!(tiles("kDirectTiles = 1;") > 3 && tiles("kDirectTiles = 2;") > 3);
    assert!(tiles("kDirectTiles = 3;") > 1 && tiles("kDirectTiles = 4;") == 0, "three and four tiles have one text");
    assert!(tiles("kBlockN = 64;") > 0, "past head dim 192");
    let of_pairs =
        |number: &str| kernels.keys().filter(|text| text.contains("kCtas = 2;") && text.contains(number)).count();
    assert!(of_pairs("kDirectTiles = 1;") > 0 && of_pairs("kDirectTiles = 2;") > 0, "pairs of CTAs");
    all_compile(&kernels, nvrtc, arch);
}
