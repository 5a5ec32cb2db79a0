//! Discovery: the GPUs, the driver and the compiler that this process finds.

use super::compile::target;
use super::fixed::FAMILY;
use crate::cuda;
use crate::cuda::driver::Driver;
use crate::cuda::library::Search;
use crate::cuda::nvrtc::Nvrtc;
use crate::device::{Arch, Device};
use crate::error::Result;

/// The GPUs that this process sees, in the order of their ordinals.
pub fn devices() -> Result<Vec<Device>> {
    let driver = Driver::get()?;
    (0..cuda::device::count(driver)?)
        .map(|ordinal| cuda::device::describe(driver, cuda::device::at(driver, ordinal)?))
        .collect()
}

/// The places where libcuda was looked for, and the result.
pub fn driver_search() -> &'static Search {
    Driver::search()
}

/// The places where libnvrtc was looked for, and the result.
pub fn nvrtc_search() -> &'static Search {
    Nvrtc::search()
}

/// The architectures that the NVRTC in use makes cubins for, ascending.
pub fn compiler_archs() -> Result<Vec<Arch>> {
    Ok(Nvrtc::get()?.archs().iter().map(|number| Arch::Sm(number / 10, number % 10)).collect())
}

/// The target that the NVRTC in use compiles fixed kernels for, on GPUs of an architecture. The
/// error says that there is no NVRTC, or that it is too old.
pub fn compiler_target(arch: Arch) -> Result<String> {
    target(arch, FAMILY, Nvrtc::get()?)
}

/// (major, minor) of the NVRTC in use; (0, 0) if there is none. Looks for it at the first call of
/// the process, which may take 0.2 s: what a pack serves must not ask.
pub fn nvrtc_version() -> (u32, u32) {
    Nvrtc::get().map_or((0, 0), Nvrtc::version)
}
