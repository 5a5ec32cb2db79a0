//! KvAppend: new keys and values are written into a K/V cache behind those that each sequence has.
//!
//! Lengths and block tables lie in the backend's memory, so the work itself judges whether a
//! sequence has room. Three kernels share the work: one that only copies, one for slots and
//! rotations, and one for caches of 8 bits, so that plain calls pay for none of these.

mod call;
mod cpu;
mod kernel;
mod rotary;

pub use super::class::{CacheFormat, EightClass, KvAppendClass, RotaryClass};
pub use call::{AppendScales, KvAppend, Rotary};

use super::class::OpClass;
use super::op::{Launch, Op};
use crate::cpu::Workers;
use crate::error::Result;
use crate::kernel::FixedSpec;

// SAFETY: KvAppendEightParams in templates/kv_append_eight.cu.tera has the same fields. It begins
// with KvAppendSlotsParams of templates/kv_append/slots.cuh, and that with KvAppendParams of
// templates/kv_append/rows.cuh. All three assert the size.
unsafe impl Op for KvAppend {
    type KernelParams = kernel::KvAppendEightParams;

    const NAME: &'static str = "kv_append";

    fn class(&self) -> OpClass {
        // The kernel for a cache of 8 bits serves slots and rotations too.
        let of_eight = KvAppendClass { slots: true, rotary: None, ..self.class };
        OpClass::KvAppend(if self.class.eight.is_some() { of_eight } else { self.class })
    }

    fn is_empty(&self) -> bool {
        let writes_nothing = self.seqlen_new == 0 && self.seqused.is_null() && self.rotary.seqlen_q == 0;
        self.batch_size == 0 || writes_nothing
    }

    fn kernel(&self) -> FixedSpec {
        self.class.kernel()
    }

    fn launches(&self, sm_count: u32, launch: &mut Launch<'_, kernel::KvAppendEightParams>) -> Result<()> {
        kernel::launches(self, sm_count, launch)
    }

    fn run_on_cpu(&self, workers: &Workers) -> Result<()> {
        cpu::run(self, workers)
    }
}
