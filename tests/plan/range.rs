//! Ranges: what one call prepares, which problems it then serves, and which ranges are refused.

use crate::serving_trace::{LLAMA, LLAMA_BITS, Random, call, llama};
use crate::source_tree::root;
use crate::support::{SMALL, engine_of};
use flashtune::config::{Config, Family};
use flashtune::device::{Arch, Device};
use flashtune::error::Status;
use flashtune::family;
use flashtune::plan::key::{Class, canonical};
use flashtune::plan::{
    Covering, EngineOptions, Known, Optional, Range, Sizes, choices, covering, predicted_us, shipped,
};
use flashtune::problem::features::bits;
use flashtune::problem::{Causal, Dtype, Eight, EightBits, Features, Four, Pass, Problem, Varlen, Window};
use std::sync::Arc;

/// q, k and v in e4m3, whose V may be transposed in the workspace.
const E4M3: Features =
    Features { eight_bits: Some(EightBits { keys: Eight::E4m3, queries: true, keys_per_scale: 0 }), ..Features::NONE };

fn known(arch: Arch) -> Known {
    Known { shipped: shipped::records(arch).into_iter().map(Arc::new).collect(), ..Known::default() }
}

fn on(arch: Arch, ranges: &[Range]) -> (Device, Covering) {
    let device = Device::typical(arch).unwrap();
    let covering = covering(&known(arch), ranges, &device).unwrap();
    (device, covering)
}

/// The prepared configs that a problem may take.
fn usable<'a>(covering: &'a Covering, problem: &Problem, device: &Device) -> Vec<&'a Config> {
    let problem = canonical(problem);
    let configs = covering.configs.iter().filter(|(of, _)| Class::of(of) == Class::of(&problem));
    configs.map(|(_, config)| config).filter(|config| family::check(&problem, config, device).is_ok()).collect()
}

#[test]
fn a_llama_server_needs_at_most_ten_kernels_and_each_call_has_one() {
    let mut kernels = Vec::new();
    for arch in [Arch::Sm(9, 0), Arch::Sm(8, 0), Arch::Sm(12, 0)] {
        let (device, covering) = on(arch, &llama());
        kernels.push(covering.kernels.len());
        // One decode kernel takes the short sequences of all batches.
        let of_short = covering.configs.iter().filter(|(_, config)| config.get("decode_rows").is_some());
        assert!(of_short.clone().all(|(_, config)| config.get("decode_splits") == Some(1)));
        assert_eq!(of_short.count() > 0, arch == Arch::Sm(9, 0));
        // Unsplit decoding has the kernels of split decoding.
        let mut decoding = covering.configs.iter().filter(|(_, config)| config.family == Family::Decode);
        assert!(decoding.all(|(_, config)| config.get("num_splits") != Some(1) || config.get("splittable") == Some(1)));
        let mut random = Random(1);
        for _ in 0..2000 {
            let problem = call(&mut random);
            assert!(llama().iter().any(|range| range.contains(&problem)), "{problem:?}");
            assert!(!usable(&covering, &problem, &device).is_empty(), "{arch}: {problem:?}");
        }
    }
    assert!(kernels.iter().all(|kernels| (2..=10).contains(kernels)), "{kernels:?}");
    let guide = std::fs::read_to_string(root().join("docs/serving.md")).unwrap();
    let documented = format!("needs {} kernels on an H200 and {} on an A100", kernels[0], kernels[1]);
    assert!(guide.contains(&documented), "docs/serving.md has to say: {documented}");
}

#[test]
fn the_prepared_configs_are_expected_to_be_about_as_fast_as_the_choices() {
    let largest = Problem { features: Features::NONE, batch_size: 4, seqlen_k: 8192, ..LLAMA };
    let range = Range { largest, least: Sizes { seqlen_q: 64, seqlen_k: 64, batch_size: 1 } };
    let (device, covering) = on(Arch::Sm(9, 0), &[range]);
    let known = known(Arch::Sm(9, 0));
    let mut random = Random(2);
    let mut compared = 0;
    for _ in 0..60 {
        let problem = Problem {
            batch_size: random.size(4),
            seqlen_q: random.size(8192).max(64),
            seqlen_k: random.size(8192).max(64),
            ..largest
        };
        let us = |config: &Config| predicted_us(&known, &problem, config, &device);
        let chosen = choices(&known, &problem, &device).swap_remove(0).config;
        let Some(chosen_us) = us(&chosen) else { continue };
        let prepared = usable(&covering, &problem, &device).into_iter().filter_map(us).fold(f64::INFINITY, f64::min);
        assert!(prepared <= 1.2 * chosen_us, "{problem:?}: {prepared} us, and {chosen_us} with {chosen}");
        compared += 1;
    }
    assert!(compared > 30, "{compared}");
}

#[test]
fn a_problem_that_follows_no_record_keeps_its_own_config() {
    let few = Features { varlen: Some(Varlen::default()), ..LLAMA.features };
    let invariant = Problem { batch_invariant: true, features: few, ..LLAMA };
    let deterministic = Problem {
        batch_size: 2,
        seqlen_q: 100,
        seqlen_k: 200,
        features: Features::NONE,
        deterministic: true,
        pass: Pass::Backward,
        ..LLAMA
    };
    for (arch, largest) in [(9, invariant), (8, invariant), (9, deterministic)] {
        let arch = Arch::Sm(arch, 0);
        let (device, covering) = on(arch, &[Range { largest, least: Sizes::ONE }]);
        assert!(covering.kernels.len() <= 24, "{}", covering.kernels.len());
        let mut random = Random(3);
        for _ in 0..200 {
            let problem = Problem {
                batch_size: random.size(largest.batch_size),
                seqlen_q: random.size(largest.seqlen_q),
                seqlen_k: random.size(largest.seqlen_k),
                ..largest
            };
            let own = choices(&known(arch), &problem, &device).swap_remove(0).config;
            assert!(usable(&covering, &problem, &device).contains(&&own), "{problem:?}: {own}");
        }
    }
    let wide = Problem { batch_size: 64, seqlen_q: 8192, seqlen_k: 8192, ..deterministic };
    let device = Device::typical(Arch::Sm(9, 0)).unwrap();
    let refused = covering(&Known::default(), &[Range { largest: wide, least: Sizes::ONE }], &device);
    let error = refused.err().unwrap();
    assert!(error.message.contains("deterministic range") && error.message.contains("seqlen_k multiplies"), "{error}");
}

#[test]
fn a_sealed_engine_serves_every_problem_of_a_prepared_range() {
    let engine = engine_of(EngineOptions::default());
    let prepared = engine.prepare_range(&llama()).unwrap();
    assert_eq!((prepared.classes, prepared.kernels, prepared.compiled), (2, 0, 0));
    assert!(prepared.configs > 0);
    // Before the seal as well nothing more is built.
    let mut random = Random(4);
    assert!((0..100).all(|_| engine.prepared(&call(&mut random)).is_some()));
    engine.seal();
    for _ in 0..2000 {
        let problem = call(&mut random);
        let plan = engine.prepared(&problem).unwrap_or_else(|| panic!("{problem:?}"));
        family::check(&canonical(&problem), &plan.config, engine.backend().device()).unwrap();
        assert!(Arc::ptr_eq(&plan, &engine.prepared(&problem).unwrap()), "the plan is kept");
    }
    let other_pages = Problem { features: Features { paged: Some(32), ..LLAMA.features }, ..LLAMA };
    assert!(engine.prepared(&other_pages).is_none(), "pages of another size are another class");
    assert_eq!(engine.prepare_range(&llama()).unwrap_err().status, Status::NotPrepared);
}

#[test]
fn a_second_range_adds_to_the_first() {
    let engine = engine_of(EngineOptions::default());
    let range = |largest| [Range { largest, least: Sizes::ONE }];
    engine.prepare_range(&range(SMALL)).unwrap();
    let backward = Problem { pass: Pass::Backward, ..SMALL };
    engine.prepare_range(&range(backward)).unwrap();
    for problem in [SMALL, backward] {
        assert!(engine.prepared(&Problem { seqlen_q: 33, seqlen_k: 70, ..problem }).is_some());
        let longer = Problem { seqlen_k: 5000, ..problem };
        assert!(engine.prepared(&longer).is_none(), "outside of the range, and the context is not sealed");
    }
}

#[test]
fn variants_are_all_combinations_that_are_legal() {
    let window = Window { left: Some(100), ..Window::default() };
    let largest = Problem { features: Features { window, sinks: true, ..LLAMA.features }, ..LLAMA };
    let features = bits::CU_SEQLENS_Q.value | bits::SEQUSED_K.value | bits::SINKS.value | bits::ALIBI.value;
    let optional = Optional { causal: true, window: true, softcap: true, dropout: true, features };
    let bits = LLAMA_BITS | bits::SINKS.value;
    let ranges = Range { largest, least: Sizes::ONE }.variants(bits, &optional).unwrap();
    // Causal, the window, sinks: 8. Varlen by offsets, by used lengths alone, or not at all. What
    // the problem does not have is not optional.
    assert_eq!(ranges.len(), 8 * 3);
    let contains = |problem: &Problem| ranges.iter().any(|range| range.contains(problem));
    let with = |features, causal| Problem { seqlen_q: 100, seqlen_k: 100, features, causal, ..LLAMA };
    let features = largest.features;
    assert!(contains(&with(features, Causal::BottomRight)));
    assert!(contains(&with(Features { window: Window::default(), ..features }, Causal::None)));
    assert!(contains(&with(Features { window: Window { left: Some(7), ..window }, ..features }, Causal::None)));
    assert!(contains(&with(Features { sinks: false, varlen: None, ..features }, Causal::None)));
    assert!(!contains(&with(Features { window: Window { right: Some(7), ..window }, ..features }, Causal::None)));
    assert!(!contains(&with(Features { alibi: true, ..features }, Causal::None)));
    // Without a window, one query that is causal to the last key is of the class without a mask.
    let single = Problem {
        seqlen_q: 1,
        ..with(Features { window: Window::default(), varlen: None, ..features }, Causal::BottomRight)
    };
    assert!(contains(&single.without_idle_causal()));
}

#[test]
fn ranges_that_make_no_sense_are_refused_with_the_field() {
    let engine = engine_of(EngineOptions::default());
    let of = |least| engine.prepare_range(&[Range { largest: SMALL, least }]).unwrap_err();
    for (least, message) in [
        (
            Sizes { batch_size: 2, ..Sizes::ONE },
            "least_batch_size is 2; it must be from 1 to the range's batch_size, which is 1",
        ),
        (Sizes { seqlen_q: 0, ..Sizes::ONE }, "least_seqlen_q is 0"),
        (Sizes { seqlen_k: 97, ..Sizes::ONE }, "least_seqlen_k is 97"),
    ] {
        let error = of(least);
        assert_eq!(error.status, Status::InvalidArgument);
        assert!(error.message.contains(message), "{error}");
    }
    let all = Features { softcap: true, alibi: true, bias: true, mask: true, sinks: true, ..Features::NONE };
    let features = bits::ALIBI.value | bits::BIAS.value | bits::MASK.value | bits::SINKS.value;
    let optional = Optional { causal: true, softcap: true, dropout: true, window: true, features };
    let largest = Problem { features: all, dropout: true, ..SMALL };
    let error = Range { largest, least: Sizes::ONE }.variants(features, &optional).unwrap_err();
    assert!(error.message.contains("optional_features") && error.message.contains("128 combinations"), "{error}");
    let wrong = Problem { head_dim: 513, ..SMALL };
    let error = engine.prepare_range(&[Range { largest: wrong, least: Sizes::ONE }]).unwrap_err();
    assert!(error.message.contains("head_dim"), "{error}");
}

#[test]
fn the_largest_workspace_is_enough_for_any_number_of_packed_queries() {
    let packed = |total| Features {
        varlen: Some(Varlen { total_q: Some(total), total_k: Some(4096), padded_q: false }),
        ..Features::NONE
    };
    let square = Problem::dense(Pass::Backward, Dtype::Bf16, 16, 8, 4096, 128);
    let largest = Problem { features: packed(4096), ..square };
    let range = Range { largest, least: Sizes::ONE };
    let most = range.largest_workspace(Problem::workspace_bytes);
    for total in [0, 1, 4096, 32768, 16 * 4096] {
        let problem = Problem { features: packed(total), ..largest };
        assert!(range.contains(&problem));
        assert!(problem.workspace_bytes() <= most, "{total}: {} of {most}", problem.workspace_bytes());
    }
    let full = Problem { features: packed(16 * 4096), ..largest }.workspace_bytes();
    assert!(2 * full >= most, "{most} is far from what a full batch needs: {full}");
}

#[test]
fn the_largest_workspace_is_enough_for_every_problem_inside() {
    let dense = Problem { features: Features::NONE, batch_size: 40, ..LLAMA };
    let e4m3 = Problem { features: E4M3, seqlen_q: 3000, seqlen_k: 5000, ..dense };
    let eight_bits = Some(EightBits { queries: false, ..E4M3.eight_bits.unwrap() });
    let widened = Problem { features: Features { eight_bits, ..Features::NONE }, ..e4m3 };
    let four_bits = Some(Four::Int4g32);
    let int4 = Problem { features: Features { four_bits, ..Features::NONE }, ..widened };
    let few_heads = Problem { num_heads_q: 2, num_heads_kv: 1, ..e4m3 };
    let backward = Problem { pass: Pass::Backward, seqlen_q: 700, seqlen_k: 5000, ..dense };
    let single = Problem { num_heads_q: 1, num_heads_kv: 1, ..dense };
    // A causal mask, which one query does not need, leaves no room for split tiles here.
    let heads = Problem { batch_size: 2, num_heads_q: 128, num_heads_kv: 64, ..backward };
    let one_query_is_split = Problem { causal: Causal::BottomRight, seqlen_q: 64, seqlen_k: 1024, ..heads };
    for (largest, least) in [
        (LLAMA, Sizes::ONE),
        (Problem { batch_invariant: true, ..LLAMA }, Sizes::ONE),
        (dense, Sizes { seqlen_q: 30, ..Sizes::ONE }),
        (single, Sizes { batch_size: 3, ..Sizes::ONE }),
        (e4m3, Sizes::ONE),
        (few_heads, Sizes::ONE),
        (widened, Sizes::ONE),
        (int4, Sizes::ONE),
        (Problem { batch_size: 400, seqlen_k: 70_000, ..widened }, Sizes { batch_size: 2, ..Sizes::ONE }),
        (backward, Sizes::ONE),
        (Problem { deterministic: true, ..backward }, Sizes { seqlen_k: 129, ..Sizes::ONE }),
        (one_query_is_split, Sizes { batch_size: 2, seqlen_k: 1024, ..Sizes::ONE }),
    ] {
        let most = Range { largest, least }.largest_workspace(Problem::workspace_bytes);
        let mut random = Random(6);
        let mut seen = 0;
        for _ in 0..20_000 {
            let problem = Problem {
                batch_size: random.size(largest.batch_size).max(least.batch_size),
                seqlen_q: random.size(largest.seqlen_q).max(least.seqlen_q),
                seqlen_k: random.size(largest.seqlen_k).max(least.seqlen_k),
                ..largest
            };
            // A call leaves out a mask that hides nothing.
            let problem = problem.without_idle_causal();
            assert!(problem.workspace_bytes() <= most, "{problem:?}");
            seen = seen.max(problem.workspace_bytes());
        }
        assert!(2 * seen >= most, "{most} is far from what any problem needs: {seen}");
    }
}
