//! Records of an engine: export, import, and the database behind them.

use crate::support::{SMALL, engine_in, engine_of, go_on, quick};
use flashtune::config::Config;
use flashtune::device::{Arch, Device};
use flashtune::error::Status;
use flashtune::family;
use flashtune::plan::{EngineOptions, Record, Source, key, record};
use flashtune::problem::Problem;
use flashtune::tune::{Outcome, Timed, TuneOptions, candidates};

#[test]
fn records_survive_the_loss_of_their_file_after_they_were_read() {
    let folder = tempfile::tempdir().unwrap();
    let far = Problem { seqlen_q: 400, seqlen_k: 400, ..SMALL };
    engine_in(folder.path()).autotune(&SMALL, &quick(), &mut go_on).unwrap();
    let engine = engine_in(folder.path());
    std::fs::remove_file(folder.path().join("records.journal")).unwrap();
    engine.autotune(&far, &quick(), &mut go_on).unwrap();
    drop(engine);
    assert_eq!(engine_in(folder.path()).records().len(), 2);
}

#[test]
fn threads_may_export_to_one_file() {
    let folder = tempfile::tempdir().unwrap();
    let engine = engine_in(folder.path());
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
    let engine = engine_in(from.path());
    for seqlen in [64, 128, 256] {
        let problem = Problem { seqlen_q: seqlen, seqlen_k: seqlen, ..SMALL };
        engine.autotune(&problem, &quick(), &mut go_on).unwrap();
    }
    let (first, second) = (from.path().join("first.jsonl"), to.path().join("second.jsonl"));
    assert_eq!(engine.export_records(&first).unwrap(), 3);
    let other = engine_in(to.path());
    assert_eq!(other.prepare(&SMALL).unwrap().source, Source::Heuristic);
    assert_eq!(other.import_records(&first, false).unwrap().taken.len(), 3);
    assert_eq!(other.prepare(&SMALL).unwrap().source, Source::Machine);
    assert_eq!(other.export_records(&second).unwrap(), 3);
    assert_eq!(std::fs::read(&first).unwrap(), std::fs::read(&second).unwrap());
    // The next process has the imported records.
    drop(other);
    assert_eq!(engine_in(to.path()).records().len(), 3);
    assert_eq!(engine.import_records(&from.path().join("missing"), false).unwrap_err().status, Status::Io);
    assert_eq!(engine.export_records(&from.path().join("no/folder")).unwrap_err().status, Status::Io);
}

#[test]
fn imported_record_replaces_only_a_slower_imported_one() {
    let folder = tempfile::tempdir().unwrap();
    let other = engine_in(&folder.path().join("other"));
    let measured = other.autotune(&SMALL, &quick(), &mut go_on).unwrap();
    let engine = engine_in(folder.path());
    let file = folder.path().join("other.jsonl");
    let write = |config: &Config, median_us: f64| {
        let record = Record { config: config.clone(), median_us, ..measured.clone() };
        record::write_file(&file, vec![record]).unwrap();
    };
    let import = |config: &Config, median_us: f64| {
        write(config, median_us);
        let imported = engine.import_records(&file, false).unwrap();
        (imported.taken.len(), imported.not_better, imported.own)
    };
    let used = || {
        let plan = engine.prepare(&SMALL).unwrap();
        (plan.source, plan.config.clone())
    };
    let candidates = candidates::all(&SMALL, engine.backend().device());
    let config = candidates.into_iter().find(|config| *config != measured.config).unwrap();
    assert_eq!(import(&measured.config, 8.0), (1, 0, 0));
    assert_eq!(import(&config, 16.0), (0, 1, 0));
    assert_eq!(import(&config, 8.0), (0, 1, 0));
    assert_eq!(used(), (Source::Machine, measured.config.clone()));
    // A record that another process stored after this one read the store counts too.
    write(&measured.config, 4.0);
    assert_eq!(engine_in(folder.path()).import_records(&file, false).unwrap().taken.len(), 1);
    assert_eq!(import(&config, 6.0), (0, 1, 0));
    assert_eq!(import(&config, 2.0), (1, 0, 0));
    assert_eq!(used(), (Source::Machine, config));
}

#[test]
fn own_measurement_gives_way_to_an_imported_record_only_on_request() {
    let folder = tempfile::tempdir().unwrap();
    let engine = engine_in(folder.path());
    let own = engine.autotune(&SMALL, &quick(), &mut go_on).unwrap();
    let file = folder.path().join("other.jsonl");
    let candidates = candidates::all(&SMALL, engine.backend().device());
    let config = candidates.into_iter().find(|config| *config != own.config).unwrap();
    let faster = Record { config, median_us: own.median_us / 2.0, ..own.clone() };
    record::write_file(&file, vec![faster.clone()]).unwrap();
    let imported = engine.import_records(&file, false).unwrap();
    assert_eq!((imported.taken.len(), imported.own), (0, 1));
    assert_eq!(engine.prepare(&SMALL).unwrap().config, own.config);
    assert_eq!(engine.import_records(&file, true).unwrap().taken.len(), 1);
    assert_eq!(engine.prepare(&SMALL).unwrap().config, faster.config);
    // Later processes find the same record, until this machine measures again.
    drop(engine);
    let engine = engine_in(folder.path());
    assert_eq!(engine.prepare(&SMALL).unwrap().config, faster.config);
    let again = engine.autotune(&SMALL, &TuneOptions { retune: true, ..quick() }, &mut go_on).unwrap();
    drop(engine);
    let records = engine_in(folder.path()).records();
    assert_eq!(records.into_iter().map(|(_, record)| record).collect::<Vec<_>>(), [again]);
}

#[test]
fn figures_that_no_measurement_gives_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let own = engine_in(&folder.path().join("other")).autotune(&SMALL, &quick(), &mut go_on).unwrap();
    let engine = engine_in(folder.path());
    let file = folder.path().join("other.jsonl");
    for (median_us, spread, check_error, reason) in [
        (1e-320, 0.0, 0.0, "median_us is 1e-320"),
        (-1.0, 0.0, 0.0, "median_us is -1"),
        (1e300, 0.0, 0.0, "median_us is 1e300"),
        (10.0, -0.5, 0.0, "spread is -5e-1"),
        (10.0, 0.0, 1e9, "check_error is 1e9"),
    ] {
        let record = Record { median_us, spread, check_error, ..own.clone() };
        record::write_file(&file, vec![record]).unwrap();
        let imported = engine.import_records(&file, true).unwrap();
        let refusal = imported.first_refusal.unwrap();
        assert!((imported.taken.len(), imported.refused) == (0, 1) && refusal.contains(reason), "{refusal}");
    }
    // A rate that no device reaches, in a time that a small problem may well take.
    let large = Problem { seqlen_q: 1 << 20, seqlen_k: 1 << 20, ..SMALL };
    let key = key::record_key(&large);
    record::write_file(&file, vec![Record { problem: large, key, median_us: 1.0, ..own }]).unwrap();
    let imported = engine.import_records(&file, true).unwrap();
    assert!(imported.first_refusal.unwrap().contains("FLOP/s"));
}

#[test]
fn records_outside_of_the_space_are_not_imported() {
    let folder = tempfile::tempdir().unwrap();
    let engine = engine_in(folder.path());
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
        // A config of another family, an unknown knob, a value outside of the space.
        (&Device { sm_count: 78, ..gpu.clone() }, here.clone(), false),
        (&Device { sm_count: 114, ..gpu.clone() }, there.with("block_o", 64), false),
        (&Device { sm_count: 1, ..cpu.clone() }, here.with("block_m", 17), false),
    ];
    for (device, config, fits) in records {
        let record = Record::new(&SMALL, device, outcome(config));
        record::write_file(&file, vec![record.clone()]).unwrap();
        assert_eq!(engine.import_records(&file, false).unwrap().taken.len(), usize::from(fits), "{record:?}");
        assert_eq!(engine.records().iter().any(|(_, known)| known.id() == record.id()), fits, "{record:?}");
    }
}

#[test]
fn without_a_folder_records_live_in_memory() {
    let engine = engine_of(EngineOptions::default());
    engine.autotune(&SMALL, &quick(), &mut go_on).unwrap();
    assert_eq!(engine.prepare(&SMALL).unwrap().source, Source::Process);
    let other = engine_of(EngineOptions::default());
    assert_eq!(other.prepare(&SMALL).unwrap().source, Source::Heuristic);
}
