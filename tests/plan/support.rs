//! Shared by the tests of the engine: a small problem, and engines on the CPU backend.

use flashtune::backend::Backend;
use flashtune::config::Config;
use flashtune::cpu::Cpu;
use flashtune::device::Device;
use flashtune::plan::{Engine, EngineOptions};
use flashtune::problem::{Causal, Dtype, Pass, Problem};
use flashtune::tune::{Event, TuneOptions, candidates};
use std::ops::ControlFlow;
use std::path::Path;
use std::time::Duration;

/// Small enough to be tuned in a test.
pub const SMALL: Problem =
    Problem { causal: Causal::BottomRight, ..Problem::dense(Pass::Forward, Dtype::Bf16, 1, 2, 96, 32) };

/// A config that is not the heuristic's.
pub fn config(problem: &Problem, device: &Device, index: usize) -> Config {
    candidates::all(problem, device).swap_remove(index + 1)
}

pub fn engine_with(folder: &Path, options: EngineOptions) -> Engine {
    engine_of(EngineOptions { cache_dir: Some(folder.to_owned()), ..options })
}

pub fn engine_of(options: EngineOptions) -> Engine {
    Engine::new(Backend::Cpu(Cpu::new(2).unwrap()), options)
}

pub fn engine_in(folder: &Path) -> Engine {
    engine_with(folder, EngineOptions::default())
}

pub fn quick() -> TuneOptions {
    TuneOptions { time_limit: Duration::from_millis(300), ..TuneOptions::default() }
}

pub fn go_on(_: Event) -> ControlFlow<()> {
    ControlFlow::Continue(())
}
