//! Preparing a problem: which config the plan gets, sealing, pinning, and problems that are
//! refused.

use crate::support::{SMALL, config, engine_in, engine_of, engine_with, go_on, quick};
use flashtune::config::Family;
use flashtune::device::{Arch, Device};
use flashtune::error::Status;
use flashtune::family;
use flashtune::plan::{EngineOptions, Policy, Record, Source, key};
use flashtune::problem::{BlockMask, Dtype, Features, Pass, Problem, Varlen};
use flashtune::tune::candidates;
use std::sync::{Arc, Barrier};
use std::time::Duration;

#[test]
fn without_records_the_plan_has_the_heuristics_config() {
    let folder = tempfile::tempdir().unwrap();
    let engine = engine_in(folder.path());
    assert!(engine.prepared(&SMALL).is_none());
    let plan = engine.prepare(&SMALL).unwrap();
    assert_eq!(plan.source, Source::Heuristic);
    assert_eq!(plan.config, family::heuristic(&key::canonical(&SMALL), engine.backend().device()));
    assert!(Arc::ptr_eq(&plan, &engine.prepared(&SMALL).unwrap()));
    // One key fewer makes the same tiles and gets the same plan.
    let shorter = Problem { seqlen_k: SMALL.seqlen_k - 1, ..SMALL };
    assert!(Arc::ptr_eq(&plan, &engine.prepared(&shorter).unwrap()));
}

#[test]
fn tune_policy_measures_once_when_preparing() {
    let folder = tempfile::tempdir().unwrap();
    let options =
        || EngineOptions { policy: Policy::Tune, time_limit: Duration::from_millis(300), ..EngineOptions::default() };
    let engine = engine_with(folder.path(), options());
    let plan = engine.prepare(&SMALL).unwrap();
    assert_eq!(plan.source, Source::Process);
    assert!(Arc::ptr_eq(&plan, &engine.prepare(&SMALL).unwrap()));
    assert_eq!(engine.records().len(), 1);
    // A far shape of the same class is a miss too, although its executable is loaded.
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
fn sealed_engine_uses_loaded_executables_and_prepares_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let engine = engine_in(folder.path());
    engine.prepare(&SMALL).unwrap();
    engine.seal();
    assert!(engine.is_sealed());
    engine.prepare(&SMALL).unwrap();
    // Another shape uses the loaded config; another class has no executable.
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
fn loaded_executable_serves_another_shape_and_leaves_it_unprepared() {
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
fn deterministic_problem_is_not_tuned_and_ignores_records() {
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
    // An executable of another config does not serve it, even if nothing may be prepared.
    let far = Problem { seqlen_q: 400, seqlen_k: 400, ..deterministic };
    assert!(engine.any_loaded(&Problem { deterministic: false, ..far }).is_some());
    assert!(engine.any_loaded(&far).is_none());
}

#[test]
fn only_a_backward_pass_may_be_deterministic_and_its_workspace_holds_the_counters() {
    let engine = engine_of(EngineOptions::default());
    let error = engine.supported(&Problem { deterministic: true, ..SMALL }).unwrap_err();
    assert!(error.message.contains("deterministic"), "{error}");
    let plain = Problem { pass: Pass::Backward, ..SMALL };
    let counters = Problem { deterministic: true, ..plain }.workspace_bytes() - plain.workspace_bytes();
    // Two heads of 96 rows, padded to 208, in tiles of 8; and the tickets. In whole 16 bytes.
    assert_eq!(counters, 16 * (2usize * 208 / 8 + 1).div_ceil(4));
}

#[test]
fn only_a_forward_pass_without_dropout_may_be_batch_invariant_and_nothing_tunes_it() {
    let engine = engine_of(EngineOptions::default());
    let invariant = Problem { batch_invariant: true, ..SMALL };
    for (wrong, message) in [
        (Problem { pass: Pass::Backward, ..invariant }, "batch_invariant is true in a backward pass"),
        (Problem { dropout: true, ..invariant }, "batch_invariant is true and dropout_p is not 0"),
    ] {
        let error = engine.supported(&wrong).unwrap_err();
        assert!(error.message.contains(message), "{error}");
    }
    let error = engine.autotune(&invariant, &quick(), &mut go_on).unwrap_err();
    assert!(error.message.contains("batch-invariant"), "{error}");
    let plan = engine.prepare(&invariant).unwrap();
    // Every batch size gets the same config, so that nothing is built for it.
    let other = Problem { batch_size: 7, ..invariant };
    assert_eq!(plan.config, engine.prepared(&other).unwrap().config);
    let stopgap = engine.any_loaded(&Problem { batch_size: 9, ..invariant }).unwrap();
    assert_eq!(stopgap.config, plan.config);
    // Its own config is not loaded, and this one might have other bits.
    assert!(engine.any_loaded(&Problem { seqlen_q: 3, ..invariant }).is_none());
}

#[test]
fn pinned_config_serves_exactly_its_problem() {
    let folder = tempfile::tempdir().unwrap();
    let engine = engine_in(folder.path());
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
    let engine = engine_in(folder.path());
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
    let (varlen, block_mask) = (Some(Varlen::default()), Some(BlockMask { block_q: 64, block_k: 64 }));
    let lengths = Problem { features: Features { varlen, block_mask, ..Features::NONE }, ..SMALL };
    assert_eq!(family::supported(&lengths, &device).unwrap_err().status, Status::Unsupported);
    let turing = Device { arch: Arch::Sm(7, 5), ..device };
    assert_eq!(family::supported(&SMALL, &turing).unwrap_err().status, Status::Unsupported);
}

#[test]
fn imported_records_keep_problems_prepared() {
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let far = Problem { seqlen_q: 400, seqlen_k: 400, ..SMALL };
    let engine = engine_in(to.path());
    engine.prepare(&SMALL).unwrap();
    engine.prepare(&far).unwrap();
    // A record whose config is not loaded.
    let record = engine_in(from.path()).autotune(&SMALL, &quick(), &mut go_on).unwrap();
    let loaded = family::heuristic(&key::canonical(&SMALL), engine.backend().device());
    let all = candidates::all(&SMALL, engine.backend().device());
    let config = all.into_iter().find(|config| *config != loaded).unwrap();
    let path = from.path().join("records.jsonl");
    std::fs::write(&path, Record { config: config.clone(), ..record }.to_line().unwrap()).unwrap();
    engine.import_records(&path, false).unwrap();
    let plan = engine.prepared(&SMALL).unwrap();
    assert_eq!((plan.source, &plan.config), (Source::Machine, &config));
    engine.prepared(&far).unwrap();
    engine.autotune(&far, &quick(), &mut go_on).unwrap();
    assert_eq!(engine.prepared(&far).unwrap().source, Source::Process);
    engine.prepared(&SMALL).unwrap();
}
