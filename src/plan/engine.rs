//! Engine: from a problem to a plan. The one object behind a C context and behind the command line.
//!
//! `prepared` is what a launch calls: no lock, no file, no compiler. `prepare` looks up or tunes, builds, and inserts,
//! outside anything a launch waits for. It knows when to use records; how they are kept is `machine`'s and `store`'s.

use super::built::Built;
use super::canonical::Canonical;
use super::key::{self, Class};
use super::loaded::{Loaded, Plan, Turns};
use super::lookup::{self, Choice, Known, Source};
use super::machine::Machine;
use super::record::{self, Record};
use super::shipped;
use super::store::Store;
use crate::backend::{Backend, Executable, KvAppender, Merger};
use crate::config::Config;
use crate::device::Arch;
use crate::error::{Error, Result, Status};
use crate::family;
use crate::kv_append::KvAppendClass;
use crate::merge::MergeClass;
use crate::problem::Problem;
use crate::tune::candidates;
use crate::tune::{self, Bench, Event, Floor, Observer, Request, Rig, TuneOptions, Worker};
use arc_swap::ArcSwap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Records and the heuristic; nothing is measured unless `autotune` is called.
    Records,
    /// `prepare` measures a problem that this device has no record of.
    Tune,
}

#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Of this machine's records, resolved (`kernel::cache_dir`); None: they live in memory alone.
    pub cache_dir: Option<PathBuf>,
    pub policy: Policy,
    /// Of one tuning run inside `prepare`.
    pub time_limit: Duration,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions { cache_dir: None, policy: Policy::Records, time_limit: tune::DEFAULT_TIME_LIMIT }
    }
}

pub struct Engine {
    backend: Backend,
    options: EngineOptions,
    machine: Machine,
    known: ArcSwap<Known>,
    loaded: Loaded,
    mergers: Built<MergeClass, Merger>,
    kv_appenders: Built<KvAppendClass, KvAppender>,
    preparing: Turns<Canonical>,
    building: Turns<(Class, Config)>,
    /// Measurements side by side would disturb each other.
    measuring: Mutex<()>,
    /// The thread that holds `measuring`: called again from its progress callback, it would wait for itself.
    measured_by: Mutex<Option<ThreadId>>,
    is_sealed: AtomicBool,
}

impl Engine {
    /// Reads this machine's records and the shipped ones, once.
    pub fn new(backend: Backend, options: EngineOptions) -> Engine {
        let machine = Machine::new(options.cache_dir.as_deref().and_then(Store::in_folder));
        let known = Known {
            process: Vec::new(),
            machine: machine.records().into_iter().map(Arc::new).collect(),
            shipped: shipped::records(backend.device().arch).into_iter().map(Arc::new).collect(),
        };
        Engine {
            backend,
            options,
            machine,
            known: ArcSwap::from_pointee(known),
            loaded: Loaded::default(),
            mergers: Built::new(Backend::build_merger),
            kv_appenders: Built::new(Backend::build_kv_appender),
            preparing: Turns::default(),
            building: Turns::default(),
            measuring: Mutex::new(()),
            measured_by: Mutex::new(None),
            is_sealed: AtomicBool::new(false),
        }
    }

    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    pub fn mergers(&self) -> &Built<MergeClass, Merger> {
        &self.mergers
    }

    pub fn kv_appenders(&self) -> &Built<KvAppendClass, KvAppender> {
        &self.kv_appenders
    }

    /// Whether this backend does the problem. Compiles nothing.
    pub fn supported(&self, problem: &Problem) -> Result<()> {
        family::supported(problem, self.backend.device())
    }

    /// The plan of a validated problem, if it is there or follows, in memory alone, from what is loaded. Takes no lock.
    pub fn prepared(&self, problem: &Problem) -> Option<Arc<Plan>> {
        if !self.loaded.pinned.is_empty()
            && let Some(plan) = self.loaded.pinned.get(problem)
        {
            return Some(plan);
        }
        let canonical = key::canonical(problem);
        if let Some(plan) = self.loaded.plans.get(&canonical) {
            return Some(plan);
        }
        self.supported(&canonical).ok()?;
        loop {
            let generation = self.loaded.plans.generation();
            let plan = self.resolve(&canonical)?;
            // Else new records came meanwhile.
            if self.loaded.plans.insert(generation, &plan) {
                return Some(plan);
            }
        }
    }

    /// The plan that follows from what is loaded.
    fn resolve(&self, canonical: &Problem) -> Option<Arc<Plan>> {
        let class = Class::of(canonical);
        for choice in lookup::choices(&self.known.load(), canonical, self.backend.device()) {
            if self.wants_tuning(canonical, &choice) {
                return None;
            }
            match self.loaded.executables.get(&(class, choice.config.clone())) {
                Some(Some(executable)) => return Some(Plan::of(*canonical, choice, executable)),
                // It does not compile, or may not be compiled any more: the next choice.
                Some(None) => {}
                None if self.is_sealed() => {}
                None => return None,
            }
        }
        self.is_sealed().then(|| self.any_loaded(canonical)).flatten()
    }

    /// For a validated call that may prepare nothing (sealed context, stream capture) and has no plan: a config that was loaded
    /// for another shape of the class is better than none. It is not kept, so that a later `prepare` does its work. None
    /// for a deterministic or batch-invariant problem, whose result may not depend on what came before.
    pub fn any_loaded(&self, problem: &Problem) -> Option<Arc<Plan>> {
        if problem.follows_no_record().is_some() {
            return None;
        }
        let (canonical, device) = (key::canonical(problem), self.backend.device());
        family::supported(&canonical, device).ok()?;
        let class = Class::of(&canonical);
        let serves = |(of, config): &(Class, Config), executable: &Option<_>| {
            executable.is_some() && *of == class && family::check(&canonical, config, device).is_ok()
        };
        let ((_, config), executable) = self.loaded.executables.first(serves)?;
        Some(Arc::new(Plan {
            problem: *canonical,
            config,
            source: Source::Heuristic,
            reason: "nothing may be prepared now: a config that was loaded for another shape of the class".to_owned(),
            record: None,
            executable: executable?,
        }))
    }

    /// The problem's plan; looks up or tunes, and builds, where it is not there yet.
    pub fn prepare(&self, problem: &Problem) -> Result<Arc<Plan>> {
        self.supported(problem)?;
        if let Some(plan) = self.prepared(problem) {
            return Ok(plan);
        }
        self.refuse_if_sealed(problem)?;
        if self.options.policy == Policy::Tune {
            // Also where it would only build: a thread that prepares the same problem may be waiting to measure it.
            self.refuse_while_measuring("prepare")?;
        }
        let canonical = key::canonical(problem);
        self.preparing.alone(&canonical, || match self.prepared(problem) {
            Some(plan) => Ok(plan),
            None => self.make(problem, canonical),
        })
    }

    /// Uses this config for exactly this problem from now on.
    pub fn pin(&self, problem: &Problem, config: Config) -> Result<()> {
        self.supported(problem)?;
        self.refuse_if_sealed(problem)?;
        family::check(problem, &config, self.backend.device()).map_err(Error::invalid)?;
        let executable = self.build(problem, &config)?;
        let plan = Plan {
            problem: *problem,
            config,
            source: Source::Pinned,
            reason: "pinned by the caller".to_owned(),
            record: None,
            executable,
        };
        self.loaded.pinned.insert(*problem, Arc::new(plan));
        Ok(())
    }

    /// Measures the candidates for a problem, keeps the winner and uses it from now on. Without `retune` a record of
    /// this machine for it is returned as it is.
    pub fn autotune(&self, problem: &Problem, options: &TuneOptions, observer: &mut Observer) -> Result<Record> {
        self.supported(problem)?;
        self.refuse_if_sealed(problem)?;
        if problem.is_empty() || problem.seqlen_q == 0 || problem.seqlen_k == 0 {
            return Err(Error::invalid(format!("{}: there is no work to measure", key::record_key(problem))));
        }
        if let Some(why) = problem.follows_no_record() {
            return Err(Error::invalid(format!(
                "{}: a {why} problem always runs the heuristic's config, and there is nothing to tune; tune it without {}",
                key::record_key(problem),
                why.replace('-', "_")
            )));
        }
        self.refuse_while_measuring("autotune")?;
        let _alone = self.measuring.lock().unwrap_or_else(PoisonError::into_inner);
        let _known = Measuring::begin(&self.measured_by);
        // A search that may try everything is not spared by one that could not.
        let preferred = family::heuristic(&key::canonical(problem), self.backend.device()).family;
        let stands = |record: &Arc<Record>| {
            !options.retune && record.has_tried(preferred) && !(record.proven_only && options.worker.is_some())
        };
        match self.own_record(problem).filter(stands) {
            Some(record) => Ok(Record::clone(&record)),
            None => self.tune(problem, options, observer),
        }
    }

    /// Writes this device's own records (not the shipped ones) as sorted lines. Returns how many.
    pub fn export_records(&self, path: &Path) -> Result<usize> {
        let device_key = key::device_key(self.backend.device());
        let known = self.known.load();
        // What this process tuned comes first and so replaces what it read at its start.
        let own = known.process.iter().chain(&known.machine).filter(|record| record.device_key() == device_key);
        let records: Vec<Record> = own.map(|record| Record::clone(record)).collect();
        record::write_file(path, records)
    }

    /// Takes records of any device from lines into this machine's, where they are better than what is there of the same
    /// device and key. Returns how many; those that the space does not accept are passed over.
    pub fn import_records(&self, path: &Path) -> Result<usize> {
        let text = std::fs::read_to_string(path).map_err(|error| Error::from(error).context(path.display()))?;
        let (records, ignored) = record::read_lines(&text);
        if let Some((line, reason)) = ignored.first() {
            log::warn!("{}: {} records ignored; line {line}: {reason}", path.display(), ignored.len());
        }
        let here = self.backend.device();
        let fits = |record: &Record| match record.check(here) {
            Ok(()) => true,
            Err(reason) => {
                log::warn!("{}: {} is passed over: {reason}", path.display(), record.id());
                false
            }
        };
        let records: Vec<Record> = records.into_iter().filter(fits).collect();
        let taken = self.machine.put_better(&records, here);
        // What this process tuned itself goes before the machine's records, but not before a better one.
        self.refresh(|process| process.retain(|own| !taken.contains(&own.id())));
        self.replan(|_| true);
        Ok(taken.len())
    }

    /// This machine's records and the shipped ones, with where each comes from.
    pub fn records(&self) -> Vec<(Source, Record)> {
        let known = self.known.load();
        let device_key = key::device_key(self.backend.device());
        let shipped = known.shipped.iter().map(|record| match record.device_key() == device_key {
            true => (Source::Shipped, Record::clone(record)),
            false => (Source::NearestGpu, Record::clone(record)),
        });
        let process = known.process.iter().map(|record| (Source::Process, Record::clone(record)));
        let machine = known.machine.iter().map(|record| (Source::Machine, Record::clone(record)));
        process.chain(machine).chain(shipped).collect()
    }

    /// From now on only what is loaded is used: nothing is tuned, compiled or read.
    pub fn seal(&self) {
        self.is_sealed.store(true, Ordering::Release);
    }

    pub fn is_sealed(&self) -> bool {
        self.is_sealed.load(Ordering::Acquire)
    }

    fn refuse_if_sealed(&self, problem: &Problem) -> Result<()> {
        match self.is_sealed() {
            false => Ok(()),
            true => Err(Error::new(
                Status::NotPrepared,
                format!("{} was not prepared before the context was sealed", key::record_key(problem)),
            )),
        }
    }

    fn refuse_while_measuring(&self, call: &str) -> Result<()> {
        match *self.measured_by.lock().unwrap_or_else(PoisonError::into_inner) == Some(std::thread::current().id()) {
            false => Ok(()),
            true => Err(Error::invalid(format!(
                "{call} was called from the progress callback of a measurement of the same context, which must end before another can begin"
            ))),
        }
    }

    /// Whether the policy is to measure rather than to take this choice.
    fn wants_tuning(&self, problem: &Problem, choice: &Choice) -> bool {
        let may_follow = problem.follows_no_record().is_none();
        self.options.policy == Policy::Tune && !choice.is_exact && may_follow && !self.is_sealed()
    }

    /// Tunes if the policy says so, then builds the best choice that builds.
    fn make(&self, problem: &Problem, canonical: Canonical) -> Result<Arc<Plan>> {
        let device = self.backend.device();
        let choices = lookup::choices(&self.known.load(), &canonical, device);
        if choices.first().is_some_and(|choice| self.wants_tuning(problem, choice)) && !problem.is_empty() {
            let options = TuneOptions { time_limit: self.options.time_limit, ..TuneOptions::default() };
            // A problem that cannot be tuned (no memory for its buffers) still has its records and the heuristic.
            if let Err(error) = self.autotune(problem, &options, &mut |_| ControlFlow::Continue(())) {
                log::warn!("tuning {}: {error}", key::record_key(problem));
            }
        }
        loop {
            let generation = self.loaded.plans.generation();
            let plan = self.build_best(&canonical)?;
            // Else new records came meanwhile.
            if self.loaded.plans.insert(generation, &plan) {
                return Ok(plan);
            }
        }
    }

    /// The best choice that builds.
    fn build_best(&self, canonical: &Problem) -> Result<Arc<Plan>> {
        let mut failure = None;
        for choice in lookup::choices(&self.known.load(), canonical, self.backend.device()) {
            match self.build(canonical, &choice.config) {
                Ok(executable) => return Ok(Plan::of(*canonical, choice, executable)),
                Err(error) if is_the_configs_fault(&error) || error.status == Status::Cuda => {
                    log::warn!("{} from {}: {error}", choice.config, choice.source.name());
                    failure = Some(error);
                }
                Err(error) => return Err(error),
            }
        }
        Err(failure.unwrap_or_else(|| Error::new(Status::Internal, "there is no config for the problem")))
    }

    /// The executable, built once however many threads ask for it.
    fn build(&self, problem: &Problem, config: &Config) -> Result<Arc<Executable>> {
        let key = (Class::of(problem), config.clone());
        self.building.alone(&key, || match self.loaded.executables.get(&key) {
            Some(Some(executable)) => Ok(executable),
            Some(None) => Err(Error::new(Status::CompileFailed, "it did not compile before")),
            None => {
                let built = self.backend.build(problem, config).map(Arc::new);
                match &built {
                    Ok(executable) => self.loaded.executables.insert(key.clone(), Some(Arc::clone(executable))),
                    Err(error) if is_the_configs_fault(error) => self.loaded.executables.insert(key.clone(), None),
                    Err(_) => {}
                }
                built
            }
        })
    }

    /// Chooses again, from new records, for the plans of these classes. Each plan stays until the new one is built:
    /// what was prepared remains prepared.
    fn replan(&self, concerns: impl Fn(&Class) -> bool) {
        let (generation, plans) = self.loaded.plans.renew();
        for plan in plans.iter().filter(|plan| concerns(&Class::of(&plan.problem))) {
            if self.is_sealed() {
                return;
            }
            match self.build_best(&plan.problem) {
                // Where a later generation has begun, its thread chooses for all plans.
                Ok(new) => drop(self.loaded.plans.insert(generation, &new)),
                Err(error) => log::warn!("{} keeps its plan: {error}", key::record_key(&plan.problem)),
            }
        }
    }

    /// This device's record for the problem's very key, from this process or machine.
    fn own_record(&self, problem: &Problem) -> Option<Arc<Record>> {
        let (key, device_key) = (key::record_key(problem), key::device_key(self.backend.device()));
        let known = self.known.load();
        let mut own = known.process.iter().chain(&known.machine);
        own.find(|record| record.key == key && record.device_key() == device_key).cloned()
    }

    fn tune(&self, problem: &Problem, options: &TuneOptions, observer: &mut Observer) -> Result<Record> {
        let device = self.backend.device();
        let id = format!("{} | {}", key::device_key(device), key::record_key(problem));
        let known = if options.retune { Vec::new() } else { self.machine.trials(&id, problem, device) };
        let is_cpu = device.arch == Arch::Cpu;
        // A config that is not proven may hang; it is tried only where that does no harm.
        let may_be_unproven = is_cpu || options.worker.is_some();
        let candidates = self.candidates(problem, may_be_unproven);
        let neighbours = |config: &Config| match may_be_unproven {
            true => self.fitting(problem, candidates::neighbours(&key::canonical(problem), config, device)),
            false => Vec::new(),
        };
        let request = Request {
            problem,
            candidates: &candidates,
            neighbours: &neighbours,
            known: &known,
            time_limit: options.time_limit,
            floor: Floor::of(problem, device),
        };
        let mut bench: Box<dyn Bench> = match &options.worker {
            Some(command) if !is_cpu => Box::new(Worker::new(command.clone(), problem)),
            _ => Box::new(Rig::new(&self.backend, problem)),
        };
        let mut measured = tune::measured_families(&known);
        let outcome = tune::search(bench.as_mut(), &request, &mut |event| {
            if let Event::Trial(trial) = event {
                measured.extend(tune::measured_families(std::slice::from_ref(trial)));
                self.machine.note(&id, problem, device, trial);
            }
            observer(event)
        });
        drop(bench);
        let record = match outcome {
            Ok(outcome) => {
                measured.remove(&outcome.winner.config.family);
                Record { proven_only: !may_be_unproven, also_tried: measured, ..Record::new(problem, device, outcome) }
            }
            Err(error) => {
                self.machine.flush();
                return Err(error);
            }
        };
        self.machine.put(std::slice::from_ref(&record));
        self.refresh(|process| {
            process.retain(|other| other.id() != record.id());
            process.push(Arc::new(record.clone()));
        });
        // Also where no plan asks for it yet: the next launch then finds it loaded.
        self.build(problem, &record.config)?;
        // Plans of the class may now have a nearer record.
        let class = Class::of(problem);
        self.replan(|planned| *planned == class);
        Ok(record)
    }

    /// The heuristic's config first, then what records name, then what the space finds promising.
    fn candidates(&self, problem: &Problem, may_be_unproven: bool) -> Vec<Config> {
        let device = self.backend.device();
        // A config must also pass for the problem that stands for all with this key, or its record would never be a hit.
        let canonical = key::canonical(problem);
        let mut all = vec![family::heuristic(&canonical, device)];
        all.extend(
            lookup::proven(&self.known.load(), &canonical, device).into_iter().take(candidates::MAX_CANDIDATES / 2),
        );
        if may_be_unproven {
            all.extend(candidates::first(&canonical, device));
        }
        let mut candidates = Vec::new();
        for config in self.fitting(problem, all) {
            if candidates.len() < candidates::MAX_CANDIDATES && !candidates.contains(&config) {
                candidates.push(config);
            }
        }
        candidates
    }

    fn fitting(&self, problem: &Problem, mut configs: Vec<Config>) -> Vec<Config> {
        configs.retain(|config| family::check(problem, config, self.backend.device()).is_ok());
        configs
    }

    /// Takes in what the machine knows by now, and a change of this process's own records.
    fn refresh(&self, change: impl Fn(&mut Vec<Arc<Record>>)) {
        let machine: Vec<Arc<Record>> = self.machine.records().into_iter().map(Arc::new).collect();
        self.known.rcu(|known| {
            let mut process = known.process.clone();
            change(&mut process);
            let is_own = |record: &&Arc<Record>| process.iter().any(|own| own.id() == record.id());
            let machine = machine.iter().filter(|record| !is_own(record)).cloned().collect();
            Known { process, machine, shipped: known.shipped.clone() }
        });
    }
}

/// Says, while it lives, which thread measures.
struct Measuring<'a>(&'a Mutex<Option<ThreadId>>);

impl<'a> Measuring<'a> {
    fn begin(by: &'a Mutex<Option<ThreadId>>) -> Self {
        *by.lock().unwrap_or_else(PoisonError::into_inner) = Some(std::thread::current().id());
        Measuring(by)
    }
}

impl Drop for Measuring<'_> {
    fn drop(&mut self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// Another config may do better, where a missing compiler or a full memory would not.
fn is_the_configs_fault(error: &Error) -> bool {
    matches!(error.status, Status::CompileFailed | Status::Unsupported | Status::InvalidArgument)
}
