//! KvAppend: new keys and values are written into a K/V cache behind those that each sequence has.
//!
//! Lengths and block tables lie in the backend's memory, so the work itself judges whether a
//! sequence has room. Two kernels share the work: one that only copies, and one for slots and
//! rotations, so that plain calls pay for neither.

mod call;
mod cpu;
mod kernel;
mod rotary;

pub use super::class::{KvAppendClass, RotaryClass};
pub use call::{KvAppend, Rotary};

use super::class::OpClass;
use super::op::{Launch, Op};
use crate::cpu::Workers;
use crate::error::Result;
use crate::kernel::FixedSpec;

// SAFETY: KvAppendSlotsParams in templates/kv_append_slots.cu.tera has the same fields, and begins
// with KvAppendParams of templates/kv_append/rows.cuh. Both templates assert the size.
unsafe impl Op for KvAppend {
    type KernelParams = kernel::KvAppendSlotsParams;

    const NAME: &'static str = "kv_append";

    fn class(&self) -> OpClass {
        OpClass::KvAppend(self.class)
    }

    fn is_empty(&self) -> bool {
        let writes_nothing = self.seqlen_new == 0 && self.seqused.is_null() && self.rotary.seqlen_q == 0;
        self.batch_size == 0 || writes_nothing
    }

    fn kernel(&self) -> FixedSpec {
        self.class.kernel()
    }

    fn kernel_params(&self) -> kernel::KvAppendSlotsParams {
        kernel::KvAppendSlotsParams::new(self)
    }

    fn grid(&self, sm_count: u32) -> [u32; 3] {
        kernel::grid(self, sm_count)
    }

    fn launches(&self, sm_count: u32, launch: &mut Launch<'_, kernel::KvAppendSlotsParams>) -> Result<()> {
        kernel::launches(self, sm_count, launch)
    }

    fn run_on_cpu(&self, workers: &Workers) -> Result<()> {
        cpu::run(self, workers)
    }
}
