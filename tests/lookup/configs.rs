//! The config of a choice: whether a record's config serves the problem, what a lookup changes in
//! it, and when the heuristic's config takes its place.

use super::{LLAMA, config, first, h200, record, record_of};
use flashtune::config::{Config, Family};
use flashtune::device::{Arch, Device};
use flashtune::family;
use flashtune::plan::record::Record;
use flashtune::plan::{Known, Source, choices, key};
use flashtune::problem::{Causal, Dtype, Features, Layout, Pass, Problem, Varlen, Window};
use flashtune::tune::candidates;
use std::sync::Arc;

#[test]
fn deterministic_problem_has_only_the_heuristics_config() {
    let device = h200();
    let plain = Problem { pass: Pass::Backward, ..LLAMA };
    let deterministic = Problem { deterministic: true, ..plain };
    let known =
        Known { process: vec![record(&plain, &device, 0), record(&deterministic, &device, 1)], ..Known::default() };
    assert_eq!(first(&known, &plain, &device).source, Source::Process);
    let [only] = &choices(&known, &deterministic, &device)[..] else { panic!("one choice") };
    assert_eq!((&only.config, only.source), (&family::heuristic(&deterministic, &device), Source::Heuristic));
    assert!(only.reason.starts_with("deterministic, whatever the records say"), "{}", only.reason);
}

/// Few and many queries, packed and paged, on every backend: the config does not depend on the
/// batch, but for the rows of sm90's tiles where their number is known.
#[test]
fn batch_invariant_problem_sums_in_one_order_in_every_batch() {
    let devices = [Arch::Sm(8, 0), Arch::Sm(9, 0), Arch::Sm(12, 0)].map(|arch| Device::typical(arch).unwrap());
    let cpu = Device { arch: Arch::Cpu, name: "cpu".into(), sm_count: 8, l2_bytes: 32 << 20, ..h200() };
    let lengths = Some(Varlen::default());
    let packed = Varlen { total_q: Some(5000), total_k: Some(5000), padded_q: false };
    let forms = [
        (Features::NONE, &[1][..]),
        (Features::NONE, &[100, 4096, 131_072]),
        (Features { varlen: lengths, ..Features::NONE }, &[1]),
        (Features { varlen: lengths, paged: Some(16), ..Features::NONE }, &[1]),
        (Features { varlen: Some(packed), ..Features::NONE }, &[1, 100, 4096, 131_072]),
        (
            Features { varlen: Some(Varlen { total_k: None, ..packed }), paged: Some(16), ..Features::NONE },
            &[1, 131_072],
        ),
    ];
    for device in devices.iter().chain([&cpu]) {
        for (features, lengths_q) in &forms {
            // Walks over all configs for each shape would take most of the test's time.
            let mut other = None;
            let mut of = |batch_size, seqlen_q, seqlen_k| {
                let problem =
                    Problem { batch_size, seqlen_q, seqlen_k, features: *features, batch_invariant: true, ..LLAMA };
                let tuned = Problem { batch_invariant: false, ..problem };
                let serves = |config: &Config| family::check(&key::canonical(&tuned), config, device).is_ok();
                let known_config = other.take().filter(serves).unwrap_or_else(|| config(&tuned, device, 0));
                let known =
                    Known { process: vec![record_of(&tuned, device, known_config.clone())], ..Known::default() };
                other = Some(known_config);
                let all = choices(&known, &key::canonical(&problem), device);
                let chosen = &all[0];
                assert!(chosen.reason.starts_with("batch-invariant, whatever the records say"), "{}", chosen.reason);
                let checked = family::check(&key::canonical(&problem), &chosen.config, device);
                assert_eq!(checked, Ok(()), "{problem:?}");
                let others = family::of_same_bits(&key::canonical(&problem), device).unwrap();
                let heuristic = family::heuristic(&key::canonical(&problem), device);
                // The others are for the case that the first one does not build.
                assert!(all.iter().all(|choice| choice.config == heuristic || others.contains(&choice.config)));
                assert!(all.iter().any(|choice| choice.config == heuristic));
                // Whichever of these it is, the order of sums is that of the heuristic.
                match others.contains(&chosen.config) {
                    true => heuristic,
                    false => chosen.config.clone(),
                }
            };
            let first = of(1, lengths_q[0], 1);
            for seqlen_q in *lengths_q {
                for (batch_size, seqlen_k) in [(1, 1), (64, 1), (1, 1000), (64, 4096), (1, 131_072), (64, 131_072)] {
                    assert_eq!(of(batch_size, *seqlen_q, seqlen_k), first, "{} {features:?}", device.name);
                }
            }
        }
    }
}

/// Combining partial states would take longer than the keys that splits spare a CTA.
#[test]
fn the_heuristic_splits_no_short_caches() {
    let splits = |batch_size, seqlen_k, head_dim, paged| {
        let features = Features { varlen: Some(Varlen::default()), paged, ..Features::NONE };
        let sizes = Problem { batch_size, seqlen_q: 1, seqlen_k, head_dim, head_dim_v: head_dim, ..LLAMA };
        let problem = Problem { causal: Causal::None, features, ..sizes };
        family::heuristic(&key::canonical(&problem), &h200()).get("num_splits").unwrap()
    };
    for (batch_size, seqlen_k, head_dim, paged) in
        [(1, 512, 64, None), (8, 512, 64, None), (8, 512, 64, Some(64)), (1, 256, 128, None)]
    {
        assert_eq!(splits(batch_size, seqlen_k, head_dim, paged), 1, "{batch_size} x {seqlen_k} d{head_dim} {paged:?}");
    }
    // Pages of 16 are read more slowly, and these keys take longer than the combining.
    for (batch_size, seqlen_k, head_dim, paged) in [(8, 512, 64, Some(16)), (1, 512, 128, None), (8, 1024, 128, None)] {
        assert!(splits(batch_size, seqlen_k, head_dim, paged) > 1, "{batch_size} x {seqlen_k} d{head_dim} {paged:?}");
    }
}

/// CTAs of nearly all SMs read at the memory's rate without splits, also where lengths differ.
#[test]
fn lengths_on_the_device_are_split_where_few_sms_have_a_cta() {
    let splits = |batch_size, seqlen_k| {
        let features = Features { varlen: Some(Varlen::default()), ..Features::NONE };
        let problem = Problem { batch_size, seqlen_q: 1, seqlen_k, causal: Causal::None, features, ..LLAMA };
        family::heuristic(&problem, &h200()).get("num_splits").unwrap()
    };
    for seqlen_k in [1024, 2048, 8192] {
        // 8 K/V heads each: 128 CTAs, and 96.
        assert_eq!(splits(16, seqlen_k), 1, "{seqlen_k}");
        assert!(splits(12, seqlen_k) > 1, "{seqlen_k}");
    }
}

/// One chunk has too few tiles of 192 rows for an H200.
#[test]
fn a_batch_invariant_chunk_has_the_tiles_that_fill_the_gpu() {
    let device = h200();
    let rows = |batch_size, seqlen_q, seqlen_k, features| {
        let problem = Problem { batch_size, seqlen_q, seqlen_k, features, batch_invariant: true, ..LLAMA };
        let choices = choices(&Known::default(), &key::canonical(&problem), &device);
        assert_eq!(choices[0].config.get("block_n"), Some(64));
        choices[0].config.get("block_m").unwrap()
    };
    let pages = Features { varlen: Some(Varlen::default()), paged: Some(16), ..Features::NONE };
    for features in [Features::NONE, pages] {
        assert_eq!(rows(1, 512, 8192, features), 128, "{features:?}");
        assert_eq!(rows(64, 4096, 8192, features), 192, "{features:?}");
    }
    // Few tiles of 128 rows fill the GPU where their segments are split.
    let splits_of = |problem: Problem| {
        let problem = Problem { batch_size: 1, seqlen_k: 8192, batch_invariant: true, ..problem };
        let config = choices(&Known::default(), &key::canonical(&problem), &device).swap_remove(0).config;
        (config.get("block_m").unwrap(), config.get("num_splits").unwrap() > 1)
    };
    let splits = |seqlen_q| splits_of(Problem { seqlen_q, ..LLAMA });
    assert_eq!([128, 256, 384, 512].map(splits), [(128, true), (128, true), (192, true), (128, false)]);
    // On an H100 these took 0.85 and 0.88 of the time of 192 and of 128 rows.
    let narrow = Problem { head_dim: 64, head_dim_v: 64, ..LLAMA };
    assert_eq!(splits_of(Problem { num_heads_q: 4, num_heads_kv: 4, seqlen_q: 2048, ..LLAMA }), (128, true));
    assert_eq!(splits_of(Problem { seqlen_q: 256, ..narrow }), (256, true));
    // Softcap takes registers, and such tiles were not timed.
    assert_eq!(rows(1, 128, 4096, Features { softcap: true, ..Features::NONE }), 128);
}

#[test]
fn num_splits_of_a_near_decode_record_are_recomputed() {
    let device = h200();
    let decode = |batch_size| Problem { batch_size, seqlen_q: 1, seqlen_k: 16384, causal: Causal::None, ..LLAMA };
    let config = family::heuristic(&decode(1), &device).with("num_splits", 24);
    let tuned = Arc::new(Record { config, ..Record::clone(&record(&decode(1), &device, 0)) });
    let known = Known { machine: vec![tuned], ..Known::default() };
    let splits = |batch_size| {
        let choice = first(&known, &decode(batch_size), &device);
        (choice.source, choice.config.get("num_splits"))
    };
    assert_eq!([1, 2, 4].map(splits), [24, 12, 6].map(|splits| (Source::Machine, Some(splits))));
}

#[test]
fn reason_names_the_num_splits_that_a_near_records_time_belongs_to() {
    let device = h200();
    let decode = |batch_size| Problem { batch_size, seqlen_q: 1, seqlen_k: 16384, causal: Causal::None, ..LLAMA };
    let config = family::heuristic(&decode(1), &device).with("num_splits", 24);
    let tuned = Arc::new(Record { config, ..Record::clone(&record(&decode(1), &device, 0)) });
    let known = Known { machine: vec![tuned], ..Known::default() };
    let reason = |batch_size| first(&known, &decode(batch_size), &device).reason;
    assert!(reason(1).ends_with("machine; 100.0 us where the default took 120.0"), "{}", reason(1));
    let neighbours_time = "; 100.0 us there with num_splits=24 where the default took 120.0";
    assert!(reason(2).ends_with(neighbours_time), "{}", reason(2));
}

/// The canonical problem's config must be usable for the problem itself.
#[test]
fn problem_whose_canonical_form_decodes_may_be_split() {
    let problem = |group_size: i64, seqlen_q| Problem {
        num_heads_kv: 1,
        seqlen_k: 65536,
        ..Problem::dense(Pass::Forward, Dtype::Bf16, 1, group_size, seqlen_q, 128)
    };
    for (group_size, seqlen_q) in (1..=200).flat_map(|group_size| (1..=200).map(move |seqlen_q| (group_size, seqlen_q)))
    {
        let problem = problem(group_size, seqlen_q);
        if family::is_bound_by_keys(&key::canonical(&problem)) {
            assert!(problem.max_splits() > 1, "{group_size} {seqlen_q}");
        }
    }
    // Beyond few queries a call needs a workspace only where query tiles are few, or where some
    // tiles of a few waves may be split.
    let splits = [(1, 97), (8, 20), (4, 32), (64, 300), (80, 300), (500, 300)].map(|(group_size, seqlen_q)| {
        let problem = problem(group_size, seqlen_q);
        (problem.max_splits(), problem.workspace_bytes() == 0)
    });
    assert_eq!(splits, [(32, false), (32, false), (32, false), (2, false), (1, false), (1, true)]);
}

#[test]
fn decode_record_with_a_missing_or_invalid_knob_is_a_miss() {
    let device = h200();
    let decode = |batch_size| Problem { batch_size, seqlen_q: 1, seqlen_k: 16384, causal: Causal::None, ..LLAMA };
    let good = family::heuristic(&decode(1), &device);
    // The record's own shape, and a shape for which the splits are computed anew.
    let sources = |config: &Config| {
        let tuned = Arc::new(Record { config: config.clone(), ..Record::clone(&record(&decode(1), &device, 0)) });
        let known = Known { machine: vec![tuned], ..Known::default() };
        [1, 2].map(|batch_size| first(&known, &decode(batch_size), &device).source)
    };
    assert_eq!(sources(&good), [Source::Machine; 2]);
    for knob in good.knobs.names() {
        let mut lacking = good.clone();
        lacking.knobs.remove(knob);
        // 0 is a value of some knobs.
        let odd = [if ["tma", "splittable", "scoring_warps"].contains(&knob) { 2 } else { 0 }, u32::MAX]
            .map(|value| good.clone().with(knob, value));
        for config in odd.into_iter().chain([lacking]) {
            assert_eq!(sources(&config), [Source::Heuristic; 2], "{config}");
        }
    }
    let half_a_team = good.with("num_warps", 1).with("warps_m", 2);
    assert_eq!(sources(&half_a_team), [Source::Heuristic; 2]);
}

#[test]
fn reason_says_why_the_preferred_family_does_not_serve() {
    let reason = |problem: &Problem, device: &Device| first(&Known::default(), problem, device).reason;
    let of_views = Problem { layout: Layout::Vec4, ..LLAMA };
    assert!(reason(&of_views, &h200()).contains("sm90 does not serve: TMA"), "{}", reason(&of_views, &h200()));
    let wide = Problem { head_dim: 264, ..LLAMA };
    assert!(reason(&wide, &h200()).contains("sm90 does not serve: its head dims end at 256"));
    let wide_backward = Problem { pass: Pass::Backward, head_dim_v: 264, ..LLAMA };
    assert!(reason(&wide_backward, &h200()).contains("sm90 does not serve: its head dims end at 256"));
    for (problem, device) in [(LLAMA, h200()), (of_views, Device::typical(Arch::Sm(8, 0)).unwrap())] {
        assert!(!reason(&problem, &device).contains("does not serve"), "{}", reason(&problem, &device));
    }
}

#[test]
fn record_that_breaks_a_constraint_is_a_miss() {
    let device = h200();
    let spoil = |change: fn(Config) -> Config| {
        let mut record = Record::clone(&record(&LLAMA, &device, 0));
        record.config = change(record.config);
        let known = Known { machine: vec![Arc::new(record)], ..Known::default() };
        first(&known, &LLAMA, &device).source
    };
    assert_eq!(spoil(|config| config), Source::Machine);
    assert_eq!(spoil(|config| config.with("block_m", 100)), Source::Heuristic);
    assert_eq!(spoil(|config| config.with("num_wraps", 4)), Source::Heuristic);
    assert_eq!(spoil(|config| Config { family: Family::Cpu, ..config }), Source::Heuristic);
    // The config fits this GPU, but not one with less shared memory.
    let large = Problem { head_dim: 256, head_dim_v: 256, ..LLAMA };
    let a10 = Device {
        sm_count: device.sm_count,
        name: device.name.clone(),
        arch: device.arch,
        ..Device::typical(Arch::Sm(8, 6)).unwrap()
    };
    let misfit =
        candidates::all(&large, &device).into_iter().find(|config| family::check(&large, config, &a10).is_err());
    let mut record = Record::clone(&record(&large, &device, 0));
    record.config = misfit.unwrap();
    let known = Known { machine: vec![Arc::new(record)], ..Known::default() };
    assert_eq!(first(&known, &large, &device).source, Source::Machine);
    assert_eq!(first(&known, &large, &a10).source, Source::Heuristic);
}

#[test]
fn one_query_at_the_end_of_the_keys_is_not_causal() {
    let query = Problem { seqlen_q: 1, ..LLAMA };
    let lengths = Varlen { padded_q: false, total_q: None, total_k: None };
    let in_cache = Features { varlen: Some(lengths), ..Features::NONE };
    for features in
        [Features::NONE, in_cache, Features { paged: Some(16), ..in_cache }, Features { alibi: true, ..Features::NONE }]
    {
        let causal = Problem { features, ..query };
        let simpler = causal.without_idle_causal();
        assert_eq!(simpler, Problem { causal: Causal::None, ..causal });
        // The causal mask stays if another feature counts from its diagonal.
        assert!(simpler.aligns_ends() && causal.aligns_ends());
    }
    let windowed = Features { window: Window { left: Some(7), ..Window::default() }, ..Features::NONE };
    let own_queries = Features { varlen: Some(Varlen { total_q: Some(5), ..lengths }), ..Features::NONE };
    let hidden = [
        Problem { seqlen_q: 2, ..query },
        Problem { causal: Causal::TopLeft, ..query },
        Problem { features: windowed, ..query },
        Problem { features: own_queries, ..query },
        Problem { batch_invariant: true, ..query },
    ];
    for problem in hidden {
        assert_eq!(problem.without_idle_causal(), problem);
    }
}
