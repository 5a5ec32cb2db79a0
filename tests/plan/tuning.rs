//! Tuning a problem: the record it leaves, when it is measured again, and searches that are cut
//! short.

use crate::support::{SMALL, engine_in, engine_of, go_on, quick};
use flashtune::error::Status;
use flashtune::plan::{Engine, EngineOptions, Policy, Record, Source};
use flashtune::problem::{BlockMask, Causal, Dtype, Features, Layout, Pass, Problem, Varlen, Window};
use flashtune::tune::{Event, Phase, Trial, TuneOptions, Verdict, worker};
use std::ops::ControlFlow;
use std::time::Duration;

#[test]
fn tuned_config_is_used_now_and_by_the_next_process() {
    let folder = tempfile::tempdir().unwrap();
    let engine = engine_in(folder.path());
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
    let engine = engine_in(folder.path());
    let plan = engine.prepare(&SMALL).unwrap();
    assert_eq!((plan.source, plan.record.as_ref()), (Source::Machine, Some(&record)));
    // A problem with a record is measured again only with `retune`.
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
    let engine = engine_in(folder.path());
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
fn record_is_a_hit_for_its_own_key() {
    // Sizes smaller and larger than their bucket: the winner must pass the check for both.
    let folder = tempfile::tempdir().unwrap();
    let engine = engine_in(folder.path());
    for seqlen in [33, 100, 130, 39, 57] {
        let problem = Problem { seqlen_q: seqlen, seqlen_k: seqlen, ..SMALL };
        let record = engine.autotune(&problem, &TuneOptions { retune: true, ..quick() }, &mut go_on).unwrap();
        let plan = engine.prepare(&problem).unwrap();
        assert_eq!(plan.record.as_ref(), Some(&record), "{seqlen}");
    }
}

#[test]
fn problem_without_work_is_not_measured() {
    let folder = tempfile::tempdir().unwrap();
    let engine = engine_in(folder.path());
    for problem in
        [Problem { seqlen_q: 0, ..SMALL }, Problem { seqlen_k: 0, ..SMALL }, Problem { batch_size: 0, ..SMALL }]
    {
        let error = engine.autotune(&problem, &quick(), &mut go_on).unwrap_err();
        assert_eq!(error.status, Status::InvalidArgument, "{error}");
        engine.prepare(&problem).unwrap();
    }
}

#[test]
fn record_of_a_restricted_search_is_measured_again_by_a_full_search() {
    let folder = tempfile::tempdir().unwrap();
    let engine = engine_of(EngineOptions::default());
    let record = engine.autotune(&SMALL, &quick(), &mut go_on).unwrap();
    assert!(!record.proven_only && !record.to_line().unwrap().contains("proven_only"));
    // A process without a worker leaves such a record on a GPU.
    let restricted = Record { proven_only: true, ..record.clone() };
    let path = folder.path().join("restricted.jsonl");
    std::fs::write(&path, restricted.to_line().unwrap()).unwrap();
    let other = engine_of(EngineOptions::default());
    assert_eq!(other.import_records(&path, false).unwrap().taken.len(), 1);
    assert_eq!(other.autotune(&SMALL, &quick(), &mut go_on).unwrap(), restricted);
    // The CPU backend needs no worker process and starts none.
    let patience = Duration::from_secs(1);
    let command = worker::Command { program: "/nowhere".into(), args: Vec::new(), patience, build_patience: patience };
    let offline = TuneOptions { worker: Some(command), ..quick() };
    assert!(!other.autotune(&SMALL, &offline, &mut go_on).unwrap().proven_only);
    assert!(other.records().iter().all(|(_, record)| !record.proven_only));
}

#[test]
fn tuning_from_a_progress_callback_is_refused() {
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
fn cancelled_search_is_resumed_by_the_next_process() {
    let folder = tempfile::tempdir().unwrap();
    let slow = Problem { pass: Pass::Backward, seqlen_q: 512, seqlen_k: 512, ..SMALL };
    let options = TuneOptions { time_limit: Duration::from_secs(30), ..TuneOptions::default() };
    // Stops when a dropped candidate was so much slower than another that the next run passes it
    // over. Returns the number of candidates at the start.
    let candidates = |engine: &Engine, stops: bool| {
        let (mut total, mut dropped) = (None, Vec::new());
        let result = engine.autotune(&slow, &options, &mut |event| {
            match event {
                Event::Trial(Trial { verdict: Verdict::Measured { median_us, .. }, .. }) => dropped.push(*median_us),
                Event::Progress(progress) if progress.phase == Phase::Compile => {
                    total.get_or_insert(progress.total);
                }
                _ => {}
            }
            let fastest = dropped.iter().copied().fold(f64::INFINITY, f64::min);
            let is_known_slow = dropped.iter().any(|us| *us > 1.3 * fastest);
            if stops && is_known_slow { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        (result, total.unwrap())
    };
    let engine = engine_in(folder.path());
    let (result, all) = candidates(&engine, true);
    assert_eq!(result.unwrap_err().status, Status::Cancelled);
    assert!(engine.records().is_empty());
    drop(engine);
    let engine = engine_in(folder.path());
    let (result, left) = candidates(&engine, false);
    let record = result.unwrap();
    assert!(left < all, "{left} of {all} candidates are tried again");
    assert_eq!(engine.prepare(&slow).unwrap().config, record.config);
}
