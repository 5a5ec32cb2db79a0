//! Executable: the loaded kernels of a pass, and the launch.
//!
//! A launch fills one parameter struct on the stack and enqueues each kernel with it. It allocates nothing, takes no
//! lock, reads no file and waits for nothing, so it is legal in a stream capture; all else was done when it was built.

use super::geometry::{self, KernelSpec};
use super::modules::Loaded;
use super::{KernelParams, Resources};
use crate::call::{Call, Stream};
use crate::config::Config;
use crate::cuda::context::Context;
use crate::cuda::module::Function;
use crate::error::{Error, Result, Status};
use std::ffi::CString;
use std::sync::Arc;

pub struct Executable {
    context: Arc<Context>,
    kernels: Box<[Kernel]>,
    config: Config,
    resources: Resources,
    name: &'static str,
}

struct Kernel {
    spec: KernelSpec,
    function: Function,
    /// Keeps the module found by those who build the same text later.
    _loaded: Arc<Loaded>,
}

impl Executable {
    /// `kernels` in launch order.
    pub(super) fn new(
        context: &Arc<Context>,
        kernels: Vec<(KernelSpec, Arc<Loaded>)>,
        config: &Config,
    ) -> Result<Executable> {
        let mut resources = Resources::default();
        let mut name = "";
        let kernels = kernels
            .into_iter()
            .map(|(spec, loaded)| {
                let entry = CString::new(spec.entry).map_err(|_| {
                    Error::new(Status::Internal, format!("the kernel name {:?} holds a NUL", spec.entry))
                })?;
                let function = loaded.module.function(&entry, spec.smem_bytes)?;
                if spec.is_main {
                    name = spec.entry;
                    resources = Resources {
                        registers: function.registers()?,
                        spill_bytes: loaded.resources.get(spec.entry).map_or(0, |entry| entry.spill_bytes),
                        smem_bytes: spec.smem_bytes + function.static_smem_bytes()?,
                        threads: spec.threads,
                    };
                }
                Ok(Kernel { spec, function, _loaded: loaded })
            })
            .collect::<Result<_>>()?;
        Ok(Executable { context: context.clone(), kernels, config: config.clone(), resources, name })
    }

    #[expect(clippy::not_unsafe_ptr_arg_deref, reason = "a Call is addresses throughout; capi's contract covers all")]
    /// Enqueues the pass on `stream`. The call's pointers and the stream are as `capi` has checked and documented.
    pub fn launch(&self, call: &Call, stream: Stream) -> Result<()> {
        let params = KernelParams::new(call);
        let current = self.context.enter()?;
        for kernel in &self.kernels {
            let spec = &kernel.spec;
            let grid = geometry::grid(spec, &call.problem, &self.config);
            if grid.contains(&0) {
                continue;
            }
            // SAFETY: every kernel takes one KernelParams, which the templates assert; that its pointers hold until
            // the work is done, and that the stream is of this context, is the caller's contract with the C face.
            unsafe { kernel.function.launch(&current, grid, spec.threads, spec.smem_bytes, stream, &params) }.map_err(
                |error| {
                    error.context(format_args!(
                        "launching {} with grid {grid:?}, {} threads, {} bytes of shared memory",
                        spec.entry, spec.threads, spec.smem_bytes
                    ))
                },
            )?;
        }
        Ok(())
    }

    /// Of the pass's main kernel.
    pub fn resources(&self) -> Resources {
        self.resources
    }

    /// The main kernel's `extern "C"` name.
    pub fn kernel_name(&self) -> &str {
        self.name
    }
}
