//! Records of an engine: export, import, and the database behind them.

use crate::support::{SMALL, engine_in, engine_of, go_on, quick};
use flashtune::config::Config;
use flashtune::device::{Arch, Device};
use flashtune::error::Status;
use flashtune::family;
use flashtune::plan::{EngineOptions, Record, Source, record};
use flashtune::problem::Problem;
use flashtune::tune::{Outcome, Timed, candidates};

#[test]
fn records_survive_damage_of_the_database_after_they_were_read() {
    let folder = tempfile::tempdir().unwrap();
    let far = Problem { seqlen_q: 400, seqlen_k: 400, ..SMALL };
    engine_in(folder.path()).autotune(&SMALL, &quick(), &mut go_on).unwrap();
    let engine = engine_in(folder.path());
    let database = folder.path().join("records.sled");
    std::fs::remove_dir_all(&database).unwrap();
    std::fs::write(&database, "not a folder").unwrap();
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
    assert_eq!(other.import_records(&first).unwrap(), 3);
    assert_eq!(other.prepare(&SMALL).unwrap().source, Source::Machine);
    assert_eq!(other.export_records(&second).unwrap(), 3);
    assert_eq!(std::fs::read(&first).unwrap(), std::fs::read(&second).unwrap());
    // The next process has the imported records.
    drop(other);
    assert_eq!(engine_in(to.path()).records().len(), 3);
    assert_eq!(engine.import_records(&from.path().join("missing")).unwrap_err().status, Status::Io);
    assert_eq!(engine.export_records(&from.path().join("no/folder")).unwrap_err().status, Status::Io);
}

#[test]
fn imported_record_replaces_only_a_slower_one() {
    let folder = tempfile::tempdir().unwrap();
    let engine = engine_in(folder.path());
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
    // A record that another process stored after this one read the store counts too.
    let faster = engine_in(folder.path());
    record::write_file(&file, vec![Record { median_us: own.median_us / 4.0, ..own.clone() }]).unwrap();
    assert_eq!(faster.import_records(&file).unwrap(), 1);
    assert_eq!(import(&other, own.median_us / 2.0), 0);
    assert_eq!(import(&other, own.median_us / 8.0), 1);
    assert_eq!(used(), (Source::Machine, other));
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
        assert_eq!(engine.import_records(&file).unwrap(), usize::from(fits), "{record:?}");
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
