//! Merge: partial results of attention over parts of the keys become the result over all keys.
//!
//! Each partial is weighted by its part of the sum of exponentials, which its log-sum-exp gives.

mod call;
mod cpu;
mod kernel;

pub use super::class::MergeClass;
pub use call::Merge;

use super::class::OpClass;
use super::op::{Launch, Op};
use crate::cpu::Workers;
use crate::error::Result;
use crate::kernel::FixedSpec;

// SAFETY: MergeParams in templates/merge.cu.tera has the same fields, and the template asserts its
// size.
unsafe impl Op for Merge {
    type KernelParams = kernel::MergeParams;

    const NAME: &'static str = "merge";

    fn class(&self) -> OpClass {
        OpClass::Merge(self.class)
    }

    fn is_empty(&self) -> bool {
        self.rows() == 0
    }

    fn kernel(&self) -> FixedSpec {
        self.class.kernel()
    }

    fn launches(&self, _sm_count: u32, launch: &mut Launch<'_, kernel::MergeParams>) -> Result<()> {
        launch(kernel::grid(self), &kernel::MergeParams::new(self))
    }

    fn run_on_cpu(&self, workers: &Workers) -> Result<()> {
        cpu::run(self, workers)
    }
}
