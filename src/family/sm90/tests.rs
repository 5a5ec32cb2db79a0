//! Which problems the family does, and that the heuristic has a config for each of them.

use super::ForwardKnobs;
use super::forward_heuristic::reading_keys;
use super::forward_widening::widening;
use crate::config::{Config, Family};
use crate::device::{Arch, Device};
use crate::family::knob::Knobs as _;
use crate::family::space::Space as _;
use crate::family::{check, families, heuristic, heuristics, work};
use crate::problem::{
    BlockMask, Causal, Dtype, Eight, EightBits, Features, Four, Layout, Pass, Problem, Varlen, Window,
};

pub fn h200() -> Device {
    Device::typical(Arch::Sm(9, 0)).unwrap()
}

pub fn problem(pass: Pass, head_dim: i64, head_dim_v: i64) -> Problem {
    Problem { head_dim_v, ..Problem::dense(pass, Dtype::Bf16, 4, 16, 4096, head_dim) }
}

/// The name of the constraint that a config breaks.
pub fn broken(problem: &Problem, config: &Config) -> Option<String> {
    let error = check(problem, config, &h200()).err()?;
    Some(error.split("breaks ").nth(1)?.split(':').next()?.to_owned())
}

#[test]
fn the_heuristic_is_of_the_family_at_every_head_dim_and_shape_that_it_does() {
    for pass in [Pass::Forward, Pass::Backward] {
        let dims = (8..=256).step_by(8).flat_map(|d| [(d, d), (d, 256), (d, 8), (256, d)]);
        for (head_dim, head_dim_v) in dims {
            for (seqlen_q, seqlen_k) in [(0, 7), (1, 1), (65, 9000), (4096, 0), (1 << 20, 1 << 20)] {
                for (dtype, causal) in [(Dtype::Bf16, Causal::None), (Dtype::Fp16, Causal::BottomRight)] {
                    let plain = problem(pass, head_dim, head_dim_v);
                    let problem = Problem { seqlen_q, seqlen_k, dtype, causal, ..plain };
                    let config = heuristic(&problem, &h200());
                    let checked = check(&problem, &config, &h200());
                    assert_eq!((config.family, checked), (Family::Sm90, Ok(())), "{problem:?}");
                }
            }
        }
    }
}

/// A scale for all keys of a sequence, for each key or for blocks, contiguous keys and pages.
#[test]
fn the_family_has_a_config_over_keys_of_8_bits() {
    let of = |keys_per_scale| {
        let eight_bits = EightBits { keys: Eight::Int8, queries: false, keys_per_scale };
        Features { eight_bits: Some(eight_bits), ..Features::NONE }
    };
    for (dim, dim_v) in (16..=256).step_by(16).flat_map(|dim| [(dim, dim), (dim, 256), (256, dim)]) {
        for plain in [0, 1, 128].map(of) {
            let paged = Features { varlen: Some(Varlen::default()), paged: Some(12), ..plain };
            let window = Window { left: Some(256), ..Window::default() };
            let scores = Features { softcap: true, alibi: true, bias: true, mask: true, window, ..plain };
            for features in [plain, paged, scores] {
                for (seqlen_q, seqlen_k) in [(65, 200), (4096, 4096), (1 << 20, 1 << 20)] {
                    for dtype in [Dtype::Bf16, Dtype::Fp16] {
                        let problem =
                            Problem { features, seqlen_q, seqlen_k, dtype, ..problem(Pass::Forward, dim, dim_v) };
                        let checked = check(&problem, &of_sm90(&problem), &h200());
                        assert_eq!(checked, Ok(()), "{problem:?}");
                    }
                }
            }
        }
    }
}

/// The config of this family's heuristic, where another family is preferred.
fn of_sm90(problem: &Problem) -> Config {
    let mut configs = heuristics(problem, &h200()).into_iter();
    configs.find(|config| config.family == Family::Sm90).unwrap_or_else(|| panic!("sm90 does not serve {problem:?}"))
}

/// The config whose producer converts keys of 8 bits.
fn converting(problem: &Problem) -> Config {
    reading_keys(problem, &h200()).unwrap_or_else(|| panic!("sm90 does not serve {problem:?}")).to_config()
}

#[test]
fn keys_of_8_bits_keep_to_the_kernels_that_take_them() {
    let eight_bits = Some(EightBits { keys: Eight::E4m3, queries: false, keys_per_scale: 128 });
    let plain = Problem { features: Features { eight_bits, ..Features::NONE }, ..problem(Pass::Forward, 128, 128) };
    let families_of = |problem: Problem| families(&problem, &h200()).to_vec();
    assert_eq!(families_of(plain), [Family::Sm90, Family::Sm80]);
    let few = Problem { seqlen_q: 1, num_heads_kv: 4, ..plain };
    assert_eq!(families_of(few), [Family::Decode, Family::Sm90, Family::Sm80]);
    assert_eq!(families_of(Problem { layout: Layout::Vec4, head_dim: 72, head_dim_v: 72, ..plain }), [Family::Sm80]);
    let block_mask = Some(BlockMask { block_q: 128, block_k: 128 });
    let listed = Problem { features: Features { block_mask, ..plain.features }, ..plain };
    assert_eq!(families_of(listed), [Family::Sm80]);
    assert_eq!(families_of(Problem { batch_invariant: true, ..plain }), []);
    // Four warps that convert in registers have the same number of keys each, and blocks divide
    // those of the scales.
    let good = converting(&plain);
    assert_eq!(broken(&plain, &good), None);
    for keys in [80, 96] {
        let few_stages = good.clone().with("k_stages", 2).with("v_stages", 2).with("block_n", keys);
        assert_eq!(broken(&plain, &few_stages).as_deref(), Some("eight_bits"), "{keys}");
    }
}

/// The choice of the producer (docs/tuning/eight-bits.md). Blocks of any size for wgmma are fit for
/// conversions in shared memory.
#[test]
fn keys_of_8_bits_are_converted_where_that_was_faster() {
    let of = |dim, keys_per_scale, paged| {
        let eight_bits = Some(EightBits { keys: Eight::E4m3, queries: false, keys_per_scale });
        Problem { features: Features { eight_bits, paged, ..Features::NONE }, ..problem(Pass::Forward, dim, dim) }
    };
    let in_place = |problem: Problem| {
        let knobs = ForwardKnobs::of(&converting(&problem)).unwrap();
        assert_eq!(knobs.box_rows(&problem) != 0, knobs.converts_in_place(&problem), "{problem:?}");
        knobs.converts_in_place(&problem)
    };
    let by_scales = |dim, paged| [0, 1, 128].map(|keys_per_scale| in_place(of(dim, keys_per_scale, paged)));
    assert_eq!([64, 128, 256].map(|dim| by_scales(dim, None)), [[false, true, false], [true, true, false], [true; 3]]);
    assert_eq!([64, 128, 256].map(|dim| by_scales(dim, Some(16))), [[false; 3], [false; 3], [true; 3]]);
    // No box fits pages of 12 keys.
    assert_eq!(by_scales(256, Some(12)), [false; 3]);
    let capped = Features { softcap: true, ..of(128, 0, None).features };
    assert!(!in_place(Problem { features: capped, ..of(128, 0, None) }));
    // Two CTAs on an SM leave a producer 40 registers.
    let shared = converting(&of(128, 1, None))
        .with("block_m", 64)
        .with("ctas_per_sm", 2)
        .with("k_stages", 2)
        .with("v_stages", 2);
    assert_eq!(broken(&of(128, 1, None), &shared).as_deref(), Some("ctas_per_sm"));
    for (problem, block_n) in [(of(128, 0, None), 96), (of(256, 0, None), 80), (of(128, 1, None), 96)] {
        let config = converting(&problem);
        assert_eq!((config.get("block_n"), broken(&problem, &config)), (Some(block_n), None), "{problem:?}");
    }
}

/// A prompt over keys of 8 bits, 32 heads on 8.
fn prompt(keys_per_scale: i64, head_dim: i64, [batch_size, seqlen_q, seqlen_k]: [i64; 3]) -> Problem {
    let eight_bits = Some(EightBits { keys: Eight::E4m3, queries: false, keys_per_scale });
    Problem {
        batch_size,
        num_heads_q: 32,
        num_heads_kv: 8,
        seqlen_q,
        seqlen_k,
        causal: Causal::BottomRight,
        features: Features { eight_bits, ..Features::NONE },
        ..problem(Pass::Forward, head_dim, head_dim)
    }
}

#[test]
fn a_kernel_of_its_own_widens_keys_of_8_bits_before_the_main_kernel() {
    let varlen = Some(Varlen::default());
    for (features, keys_per_scale, templates) in [
        (Features::NONE, 0, &["sm90_widen_kv", "sm90_forward"][..]),
        (Features { varlen, key_starts: true, ..Features::NONE }, 128, &["sm90_widen_kv", "sm90_forward"]),
        (Features { varlen, paged: Some(3), ..Features::NONE }, 1, &["sm90_widen_kv", "decode", "sm90_forward"]),
    ] {
        let own = prompt(keys_per_scale, 128, [2, 2048, 16_384]);
        let own = Problem { features: Features { eight_bits: own.features.eight_bits, ..features }, ..own };
        let knobs = widening(&own, &h200()).unwrap();
        let kernels = knobs.kernels(&own);
        assert_eq!(kernels.iter().map(|spec| spec.template).collect::<Vec<_>>(), templates);
        assert_eq!((kernels[0].rows, kernels[0].slices, kernels[0].ends_alone), (128, 2, kernels.len() > 2));
        let main = kernels.last().unwrap();
        assert!(main.reads_widened && main.problem(&own) == own.widened());
        assert_eq!(knobs.box_rows(&own), knobs.block_n, "pages of any size are rows");
        let factors = if keys_per_scale == 0 { 4 * 8 } else { knobs.k_stages * knobs.block_n * 4 };
        assert_eq!(knobs.smem_bytes(&own), ForwardKnobs { widens: 0, ..knobs }.smem_bytes(&own.widened()) + factors);
        let undivided = ForwardKnobs { decode_rows: 0, ..knobs };
        assert_eq!(broken(&own.widened(), &undivided.to_config()).unwrap(), "widens", "keys have 16 bits");
        let few = Problem { seqlen_q: 64, ..own };
        assert_eq!(broken(&few, &knobs.to_config()).unwrap(), "widens", "not in all problems of the record");
    }
    let of_fp16 = Problem { dtype: Dtype::Fp16, ..prompt(0, 128, [2, 2048, 16_384]) };
    assert_eq!(widening(&of_fp16, &h200()).map(|knobs| knobs.stale_max), Some(0));
    assert!(widening(&Problem { dtype: Dtype::Fp16, ..prompt(1, 128, [2, 2048, 16_384]) }, &h200()).is_none());
    assert!(widening(&prompt(0, 128, [64, 2048, 16_384]), &h200()).is_none(), "too large");
}

#[test]
fn keys_of_8_bits_are_widened_before_where_that_was_faster() {
    // (head dim, heads, [batch, queries, keys], lengths and pages), and whether it was by 3 % or
    // more on an H200, with scales of heads and with scales of keys.
    let lengths = Features { varlen: Some(Varlen::default()), ..Features::NONE };
    let pages = |rows| Features { paged: Some(rows), ..lengths };
    let measured = [
        (128, (32, 8), [1, 2048, 16_384], Features::NONE, [true, true]),
        (128, (32, 8), [1, 2048, 16_384], lengths, [true, true]),
        (128, (32, 8), [1, 2048, 16_384], pages(16), [true, true]),
        (128, (32, 8), [4, 512, 16_384], pages(64), [true, true]),
        (128, (32, 8), [1, 512, 16_384], Features::NONE, [true, true]),
        (128, (32, 8), [4, 256, 16_384], pages(64), [false, true]),
        (128, (32, 8), [4, 256, 4096], Features::NONE, [false, true]),
        (128, (32, 8), [8, 1024, 1024], Features::NONE, [true, true]),
        (128, (16, 16), [1, 2048, 16_384], Features::NONE, [true, true]),
        (256, (32, 8), [1, 2048, 8192], Features::NONE, [true, true]),
        (256, (32, 8), [1, 2048, 8192], pages(16), [true, true]),
        (64, (32, 8), [1, 4096, 4096], lengths, [false, true]),
    ];
    for (head_dim, (num_heads_q, num_heads_kv), sizes, features, expected) in measured {
        let widens = [0, 1].map(|keys_per_scale| {
            let own = prompt(keys_per_scale, head_dim, sizes);
            let features = Features { eight_bits: own.features.eight_bits, ..features };
            heuristic(&Problem { num_heads_q, num_heads_kv, features, ..own }, &h200()).get("widens") == Some(1)
        });
        assert_eq!(widens, expected, "{head_dim} {num_heads_kv} {sizes:?}");
    }
}

#[test]
fn prompts_over_int4_are_widened_before_and_the_decode_family_is_their_second() {
    let of = |sizes: [i64; 3], features: Features| {
        let four_bits = Some(Four::Int4g32);
        Problem { features: Features { eight_bits: None, four_bits, ..features }, ..prompt(0, 128, sizes) }
    };
    let (long, varlen) = ([1, 2048, 16_384], Some(Varlen::default()));
    let pages = Features { varlen, paged: Some(16), ..Features::NONE };
    for (own, templates) in [
        (of(long, Features::NONE), &["sm90_widen_kv", "sm90_forward"][..]),
        (of([4, 512, 16_384], pages), &["sm90_widen_kv", "decode", "sm90_forward", "combine"]),
    ] {
        assert_eq!(families(&own, &h200()), [Family::Sm90, Family::Decode]);
        let knobs = ForwardKnobs::of(&heuristic(&own, &h200())).unwrap();
        assert_eq!((knobs.widens, check(&own, &knobs.to_config(), &h200())), (1, Ok(())));
        let kernels = knobs.kernels(&own);
        assert_eq!(kernels.iter().map(|spec| spec.template).collect::<Vec<_>>(), templates);
        assert_eq!(knobs.smem_bytes(&own), ForwardKnobs { widens: 0, ..knobs }.smem_bytes(&own.widened()));
        let reading = ForwardKnobs { widens: 0, ..knobs }.to_config();
        assert_eq!(broken(&own, &reading).unwrap(), "widens", "no kernel of the family reads int4");
    }
    let plain = of(long, Features::NONE);
    for own in [
        of([1, 1, 16_384], Features::NONE),
        of([4, 64, 16_384], pages),
        of([64, 2048, 16_384], Features::NONE),
        Problem { dtype: Dtype::Fp16, ..plain },
        Problem { features: Features { mask: true, ..plain.features }, layout: Layout::Vec4, ..plain },
    ] {
        assert_eq!(families(&own, &h200()), [Family::Decode], "{own:?}");
    }
    assert_eq!(families(&plain, &Device::typical(Arch::Sm(8, 0)).unwrap()), [Family::Decode]);
}

#[test]
fn the_heuristic_is_of_the_family_with_any_features() {
    let window = Features { window: Window { left: Some(256), ..Window::default() }, ..Features::NONE };
    let lengths = Features { varlen: Some(Varlen::default()), ..window };
    let scores = Features { softcap: true, alibi: true, bias: true, mask: true, sinks: true, ..window };
    for head_dim in (8..=256).step_by(8) {
        for pass in [Pass::Forward, Pass::Backward] {
            let gradients = pass == Pass::Backward;
            let all = Features { dbias: gradients, dlse: gradients, varlen: lengths.varlen, ..scores };
            for features in [window, lengths, scores, all] {
                for dropout in [false, true] {
                    let problem = Problem { features, dropout, ..problem(pass, head_dim, head_dim) };
                    let config = heuristic(&problem, &h200());
                    let checked = check(&problem, &config, &h200());
                    assert_eq!((config.family, checked), (Family::Sm90, Ok(())), "{problem:?}");
                }
            }
        }
    }
}

fn of_blocks(block_q: i64, block_k: i64) -> Features {
    Features { block_mask: Some(BlockMask { block_q, block_k }), ..Features::NONE }
}

#[test]
fn the_heuristic_is_of_the_family_for_blocks_of_whole_tiles() {
    for head_dim in (8..=256).step_by(8) {
        let backward = if (136..=192).contains(&head_dim) { (64, 64) } else { (16, 128) };
        for (pass, sizes) in [(Pass::Forward, (64, 64)), (Pass::Backward, backward), (Pass::Forward, (256, 128))] {
            for mask in [false, true] {
                let features = Features { mask, ..of_blocks(sizes.0, sizes.1) };
                let problem = Problem { features, ..problem(pass, head_dim, head_dim) };
                let config = heuristic(&problem, &h200());
                let checked = check(&problem, &config, &h200());
                assert_eq!((config.family, checked), (Family::Sm90, Ok(())), "{problem:?}");
            }
        }
    }
}

#[test]
fn what_it_does_not_do_is_the_other_familys() {
    let typical = |arch| Device::typical(arch).unwrap();
    for pass in [Pass::Forward, Pass::Backward] {
        let plain = problem(pass, 64, 64);
        assert_eq!(families(&problem(pass, 256, 256), &h200()), [Family::Sm90, Family::Sm80]);
        let config = heuristic(&plain, &h200());
        let others = [
            (Problem { layout: Layout::Vec4, ..plain }, h200(), "TMA needs"),
            (Problem { features: of_blocks(96, 96), ..plain }, h200(), "which the block mask's blocks are not"),
            (
                Problem { features: of_blocks(32, 128), ..problem(pass, 160, 160) },
                h200(),
                "which the block mask's blocks are not",
            ),
            (Problem { dtype: Dtype::Fp32, ..plain }, h200(), "only if the reduction dimension is contiguous"),
            (problem(pass, 264, 64), h200(), "end at 256"),
            (problem(pass, 64, 264), h200(), "end at 256"),
            (plain, typical(Arch::Sm(10, 0)), ""),
            (plain, typical(Arch::Sm(8, 0)), ""),
        ];
        for (problem, device, reason) in others {
            assert_eq!(families(&problem, &device), [Family::Sm80], "{problem:?}");
            assert!(heuristics(&problem, &device).iter().all(|config| config.family == Family::Sm80));
            let error = check(&problem, &config, &device).unwrap_err();
            assert!(error.starts_with("family is sm90") && error.contains(reason), "{error}");
        }
    }
}

/// Only the device knows the lengths, so every sequence counts as the longest, with its diagonal.
#[test]
fn keys_in_pages_have_the_work_of_as_many_contiguous_keys() {
    let dense = Problem {
        seqlen_q: 512,
        seqlen_k: 8192,
        causal: Causal::BottomRight,
        features: Features::NONE,
        ..problem(Pass::Forward, 128, 128)
    };
    let config = heuristic(&dense, &h200());
    let features = Features { varlen: Some(Varlen::default()), paged: Some(64), ..Features::NONE };
    let paged = work(&Problem { features, ..dense }, &config, &h200());
    assert!(paged.is_some() && paged == work(&dense, &config, &h200()));
    let contiguous = Features { paged: None, ..features };
    assert_eq!(work(&Problem { features: contiguous, ..dense }, &config, &h200()), paged);
    let packed = Features { varlen: Some(Varlen { total_q: Some(512), ..Varlen::default() }), ..contiguous };
    assert_eq!(work(&Problem { features: packed, ..dense }, &config, &h200()), None);
}

#[test]
fn boxes_of_pages_are_whole_eights() {
    let config = heuristic(&problem(Pass::Forward, 64, 64), &h200());
    let box_rows = |block_n, page_size| {
        let knobs = ForwardKnobs::of(&config.clone().with("block_n", block_n)).unwrap();
        let features = Features { paged: Some(page_size), ..Features::NONE };
        knobs.box_rows(&Problem { features, ..problem(Pass::Forward, 64, 64) })
    };
    assert_eq!([(64, 64), (64, 256), (64, 96), (80, 40)].map(|(n, page)| box_rows(n, page)), [64, 64, 32, 40]);
    assert_eq!([(64, 16), (64, 8), (80, 64), (96, 24)].map(|(n, page)| box_rows(n, page)), [16, 8, 16, 24]);
    // 36 divides 144 and 180, and the swizzle repeats after 8 rows.
    assert_eq!([(64, 4), (64, 1), (144, 36), (144, 180)].map(|(n, page)| box_rows(n, page)), [0; 4]);
}
