//! Backend: the one place where GPU and CPU meet, so that plan and tune are written once.
//!
//! It knows how to build an Executable for (Problem, Config), to launch it, and what the tuner needs of a machine:
//! memory, copies and a clock. It knows nothing of records, spaces or C.

use crate::call::Call;
use crate::config::Config;
use crate::cpu;
use crate::device::Device;
use crate::error::{Result, Status};
use crate::kernel;
use crate::kv_append::{KvAppend, KvAppendClass};
use crate::merge::{Merge, MergeClass};
use crate::problem::Problem;
use std::path::PathBuf;

pub use crate::call::Stream;
pub use crate::kernel::{Elapsed, Resources};

pub enum Backend {
    Cuda(kernel::Gpu),
    Cpu(cpu::Cpu),
}

/// A (Problem class, Config) built and loaded: ready for any shape of its class. Cheap to share; launches from many
/// threads at once are fine.
pub enum Executable {
    Cuda(kernel::Executable),
    Cpu(cpu::Executable),
}

/// What merges partial results, built and loaded. Shared as an Executable.
pub enum Merger {
    Cuda(kernel::Merger),
    Cpu(cpu::Merger),
}

/// What writes new keys into a cache, built and loaded. Shared as an Executable.
pub enum KvAppender {
    Cuda(kernel::KvAppender),
    Cpu(cpu::KvAppender),
}

/// Memory of the backend's device, owned; freed on drop.
pub enum Memory {
    Cuda(kernel::DeviceMemory),
    Cpu(cpu::HostMemory),
}

impl Backend {
    /// The GPU if it is complete, that is usable and with a compiler for it, else the CPU, with the reason as a log line.
    pub fn open_auto(ordinal: i32, cache_dir: Option<PathBuf>, num_threads: usize) -> Result<Backend> {
        let (reason, level) = match kernel::Gpu::new(ordinal, None, cache_dir) {
            // With cubins in the cache it would do some problems, and fail at others.
            Ok(gpu) if gpu.device().nvrtc_version == (0, 0) => {
                (format!("{} is there, but no libnvrtc", gpu.device().name), log::Level::Warn)
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

    /// Renders, compiles (or takes from the cubin cache) and loads. May run on several threads at once.
    pub fn build(&self, problem: &Problem, config: &Config) -> Result<Executable> {
        match self {
            Backend::Cuda(gpu) => gpu.build(problem, config).map(Executable::Cuda),
            Backend::Cpu(cpu) => cpu.build(problem, config).map(Executable::Cpu),
        }
    }

    pub fn build_merger(&self, class: &MergeClass) -> Result<Merger> {
        match self {
            Backend::Cuda(gpu) => gpu.build_merger(class).map(Merger::Cuda),
            Backend::Cpu(cpu) => Ok(Merger::Cpu(cpu.build_merger())),
        }
    }

    pub fn build_kv_appender(&self, class: &KvAppendClass) -> Result<KvAppender> {
        match self {
            Backend::Cuda(gpu) => gpu.build_kv_appender(class).map(KvAppender::Cuda),
            Backend::Cpu(cpu) => Ok(KvAppender::Cpu(cpu.build_kv_appender())),
        }
    }

    /// Bytes are left as they come: nothing relies on zeros.
    pub fn allocate(&self, bytes: usize) -> Result<Memory> {
        match self {
            Backend::Cuda(gpu) => gpu.allocate(bytes).map(Memory::Cuda),
            Backend::Cpu(cpu) => cpu.allocate(bytes).map(Memory::Cpu),
        }
    }

    /// Copies host bytes to the start of `memory`; returns when done. Lengths must not exceed the allocation.
    pub fn upload(&self, memory: &Memory, bytes: &[u8]) -> Result<()> {
        match (self, memory) {
            (Backend::Cuda(gpu), Memory::Cuda(memory)) => gpu.upload(memory, bytes),
            (Backend::Cpu(cpu), Memory::Cpu(memory)) => cpu.upload(memory, bytes),
            _ => unreachable!("memory of another backend"),
        }
    }

    /// Copies the start of `memory` to the host once all work queued on the backend's own stream is done.
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

    /// Time of one run of `work` on the backend's own stream, by device events on the GPU and the monotonic clock on
    /// the CPU. With `cold` the last-level cache is overwritten first, outside the timed span.
    pub fn time(&self, cold: bool, work: &mut dyn FnMut(Stream) -> Result<()>) -> Result<Elapsed> {
        match self {
            Backend::Cuda(gpu) => gpu.time(cold, work),
            Backend::Cpu(cpu) => Ok(Elapsed { time: cpu.time(cold, work)?, sm_clock_hz: None }),
        }
    }
}

impl Executable {
    /// Enqueues the pass on `stream` (CPU: runs it). No allocation, synchronisation, compilation, file or lock.
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

impl Merger {
    /// Enqueues the work on `stream` (CPU: does it), as an Executable.
    pub fn launch(&self, merge: &Merge, stream: Stream) -> Result<()> {
        match self {
            Merger::Cuda(merger) => merger.launch(merge, stream),
            Merger::Cpu(merger) => merger.launch(merge),
        }
    }
}

impl KvAppender {
    /// Enqueues the work on `stream` (CPU: does it), as an Executable.
    pub fn launch(&self, append: &KvAppend, stream: Stream) -> Result<()> {
        match self {
            KvAppender::Cuda(appender) => appender.launch(append, stream),
            KvAppender::Cpu(appender) => appender.launch(append),
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
