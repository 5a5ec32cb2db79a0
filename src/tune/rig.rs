//! Rig: the bench in this process. It owns the buffers of one problem, the check's reference and
//! the built candidates.
//!
//! It makes buffers and reference when they are first needed, so that compilation begins at once.

use super::arena::{self, Arena};
use super::check::Check;
use super::search::{Bench, BuildObserver, Fault};
use super::timing::Samples;
use crate::backend::{Backend, Elapsed, Executable};
use crate::config::Config;
use crate::dropout::Dropout;
use crate::error::{Error, Result, Status};
use crate::problem::Problem;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;

/// The most sets of buffers that runs rotate through. The last-level cache would otherwise still
/// hold part of a small set, even though it is overwritten between runs.
const MAX_SETS: usize = 3;

pub struct Rig<'a> {
    backend: &'a Backend,
    problem: Problem,
    executables: HashMap<Config, Executable>,
    check: Option<Check>,
    arenas: Vec<Arena>,
    samples_taken: usize,
}

impl<'a> Rig<'a> {
    pub fn new(backend: &'a Backend, problem: &Problem) -> Rig<'a> {
        Rig {
            backend,
            problem: *problem,
            executables: HashMap::new(),
            check: None,
            arenas: Vec::new(),
            samples_taken: 0,
        }
    }

    /// Times a config that is known to work: `runs` cold runs after a discarded one.
    pub fn measure(&mut self, config: &Config, runs: usize) -> Result<Samples> {
        let fault = |fault| match fault {
            Fault::Bench(error) => error,
            Fault::Candidate(reason) | Fault::Here(reason) | Fault::Poisoned(reason) => {
                Error::new(Status::Unsupported, reason)
            }
        };
        self.sample(config).map_err(fault)?;
        let mut samples = Samples::default();
        for lap in 0..runs {
            samples.push(lap, self.sample(config).map_err(fault)?);
        }
        Ok(samples)
    }

    fn ensure_built(&mut self, config: &Config) -> Result<(), Fault> {
        if !self.executables.contains_key(config) {
            let executable = self.backend.build(&self.problem, config).map_err(blame)?;
            self.executables.insert(config.clone(), executable);
        }
        Ok(())
    }

    /// The CPU compiles nothing. A thread would take 64 MB of its address space for itself, which a
    /// limited process lacks afterwards.
    fn build_without_threads(&mut self, configs: &[Config], done: &mut BuildObserver) {
        for (index, config) in configs.iter().enumerate() {
            let built = self.backend.build(&self.problem, config);
            if done(index, self.keep(config, built)).is_break() {
                return;
            }
        }
    }

    /// The bytes of registers that the executable spills.
    fn keep(&mut self, config: &Config, built: Result<Executable>) -> Result<u32, Fault> {
        let executable = built.map_err(blame)?;
        let spills = executable.resources().costly_spill_bytes;
        self.executables.insert(config.clone(), executable);
        Ok(spills)
    }

    fn ensure_arenas(&mut self) -> Result<()> {
        if self.arenas.is_empty() {
            let cache = self.backend.device().l2_bytes as usize;
            let sets = (cache as u128 / arena::arena_bytes(&self.problem).max(1) + 1).min(MAX_SETS as u128);
            let dropout = match self.problem.dropout {
                true => Dropout { p: 0.1, seed: 1, ..Dropout::NONE },
                false => Dropout::NONE,
            };
            self.arenas = (0..sets)
                .map(|set| Arena::random(self.backend, &self.problem, dropout, set as u32))
                .collect::<Result<_>>()?;
        }
        Ok(())
    }
}

impl Bench for Rig<'_> {
    fn build(&mut self, configs: &[Config], done: &mut BuildObserver) {
        if let Backend::Cpu(_) = self.backend {
            return self.build_without_threads(configs, done);
        }
        let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
        let (sender, receiver) = mpsc::channel();
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(configs.len());
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let (sender, next, stop, backend, problem) = (sender.clone(), &next, &stop, self.backend, self.problem);
                let build_some = move || {
                    while !stop.load(Ordering::Relaxed) {
                        let index = next.fetch_add(1, Ordering::Relaxed);
                        let Some(config) = configs.get(index) else { break };
                        // The receiver is gone only if the caller has stopped.
                        if sender.send((index, backend.build(&problem, config))).is_err() {
                            break;
                        }
                    }
                };
                // The panic hook of the C face knows our threads by their names.
                let spawned =
                    std::thread::Builder::new().name("flashtune-build".into()).spawn_scoped(scope, build_some);
                if let Err(error) = spawned {
                    // One thread is enough.
                    if thread == 0 {
                        let reason = format!("cannot start a thread that builds kernels: {error}");
                        let _ = done(0, Err(Fault::Bench(Error::new(Status::OutOfMemory, reason))));
                    }
                    break;
                }
            }
            drop(sender);
            for (index, built) in receiver {
                if done(index, self.keep(&configs[index], built)).is_break() {
                    stop.store(true, Ordering::Relaxed);
                    break;
                }
            }
        });
    }

    fn check(&mut self, config: &Config) -> Result<f64, Fault> {
        self.ensure_built(config)?;
        if self.check.is_none() {
            self.check = Some(Check::new(self.backend, &self.problem).map_err(Fault::Bench)?);
        }
        let (Some(check), Some(executable)) = (&self.check, self.executables.get(config)) else {
            return Err(Fault::Bench(Error::new(Status::Internal, "the check was not made")));
        };
        check.run(self.backend, config, executable).map_err(blame)?.map_err(Fault::Candidate)
    }

    fn sample(&mut self, config: &Config) -> Result<Elapsed, Fault> {
        self.ensure_built(config)?;
        self.ensure_arenas().map_err(Fault::Bench)?;
        self.samples_taken += 1;
        let call = self.arenas[self.samples_taken % self.arenas.len()].call();
        let executable = &self.executables[config];
        self.backend.time(true, &mut |stream| executable.launch(call, stream)).map_err(blame)
    }
}

/// Whether the candidate or the bench is to blame for an error while a candidate was built or run.
fn blame(error: Error) -> Fault {
    match error.status {
        Status::NoDevice | Status::NoCompiler | Status::OutOfMemory | Status::Internal => Fault::Bench(error),
        // An illegal address or instruction ends the context. The driver does not document which
        // errors do.
        Status::Cuda => Fault::Poisoned(error.message),
        _ => Fault::Candidate(error.message),
    }
}
