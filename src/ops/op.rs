//! Op: what an operation answers, so that building, caching and launching are written once for all
//! operations.

use super::class::OpClass;
use crate::cpu::Workers;
use crate::error::Result;
use crate::kernel::FixedSpec;

/// Enqueues one launch, given its grid and its argument.
pub type Launch<'a, P> = dyn FnMut([u32; 3], &P) -> Result<()> + 'a;

/// One call of an operation: its sizes and tensors, checked by `capi`. Nothing below `capi` checks
/// pointers again.
///
/// # Safety
/// `KernelParams` is the twin of the only argument of the kernel that `kernel` describes, or begins
/// with that twin. The pointers in it are those of the call.
pub unsafe trait Op {
    /// The struct that the kernel takes by value.
    type KernelParams;

    /// Name of the C function `flashtune_<NAME>`, of the kernel and of its template. A second
    /// kernel has a longer name.
    const NAME: &'static str;

    fn class(&self) -> OpClass;

    /// Whether the call writes nothing, and so launches nothing.
    fn is_empty(&self) -> bool;

    /// The kernel of this call's class.
    fn kernel(&self) -> FixedSpec;

    /// Calls `launch` with the grid (CTAs along x, y and z) and the argument of each launch of a
    /// call that is not empty, in order.
    fn launches(&self, sm_count: u32, launch: &mut Launch<'_, Self::KernelParams>) -> Result<()>;

    /// Does the work on host memory and returns when it is done.
    fn run_on_cpu(&self, workers: &Workers) -> Result<()>;
}
