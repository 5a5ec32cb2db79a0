//! BuiltOps: the small operations that this process has built, readable without a lock.
//!
//! A class has exactly one executable, so nothing is chosen and nothing is recorded.

use super::shared_map::{KeyLocks, SharedMap};
use crate::backend::{Backend, OpExecutable};
use crate::error::Result;
use crate::ops::{Op, OpClass};
use std::sync::Arc;

#[derive(Default)]
pub struct BuiltOps {
    built: SharedMap<OpClass, Arc<OpExecutable>>,
    building: KeyLocks<OpClass>,
}

impl BuiltOps {
    /// The executable of a class, if it is built. Takes no lock.
    pub fn get(&self, class: &OpClass) -> Option<Arc<OpExecutable>> {
        self.built.get(class)
    }

    /// Builds the executable for the class of this call, once however many threads ask for it.
    pub fn prepare<O: Op>(&self, backend: &Backend, op: &O) -> Result<Arc<OpExecutable>> {
        let class = op.class();
        self.building.locked(&class, || match self.built.get(&class) {
            Some(built) => Ok(built),
            None => {
                let built = Arc::new(backend.build_op(op)?);
                self.built.insert(class, Arc::clone(&built));
                Ok(built)
            }
        })
    }
}
