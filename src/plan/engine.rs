//! Engine: from a problem to a plan. A C context and the command line each hold one engine.
//!
//! A launch first calls `prepared`, which takes no lock, reads no file and compiles nothing. If
//! `prepared` returns no plan, the launch calls `prepare`, or `any_loaded` on a capturing stream.
//! In a sealed engine `prepared` itself falls back to any loaded config of the class, and the
//! launch fails if none fits. A launch that has a plan never waits for another thread's `prepare`.
//! `prepare_range` builds what every problem of a range may need. From then on `prepared` finds or
//! makes a plan for each of them, sealed or not.
//!
//! `prepare` makes the canonical problem, whose sizes are rounded (`canonical`). It measures the
//! given problem if the policy says so (`tuning`), looks up a config (`lookup`), builds the config
//! (`executables`) and keeps the plan (`plans`). This file decides when each of these modules acts.

use super::among::Packed;
use super::built_ops::BuiltOps;
use super::canonical::{self, Canonical, canonical};
use super::executables::{Executables, Loaded, is_of_the_config};
use super::key::{self, Class};
use super::known_records::KnownRecords;
use super::lookup::{self, Choice, Known, Source};
use super::machine::Imported;
use super::measuring::Measuring;
use super::plans::{Plan, Plans};
use super::range::Range;
use super::ranges::{Building, Prepared, Ranges};
use super::record::Record;
use super::shared_map::{KeyLocks, SharedMap};
use super::tuning;
use crate::backend::Backend;
use crate::config::Config;
use crate::error::{Error, Result, Status};
use crate::family;
use crate::pool;
use crate::problem::Problem;
use crate::tune::{self, Observer, TuneOptions};
use arc_swap::ArcSwapOption;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Records and the heuristic; only `autotune` measures.
    Records,
    /// `prepare` measures a problem that this device has no record of.
    Tune,
}

#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// The folder of this machine's records, as `kernel::cache_dir::resolve` returns it. None keeps
    /// records in memory alone.
    pub cache_dir: Option<PathBuf>,
    pub policy: Policy,
    /// The limit of one tuning run inside `prepare`.
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
    records: KnownRecords,
    packed: Packed,
    /// The plans whose config the caller has set (`pin`), by the exact problem. All other plans are
    /// kept by the canonical problem.
    pinned: SharedMap<Problem, Arc<Plan>>,
    plans: Plans,
    /// The problems for which a loaded config is enough.
    ranges: Ranges,
    executables: Executables,
    ops: BuiltOps,
    preparing: KeyLocks<Canonical>,
    measuring: Measuring,
    is_sealed: AtomicBool,
    last_chosen: ArcSwapOption<Chosen>,
}

/// The choices for a problem among the records that were known then.
struct Chosen {
    known: Arc<Known>,
    canonical: Canonical,
    choices: Vec<Choice>,
}

impl Engine {
    /// Reads this machine's records, once.
    pub fn new(backend: Backend, options: EngineOptions) -> Engine {
        let pack = backend.pack().pack();
        Engine {
            records: KnownRecords::read(options.cache_dir.as_deref(), backend.device(), pack.map(Arc::as_ref)),
            packed: Packed::of(pack, backend.device().arch),
            backend,
            options,
            pinned: SharedMap::default(),
            plans: Plans::default(),
            ranges: Ranges::default(),
            executables: Executables::default(),
            ops: BuiltOps::default(),
            preparing: KeyLocks::default(),
            measuring: Measuring::default(),
            is_sealed: AtomicBool::new(false),
            last_chosen: ArcSwapOption::empty(),
        }
    }

    pub fn backend(&self) -> &Backend {
        &self.backend
    }

    pub fn ops(&self) -> &BuiltOps {
        &self.ops
    }

    /// An error if this backend cannot run the problem. Compiles nothing.
    pub fn supported(&self, problem: &Problem) -> Result<()> {
        family::supported(problem, self.backend.device())
    }

    /// The plan of a validated problem, if there is one or loaded executables suffice to make one.
    /// Takes no lock.
    pub fn prepared(&self, problem: &Problem) -> Option<Arc<Plan>> {
        self.pinned(problem).or_else(|| self.planned(problem, &canonical(problem)))
    }

    /// Builds a few configs that serve every problem of these ranges, on all cores, and measures
    /// nothing. From then on `prepared` has a plan for each of these problems.
    pub fn prepare_range(&self, ranges: &[Range]) -> Result<Prepared> {
        let start = Instant::now();
        for range in ranges {
            range.validate()?;
            self.refuse_if_sealed(&range.largest)?;
        }
        // Variants that this device does not run are left out, but not all of them.
        let refusals: Vec<Error> = ranges.iter().filter_map(|range| self.supported(&range.largest).err()).collect();
        if let Some(refusal) = refusals.first().filter(|_| refusals.len() == ranges.len()) {
            return Err(refusal.clone());
        }
        let building = Building {
            backend: &self.backend,
            known: &self.records.snapshot(),
            executables: &self.executables,
            packed: &self.packed,
        };
        let prepared = pool::install(usize::MAX, || building.build(ranges))??;
        self.ranges.add(ranges);
        Ok(Prepared { time: start.elapsed(), ..prepared })
    }

    /// The problem's plan. If there is none, makes one: measures the problem if the policy says so,
    /// looks up a config and builds the config.
    pub fn prepare(&self, problem: &Problem) -> Result<Arc<Plan>> {
        self.supported(problem)?;
        let canonical = canonical(problem);
        let loaded = || self.pinned(problem).or_else(|| self.planned(problem, &canonical));
        if let Some(plan) = loaded() {
            return Ok(plan);
        }
        self.refuse_if_sealed(problem)?;
        if self.options.policy == Policy::Tune {
            // A progress callback must not wait for the lock below, even if this call would measure
            // nothing: the lock's holder may itself wait for this thread's tuning run to end.
            self.measuring.refuse_inside("prepare")?;
        }
        self.preparing.locked(&canonical, || {
            // Another thread may have prepared it meanwhile.
            if let Some(plan) = loaded() {
                return Ok(plan);
            }
            self.tune_if_wanted(problem, &canonical);
            self.plans.insert_chosen(&canonical, || self.build_best(&canonical))
        })
    }

    /// Uses this config for exactly this problem from now on.
    pub fn pin(&self, problem: &Problem, config: Config) -> Result<()> {
        self.supported(problem)?;
        self.refuse_if_sealed(problem)?;
        canonical::check(problem, &config, self.backend.device()).map_err(Error::invalid)?;
        let executable = self.executables.build(&self.backend, problem, &config)?;
        let plan = Plan {
            problem: *problem,
            config,
            source: Source::Pinned,
            reason: "pinned by the caller".to_owned(),
            record: None,
            executable,
        };
        self.pinned.insert(*problem, Arc::new(plan));
        Ok(())
    }

    /// Measures the candidates for a problem, keeps the winner and uses it from now on. If this
    /// machine already has a record of the problem and `tuning::is_enough` accepts that record,
    /// returns the record and measures nothing.
    pub fn autotune(&self, problem: &Problem, options: &TuneOptions, observer: &mut Observer) -> Result<Record> {
        self.supported(problem)?;
        self.tune(problem, &canonical(problem), options, observer)
    }

    /// A stopgap plan for a launch on a capturing stream, where preparing is not allowed. The
    /// problem is validated and has no plan. The stopgap uses a config that was loaded for another
    /// shape of the problem's class (`key::Class`). It is not kept, so a later `prepare` makes the
    /// proper plan. (A sealed engine makes no plan later; there `prepared` makes such a stopgap and
    /// keeps it.) None for a deterministic problem, whose result must not depend on earlier calls.
    /// A batch-invariant one takes only configs of the same bits.
    pub fn any_loaded(&self, problem: &Problem) -> Option<Arc<Plan>> {
        let canonical = canonical(problem);
        self.supported(&canonical).ok()?;
        self.substitute(&canonical, self.choices(&canonical).first()?)
    }

    /// Writes this device's own records (not the shipped ones) as sorted lines. Returns their
    /// number.
    pub fn export_records(&self, path: &Path) -> Result<usize> {
        self.records.export(path)
    }

    /// Adds the records of a file to this machine's, whatever their device. A record of a problem
    /// that this machine measured itself is not taken, unless `replaces`. One that was imported
    /// before is replaced by a better one. A record whose config is not valid on its device is
    /// refused.
    pub fn import_records(&self, path: &Path, replaces: bool) -> Result<Imported> {
        let imported = self.records.import(path, replaces)?;
        self.replan(|_| true);
        Ok(imported)
    }

    /// The folder that has all records of this process. The error says why they live in this
    /// process alone.
    pub fn kept_records(&self) -> Result<&Path, String> {
        self.records.keep_all()?;
        self.options.cache_dir.as_deref().ok_or_else(|| "there is no cache folder".to_owned())
    }

    /// This machine's records and the shipped ones, with where each comes from.
    pub fn records(&self) -> Vec<(Source, Record)> {
        self.records.all()
    }

    /// From now on the engine uses only what is loaded: it tunes, compiles and reads nothing.
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

    fn pinned(&self, problem: &Problem) -> Option<Arc<Plan>> {
        // Few callers pin anything; the others need not hash the problem.
        if self.pinned.is_empty() { None } else { self.pinned.get(problem) }
    }

    /// The plan that exists, or else one made from loaded executables, which is then kept.
    fn planned(&self, problem: &Problem, canonical: &Canonical) -> Option<Arc<Plan>> {
        if let Some(plan) = self.plans.get(canonical) {
            return Some(plan);
        }
        self.supported(canonical).ok()?;
        let may_substitute = self.is_sealed() || self.ranges.contain(problem);
        self.plans.insert_chosen(canonical, || self.best_loaded(canonical, may_substitute).ok_or(())).ok()
    }

    /// A plan made from loaded executables. It follows the best choice, not counting configs that
    /// did not build. Where this choice is not loaded or must be tuned first, or no choice built, a
    /// substitute serves if there may be one, or else there is no plan.
    fn best_loaded(&self, canonical: &Canonical, may_substitute: bool) -> Option<Arc<Plan>> {
        let class = Class::of(canonical);
        let mut failed = None;
        let choices = if may_substitute { self.choices(canonical) } else { self.choices_to_build(canonical) };
        for choice in choices {
            if !may_substitute && self.wants_tuning(canonical, &choice) {
                return None;
            }
            match self.executables.get(class, &choice.config) {
                Loaded::Executable(executable) => return Some(Plan::new(canonical, choice, executable)),
                Loaded::DoesNotBuild => failed = failed.or(Some(choice)),
                Loaded::NotBuilt if may_substitute => return self.substitute(canonical, &choice),
                Loaded::NotBuilt => return None,
            }
        }
        failed.filter(|_| may_substitute).and_then(|choice| self.substitute(canonical, &choice))
    }

    /// A plan of the loaded config that serves best in place of a choice. For a batch-invariant
    /// problem it has the bits of the choice, and for a deterministic one there is none.
    fn substitute(&self, canonical: &Canonical, choice: &Choice) -> Option<Arc<Plan>> {
        if canonical.deterministic {
            return None;
        }
        let device = self.backend.device();
        self.supported(canonical).ok()?;
        let mut loaded = self.executables.of_class(Class::of(canonical));
        if let Some(others) = family::of_same_bits(canonical, device) {
            let heuristic = family::heuristic(canonical, device);
            loaded.retain(|(config, _)| *config == heuristic || others.contains(config));
        }
        let configs: Vec<&Config> = loaded.iter().map(|(config, _)| config).collect();
        let known = self.records.snapshot_of(&Class::of(canonical));
        let index = lookup::substitute(&known, canonical, &choice.config, &configs, device)?;
        let (config, executable) = loaded.into_iter().nth(index)?;
        Some(Arc::new(Plan {
            problem: **canonical,
            config,
            source: Source::Heuristic,
            reason: format!("the loaded config that is expected to be fastest; {} is not loaded", choice.config),
            record: None,
            executable,
        }))
    }

    fn choices(&self, canonical: &Canonical) -> Vec<Choice> {
        lookup::choices(&self.records.snapshot_of(&Class::of(canonical)), canonical, self.backend.device())
    }

    /// The choices in the order in which they are built. If a config of the pack serves as well as
    /// the lookup's first choice, it comes before that, since it need not be compiled. The result
    /// for the last problem is kept, since a call that makes a plan asks for it three times.
    fn choices_to_build(&self, canonical: &Canonical) -> Vec<Choice> {
        let known = self.records.snapshot_of(&Class::of(canonical));
        if let Some(last) = &*self.last_chosen.load()
            && last.canonical == *canonical
            && Arc::ptr_eq(&last.known, &known)
        {
            return last.choices.clone();
        }
        let mut choices = lookup::choices(&known, canonical, self.backend.device());
        let instead = choices.first().and_then(|first| self.packed.instead_of(first, &known, canonical, &self.backend));
        choices.splice(0..0, instead);
        let last = Chosen { known: Arc::clone(&known), canonical: *canonical, choices: choices.clone() };
        self.last_chosen.store(Some(Arc::new(last)));
        choices
    }

    /// Whether the policy asks for a measurement instead of this choice.
    fn wants_tuning(&self, canonical: &Canonical, choice: &Choice) -> bool {
        let may_follow = canonical.follows_no_record().is_none();
        self.options.policy == Policy::Tune && !choice.is_exact && may_follow && !self.is_sealed()
    }

    /// Measures the problem if the policy says so. If tuning fails, for example because its buffers
    /// do not fit in memory, records and the heuristic still serve.
    fn tune_if_wanted(&self, problem: &Problem, canonical: &Canonical) {
        if self.options.policy != Policy::Tune || problem.is_empty() {
            return;
        }
        let is_wanted = self.choices(canonical).first().is_some_and(|choice| self.wants_tuning(canonical, choice));
        if !is_wanted {
            return;
        }
        let options = TuneOptions { time_limit: self.options.time_limit, ..TuneOptions::default() };
        if let Err(error) = self.tune(problem, canonical, &options, &mut |_| ControlFlow::Continue(())) {
            log::warn!("tuning {}: {error}", key::record_key(problem));
        }
    }

    /// Measures a supported problem and chooses again for every plan of its class. Does neither if
    /// `tuning::is_enough` accepts the record that this machine has of the problem.
    fn tune(
        &self,
        problem: &Problem,
        canonical: &Canonical,
        options: &TuneOptions,
        observer: &mut Observer,
    ) -> Result<Record> {
        self.refuse_if_sealed(problem)?;
        tuning::refuse_unmeasurable(problem)?;
        self.measuring.refuse_inside("autotune")?;
        let _run = self.measuring.begin();
        let is_enough = |record: &Arc<Record>| tuning::is_enough(record, canonical, self.backend.device(), options);
        if let Some(record) = self.records.own(problem).filter(is_enough) {
            return Ok(Record::clone(&record));
        }
        tune::require_memory(&self.backend, problem)?;
        let record = tuning::run(&self.backend, &self.records, problem, canonical, options, observer)?;
        self.records.insert(&record);
        // Build now, even if no plan needs the executable yet, so that the next launch finds it
        // loaded.
        self.executables.build(&self.backend, problem, &record.config)?;
        // For other shapes of the class, the new record may be nearer than the one they use.
        let class = Class::of(problem);
        self.replan(|planned| *planned == class);
        Ok(record)
    }

    /// The best choice that builds. Where nothing can be compiled, a config of the pack serves if
    /// the best choice is not there.
    fn build_best(&self, canonical: &Canonical) -> Result<Arc<Plan>> {
        match self.build_first(canonical, self.choices_to_build(canonical)) {
            Err(error) if error.status == Status::NoCompiler => {
                let known = self.records.snapshot_of(&Class::of(canonical));
                let choices = self.packed.choices(&known, canonical, &self.backend);
                self.build_first(canonical, choices).map_err(|_| error)
            }
            built => built,
        }
    }

    /// The first choice that builds. A missing compiler ends the walk, since a choice that is not
    /// there is no worse than the next one.
    fn build_first(&self, canonical: &Canonical, choices: Vec<Choice>) -> Result<Arc<Plan>> {
        let mut failure = None;
        for choice in choices {
            match self.executables.build(&self.backend, canonical, &choice.config) {
                Ok(executable) => {
                    let (device, source) = (&self.backend.device().name, choice.source.name());
                    log::info!("{} on {device}: {} from {source}", key::record_key(canonical), choice.config);
                    return Ok(Plan::new(canonical, choice, executable));
                }
                Err(error) if is_of_the_config(&error) || error.status == Status::Cuda => {
                    log::warn!("{} from {}: {error}", choice.config, choice.source.name());
                    failure = Some(error);
                }
                Err(error) => return Err(error),
            }
        }
        Err(failure.unwrap_or_else(|| Error::new(Status::Internal, "no family has a config for the problem")))
    }

    /// Chooses again, from new records, for the plans whose class passes `concerns`. Each old plan
    /// serves until its successor is built, so a prepared problem stays prepared.
    fn replan(&self, concerns: impl Fn(&Class) -> bool) {
        for canonical in self.plans.begin_generation().iter().filter(|planned| concerns(&Class::of(planned))) {
            if self.is_sealed() {
                return;
            }
            if let Err(error) = self.plans.insert_chosen(canonical, || self.build_best(canonical)) {
                log::warn!("{} keeps its plan: {error}", key::record_key(canonical));
            }
        }
    }
}
