//! Executables: the passes that this process has built, by problem class and config, readable
//! without a lock.
//!
//! It builds each once, however many threads ask, and remembers configs that do not build. It does
//! not know which config a problem should have.

use super::key::Class;
use super::shared_map::{KeyLocks, SharedMap};
use crate::backend::{Backend, Executable};
use crate::config::Config;
use crate::error::{Error, Result, Status};
use crate::problem::Problem;
use std::sync::Arc;

#[derive(Default)]
pub struct Executables {
    /// None for a config that does not build: it is not tried again.
    built: SharedMap<(Class, Config), Option<Arc<Executable>>>,
    building: KeyLocks<(Class, Config)>,
}

/// The state of a config, without building it.
pub enum Loaded {
    Executable(Arc<Executable>),
    DoesNotBuild,
    NotBuilt,
}

impl Executables {
    /// Takes no lock.
    pub fn get(&self, class: Class, config: &Config) -> Loaded {
        match self.built.get(&(class, config.clone())) {
            Some(Some(executable)) => Loaded::Executable(executable),
            Some(None) => Loaded::DoesNotBuild,
            None => Loaded::NotBuilt,
        }
    }

    /// The executables of a class, by rising configs. Takes no lock.
    pub fn of_class(&self, class: Class) -> Vec<(Config, Arc<Executable>)> {
        let of_class = |((of, config), built): (&(Class, Config), &Option<Arc<Executable>>)| {
            built.as_ref().filter(|_| *of == class).map(|executable| (config.clone(), Arc::clone(executable)))
        };
        let mut found = self.built.select(of_class);
        found.sort_by(|(a, _), (b, _)| a.cmp(b));
        found
    }

    /// Builds the executable unless it is built already.
    pub fn build(&self, backend: &Backend, problem: &Problem, config: &Config) -> Result<Arc<Executable>> {
        let key = (Class::of(problem), config.clone());
        self.building.locked(&key, || match self.built.get(&key) {
            Some(Some(executable)) => Ok(executable),
            Some(None) => Err(Error::new(Status::CompileFailed, "it did not compile before")),
            None => {
                let built = backend.build_side_by_side(problem, config).map(Arc::new);
                match &built {
                    Ok(executable) => self.built.insert(key.clone(), Some(Arc::clone(executable))),
                    Err(error) if is_of_the_config(error) => self.built.insert(key.clone(), None),
                    Err(_) => {}
                }
                built
            }
        })
    }
}

/// Whether another config may build where this one failed. A missing compiler or a full memory
/// fails all configs.
pub fn is_of_the_config(error: &Error) -> bool {
    matches!(error.status, Status::CompileFailed | Status::Unsupported | Status::InvalidArgument)
}
