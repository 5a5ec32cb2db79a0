//! The order in which a lookup tries records, and records as text. No device is needed.

use flashtune::config::{Config, Family};
use flashtune::device::{Arch, Device};
use flashtune::family;
use flashtune::plan::record::{Record, read_lines, write_lines};
use flashtune::plan::{Choice, Known, Source, choices, key, proven, shipped};
use flashtune::problem::{Causal, Dtype, Features, Layout, Pass, Problem, Varlen, Window};
use flashtune::tune::candidates;
use flashtune::tune::{Outcome, Timed};
use std::sync::Arc;

const LLAMA: Problem = Problem {
    num_heads_kv: 8,
    causal: Causal::BottomRight,
    ..Problem::dense(Pass::Forward, Dtype::Bf16, 1, 32, 4096, 128)
};

fn h200() -> Device {
    Device::typical(Arch::Sm(9, 0)).unwrap()
}

/// A config of the problem that is not the heuristic's; `index` tells several apart.
fn config(problem: &Problem, device: &Device, index: usize) -> Config {
    candidates::all(problem, device).swap_remove(index + 1)
}

fn record(problem: &Problem, device: &Device, index: usize) -> Arc<Record> {
    let winner = Timed { config: config(problem, device, index), median_us: 100.0, utilisation: Some(0.7) };
    let outcome = Outcome { winner, spread: 0.01, check_error: 0.001, runner_up: None, default_us: Some(120.0) };
    Arc::new(Record::new(problem, device, outcome))
}

fn first(known: &Known, problem: &Problem, device: &Device) -> Choice {
    choices(known, problem, device).swap_remove(0)
}

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
/// batch.
#[test]
fn batch_invariant_problem_has_one_config_for_every_batch() {
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
            let of = |batch_size, seqlen_q, seqlen_k| {
                let problem =
                    Problem { batch_size, seqlen_q, seqlen_k, features: *features, batch_invariant: true, ..LLAMA };
                let tuned = Problem { batch_invariant: false, ..problem };
                let known = Known { process: vec![record(&tuned, device, 0)], ..Known::default() };
                let [only] = &choices(&known, &key::canonical(&problem), device)[..] else { panic!("one choice") };
                assert!(only.reason.starts_with("batch-invariant, whatever the records say"), "{}", only.reason);
                let checked = family::check(&key::canonical(&problem), &only.config, device);
                assert_eq!(checked, Ok(()), "{problem:?}");
                only.config.clone()
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

#[test]
fn record_of_a_deterministic_problem_is_ignored() {
    let deterministic = Problem { pass: Pass::Backward, deterministic: true, ..LLAMA };
    let line = record(&deterministic, &h200(), 0).to_line().unwrap();
    let (records, ignored) = read_lines(&line);
    assert!(records.is_empty() && ignored[0].1.contains("deterministic"), "{ignored:?}");
}

#[test]
fn the_lookup_order_is_process_machine_shipped_nearest_gpu_heuristic() {
    let device = h200();
    let other_gpu = Device { name: "NVIDIA H100 PCIe".into(), sm_count: 114, ..h200() };
    let records = [
        record(&LLAMA, &device, 0),
        record(&LLAMA, &device, 1),
        record(&LLAMA, &device, 2),
        record(&LLAMA, &other_gpu, 3),
    ];
    let [process, machine, shipped, nearest] = records.clone();
    let mut known = Known { process: vec![process], machine: vec![machine], shipped: vec![shipped, nearest] };
    let all = choices(&known, &LLAMA, &device);
    let sources: Vec<Source> = all.iter().map(|choice| choice.source).collect();
    use Source::*;
    // The config of the other family comes last, in case the preferred one's does not build.
    assert_eq!(sources, [Process, Machine, Shipped, NearestGpu, Heuristic, Heuristic]);
    for (index, choice) in all[..4].iter().enumerate() {
        assert_eq!(choice.config, records[index].config);
        assert_eq!(choice.is_exact, index < 3, "{:?}", choice.source);
    }
    assert_eq!(
        all[4..].iter().map(|choice| choice.config.clone()).collect::<Vec<_>>(),
        family::heuristics(&LLAMA, &device)
    );
    known.process.clear();
    known.machine.clear();
    assert_eq!(first(&known, &LLAMA, &device).source, Shipped);
    known.shipped.remove(0);
    let nearest = first(&known, &LLAMA, &device);
    assert_eq!(nearest.source, NearestGpu);
    assert!(nearest.reason.contains("NVIDIA H100 PCIe"), "{}", nearest.reason);
}

#[test]
fn record_of_the_gpu_with_the_nearest_sm_count_is_taken() {
    let gpu = |name: &str, sm_count| Device { name: name.into(), sm_count, ..h200() };
    let [small, large] =
        [("NVIDIA GH200", 78), ("NVIDIA H100", 114)].map(|(name, sms)| record(&LLAMA, &gpu(name, sms), 0));
    let known = Known { shipped: vec![small.clone(), large.clone()], ..Known::default() };
    let taken = |name, sms| first(&known, &LLAMA, &gpu(name, sms)).record.unwrap();
    assert_eq!(taken("NVIDIA H800", 132), large);
    assert_eq!(taken("NVIDIA H20", 70), small);
}

#[test]
fn records_of_another_architecture_are_never_hits() {
    let a100 = Device::typical(Arch::Sm(8, 0)).unwrap();
    let known = Known { machine: vec![record(&LLAMA, &a100, 0)], ..Known::default() };
    assert_eq!(first(&known, &LLAMA, &h200()).source, Source::Heuristic);
}

#[test]
fn the_nearest_shape_of_the_class_is_taken() {
    let device = h200();
    let shape = |batch_size, seqlen| Problem { batch_size, seqlen_q: seqlen, seqlen_k: seqlen, ..LLAMA };
    let records = [shape(1, 1024), shape(1, 8192), shape(16, 8192)].map(|shape| record(&shape, &device, 0));
    let known = Known { machine: records.to_vec(), ..Known::default() };
    let taken = |problem: &Problem| first(&known, problem, &device).record.unwrap();
    assert_eq!(taken(&shape(1, 900)), records[0]);
    assert_eq!(taken(&shape(1, 6000)), records[1]);
    assert_eq!(taken(&shape(12, 8192)), records[2]);
    assert!(first(&known, &shape(1, 6000), &device).reason.contains("nearest shape"));
    let other_class = Problem { dropout: true, ..shape(1, 1024) };
    assert_eq!(first(&known, &other_class, &device).source, Source::Heuristic);
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
    // Beyond few queries a call needs a workspace only where query tiles are few.
    let splits = [(1, 97), (8, 20), (4, 32), (64, 300), (80, 300)].map(|(group_size, seqlen_q)| {
        let problem = problem(group_size, seqlen_q);
        (problem.max_splits(), problem.workspace_bytes() == 0)
    });
    assert_eq!(splits, [(32, false), (32, false), (32, false), (2, false), (1, true)]);
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
    for knob in good.knobs.keys() {
        let mut lacking = good.clone();
        lacking.knobs.remove(knob);
        // A config without TMA is valid too.
        let odd = [if knob == "tma" { 2 } else { 0 }, u32::MAX].map(|value| good.clone().with(knob, value));
        for config in odd.into_iter().chain([lacking]) {
            assert_eq!(sources(&config), [Source::Heuristic; 2], "{config}");
        }
    }
    let half_a_team = good.with("num_warps", 1).with("warps_m", 2);
    assert_eq!(sources(&half_a_team), [Source::Heuristic; 2]);
}

/// Leaves out each shipped record in turn and compares its problem's lookup among the others with
/// the record. The record's runner-up often tells how fast the neighbour's config is.
#[test]
fn neighbours_predict_a_shipped_record_that_is_left_out() {
    let device = h200();
    let shipped = shipped::EMBEDDED.iter().flat_map(|(_, text)| read_lines(text).0).map(Arc::new);
    let records: Vec<Arc<Record>> = shipped.filter(|record| record.arch == device.arch).collect();
    let tile = |config: &Config| (config.family, config.get("block_m"), config.get("block_n"));
    let (mut near, mut same_tile, mut known_worse) = (0, 0, Vec::new());
    for left_out in &records {
        let others = records.iter().filter(|record| !Arc::ptr_eq(record, left_out)).cloned();
        let choice = first(&Known { shipped: others.collect(), ..Known::default() }, &left_out.problem, &device);
        // Some records are the only ones of their class, or too far from any other for a lookup.
        let Some(neighbour) = &choice.record else { continue };
        if key::distance(&neighbour.problem, &left_out.problem) > 2.0 {
            continue;
        }
        near += 1;
        same_tile += usize::from(tile(&choice.config) == tile(&left_out.config));
        let measured = left_out.runner_up.iter().find(|other| other.config == choice.config);
        known_worse.extend(measured.filter(|other| other.median_us > 1.05 * left_out.median_us).map(|_| &left_out.key));
    }
    assert!(near > 100, "{near} records have a neighbour");
    assert!(100 * same_tile >= 85 * near, "{same_tile} of {near} neighbours have the same tile");
    assert!(100 * known_worse.len() <= 2 * near, "more than 5 % off: {known_worse:#?}");
}

#[test]
fn shipped_record_of_the_same_shape_precedes_a_near_record_of_this_machine() {
    let device = h200();
    let near = Problem { batch_size: 2, ..LLAMA };
    let known = Known {
        machine: vec![record(&near, &device, 0)],
        shipped: vec![record(&LLAMA, &device, 1)],
        ..Known::default()
    };
    let sources = |problem: &Problem| -> Vec<Source> {
        choices(&known, problem, &device).iter().map(|choice| choice.source).collect()
    };
    assert_eq!(sources(&LLAMA)[..3], [Source::Shipped, Source::Machine, Source::Heuristic]);
    assert_eq!(sources(&near)[..3], [Source::Machine, Source::Shipped, Source::Heuristic]);
    // Neither record has this shape, so this machine's is taken.
    assert_eq!(sources(&Problem { batch_size: 4, ..LLAMA })[0], Source::Machine);
    // A record of another GPU stays a guess, however near its shape.
    let other = Device { name: "NVIDIA H100".into(), ..h200() };
    let elsewhere = Known { shipped: vec![record(&LLAMA, &other, 1)], ..known.clone() };
    assert_eq!(choices(&elsewhere, &LLAMA, &device)[0].source, Source::Machine);
}

#[test]
fn near_shipped_record_precedes_a_far_record_of_this_machine() {
    let device = h200();
    let short = Problem { seqlen_q: 128, seqlen_k: 128, ..LLAMA };
    let known = Known {
        machine: vec![record(&short, &device, 0)],
        shipped: vec![record(&LLAMA, &device, 1)],
        ..Known::default()
    };
    let sources: Vec<Source> = choices(&known, &LLAMA, &device).iter().map(|choice| choice.source).collect();
    assert_eq!(sources[..3], [Source::Shipped, Source::Machine, Source::Heuristic]);
}

/// Equal batch x heads is distance 0, and `b1` sorts before `b2`.
#[test]
fn record_of_the_exact_shape_precedes_one_of_as_many_heads_in_all() {
    let device = h200();
    let split = |batch_size, heads| Problem {
        batch_size,
        num_heads_q: heads,
        num_heads_kv: heads,
        ..Problem::dense(Pass::Backward, Dtype::Bf16, 1, 8, 8192, 256)
    };
    let records = [record(&split(1, 16), &device, 0), record(&split(2, 8), &device, 1)];
    let known = Known { shipped: records.to_vec(), ..Known::default() };
    for (problem, own) in [(split(1, 16), &records[0]), (split(2, 8), &records[1])] {
        let choice = first(&known, &problem, &device);
        assert_eq!((choice.record.as_ref(), choice.is_exact), (Some(own), true));
    }
}

#[test]
fn nearer_shipped_record_precedes_a_near_record_of_this_process() {
    let device = h200();
    let of = |seqlen| Problem { seqlen_q: seqlen, seqlen_k: seqlen, ..LLAMA };
    let known = Known {
        process: vec![record(&of(2048), &device, 0)],
        shipped: vec![record(&of(4096), &device, 1)],
        ..Known::default()
    };
    assert_eq!(first(&known, &of(3000), &device).source, Source::Shipped);
    assert_eq!(first(&known, &of(1500), &device).source, Source::Process);
    // At equal distance the process's own record wins.
    let both = Known { shipped: vec![record(&of(2048), &device, 1)], ..known };
    assert_eq!(first(&both, &of(3000), &device).source, Source::Process);
}

#[test]
fn record_that_did_not_try_the_preferred_family_follows_the_heuristic() {
    let device = h200();
    let sm80 = family::heuristics(&LLAMA, &device).pop().unwrap().with("num_stages", 1);
    assert_eq!((sm80.family, family::check(&LLAMA, &sm80, &device)), (Family::Sm80, Ok(())));
    let old = Record { config: sm80.clone(), ..Record::clone(&record(&LLAMA, &device, 0)) };
    let known = |records: &[&Record]| {
        let machine = records.iter().map(|record| Arc::new(Record::clone(record))).collect();
        Known { machine, ..Known::default() }
    };
    let configs = |records: &[&Record]| -> Vec<Config> {
        choices(&known(records), &LLAMA, &device).into_iter().map(|choice| choice.config).collect()
    };
    let [sm90, other] = &family::heuristics(&LLAMA, &device)[..] else { panic!("two families serve") };
    assert_eq!(configs(&[&old]), [sm90.clone(), sm80.clone(), other.clone()]);
    let reason = |records: &[&Record]| first(&known(records), &LLAMA, &device).reason;
    assert!(reason(&[]).starts_with("no record of "), "{}", reason(&[]));
    assert!(reason(&[&old]).contains("did not try sm90: the heuristic's"), "{}", reason(&[&old]));
    // A record that measured both families is a hit, and the field survives the round trip through
    // its line.
    let new = Record { also_tried: [Family::Sm90].into(), ..old.clone() };
    let new = Record::from_line(&new.to_line().unwrap()).unwrap();
    assert_eq!(configs(&[&new])[0], sm80);
    // An old record of this very shape does not hide a new record of another shape.
    let far = Record::clone(&record(&Problem { seqlen_q: 1024, ..LLAMA }, &device, 3));
    let order = configs(&[&old, &far]);
    let position = |config: &Config| order.iter().position(|other| other == config).unwrap();
    assert!(position(&far.config) < position(&sm80), "{order:?}");
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

/// sm90's forward records are older than num_splits.
#[test]
fn record_older_than_a_knob_has_the_value_that_it_was_measured_with() {
    let device = h200();
    let index = (0..).find(|index| config(&LLAMA, &device, *index).get("num_splits") == Some(1)).unwrap();
    let present = record(&LLAMA, &device, index);
    let line = present.to_line().unwrap();
    let older = line.replace(r#""num_splits":1,"#, "");
    assert_ne!(older, line);
    assert_eq!(Record::from_line(&older).as_ref(), Ok(&*present));
}

#[test]
fn unknown_field_of_a_record_is_ignored_alone() {
    let line = record(&LLAMA, &h200(), 0).to_line().unwrap();
    let with = |field: &str| line.replacen('{', &format!("{{{field},"), 1);
    let read = Record::from_line(&with(r#""clock_mhz":1980,"notes":{"by":"me"}"#)).unwrap();
    assert_eq!(read, Record::from_line(&line).unwrap());
}

#[test]
fn record_with_an_unknown_meaning_is_ignored_whole() {
    let line = record(&LLAMA, &Device::typical(Arch::Sm(8, 0)).unwrap(), 0).to_line().unwrap();
    assert!(Record::from_line(&line).is_ok());
    for (from, to) in [
        // A later version's key has a field that this library does not know. Ignoring the field
        // would make it a record of full attention.
        ("v1 forward", "v2 forward"),
        ("vec8 gqa4", "vec8 window128 gqa4"),
        (r#""family":"sm80""#, r#""family":"sm200""#),
        (r#""seqlen_q":4096"#, r#""seqlen_q":1"#),
        (r#""seqlen_q":4096"#, r#""seqlen_q":-4096"#),
        (r#""median_us":100.0"#, r#""median_us":-1.0"#),
        (r#""arch":"sm_80""#, r#""arch":"gfx942""#),
        (r#""num_warps":"#, r#""num_warps":-"#),
    ] {
        let changed = line.replacen(from, to, 1);
        assert_ne!(changed, line, "{from}");
        assert!(Record::from_line(&changed).is_err(), "{changed}");
    }
    let text = format!("{line}\nnot json\n\n{line}\n");
    let (records, ignored) = read_lines(&text);
    assert_eq!((records.len(), ignored.len(), ignored[0].0), (2, 1, 2));
}

#[test]
fn record_with_a_layout_that_its_dtype_does_not_allow_is_ignored() {
    let read = |dtype, layout| {
        let problem = Problem { dtype, layout, ..LLAMA };
        Record::from_line(&record(&problem, &h200(), 0).to_line().unwrap())
    };
    assert!(read(Dtype::Fp32, Layout::Vec4).is_ok() && read(Dtype::Bf16, Layout::Vec8).is_ok());
    let reason = read(Dtype::Fp32, Layout::Vec8).unwrap_err();
    assert_eq!(reason, "its layout is vec8; of fp32 no call has more than vec4");
}

#[test]
fn lines_are_sorted_and_byte_stable() {
    let device = h200();
    let records: Vec<Record> = (0..40)
        .map(|index| {
            let problem = Problem { batch_size: 1 << (index % 7), seqlen_q: 100 + 300 * index, ..LLAMA };
            let mut record = Record::clone(&record(&problem, &device, index as usize % 5));
            let outcome = Outcome {
                winner: Timed {
                    config: record.config.clone(),
                    median_us: 1e4 / (1.0 + index as f64),
                    utilisation: (index % 3 == 0).then_some(2.0 / 3.0),
                },
                spread: 0.1 / 3.0 * index as f64,
                check_error: 1e-7 * index as f64 / 7.0,
                runner_up: Some(Timed {
                    config: record.config.clone(),
                    median_us: std::f64::consts::PI * index as f64,
                    utilisation: None,
                }),
                default_us: (index % 2 == 0).then_some(1.0 / 3.0),
            };
            record = Record::new(&problem, &device, outcome);
            record
        })
        .collect();
    let text = write_lines(records.clone()).unwrap();
    let mut lines: Vec<&str> = text.lines().collect();
    let (read, ignored) = read_lines(&text);
    assert!(ignored.is_empty() && read.len() == lines.len());
    let reversed: Vec<Record> = read.into_iter().rev().collect();
    assert_eq!(write_lines(reversed).unwrap(), text);
    lines.sort();
    assert_eq!(lines.join("\n") + "\n", text);
}

#[test]
fn proven_configs_come_from_records_of_the_architecture_and_pass() {
    let (device, a100) = (h200(), Device::typical(Arch::Sm(8, 0)).unwrap());
    let other_gpu = Device { name: "NVIDIA H100 PCIe".into(), sm_count: 114, ..h200() };
    let far = Problem { dropout: true, seqlen_q: 512, ..LLAMA };
    let known = Known {
        machine: vec![record(&far, &device, 0), record(&LLAMA, &a100, 1)],
        shipped: vec![record(&LLAMA, &other_gpu, 2), record(&Problem { pass: Pass::Backward, ..LLAMA }, &device, 3)],
        ..Known::default()
    };
    // The same class comes first. Configs of the A100 and of the other pass prove nothing here.
    let expected = [&known.shipped[0], &known.machine[0]].map(|record| record.config.clone());
    assert_eq!(proven(&known, &LLAMA, &device), expected);
    assert!(proven(&known, &LLAMA, &Device { arch: Arch::Sm(12, 0), ..h200() }).is_empty());
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
