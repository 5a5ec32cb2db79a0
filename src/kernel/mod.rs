//! Kernels on the GPU: render a template, compile it, keep the cubin, load it, launch it.
//!
//! Everything here handles one (Problem class, Config) pair at a time. The layers above choose the
//! config and remember it. Rendering and compiling need no GPU; cached cubins need no NVRTC.

pub mod cache_dir;
pub mod compile;
pub mod constants;
pub mod cubin_cache;
pub mod cubin_limit;
mod cubins;
mod discovery;
pub mod fixed;
mod gpu;
mod launch;
mod launch_maps;
mod modules;
pub mod pack;
mod params;
pub mod render;
mod resources;
pub mod sass;
pub mod sm_clock;
pub mod sources;
mod template_limits;
mod tile_counters;

pub use crate::cuda::library::{Attempt, Search};
pub use crate::cuda::memory::DeviceMemory;
pub use compile::Compiled;
pub use constants::Value;
pub use discovery::{compiler_archs, compiler_target, devices, driver_search, nvrtc_search, nvrtc_version};
pub use fixed::{FixedKernel, FixedSpec};
pub use gpu::{Elapsed, Gpu, LoadedKernel};
pub use launch::Executable;
pub use modules::{Origin, Source};
pub use params::KernelParams;
pub use resources::Resources;

use crate::config::Config;
use crate::cuda::nvrtc::Nvrtc;
use crate::device::Arch;
use crate::error::{Error, Result};
use crate::family;
use crate::family::spec::KernelSpec;
use crate::problem::Problem;
use render::Renderer;

/// Knobs that the text does not contain: a launch uses them, or a kernel that not all configs have,
/// or a spec hands them to the text. A text says whether the kernel may split (`may_split`), so
/// that configs of any number of splits share it, and has `direct_tiles`, one number for several of
/// `direct_dq`.
const LAUNCH_KNOBS: [&str; 9] = [
    "num_splits",
    "splits_rest",
    "split_waves",
    "decode_splits",
    "splittable",
    "scoring_warps",
    "scoring_stages",
    "tile_ctas",
    "direct_dq",
];

/// Renders all kernels of a pass, in launch order. At least one of them must read each knob of the
/// config. A knob that no kernel reads is misspelt, or the templates no longer match the family.
pub fn render_pass(problem: &Problem, config: &Config, arch: Arch) -> Result<Vec<(KernelSpec, String)>> {
    let renderer = Renderer::shared()?;
    let kernels = family::kernels(problem, config)?;
    for knob in config.knobs.names() {
        let mut read = false;
        for spec in &kernels {
            let names = renderer.names(spec.template)?;
            let is_of_launch = LAUNCH_KNOBS.contains(&knob) && names.contains("may_split");
            read |= names.contains(knob) || is_of_launch;
        }
        if !read {
            let names: Vec<&str> = kernels.iter().map(|spec| spec.template).collect();
            return Err(Error::invalid(format!(
                "the config sets {knob}, which no kernel of the pass reads ({})",
                names.join(", ")
            )));
        }
    }
    kernels.into_iter().map(|spec| Ok((spec, renderer.render(problem, config, &spec, arch)?))).collect()
}

/// Renders a kernel that has no config.
pub fn render_fixed(spec: &FixedSpec, arch: Arch) -> Result<String> {
    spec.text(Renderer::shared()?, arch)
}

/// A digest of the template files in use, overrides included.
pub fn templates_digest() -> Result<String> {
    Ok(Renderer::shared()?.digest())
}

/// Renders and compiles all kernels of a pass for an architecture. It needs NVRTC but no GPU, and
/// reads no cache.
pub fn compile_only(problem: &Problem, config: &Config, arch: Arch) -> Result<Vec<(KernelSpec, String, Compiled)>> {
    let nvrtc = Nvrtc::get()?;
    render_pass(problem, config, arch)?
        .into_iter()
        .map(|(spec, text)| {
            let target = compile::target(arch, spec.family(config), nvrtc)?;
            let compiled = compile::compile(nvrtc, spec.template, &text, &target)?;
            Ok((spec, text, compiled))
        })
        .collect()
}
