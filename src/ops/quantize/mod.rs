//! Quantize: a tensor of 16-bit elements becomes 8-bit numbers times scales, given or computed. Its
//! rows may be rotated before, or rotated and left in 16 bits.

mod call;
mod cpu;
mod kernel;
mod rotation;

pub use super::class::QuantizeClass;
pub use call::Quantize;
pub use rotation::{LEAST_BLOCK, Rotation};

use super::class::OpClass;
use super::op::{Launch, Op};
use crate::cpu::Workers;
use crate::error::Result;
use crate::kernel::FixedSpec;

// SAFETY: QuantizeParams in templates/quantize.cu.tera has the same fields, and the template
// asserts its size.
unsafe impl Op for Quantize {
    type KernelParams = kernel::QuantizeParams;

    const NAME: &'static str = "quantize";

    fn class(&self) -> OpClass {
        OpClass::Quantize(self.class)
    }

    fn is_empty(&self) -> bool {
        self.units() == 0
    }

    fn kernel(&self) -> FixedSpec {
        self.class.kernel()
    }

    fn launches(&self, _sm_count: u32, launch: &mut Launch<'_, kernel::QuantizeParams>) -> Result<()> {
        kernel::launches(self, launch)
    }

    fn run_on_cpu(&self, workers: &Workers) -> Result<()> {
        cpu::run(self, workers)
    }
}
