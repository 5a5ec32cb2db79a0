//! Plans: lookup order, record keys, records on disk, and the plans of this process.

use crate::backend::{Backend, Executable};
use crate::config::Config;
use crate::error::Result;
use crate::problem::Problem;
use crate::tune::{Progress, TuneOptions};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

pub enum Policy {
    Records,
    Tune,
}
pub struct EngineOptions {
    pub cache_dir: Option<PathBuf>,
    pub policy: Policy,
    pub time_limit: Duration,
    pub use_disk: bool,
}
pub enum Source {
    Pinned,
    Process,
    Machine,
    Shipped,
    NearestGpu,
    Heuristic,
}
pub struct Record {
    pub median_us: f64,
    pub default_us: Option<f64>,
}
pub struct Plan {
    pub problem: Problem,
    pub config: Config,
    pub source: Source,
    pub reason: String,
    pub record: Option<Record>,
    pub executable: Arc<Executable>,
}
pub struct Engine {
    backend: Backend,
    sealed: std::sync::atomic::AtomicBool,
}

impl Engine {
    pub fn new(backend: Backend, _options: EngineOptions) -> Engine {
        Engine { backend, sealed: false.into() }
    }
    pub fn backend(&self) -> &Backend {
        &self.backend
    }
    pub fn supported(&self, _problem: &Problem) -> Result<()> {
        Ok(())
    }
    pub fn prepared(&self, _problem: &Problem) -> Option<Arc<Plan>> {
        None
    }
    pub fn prepare(&self, _problem: &Problem) -> Result<Arc<Plan>> {
        unimplemented!()
    }
    pub fn autotune(
        &self,
        _problem: &Problem,
        _options: &TuneOptions,
        _progress: &mut dyn FnMut(&Progress) -> ControlFlow<()>,
    ) -> Result<Record> {
        unimplemented!()
    }
    pub fn export_records(&self, _path: &Path) -> Result<usize> {
        unimplemented!()
    }
    pub fn import_records(&self, _path: &Path) -> Result<usize> {
        unimplemented!()
    }
    pub fn seal(&self) {
        self.sealed.store(true, std::sync::atomic::Ordering::Release);
    }
    pub fn is_sealed(&self) -> bool {
        self.sealed.load(std::sync::atomic::Ordering::Acquire)
    }
}
