//! From a problem to a plan: lookup order, nearest shapes, records as text, and the engine on the CPU backend.

use flashtune::backend::Backend;
use flashtune::config::{Config, Family};
use flashtune::cpu::Cpu;
use flashtune::device::{Arch, Device};
use flashtune::error::Status;
use flashtune::plan::record::{Record, read_lines, write_lines};
use flashtune::plan::{Choice, Engine, EngineOptions, Known, Policy, Source, choices, key};
use flashtune::problem::{Causal, Dtype, Layout, Pass, Problem};
use flashtune::tune::{Outcome, Phase, Timed, TuneOptions, space};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Barrier, Once};
use std::time::Duration;

const LLAMA: Problem = Problem {
    pass: Pass::Forward,
    dtype: Dtype::Bf16,
    batch_size: 1,
    num_heads_q: 32,
    num_heads_kv: 8,
    seqlen_q: 4096,
    seqlen_k: 4096,
    head_dim: 128,
    head_dim_v: 128,
    causal: Causal::BottomRight,
    dropout: false,
    layout: Layout::Vec8,
};

/// Small enough to be tuned in a test.
const SMALL: Problem =
    Problem { num_heads_q: 2, num_heads_kv: 2, seqlen_q: 96, seqlen_k: 96, head_dim: 32, head_dim_v: 32, ..LLAMA };

fn h200() -> Device {
    Device::typical(Arch::Sm(9, 0)).unwrap()
}

/// Configs of the problem that are not the heuristic's, told apart by their order.
fn config(problem: &Problem, device: &Device, index: usize) -> Config {
    space::candidates(problem, device).swap_remove(index + 1)
}

fn record(problem: &Problem, device: &Device, index: usize) -> Arc<Record> {
    let winner = Timed { config: config(problem, device, index), median_us: 100.0 };
    let outcome = Outcome { winner, spread: 0.01, check_error: 0.001, runner_up: None, default_us: Some(120.0) };
    Arc::new(Record::new(problem, device, outcome))
}

fn first(known: &Known, problem: &Problem, device: &Device) -> Choice {
    choices(known, problem, device).swap_remove(0)
}

#[test]
fn the_lookup_order_is_process_machine_shipped_nearest_gpu_heuristic() {
    let device = h200();
    let other_gpu = Device { name: "NVIDIA H100 PCIe".into(), sm_count: 114, ..h200() };
    let mut known = Known {
        process: vec![record(&LLAMA, &device, 0)],
        machine: vec![record(&LLAMA, &device, 1)],
        shipped: vec![record(&LLAMA, &device, 2), record(&LLAMA, &other_gpu, 3)],
    };
    let all = choices(&known, &LLAMA, &device);
    let sources: Vec<Source> = all.iter().map(|choice| choice.source).collect();
    use Source::*;
    assert_eq!(sources, [Process, Machine, Shipped, NearestGpu, Heuristic]);
    for (index, choice) in all[..4].iter().enumerate() {
        assert_eq!(choice.config, config(&LLAMA, &device, index));
        assert_eq!(choice.is_exact, index < 3, "{:?}", choice.source);
    }
    assert_eq!(all[4].config, space::heuristic(&LLAMA, &device));
    known.process.clear();
    known.machine.clear();
    assert_eq!(first(&known, &LLAMA, &device).source, Shipped);
    known.shipped.remove(0);
    let nearest = first(&known, &LLAMA, &device);
    assert_eq!(nearest.source, NearestGpu);
    assert!(nearest.reason.contains("NVIDIA H100 PCIe"), "{}", nearest.reason);
}

#[test]
fn of_several_gpus_the_one_with_the_nearest_size_is_taken() {
    let gpu = |name: &str, sm_count| Device { name: name.into(), sm_count, ..h200() };
    let known = Known {
        shipped: vec![record(&LLAMA, &gpu("NVIDIA GH200", 78), 0), record(&LLAMA, &gpu("NVIDIA H100", 114), 1)],
        ..Known::default()
    };
    assert_eq!(first(&known, &LLAMA, &gpu("NVIDIA H800", 132)).config, config(&LLAMA, &h200(), 1));
    assert_eq!(first(&known, &LLAMA, &gpu("NVIDIA H20", 70)).config, config(&LLAMA, &h200(), 0));
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
    let known = Known {
        machine: vec![
            record(&shape(1, 1024), &device, 0),
            record(&shape(1, 8192), &device, 1),
            record(&shape(16, 8192), &device, 2),
        ],
        ..Known::default()
    };
    let taken = |problem: &Problem| first(&known, problem, &device).config;
    assert_eq!(taken(&shape(1, 900)), config(&LLAMA, &device, 0));
    assert_eq!(taken(&shape(1, 6000)), config(&LLAMA, &device, 1));
    assert_eq!(taken(&shape(12, 8192)), config(&LLAMA, &device, 2));
    assert!(first(&known, &shape(1, 6000), &device).reason.contains("nearest shape"));
    let other_class = Problem { dropout: true, ..shape(1, 1024) };
    assert_eq!(first(&known, &other_class, &device).source, Source::Heuristic);
}

#[test]
fn a_far_record_of_this_machine_comes_after_a_near_shipped_one() {
    let device = h200();
    let short = Problem { seqlen_q: 128, seqlen_k: 128, ..LLAMA };
    let known = Known {
        machine: vec![record(&short, &device, 0)],
        shipped: vec![record(&LLAMA, &device, 1)],
        ..Known::default()
    };
    let sources: Vec<Source> = choices(&known, &LLAMA, &device).iter().map(|choice| choice.source).collect();
    assert_eq!(sources, [Source::Shipped, Source::Machine, Source::Heuristic]);
}

#[test]
fn a_record_that_breaks_a_constraint_is_a_miss() {
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
    // Fits this GPU, but not one with less shared memory.
    let large = Problem { head_dim: 256, head_dim_v: 256, ..LLAMA };
    let a10 = Device {
        sm_count: device.sm_count,
        name: device.name.clone(),
        arch: device.arch,
        ..Device::typical(Arch::Sm(8, 6)).unwrap()
    };
    let misfit =
        space::candidates(&large, &device).into_iter().find(|config| space::check(&large, config, &a10).is_err());
    let mut record = Record::clone(&record(&large, &device, 0));
    record.config = misfit.unwrap();
    let known = Known { machine: vec![Arc::new(record)], ..Known::default() };
    assert_eq!(first(&known, &large, &device).source, Source::Machine);
    assert_eq!(first(&known, &large, &a10).source, Source::Heuristic);
}

#[test]
fn record_with_unknown_field_is_ignored_in_the_field_alone() {
    let line = record(&LLAMA, &h200(), 0).to_line().unwrap();
    let with = |field: &str| line.replacen('{', &format!("{{{field},"), 1);
    let read = Record::from_line(&with(r#""clock_mhz":1980,"notes":{"by":"me"}"#)).unwrap();
    assert_eq!(read, Record::from_line(&line).unwrap());
}

#[test]
fn record_with_another_meaning_is_ignored_as_a_whole() {
    let line = record(&LLAMA, &h200(), 0).to_line().unwrap();
    assert!(Record::from_line(&line).is_ok());
    for (from, to) in [
        // A later version's key, with a field that this library does not know: it would be taken for full attention.
        ("v1 forward", "v2 forward"),
        ("vec8 gqa4", "vec8 window128 gqa4"),
        (r#""family":"sm80""#, r#""family":"sm200""#),
        (r#""seqlen_q":4096"#, r#""seqlen_q":1"#),
        (r#""seqlen_q":4096"#, r#""seqlen_q":-4096"#),
        (r#""median_us":100.0"#, r#""median_us":-1.0"#),
        (r#""arch":"sm_90""#, r#""arch":"gfx942""#),
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
fn lines_are_sorted_and_byte_stable() {
    let device = h200();
    let records: Vec<Record> = (0..40)
        .map(|index| {
            let problem = Problem { batch_size: 1 << (index % 7), seqlen_q: 100 + 300 * index, ..LLAMA };
            let mut record = Record::clone(&record(&problem, &device, index as usize % 5));
            let outcome = Outcome {
                winner: Timed { config: record.config.clone(), median_us: 1e4 / (1.0 + index as f64) },
                spread: 0.1 / 3.0 * index as f64,
                check_error: 1e-7 * index as f64 / 7.0,
                runner_up: Some(Timed {
                    config: record.config.clone(),
                    median_us: std::f64::consts::PI * index as f64,
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

fn engine_with(folder: &Path, options: EngineOptions) -> Engine {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: only Rust code reads the environment in this process, and the standard library locks it.
        unsafe { std::env::remove_var("FLASHTUNE_CACHE_DIR") };
    });
    let options = EngineOptions { cache_dir: Some(folder.to_owned()), ..options };
    Engine::new(Backend::Cpu(Cpu::new(2).unwrap()), options)
}

fn engine(folder: &Path) -> Engine {
    engine_with(folder, EngineOptions::default())
}

fn quick() -> TuneOptions {
    TuneOptions { time_limit: Duration::from_millis(300), ..TuneOptions::default() }
}

fn go_on(_: &flashtune::tune::Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

#[test]
fn without_records_the_plan_is_the_heuristics() {
    let folder = tempfile::tempdir().unwrap();
    let engine = engine(folder.path());
    assert!(engine.prepared(&SMALL).is_none());
    let plan = engine.prepare(&SMALL).unwrap();
    assert_eq!(plan.source, Source::Heuristic);
    assert_eq!(plan.config, space::heuristic(&key::canonical(&SMALL), engine.backend().device()));
    assert!(Arc::ptr_eq(&plan, &engine.prepared(&SMALL).unwrap()));
    // One token more is the same bucket and the same plan.
    let longer = Problem { seqlen_k: 97, ..SMALL };
    assert!(Arc::ptr_eq(&plan, &engine.prepared(&longer).unwrap()));
}

#[test]
fn what_is_tuned_is_used_and_is_there_in_the_next_process() {
    let folder = tempfile::tempdir().unwrap();
    let engine = engine(folder.path());
    assert_eq!(engine.prepare(&SMALL).unwrap().source, Source::Heuristic);
    let mut phases = Vec::new();
    let record = engine
        .autotune(&SMALL, &quick(), &mut |progress| {
            phases.push(progress.phase);
            ControlFlow::Continue(())
        })
        .unwrap();
    phases.dedup();
    assert_eq!(phases, [Phase::Compile, Phase::Check, Phase::Measure]);
    assert!(record.median_us > 0.0 && record.default_us.is_some() && record.check_error < 0.02);
    let plan = engine.prepare(&SMALL).unwrap();
    assert_eq!((plan.source, &plan.config), (Source::Process, &record.config));
    drop(engine);
    let engine = self::engine(folder.path());
    let plan = engine.prepare(&SMALL).unwrap();
    assert_eq!((plan.source, plan.record.as_ref()), (Source::Machine, Some(&record)));
    // A record is not measured again, unless it is asked for.
    let mut steps = 0;
    let mut count = |_: &flashtune::tune::Progress| {
        steps += 1;
        ControlFlow::Continue(())
    };
    assert_eq!(engine.autotune(&SMALL, &quick(), &mut count).unwrap(), record);
    assert_eq!(steps, 0);
    let mut count = |_: &flashtune::tune::Progress| {
        steps += 1;
        ControlFlow::Continue(())
    };
    engine.autotune(&SMALL, &TuneOptions { retune: true, ..quick() }, &mut count).unwrap();
    assert!(steps > 0);
}

#[test]
fn both_passes_and_every_feature_can_be_tuned_on_the_cpu() {
    let folder = tempfile::tempdir().unwrap();
    let engine = engine(folder.path());
    for problem in [
        Problem { pass: Pass::Backward, dtype: Dtype::Fp32, causal: Causal::None, ..SMALL },
        Problem { pass: Pass::Backward, dropout: true, num_heads_kv: 1, ..SMALL },
        Problem {
            dtype: Dtype::Fp16,
            head_dim: 33,
            head_dim_v: 20,
            layout: Layout::Vec1,
            causal: Causal::TopLeft,
            ..SMALL
        },
        Problem { seqlen_q: 1, dropout: true, ..SMALL },
        Problem { seqlen_k: 1, ..SMALL },
    ] {
        let record = engine.autotune(&problem, &quick(), &mut go_on).unwrap();
        assert_eq!(engine.prepare(&problem).unwrap().config, record.config, "{problem:?}");
    }
}

#[test]
fn a_record_is_a_hit_for_its_own_key() {
    // Sizes whose bucket is smaller or larger than they are: the winner must pass for both.
    let folder = tempfile::tempdir().unwrap();
    let engine = engine(folder.path());
    for seqlen in [33, 100, 130, 39, 57] {
        let problem = Problem { seqlen_q: seqlen, seqlen_k: seqlen, ..SMALL };
        let record = engine.autotune(&problem, &TuneOptions { retune: true, ..quick() }, &mut go_on).unwrap();
        let plan = engine.prepare(&problem).unwrap();
        assert_eq!(plan.record.as_ref(), Some(&record), "{seqlen}");
    }
}

#[test]
fn a_problem_without_work_is_not_measured() {
    let folder = tempfile::tempdir().unwrap();
    let engine = engine(folder.path());
    for problem in
        [Problem { seqlen_q: 0, ..SMALL }, Problem { seqlen_k: 0, ..SMALL }, Problem { batch_size: 0, ..SMALL }]
    {
        let error = engine.autotune(&problem, &quick(), &mut go_on).unwrap_err();
        assert_eq!(error.status, Status::InvalidArgument, "{error}");
        engine.prepare(&problem).unwrap();
    }
}

#[test]
fn with_the_tune_policy_preparing_measures_once() {
    let folder = tempfile::tempdir().unwrap();
    let options =
        || EngineOptions { policy: Policy::Tune, time_limit: Duration::from_millis(300), ..EngineOptions::default() };
    let engine = engine_with(folder.path(), options());
    let plan = engine.prepare(&SMALL).unwrap();
    assert_eq!(plan.source, Source::Process);
    assert!(Arc::ptr_eq(&plan, &engine.prepare(&SMALL).unwrap()));
    assert_eq!(engine.records().len(), 1);
    // A far shape of the same class is a miss too, though its executable is there.
    let far = Problem { seqlen_q: 400, seqlen_k: 400, ..SMALL };
    assert!(engine.prepared(&far).is_none());
    assert_eq!(engine.prepare(&far).unwrap().source, Source::Process);
    drop(engine);
    assert_eq!(engine_with(folder.path(), options()).prepare(&SMALL).unwrap().source, Source::Machine);
}

#[test]
fn threads_that_prepare_the_same_problem_get_one_plan() {
    let folder = tempfile::tempdir().unwrap();
    let engine = engine_with(
        folder.path(),
        EngineOptions { policy: Policy::Tune, time_limit: Duration::from_millis(200), ..EngineOptions::default() },
    );
    let barrier = Barrier::new(8);
    let plans: Vec<_> = std::thread::scope(|scope| {
        let prepare = || {
            barrier.wait();
            engine.prepare(&SMALL).unwrap()
        };
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(prepare)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(plans.iter().all(|plan| Arc::ptr_eq(plan, &plans[0])));
    assert_eq!(engine.records().len(), 1);
}

#[test]
fn a_sealed_engine_uses_what_is_loaded_and_prepares_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let engine = engine(folder.path());
    engine.prepare(&SMALL).unwrap();
    engine.seal();
    assert!(engine.is_sealed());
    engine.prepare(&SMALL).unwrap();
    // Another shape whose config is loaded; another class.
    let similar = Problem { batch_size: 2, ..SMALL };
    assert!(engine.prepare(&similar).unwrap().config.family == Family::Cpu);
    let other = Problem { dtype: Dtype::Fp16, ..SMALL };
    assert!(engine.prepared(&other).is_none());
    assert_eq!(engine.prepare(&other).err().unwrap().status, Status::NotPrepared);
    assert_eq!(engine.autotune(&SMALL, &quick(), &mut go_on).unwrap_err().status, Status::NotPrepared);
    assert_eq!(
        engine.pin(&other, config(&other, engine.backend().device(), 0)).unwrap_err().status,
        Status::NotPrepared
    );
}

#[test]
fn a_pinned_config_is_for_exactly_its_problem() {
    let folder = tempfile::tempdir().unwrap();
    let engine = engine(folder.path());
    let pinned = config(&SMALL, engine.backend().device(), 2);
    engine.pin(&SMALL, pinned.clone()).unwrap();
    let plan = engine.prepare(&SMALL).unwrap();
    assert_eq!((plan.source, &plan.config), (Source::Pinned, &pinned));
    let longer = Problem { seqlen_k: 97, ..SMALL };
    assert_eq!(engine.prepare(&longer).unwrap().source, Source::Heuristic);
    let error = engine.pin(&SMALL, pinned.with("block_m", 17)).unwrap_err();
    assert_eq!(error.status, Status::InvalidArgument);
    assert!(error.message.contains("block_m is 17"), "{error}");
}

#[test]
fn invalid_and_unsupported_problems_are_statuses() {
    let folder = tempfile::tempdir().unwrap();
    let engine = engine(folder.path());
    for problem in [
        Problem { num_heads_kv: 0, ..SMALL },
        Problem { num_heads_q: 3, ..SMALL },
        Problem { head_dim: 513, ..SMALL },
        Problem { seqlen_q: i64::MAX, ..SMALL },
        Problem { batch_size: i64::MIN, ..SMALL },
    ] {
        assert_eq!(engine.supported(&problem).unwrap_err().status, Status::InvalidArgument, "{problem:?}");
        assert!(engine.prepared(&problem).is_none(), "{problem:?}");
        assert_eq!(engine.prepare(&problem).err().unwrap().status, Status::InvalidArgument, "{problem:?}");
    }
    let device = h200();
    assert_eq!(
        space::supported(&Problem { dtype: Dtype::Fp32, ..SMALL }, &device).unwrap_err().status,
        Status::Unsupported
    );
    let turing = Device { arch: Arch::Sm(7, 5), ..device };
    assert_eq!(space::supported(&SMALL, &turing).unwrap_err().status, Status::Unsupported);
}

#[test]
fn export_and_import_round_trip_byte_for_byte() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let engine = engine(from.path());
    for seqlen in [64, 128, 256] {
        let problem = Problem { seqlen_q: seqlen, seqlen_k: seqlen, ..SMALL };
        engine.autotune(&problem, &quick(), &mut go_on).unwrap();
    }
    let (first, second) = (from.path().join("first.jsonl"), to.path().join("second.jsonl"));
    assert_eq!(engine.export_records(&first).unwrap(), 3);
    let other = self::engine(to.path());
    assert_eq!(other.prepare(&SMALL).unwrap().source, Source::Heuristic);
    assert_eq!(other.import_records(&first).unwrap(), 3);
    assert_eq!(other.prepare(&SMALL).unwrap().source, Source::Machine);
    assert_eq!(other.export_records(&second).unwrap(), 3);
    assert_eq!(std::fs::read(&first).unwrap(), std::fs::read(&second).unwrap());
    // What a process imports is there for the next one.
    drop(other);
    assert_eq!(self::engine(to.path()).records().len(), 3);
    assert_eq!(engine.import_records(&from.path().join("missing")).unwrap_err().status, Status::Io);
    assert_eq!(engine.export_records(&from.path().join("no/folder")).unwrap_err().status, Status::Io);
}

#[test]
fn a_cancelled_run_is_resumed_by_the_next_process() {
    let folder = tempfile::tempdir().unwrap();
    let slow = Problem { pass: Pass::Backward, seqlen_q: 512, seqlen_k: 512, ..SMALL };
    let options = TuneOptions { time_limit: Duration::from_secs(30), ..TuneOptions::default() };
    let candidates = |engine: &Engine, stop_at: Option<usize>| {
        let mut total = 0;
        let result = engine.autotune(&slow, &options, &mut |progress| {
            if progress.phase == Phase::Compile {
                total = progress.total;
            }
            match stop_at {
                Some(round) if progress.phase == Phase::Measure && progress.done >= round => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            }
        });
        (result, total)
    };
    let engine = engine(folder.path());
    let (result, all) = candidates(&engine, Some(3));
    assert_eq!(result.unwrap_err().status, Status::Cancelled);
    assert!(engine.records().is_empty());
    drop(engine);
    let engine = self::engine(folder.path());
    let (result, left) = candidates(&engine, None);
    let record = result.unwrap();
    assert!(left < all, "{left} of {all} candidates are tried again");
    assert_eq!(engine.prepare(&slow).unwrap().config, record.config);
}

#[test]
fn without_disk_records_live_in_memory() {
    let folder = tempfile::tempdir().unwrap();
    let engine = engine_with(folder.path(), EngineOptions { use_disk: false, ..EngineOptions::default() });
    assert_eq!(engine.cache_dir(), None);
    engine.autotune(&SMALL, &quick(), &mut go_on).unwrap();
    assert_eq!(engine.prepare(&SMALL).unwrap().source, Source::Process);
    drop(engine);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
