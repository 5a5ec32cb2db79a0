//! FixedKernel: a kernel whose text follows from its class alone. There is no config to choose for
//! it.
//!
//! A FixedSpec describes the kernel, and this file renders, compiles, loads and launches it. The
//! small operations and the SM clock are built here; this file knows none of them by name.

use super::constants::{ARCH, Value};
use super::cubins::Cubins;
use super::modules::{self, Loaded, Source};
use super::render::Renderer;
use crate::call::Stream;
use crate::config::Family;
use crate::cuda::context::Context;
use crate::cuda::module::Function;
use crate::device::{Arch, Device};
use crate::error::Result;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::sync::Arc;

/// Fixed kernels use sm80's instructions alone, so they are compiled for every target, as decode's
/// kernels are.
pub const FAMILY: Family = Family::Decode;

/// What a fixed kernel is rendered from.
#[derive(Clone, Debug)]
pub struct FixedSpec {
    /// The template is `templates/<name>.cu.tera`, its only kernel `flashtune_<name>`.
    pub name: &'static str,
    /// Threads of a CTA. The template sees them as `threads`.
    pub threads: u32,
    /// Values that templates of passes have too, such as `dtype`.
    pub class: Vec<(&'static str, Value)>,
    /// Values of this template alone.
    pub knobs: Vec<(&'static str, Value)>,
}

impl FixedSpec {
    /// The kernel's text.
    pub fn text(&self, renderer: &Renderer, arch: Arch) -> Result<String> {
        let given = self.class.iter().chain(&self.knobs).map(|(name, value)| ((*name).to_owned(), value.clone()));
        let threads = ("threads".to_owned(), Value::Integer(self.threads));
        let number = if let Arch::Sm(major, minor) = arch { major * 10 + minor } else { 0 };
        let arch_number = (ARCH.to_owned(), Value::Integer(number));
        let values: BTreeMap<String, Value> = given.chain([threads, arch_number]).collect();
        let knobs: Vec<&str> = self.knobs.iter().map(|(name, _)| *name).collect();
        renderer.fill(self.name, &values, FAMILY, &knobs, arch, None)
    }
}

pub struct FixedKernel {
    context: Arc<Context>,
    function: Function,
    threads: u32,
    sm_count: u32,
    /// Lets a later build of the same text find the module.
    _loaded: Arc<Loaded>,
}

impl FixedKernel {
    pub(super) fn new(
        context: &Arc<Context>,
        device: &Device,
        cubins: &Cubins,
        spec: &FixedSpec,
    ) -> Result<FixedKernel> {
        let text = spec.text(Renderer::shared()?, device.arch)?;
        let (loaded, _) =
            modules::load(context, device, cubins, &Source { name: spec.name, family: FAMILY, text: &text })?;
        let entry = CString::new(format!("flashtune_{}", spec.name)).expect("a kernel's name holds no NUL");
        let function = loaded.module.function(&entry, 0)?;
        let (threads, sm_count) = (spec.threads, device.sm_count);
        Ok(FixedKernel { context: context.clone(), function, threads, sm_count, _loaded: loaded })
    }

    /// SMs of the device that the kernel is loaded on.
    pub fn sm_count(&self) -> u32 {
        self.sm_count
    }

    /// Enqueues the kernel on `stream`. The launch allocates nothing and takes no lock.
    ///
    /// # Safety
    /// `Params` is the twin of the kernel's only argument. Every pointer in `params` is valid on
    /// the device until the stream's work is done. `stream` is NULL or a live stream of the
    /// kernel's context.
    pub unsafe fn launch<Params>(&self, grid: [u32; 3], params: &Params, stream: Stream) -> Result<()> {
        let current = self.context.enter()?;
        let mut arguments = [std::ptr::from_ref(params).cast_mut().cast()];
        // SAFETY: by the caller's promise; the context is current, and `params` outlives the call.
        unsafe { self.function.launch(&current, grid, self.threads, 0, stream, false, &mut arguments) }
    }
}
