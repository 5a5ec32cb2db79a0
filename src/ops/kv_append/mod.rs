//! KvAppend: new keys and values are written into a K/V cache behind those that each sequence has.
//!
//! Lengths and block tables lie in the backend's memory, so the work itself judges whether a
//! sequence has room.

mod call;
mod cpu;
mod kernel;

pub use super::class::KvAppendClass;
pub use call::KvAppend;

use super::class::OpClass;
use super::op::Op;
use crate::cpu::Workers;
use crate::error::Result;
use crate::kernel::FixedSpec;

// SAFETY: KvAppendParams in templates/kv_append.cu.tera has the same fields, and the template
// asserts its size.
unsafe impl Op for KvAppend {
    type KernelParams = kernel::KvAppendParams;

    const NAME: &'static str = "kv_append";

    fn class(&self) -> OpClass {
        OpClass::KvAppend(self.class)
    }

    fn is_empty(&self) -> bool {
        self.batch_size == 0 || (self.seqlen_new == 0 && self.seqused.is_null())
    }

    fn kernel(&self) -> FixedSpec {
        self.class.kernel()
    }

    fn kernel_params(&self) -> kernel::KvAppendParams {
        kernel::KvAppendParams::new(self)
    }

    fn grid(&self, sm_count: u32) -> [u32; 3] {
        kernel::grid(self, sm_count)
    }

    fn run_on_cpu(&self, workers: &Workers) -> Result<()> {
        cpu::run(self, workers)
    }
}
