//! The order in which a lookup tries records. `configs` has the config that a choice gives, `lines`
//! the records as text. No device is needed.

mod configs;
mod lines;

use flashtune::config::{Config, Family};
use flashtune::device::{Arch, Device};
use flashtune::family;
use flashtune::plan::record::{Record, read_lines};
use flashtune::plan::{Choice, Known, Source, choices, key, proven, shipped};
use flashtune::problem::{Causal, Dtype, Pass, Problem};
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
    record_of(problem, device, config(problem, device, index))
}

fn record_of(problem: &Problem, device: &Device, config: Config) -> Arc<Record> {
    let winner = Timed { config, median_us: 100.0, utilisation: Some(0.7) };
    let outcome = Outcome { winner, spread: 0.01, check_error: 0.001, runner_up: None, default_us: Some(120.0) };
    Arc::new(Record::new(problem, device, outcome))
}

fn first(known: &Known, problem: &Problem, device: &Device) -> Choice {
    choices(known, problem, device).swap_remove(0)
}

#[test]
fn the_lookup_order_is_process_machine_pack_shipped_nearest_gpu_heuristic() {
    let device = h200();
    let other_gpu = Device { name: "NVIDIA H100 PCIe".into(), sm_count: 114, ..h200() };
    let records = [
        record(&LLAMA, &device, 0),
        record(&LLAMA, &device, 1),
        record(&LLAMA, &device, 2),
        record(&LLAMA, &device, 3),
        record(&LLAMA, &other_gpu, 4),
    ];
    let [process, machine, pack, shipped, nearest] = records.clone();
    let (process, machine, pack) = (vec![process], vec![machine], vec![pack]);
    let mut known = Known { process, machine, pack, shipped: vec![shipped, nearest] };
    let all = choices(&known, &LLAMA, &device);
    let sources: Vec<Source> = all.iter().map(|choice| choice.source).collect();
    use Source::*;
    // The config of the other family comes last, in case the preferred one's does not build.
    assert_eq!(sources, [Process, Machine, Pack, Shipped, NearestGpu, Heuristic, Heuristic]);
    for (index, choice) in all[..5].iter().enumerate() {
        assert_eq!(choice.config, records[index].config);
        assert_eq!(choice.is_exact, index < 4, "{:?}", choice.source);
    }
    assert_eq!(
        all[5..].iter().map(|choice| choice.config.clone()).collect::<Vec<_>>(),
        family::heuristics(&LLAMA, &device)
    );
    known.process.clear();
    known.machine.clear();
    assert_eq!(first(&known, &LLAMA, &device).source, Pack);
    known.pack.clear();
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
    let carried = family::carried_over(&far.config, &far.problem, &LLAMA, &device);
    assert!(position(&carried) < position(&sm80), "{order:?}");
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
