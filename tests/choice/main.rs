//! The choice for shapes that have no record: which config the lookup takes on an H200 from the
//! shipped records and the model of its time. No device is needed.

#[path = "../source_tree/mod.rs"]
mod source_tree;

use flashtune::config::Config;
use flashtune::device::{Arch, Device};
use flashtune::family;
use flashtune::plan::{Choice, Known, Record, Source, choices, predicted_us, shipped};
use flashtune::problem::{Causal, Dtype, Eight, EightBits, Features, Pass, Problem};
use std::sync::Arc;

/// Shapes that people run, each with the config that is chosen: the project's examples of slow
/// choices, 50 random ones (many heads, few heads, GQA, cross-attention, short sequences), fifteen
/// that random shapes on an H100 and an H200 asked for, nine of backward passes whose heads have up
/// to four tiles or whose walks alternate, eight with q, k and v in e4m3, prompts over k and v in
/// e4m3, eight whose choice took 1.04 to 1.32 of the fastest config's time, and four of pairs and
/// of parts of a last wave.
const SHAPES: &str = include_str!("shapes.txt");

fn h200() -> Device {
    Device::typical(Arch::Sm(9, 0)).unwrap()
}

fn known() -> Known {
    let shipped = shipped::records(Arch::Sm(9, 0)).into_iter().map(Arc::new).collect();
    Known { shipped, ..Known::default() }
}

/// Reads `forward b4 hq8 hkv8 sq2304 sk154 d64 full`, perhaps with `e4m3`, `kve4m3` or `kve4m3s1`
/// behind it.
fn problem(shape: &str) -> Problem {
    let words: Vec<&str> = shape.split(' ').collect();
    let [pass, b, hq, hkv, sq, sk, d, mask, ref rest @ ..] = words[..] else { panic!("{shape}") };
    let e4m3 = |queries, keys_per_scale| Some(EightBits { keys: Eight::E4m3, queries, keys_per_scale });
    let eight_bits = match rest {
        [] => None,
        ["e4m3"] => e4m3(true, 0),
        ["kve4m3"] => e4m3(false, 0),
        ["kve4m3s1"] => e4m3(false, 1),
        _ => panic!("{shape}"),
    };
    let number = |word: &str, name: &str| word.strip_prefix(name).unwrap().parse::<i64>().unwrap();
    let pass = if pass == "forward" { Pass::Forward } else { Pass::Backward };
    let sizes = (number(b, "b"), number(hq, "hq"), number(sq, "sq"), number(d, "d"));
    Problem {
        num_heads_kv: number(hkv, "hkv"),
        seqlen_k: number(sk, "sk"),
        causal: if mask == "causal" { Causal::BottomRight } else { Causal::None },
        features: Features { eight_bits, ..Features::NONE },
        ..Problem::dense(pass, Dtype::Bf16, sizes.0, sizes.1, sizes.2, sizes.3)
    }
}

fn shapes() -> impl Iterator<Item = &'static str> {
    SHAPES.lines().map(|line| line.split_once(": ").unwrap().0)
}

fn first(problem: &Problem) -> Choice {
    choices(&known(), problem, &h200()).swap_remove(0)
}

/// `FLASHTUNE_WRITE_CHOICES=1 cargo test --test choice` writes the file anew, for a change that is
/// meant to choose otherwise. Its diff then shows what changed.
#[test]
fn listed_shapes_choose_the_listed_configs() {
    let chosen = shapes().map(|shape| format!("{shape}: {}\n", first(&problem(shape)).config)).collect::<String>();
    if std::env::var_os("FLASHTUNE_WRITE_CHOICES").is_some() {
        return std::fs::write(source_tree::root().join("tests/choice/shapes.txt"), chosen).unwrap();
    }
    for (now, listed) in chosen.lines().zip(SHAPES.lines()) {
        assert_eq!(now, listed);
    }
}

/// Tiles, splits and clusters count. Partial results of splits cost time too, so a config that
/// keeps more SMs busy counts only if its predicted time is at most 5 % longer. Forward splits are
/// left to tuning runs.
#[test]
fn no_choice_leaves_half_of_the_sms_idle_where_another_config_would_not() {
    let device = h200();
    let idle =
        |problem: &Problem, config: &Config| family::work(problem, config, &device).map_or(0.0, |work| work.idle());
    let mut with_few_tiles = 0;
    for shape in shapes() {
        let problem = problem(shape);
        let config = first(&problem).config;
        if idle(&problem, &config) > 0.5 {
            with_few_tiles += 1;
            let others = family::passing(config.family, &problem, &device);
            let us = |config: &Config| family::work(&problem, config, &device).unwrap().us(&device);
            let is_as_fast = |other: &Config| us(other) <= 1.05 * us(&config);
            let is_unsplit = |other: &Config| other.get("num_splits").is_none_or(|splits| splits == 1);
            let mut unsplit = others.iter().filter(|(_, other)| is_unsplit(other));
            let better = unsplit.find(|(_, other)| idle(&problem, other) <= 0.5 && is_as_fast(other));
            assert!(better.is_none(), "{shape}: {config}, and not {}", better.unwrap().1);
        }
    }
    assert!(with_few_tiles > 0, "no listed shape is so small that it matters");
}

/// A model that prefers its own configs to measured ones would show here.
#[test]
fn shape_of_a_record_keeps_the_records_config_on_its_gpu() {
    let known = known();
    let is_current = |record: &&Arc<Record>| record.has_tried(family::heuristic(&record.problem, &h200()).family);
    for record in known.shipped.iter().filter(is_current) {
        let device = Device { name: record.device.clone(), sm_count: record.sm_count, ..h200() };
        let choice = choices(&known, &record.problem, &device).swap_remove(0);
        assert_eq!(choice.config, record.config, "{} on {}: {}", record.key, record.device, choice.reason);
    }
}

/// The H200 keeps its record's groups of 16 MB. Another GPU, where the record was not measured,
/// gets those of its few rows.
#[test]
fn record_of_another_gpu_gets_the_groups_of_this_one() {
    let mut known = known();
    known.shipped.retain(|record| record.device == h200().name);
    let problem = problem("backward b32 hq32 hkv32 sq512 sk512 d64 full");
    let group_mb = |name: &str| {
        let device = Device { name: name.to_owned(), ..h200() };
        choices(&known, &problem, &device).swap_remove(0).config.get("group_mb")
    };
    assert_eq!([group_mb(&h200().name), group_mb("NVIDIA H100 80GB HBM3")], [Some(16), Some(4)]);
}

/// Both GPUs that have records count for a third one with as many SMs.
#[test]
fn third_gpu_takes_the_records_of_each_shape() {
    let gh200 = Device { name: "NVIDIA GH200 480GB".to_owned(), ..h200() };
    let measured_on = |shape: &str| {
        let choice = choices(&known(), &problem(shape), &gh200).swap_remove(0);
        assert_eq!(choice.source, Source::NearestGpu, "{shape}");
        choice.record.unwrap().device.clone()
    };
    assert_eq!(measured_on("backward b1 hq64 hkv8 sq8192 sk8192 d128 causal"), h200().name);
    assert_eq!(measured_on("backward b2 hq16 hkv16 sq8192 sk8192 d128 causal"), "NVIDIA H100 80GB HBM3");
}

/// A record of the same key was measured at another length, so the model is asked; the reason says
/// what it was calibrated by.
#[test]
fn predicted_choice_says_what_the_model_was_calibrated_by() {
    let choice = first(&problem("forward b4 hq8 hkv8 sq2304 sk154 d64 full"));
    assert_eq!(choice.source, Source::Shipped);
    let record = choice.record.as_ref().unwrap();
    assert!(choice.reason.starts_with("the model chose it: "), "{}", choice.reason);
    let calibrated = format!("calibrates it: {}, {:.1} us", record.key, record.median_us);
    assert!(choice.reason.ends_with(&calibrated) && choice.reason.len() < 256, "{}", choice.reason);
}

#[test]
fn without_records_the_model_chooses_among_the_heuristics_tiles() {
    let few_tiles = problem("forward b1 hq1 hkv1 sq6089 sk6089 d96 full");
    let choice = choices(&Known::default(), &few_tiles, &h200()).swap_remove(0);
    assert_eq!((choice.source, choice.record.is_none()), (Source::Heuristic, true));
    let us = |config: &Config| predicted_us(&Known::default(), &few_tiles, config, &h200()).unwrap();
    let alternatives = family::alternatives(&few_tiles, &h200());
    assert!(alternatives.iter().all(|other| us(&choice.config) <= 1.03 * us(other)), "{}", choice.config);
}
