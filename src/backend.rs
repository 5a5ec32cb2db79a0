//! Backend: the one place where GPU and CPU meet, so that plan and tune are written once.
//!
//! It builds and launches passes (Executable) and small operations (OpExecutable). It gives the
//! tuner memory, copies and a clock. It knows nothing of records, spaces or C.

use crate::call::Call;
use crate::config::Config;
use crate::cpu;
use crate::device::Device;
use crate::error::{Error, Result, Status};
use crate::kernel;
use crate::kernel::pack::{PackStatus, Place};
use crate::ops::{Op, OpClass};
use crate::problem::Problem;
use std::path::PathBuf;
use std::sync::Arc;

pub use crate::call::Stream;
pub use crate::kernel::{Elapsed, Resources};

pub enum Backend {
    Cuda(kernel::Gpu),
    Cpu(cpu::Cpu),
}

/// A (Problem class, Config) built and loaded: ready for any shape of its class. Sharing it is
/// cheap, and many threads may launch it at once.
pub enum Executable {
    Cuda(kernel::Executable),
    Cpu(cpu::Executable),
}

/// A small operation built and loaded: ready for any call of its class. It is shared as an
/// Executable is.
pub struct OpExecutable {
    class: OpClass,
    target: OpTarget,
}

enum OpTarget {
    Cuda(kernel::FixedKernel),
    Cpu(Arc<cpu::Workers>),
}

/// Memory of the backend's device, owned; freed on drop.
pub enum Memory {
    Cuda(kernel::DeviceMemory),
    Cpu(cpu::HostMemory),
}

impl Backend {
    /// The GPU if it is usable and has a compiler or a pack, else the CPU. A log line gives the
    /// reason for the CPU.
    pub fn open_auto(
        ordinal: i32,
        cache_dir: Option<PathBuf>,
        pack: Option<Place>,
        num_threads: usize,
    ) -> Result<Backend> {
        let gpu = kernel::Gpu::new(ordinal, None, cache_dir).map(|gpu| gpu.with_pack(pack));
        let (reason, level) = match gpu {
            // The cubin cache would serve some problems, and the others would fail.
            Ok(gpu) if gpu.pack().pack().is_none() && kernel::nvrtc_version() == (0, 0) => {
                let note = gpu.pack().note().map_or(String::new(), |note| format!(", and {note}"));
                (format!("{} is there, but no libnvrtc{note}", gpu.device().name), log::Level::Warn)
            }
            Ok(gpu) => return Ok(Backend::Cuda(gpu)),
            Err(error) if matches!(error.status, Status::NoDevice | Status::NoCompiler | Status::Unsupported) => {
                (error.to_string(), log::Level::Info)
            }
            Err(error) => return Err(error),
        };
        log::log!(level, "using the CPU: {reason}");
        cpu::Cpu::new(num_threads).map(Backend::Cpu)
    }

    pub fn device(&self) -> &Device {
        match self {
            Backend::Cuda(gpu) => gpu.device(),
            Backend::Cpu(cpu) => cpu.device(),
        }
    }

    /// The pack before a GPU's cubin cache. The CPU has none.
    pub fn pack(&self) -> &PackStatus {
        match self {
            Backend::Cuda(gpu) => gpu.pack(),
            Backend::Cpu(_) => &PackStatus::None,
        }
    }

    /// Whether the pack has all kernels of a pass. Compiles and loads nothing.
    pub fn is_packed(&self, problem: &Problem, config: &Config) -> bool {
        match self {
            Backend::Cuda(gpu) => gpu.is_packed(problem, config),
            Backend::Cpu(_) => false,
        }
    }

    /// Renders, compiles (or takes from the cubin cache or the pack) and loads. May run on several
    /// threads at once.
    pub fn build(&self, problem: &Problem, config: &Config) -> Result<Executable> {
        match self {
            Backend::Cuda(gpu) => gpu.build(problem, config).map(Executable::Cuda),
            Backend::Cpu(cpu) => cpu.build(problem, config).map(Executable::Cpu),
        }
    }

    /// As `build`, with the kernels of the pass side by side on all cores.
    pub fn build_side_by_side(&self, problem: &Problem, config: &Config) -> Result<Executable> {
        match self {
            Backend::Cuda(gpu) => gpu.build_side_by_side(problem, config).map(Executable::Cuda),
            Backend::Cpu(_) => self.build(problem, config),
        }
    }

    /// Compiles (or takes from the cubin cache) and loads a rendered kernel, which stays loaded as
    /// long as the result. The CPU has no kernels.
    pub fn load(&self, source: &kernel::Source) -> Result<kernel::LoadedKernel> {
        match self {
            Backend::Cuda(gpu) => gpu.load(source),
            Backend::Cpu(_) => Err(Error::unsupported(format!("{} is a GPU's kernel; this is the CPU", source.name))),
        }
    }

    /// Builds the operation for the class of this call. The call's pointers are not read.
    pub fn build_op<O: Op>(&self, op: &O) -> Result<OpExecutable> {
        let target = match self {
            Backend::Cuda(gpu) => OpTarget::Cuda(gpu.build_fixed(&op.kernel())?),
            Backend::Cpu(cpu) => OpTarget::Cpu(Arc::clone(cpu.workers())),
        };
        Ok(OpExecutable { class: op.class(), target })
    }

    /// The bytes are uninitialised: nothing relies on zeros.
    pub fn allocate(&self, bytes: usize) -> Result<Memory> {
        match self {
            Backend::Cuda(gpu) => gpu.allocate(bytes).map(Memory::Cuda),
            Backend::Cpu(cpu) => cpu.allocate(bytes).map(Memory::Cpu),
        }
    }

    /// Copies host bytes to the start of `memory`; returns when done. Lengths must not exceed the
    /// allocation.
    pub fn upload(&self, memory: &Memory, bytes: &[u8]) -> Result<()> {
        match (self, memory) {
            (Backend::Cuda(gpu), Memory::Cuda(memory)) => gpu.upload(memory, bytes),
            (Backend::Cpu(cpu), Memory::Cpu(memory)) => cpu.upload(memory, bytes),
            _ => unreachable!("memory of another backend"),
        }
    }

    /// Copies the start of `memory` to the host once all work queued on the backend's own stream is
    /// done.
    pub fn download(&self, memory: &Memory, bytes: &mut [u8]) -> Result<()> {
        match (self, memory) {
            (Backend::Cuda(gpu), Memory::Cuda(memory)) => gpu.download(memory, bytes),
            (Backend::Cpu(cpu), Memory::Cpu(memory)) => cpu.download(memory, bytes),
            _ => unreachable!("memory of another backend"),
        }
    }

    /// The backend's own stream, which the tuner launches on.
    pub fn stream(&self) -> Stream {
        match self {
            Backend::Cuda(gpu) => gpu.stream(),
            Backend::Cpu(_) => std::ptr::null_mut(),
        }
    }

    /// Whether work enqueued on `stream` goes into a graph instead of to the device.
    pub fn is_capturing(&self, stream: Stream) -> Result<bool> {
        match self {
            Backend::Cuda(gpu) => gpu.is_capturing(stream),
            Backend::Cpu(_) => Ok(false),
        }
    }

    /// Waits for the backend's own stream.
    pub fn synchronize(&self) -> Result<()> {
        match self {
            Backend::Cuda(gpu) => gpu.synchronize(),
            Backend::Cpu(_) => Ok(()),
        }
    }

    /// Time of one run of `work` on the backend's own stream. The GPU uses device events, the CPU
    /// the monotonic clock. With `cold` the last-level cache is overwritten before the timed span.
    pub fn time(&self, cold: bool, work: &mut dyn FnMut(Stream) -> Result<()>) -> Result<Elapsed> {
        match self {
            Backend::Cuda(gpu) => gpu.time(cold, work),
            Backend::Cpu(cpu) => Ok(Elapsed { time: cpu.time(cold, work)?, sm_clock_hz: None }),
        }
    }
}

impl Executable {
    /// Enqueues the pass on `stream`; the CPU runs it. A launch does not allocate, synchronise,
    /// compile, read files or lock.
    pub fn launch(&self, call: &Call, stream: Stream) -> Result<()> {
        match self {
            Executable::Cuda(executable) => executable.launch(call, stream),
            Executable::Cpu(executable) => executable.launch(call),
        }
    }

    pub fn resources(&self) -> Resources {
        match self {
            Executable::Cuda(executable) => executable.resources(),
            Executable::Cpu(_) => Resources::default(),
        }
    }

    /// The kernel's name for `plan_info`: `flashtune_sm80_forward`, `flashtune_cpu_backward`, …
    pub fn kernel_name(&self) -> &str {
        match self {
            Executable::Cuda(executable) => executable.kernel_name(),
            Executable::Cpu(executable) => executable.kernel_name(),
        }
    }
}

impl OpExecutable {
    /// Enqueues the work on `stream`; the CPU does it. The call has the class that this executable
    /// was built for, and is not empty.
    #[expect(
        clippy::not_unsafe_ptr_arg_deref,
        reason = "a stream is a handle that the caller answers for, as in an Executable's launch"
    )]
    pub fn launch<O: Op>(&self, op: &O, stream: Stream) -> Result<()> {
        assert_eq!(self.class, op.class(), "an operation is launched by what was built for its class");
        match &self.target {
            // SAFETY: the kernel has the call's class, so it takes KernelParams (`Op`'s promise).
            // By the contract of the C face the pointers hold until the work is done, and the
            // stream is of this context.
            OpTarget::Cuda(kernel) => {
                op.launches(kernel.sm_count(), &mut |grid, params| unsafe { kernel.launch(grid, params, stream) })
            }
            OpTarget::Cpu(workers) => op.run_on_cpu(workers),
        }
    }
}

impl Memory {
    pub fn address(&self) -> *mut std::ffi::c_void {
        match self {
            Memory::Cuda(memory) => memory.address(),
            Memory::Cpu(memory) => memory.address(),
        }
    }

    pub fn bytes(&self) -> usize {
        match self {
            Memory::Cuda(memory) => memory.bytes(),
            Memory::Cpu(memory) => memory.bytes(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::TensorRef;
    use crate::ops::merge::{Merge, MergeClass};
    use crate::problem::{Dtype, Layout};

    #[test]
    #[should_panic(expected = "built for its class")]
    fn an_operation_of_another_class_is_not_launched() {
        let merge = |dtype| Merge {
            class: MergeClass { dtype, partial_dtype: Dtype::Fp32, layout: Layout::Vec1 },
            num_partials: 1,
            batch_size: 0,
            seqlen: 0,
            num_heads: 1,
            head_dim_v: 1,
            partial_out: TensorRef::NULL,
            partial_out_stride: 0,
            partial_lse: std::ptr::null(),
            partial_lse_stride: 0,
            out: TensorRef::NULL,
            lse: std::ptr::null_mut(),
        };
        let backend = Backend::Cpu(cpu::Cpu::new(1).unwrap());
        let executable = backend.build_op(&merge(Dtype::Fp16)).unwrap();
        let _ = executable.launch(&merge(Dtype::Bf16), std::ptr::null_mut());
    }
}
