//! The engine on the CPU backend: preparing, tuning, sealing, pinning, and what the next process finds.

use flashtune::backend::Backend;
use flashtune::config::{Config, Family};
use flashtune::cpu::Cpu;
use flashtune::device::{Arch, Device};
use flashtune::error::Status;
use flashtune::family;
use flashtune::plan::{Engine, EngineOptions, Policy, Record, Source, key, record};
use flashtune::problem::{BlockMask, Causal, Dtype, Features, Layout, Pass, Problem, Varlen, Window};
use flashtune::tune::candidates;
use flashtune::tune::{Event, Outcome, Phase, Timed, TuneOptions, worker};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Barrier};
use std::time::Duration;

/// Small enough to be tuned in a test.
const SMALL: Problem =
    Problem { causal: Causal::BottomRight, ..Problem::dense(Pass::Forward, Dtype::Bf16, 1, 2, 96, 32) };

/// A config that is not the heuristic's.
fn config(problem: &Problem, device: &Device, index: usize) -> Config {
    candidates::all(problem, device).swap_remove(index + 1)
}

fn engine_with(folder: &Path, options: EngineOptions) -> Engine {
    engine_of(EngineOptions { cache_dir: Some(folder.to_owned()), ..options })
}

fn engine_of(options: EngineOptions) -> Engine {
    Engine::new(Backend::Cpu(Cpu::new(2).unwrap()), options)
}

fn engine(folder: &Path) -> Engine {
    engine_with(folder, EngineOptions::default())
}

fn quick() -> TuneOptions {
    TuneOptions { time_limit: Duration::from_millis(300), ..TuneOptions::default() }
}

fn go_on(_: Event) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

#[test]
fn without_records_the_plan_is_the_heuristics() {
    let folder = tempfile::tempdir().unwrap();
    let engine = engine(folder.path());
    assert!(engine.prepared(&SMALL).is_none());
    let plan = engine.prepare(&SMALL).unwrap();
    assert_eq!(plan.source, Source::Heuristic);
    assert_eq!(plan.config, family::heuristic(&key::canonical(&SMALL), engine.backend().device()));
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
        .autotune(&SMALL, &quick(), &mut |event| {
            if let Event::Progress(progress) = event {
                phases.push(progress.phase);
            }
            ControlFlow::Continue(())
        })
        .unwrap();
    phases.dedup();
    assert_eq!(phases[..3], [Phase::Compile, Phase::Check, Phase::Measure]);
    assert!(record.median_us > 0.0 && record.default_us.is_some() && record.check_error < 0.02);
    let plan = engine.prepare(&SMALL).unwrap();
    assert_eq!((plan.source, &plan.config), (Source::Process, &record.config));
    drop(engine);
    let engine = self::engine(folder.path());
    let plan = engine.prepare(&SMALL).unwrap();
    assert_eq!((plan.source, plan.record.as_ref()), (Source::Machine, Some(&record)));
    // A record is not measured again, unless it is asked for.
    let mut steps = 0;
    let mut count = |_: Event| {
        steps += 1;
        ControlFlow::Continue(())
    };
    assert_eq!(engine.autotune(&SMALL, &quick(), &mut count).unwrap(), record);
    assert_eq!(steps, 0);
    let mut count = |_: Event| {
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
    let none = Features::NONE;
    let of_bytes = Features { mask: true, ..none };
    let of_blocks = |block_q, block_k| Features { block_mask: Some(BlockMask { block_q, block_k }), ..none };
    let of_both_passes = [
        Features { window: Window { left: Some(20), ..Window::default() }, ..none },
        Features { softcap: true, ..none },
        Features { alibi: true, ..none },
        Features { bias: true, ..none },
        of_bytes,
        Features { mask_bits: true, ..of_bytes },
        Features { sinks: true, ..none },
        of_blocks(32, 48),
        Features { varlen: Some(Varlen { total_q: Some(96), total_k: Some(96), padded_q: false }), ..none },
    ];
    let of_backward = [Features { bias: true, dbias: true, ..none }, Features { dlse: true, ..none }];
    let of = |pass, features: &Features| Problem { pass, features: *features, ..SMALL };
    let problems = [
        Problem { pass: Pass::Backward, dtype: Dtype::Fp32, layout: Layout::Vec4, causal: Causal::None, ..SMALL },
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
        Problem { features: Features { paged: Some(16), ..Features::NONE }, ..SMALL },
        Problem {
            seqlen_q: 1,
            features: Features { paged: Some(7), varlen: Some(Varlen::default()), ..Features::NONE },
            ..SMALL
        },
    ];
    let forward = of_both_passes.iter().map(|features| of(Pass::Forward, features));
    let backward = of_both_passes.iter().chain(&of_backward).map(|features| of(Pass::Backward, features));
    for problem in problems.into_iter().chain(forward).chain(backward) {
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
fn what_is_loaded_serves_a_shape_that_may_not_be_prepared_and_leaves_it_to_be_prepared() {
    let engine = engine_of(EngineOptions {
        policy: Policy::Tune,
        time_limit: Duration::from_millis(200),
        ..EngineOptions::default()
    });
    let far = Problem { seqlen_q: 400, seqlen_k: 400, ..SMALL };
    assert!(engine.any_loaded(&far).is_none());
    engine.prepare(&SMALL).unwrap();
    let plan = engine.any_loaded(&far).unwrap();
    family::check(&far, &plan.config, engine.backend().device()).unwrap();
    assert!(engine.any_loaded(&Problem { dropout: true, ..SMALL }).is_none(), "another class");
    assert!(engine.prepared(&far).is_none());
    assert_eq!(engine.prepare(&far).unwrap().source, Source::Process);
}

#[test]
fn a_deterministic_problem_is_not_tuned_and_takes_nothing_from_what_was() {
    let engine = engine_of(EngineOptions {
        policy: Policy::Tune,
        time_limit: Duration::from_millis(200),
        ..EngineOptions::default()
    });
    let plain = Problem { pass: Pass::Backward, ..SMALL };
    let deterministic = Problem { deterministic: true, ..plain };
    let error = engine.autotune(&deterministic, &quick(), &mut go_on).unwrap_err();
    assert_eq!(error.status, Status::InvalidArgument);
    assert!(error.message.contains("deterministic"), "{error}");
    assert_eq!(engine.prepare(&plain).unwrap().source, Source::Process);
    let plan = engine.prepare(&deterministic).unwrap();
    assert_eq!(plan.source, Source::Heuristic);
    assert_eq!(plan.config, family::heuristic(&deterministic, engine.backend().device()));
    // Not even where nothing may be prepared.
    let far = Problem { seqlen_q: 400, seqlen_k: 400, ..deterministic };
    assert!(engine.any_loaded(&Problem { deterministic: false, ..far }).is_some());
    assert!(engine.any_loaded(&far).is_none());
}

#[test]
fn only_a_backward_pass_may_be_deterministic_and_its_workspace_has_room_for_the_turns() {
    let engine = engine_of(EngineOptions::default());
    let error = engine.supported(&Problem { deterministic: true, ..SMALL }).unwrap_err();
    assert!(error.message.contains("deterministic"), "{error}");
    let plain = Problem { pass: Pass::Backward, ..SMALL };
    let turns = Problem { deterministic: true, ..plain }.workspace_bytes() - plain.workspace_bytes();
    // Two heads of 96 rows, with room for 208, in tiles of 8; and the tickets.
    assert_eq!(turns, 4 * (2 * 208 / 8 + 1));
}

#[test]
fn only_a_forward_pass_without_dropout_may_be_batch_invariant_and_nothing_tunes_it() {
    let engine = engine_of(EngineOptions::default());
    let invariant = Problem { batch_invariant: true, ..SMALL };
    for (wrong, told) in [
        (Problem { pass: Pass::Backward, ..invariant }, "batch_invariant is true in a backward pass"),
        (Problem { dropout: true, ..invariant }, "batch_invariant is true and dropout_p is not 0"),
    ] {
        let error = engine.supported(&wrong).unwrap_err();
        assert!(error.message.contains(told), "{error}");
    }
    let error = engine.autotune(&invariant, &quick(), &mut go_on).unwrap_err();
    assert!(error.message.contains("batch-invariant"), "{error}");
    let plan = engine.prepare(&invariant).unwrap();
    // The plan of every other batch, too.
    let other = Problem { batch_size: 7, ..invariant };
    assert!(Arc::ptr_eq(&plan, &engine.prepared(&other).unwrap()));
    assert!(engine.any_loaded(&invariant).is_none());
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
        assert_eq!(engine.prepare(&problem).err().unwrap().status, Status::InvalidArgument, "{problem:?}");
    }
    let device = Device::typical(Arch::Sm(9, 0)).unwrap();
    let fp32 = Problem { dtype: Dtype::Fp32, ..SMALL };
    assert!(family::supported(&fp32, &device).is_ok());
    let pages = Problem { features: Features { paged: Some(16), ..Features::NONE }, ..fp32 };
    assert_eq!(family::supported(&pages, &device).unwrap_err().status, Status::Unsupported);
    let turing = Device { arch: Arch::Sm(7, 5), ..device };
    assert_eq!(family::supported(&SMALL, &turing).unwrap_err().status, Status::Unsupported);
}

#[test]
fn a_record_of_a_restricted_search_is_measured_again_by_a_pass_that_may_try_all() {
    let folder = tempfile::tempdir().unwrap();
    let engine = engine_of(EngineOptions::default());
    let record = engine.autotune(&SMALL, &quick(), &mut go_on).unwrap();
    assert!(!record.proven_only && !record.to_line().unwrap().contains("proven_only"));
    // What a process without a worker leaves on a GPU.
    let restricted = Record { proven_only: true, ..record.clone() };
    let path = folder.path().join("restricted.jsonl");
    std::fs::write(&path, restricted.to_line().unwrap()).unwrap();
    let other = engine_of(EngineOptions::default());
    assert_eq!(other.import_records(&path).unwrap(), 1);
    assert_eq!(other.autotune(&SMALL, &quick(), &mut go_on).unwrap(), restricted);
    // The CPU backend needs no process of its own and so starts none.
    let patience = Duration::from_secs(1);
    let command = worker::Command { program: "/nowhere".into(), args: Vec::new(), patience, build_patience: patience };
    let offline = TuneOptions { worker: Some(command), ..quick() };
    assert!(!other.autotune(&SMALL, &offline, &mut go_on).unwrap().proven_only);
    assert!(other.records().iter().all(|(_, record)| !record.proven_only));
}

#[test]
fn what_is_prepared_remains_so_when_records_come() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let far = Problem { seqlen_q: 400, seqlen_k: 400, ..SMALL };
    let engine = engine(to.path());
    engine.prepare(&SMALL).unwrap();
    engine.prepare(&far).unwrap();
    // A record whose config is not loaded.
    let record = self::engine(from.path()).autotune(&SMALL, &quick(), &mut go_on).unwrap();
    let loaded = family::heuristic(&key::canonical(&SMALL), engine.backend().device());
    let all = candidates::all(&SMALL, engine.backend().device());
    let config = all.into_iter().find(|config| *config != loaded).unwrap();
    let path = from.path().join("records.jsonl");
    std::fs::write(&path, Record { config: config.clone(), ..record }.to_line().unwrap()).unwrap();
    engine.import_records(&path).unwrap();
    let plan = engine.prepared(&SMALL).unwrap();
    assert_eq!((plan.source, &plan.config), (Source::Machine, &config));
    engine.prepared(&far).unwrap();
    engine.autotune(&far, &quick(), &mut go_on).unwrap();
    assert_eq!(engine.prepared(&far).unwrap().source, Source::Process);
    engine.prepared(&SMALL).unwrap();
}

#[test]
fn a_progress_callback_that_would_measure_is_refused() {
    let engine = engine_of(EngineOptions { policy: Policy::Tune, ..EngineOptions::default() });
    let far = Problem { seqlen_q: 400, seqlen_k: 400, ..SMALL };
    let mut refused = Vec::new();
    let calls_back = &mut |_: Event| {
        refused.push(engine.autotune(&far, &quick(), &mut go_on).unwrap_err());
        refused.push(engine.prepare(&far).err().unwrap());
        ControlFlow::Continue(())
    };
    engine.autotune(&SMALL, &quick(), calls_back).unwrap();
    assert!(refused.len() > 2);
    for error in refused {
        assert_eq!(error.status, Status::InvalidArgument);
        assert!(error.message.contains("progress callback"), "{error}");
    }
    engine.autotune(&far, &quick(), &mut go_on).unwrap();
}

#[test]
fn a_database_that_is_damaged_meanwhile_loses_no_record_that_was_read() {
    let folder = tempfile::tempdir().unwrap();
    let far = Problem { seqlen_q: 400, seqlen_k: 400, ..SMALL };
    engine(folder.path()).autotune(&SMALL, &quick(), &mut go_on).unwrap();
    let engine = engine(folder.path());
    let database = folder.path().join("records.sled");
    std::fs::remove_dir_all(&database).unwrap();
    std::fs::write(&database, "not a folder").unwrap();
    engine.autotune(&far, &quick(), &mut go_on).unwrap();
    drop(engine);
    assert_eq!(self::engine(folder.path()).records().len(), 2);
}

#[test]
fn threads_that_export_to_one_file_do_not_disturb_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let engine = engine(folder.path());
    engine.autotune(&SMALL, &quick(), &mut go_on).unwrap();
    let path = folder.path().join("records.jsonl");
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| (0..25).for_each(|_| assert_eq!(engine.export_records(&path).unwrap(), 1)));
        }
    });
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
fn an_imported_record_replaces_only_a_slower_one() {
    let folder = tempfile::tempdir().unwrap();
    let engine = engine(folder.path());
    let own = engine.autotune(&SMALL, &quick(), &mut go_on).unwrap();
    let file = folder.path().join("other.jsonl");
    let import = |config: &Config, median_us: f64| {
        let record = Record { config: config.clone(), median_us, ..own.clone() };
        record::write_file(&file, vec![record]).unwrap();
        engine.import_records(&file).unwrap()
    };
    let used = || {
        let plan = engine.prepare(&SMALL).unwrap();
        (plan.source, plan.config.clone())
    };
    let candidates = candidates::all(&SMALL, engine.backend().device());
    let other = candidates.into_iter().find(|config| *config != own.config).unwrap();
    assert_eq!(import(&other, own.median_us * 2.0), 0);
    assert_eq!(import(&other, own.median_us), 0);
    assert_eq!(used(), (Source::Process, own.config.clone()));
    // What another process has found since this one read the store counts too.
    let faster = self::engine(folder.path());
    record::write_file(&file, vec![Record { median_us: own.median_us / 4.0, ..own.clone() }]).unwrap();
    assert_eq!(faster.import_records(&file).unwrap(), 1);
    assert_eq!(import(&other, own.median_us / 2.0), 0);
    assert_eq!(import(&other, own.median_us / 8.0), 1);
    assert_eq!(used(), (Source::Machine, other));
}

#[test]
fn records_that_the_space_does_not_accept_are_not_imported() {
    let folder = tempfile::tempdir().unwrap();
    let engine = engine(folder.path());
    let file = folder.path().join("records.jsonl");
    let outcome = |config: Config| Outcome {
        winner: Timed { config, median_us: 100.0, utilisation: None },
        spread: 0.01,
        check_error: 0.001,
        runner_up: None,
        default_us: None,
    };
    let cpu = engine.backend().device().clone();
    let other_cpu = Device { name: "another host".to_owned(), ..cpu.clone() };
    let gpu = Device::typical(Arch::Sm(9, 0)).unwrap();
    let turing = Device { name: "NVIDIA T4".to_owned(), arch: Arch::Sm(7, 5), ..gpu.clone() };
    let (here, there) = (family::heuristic(&SMALL, &cpu), family::heuristic(&SMALL, &gpu));
    let records = [
        (&cpu, here.clone(), true),
        (&other_cpu, here.clone(), true),
        (&gpu, there.clone(), true),
        (&turing, there.clone(), false),
        // Of another family, with an unknown knob, with a value that is none.
        (&Device { sm_count: 78, ..gpu.clone() }, here.clone(), false),
        (&Device { sm_count: 114, ..gpu.clone() }, there.with("block_o", 64), false),
        (&Device { sm_count: 1, ..cpu.clone() }, here.with("block_m", 17), false),
    ];
    for (device, config, fits) in records {
        let record = Record::new(&SMALL, device, outcome(config));
        record::write_file(&file, vec![record.clone()]).unwrap();
        assert_eq!(engine.import_records(&file).unwrap(), usize::from(fits), "{record:?}");
        assert_eq!(engine.records().iter().any(|(_, known)| known.id() == record.id()), fits, "{record:?}");
    }
}

#[test]
fn a_cancelled_run_is_resumed_by_the_next_process() {
    let folder = tempfile::tempdir().unwrap();
    let slow = Problem { pass: Pass::Backward, seqlen_q: 512, seqlen_k: 512, ..SMALL };
    let options = TuneOptions { time_limit: Duration::from_secs(30), ..TuneOptions::default() };
    // Stopped once the first candidates were weeded out and one is measured on. Returns how many
    // candidates it began with.
    let candidates = |engine: &Engine, stops: bool| {
        let (mut total, mut turns) = (None, 0);
        let result = engine.autotune(&slow, &options, &mut |event| {
            let Event::Progress(progress) = event else { return ControlFlow::Continue(()) };
            match progress.phase {
                Phase::Compile => drop(total.get_or_insert(progress.total)),
                Phase::Measure if progress.best.is_some() => turns += 1,
                _ => {}
            }
            if stops && turns > 5 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        (result, total.unwrap())
    };
    let engine = engine(folder.path());
    let (result, all) = candidates(&engine, true);
    assert_eq!(result.unwrap_err().status, Status::Cancelled);
    assert!(engine.records().is_empty());
    drop(engine);
    let engine = self::engine(folder.path());
    let (result, left) = candidates(&engine, false);
    let record = result.unwrap();
    assert!(left < all, "{left} of {all} candidates are tried again");
    assert_eq!(engine.prepare(&slow).unwrap().config, record.config);
}

#[test]
fn without_a_folder_records_live_in_memory() {
    let engine = engine_of(EngineOptions::default());
    engine.autotune(&SMALL, &quick(), &mut go_on).unwrap();
    assert_eq!(engine.prepare(&SMALL).unwrap().source, Source::Process);
    let other = engine_of(EngineOptions::default());
    assert_eq!(other.prepare(&SMALL).unwrap().source, Source::Heuristic);
}
