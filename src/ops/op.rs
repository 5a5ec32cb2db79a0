//! Op: what an operation answers, so that building, caching and launching are written once for all
//! operations.

use super::class::OpClass;
use crate::cpu::Workers;
use crate::error::Result;
use crate::kernel::FixedSpec;

/// One call of an operation: its sizes and tensors, checked by `capi`. Nothing below `capi` checks
/// pointers again.
///
/// # Safety
/// `KernelParams` is the twin of the only argument of the kernel that `kernel` describes. The
/// pointers in it are those of the call.
pub unsafe trait Op {
    /// The struct that the kernel takes by value.
    type KernelParams;

    /// Name of the C function `flashtune_<NAME>`, of the kernel and of its template.
    const NAME: &'static str;

    fn class(&self) -> OpClass;

    /// Whether the call writes nothing, and so launches nothing.
    fn is_empty(&self) -> bool;

    /// The kernel of this call's class.
    fn kernel(&self) -> FixedSpec;

    fn kernel_params(&self) -> Self::KernelParams;

    /// CTAs along x, y and z of a call that is not empty.
    fn grid(&self, sm_count: u32) -> [u32; 3];

    /// Does the work on host memory and returns when it is done.
    fn run_on_cpu(&self, workers: &Workers) -> Result<()>;
}
