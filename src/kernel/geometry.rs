//! What a (Problem, Config) launches and what it costs, by arithmetic alone: kernels, threads, shared memory, grids.
//!
//! `tune::space` discards by it what cannot fit, `launch` launches by it, and the templates assert the same sizes.

use crate::config::Config;
use crate::problem::Problem;

/// One kernel of a pass, in launch order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelSpec {
    /// File under `templates/`, without `.cu.tera`.
    pub template: &'static str,
    /// The `extern "C"` name.
    pub entry: &'static str,
    pub threads: u32,
    /// Dynamic shared memory in bytes.
    pub smem_bytes: u32,
    /// Whether this is the kernel whose registers and spills stand for the pass.
    pub is_main: bool,
}

/// The kernels of a pass in launch order; their templates see the same values.
pub fn kernels(_problem: &Problem, _config: &Config) -> Vec<KernelSpec> {
    unimplemented!()
}

/// The launch grid of one of `kernels`; any dimension 0 means that there is nothing to launch.
pub fn grid(_spec: &KernelSpec, _problem: &Problem, _config: &Config, _sm_count: u32) -> [u32; 3] {
    unimplemented!()
}
