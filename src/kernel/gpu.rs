//! Gpu: one device through one context. It builds executables and gives the tuner memory, a stream
//! and a clock.
//!
//! It turns a pass into modules on the device. `launch` uses them.

use super::compile::{Target, targets};
use super::cubin_cache::{CubinCache, TextDigest};
use super::cubins::Cubins;
use super::fixed::{FixedKernel, FixedSpec};
use super::launch::Executable;
use super::modules::{self, Loaded, Origin, Source};
use super::pack::{PackStatus, Place};
use super::render_pass;
use super::sm_clock::SmClock;
use super::tile_counters::TileCounters;
use crate::call::Stream;
use crate::config::Config;
use crate::cuda::context::Context;
use crate::cuda::device::describe;
use crate::cuda::event::Event;
use crate::cuda::memory::DeviceMemory;
use crate::cuda::stream::{OwnedStream, is_capturing};
use crate::device::{Arch, Device};
use crate::error::{Error, Result, Status};
use crate::family::spec::{Arguments, KernelSpec};
use crate::pool;
use crate::problem::Problem;
use rayon::prelude::*;
use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::time::Duration;

pub struct Gpu {
    context: Arc<Context>,
    device: Device,
    cubins: Box<Cubins>,
    stream: OwnedStream,
    /// Locked for a whole measurement, so that no two share the stream.
    clock: Mutex<Option<Clock>>,
    /// Made for the first executable that needs the counters.
    tile_counters: Mutex<Option<Arc<TileCounters>>>,
}

/// What `time` needs, made at its first call.
struct Clock {
    start: Event,
    stop: Event,
    /// Twice the L2 cache: overwriting it leaves nothing of a kernel's inputs there.
    flush: DeviceMemory,
    /// None if its kernel cannot be built. Times are then reported without a clock.
    sm_clock: Option<SmClock>,
}

/// A kernel on the device.
pub struct LoadedKernel {
    loaded: Arc<Loaded>,
    pub origin: Origin,
}

/// Time and clock of some work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Elapsed {
    pub time: Duration,
    /// Mean clock of the SMs during the work; None if unknown.
    pub sm_clock_hz: Option<f64>,
}

impl Gpu {
    /// The GPU of the caller's CUDA context. Without one, the GPU of this ordinal through its
    /// primary context. The context must outlive the Gpu and all that it makes. `cache_dir` is the
    /// folder of cubins (`cache_dir::resolve`).
    pub fn new(ordinal: i32, context: Option<*mut c_void>, cache_dir: Option<PathBuf>) -> Result<Gpu> {
        let context = match context {
            // SAFETY: the C face's contract for its `cuda_context` is that of this call.
            Some(raw) => unsafe { Context::of_caller(raw) }?,
            None => Context::primary(ordinal)?,
        };
        let device = describe(context.driver(), context.device())?;
        match device.arch {
            Arch::Sm(major, _) if major >= 8 => {}
            arch => {
                return Err(Error::unsupported(format!("{} is {arch}; the kernels need sm_80 or newer", device.name)));
            }
        }
        let stream = OwnedStream::new(&context)?;
        let cubins = Box::new(Cubins { cache: CubinCache::new(cache_dir.as_deref()), pack: PackStatus::None });
        Ok(Gpu { context, device, cubins, stream, clock: Mutex::default(), tile_counters: Mutex::default() })
    }

    /// The same GPU with the pack at a place before its cubin cache. A pack that does not fit is
    /// refused (`pack`), and the GPU goes on without it.
    pub fn with_pack(mut self, place: Option<Place>) -> Gpu {
        self.cubins.pack = PackStatus::load(place, &self.device);
        self
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    pub fn pack(&self) -> &PackStatus {
        &self.cubins.pack
    }

    /// Whether the pack has all kernels of a pass.
    pub fn is_packed(&self, problem: &Problem, config: &Config) -> bool {
        let Some(pack) = self.cubins.pack.pack() else { return false };
        let has = |(spec, text): &(KernelSpec, String)| {
            let Ok(targets) = targets(self.device.arch, spec.family(config)) else { return false };
            let targets: Vec<String> = targets.iter().map(Target::to_string).collect();
            pack.has(&TextDigest::new(text), &targets)
        };
        render_pass(problem, config, self.device.arch).is_ok_and(|kernels| kernels.iter().all(has))
    }

    /// Renders, compiles or takes from the pack or the cache, and loads all kernels of the pass,
    /// one after the other: many threads may build passes at once.
    pub fn build(&self, problem: &Problem, config: &Config) -> Result<Executable> {
        let rendered = render_pass(problem, config, self.device.arch)?;
        let loaded = rendered.iter().map(|kernel| self.load_rendered(config, kernel)).collect::<Result<_>>()?;
        self.executable(loaded)
    }

    /// As `build`, with the kernels side by side on all cores. A task of a pool builds as `build`
    /// does. While it waited for its kernels it would take up other tasks, which may need a lock
    /// that it holds.
    pub fn build_side_by_side(&self, problem: &Problem, config: &Config) -> Result<Executable> {
        if rayon::current_thread_index().is_some() {
            return self.build(problem, config);
        }
        let rendered = render_pass(problem, config, self.device.arch)?;
        let load = |kernel| self.load_rendered(config, kernel);
        let loaded = pool::install(rendered.len(), || rendered.par_iter().map(load).collect::<Result<_>>())??;
        self.executable(loaded)
    }

    fn load_rendered(&self, config: &Config, (spec, text): &(KernelSpec, String)) -> Result<(KernelSpec, Arc<Loaded>)> {
        let source = Source { name: spec.template, family: spec.family(config), text };
        Ok((*spec, self.load(&source)?.loaded))
    }

    fn executable(&self, kernels: Vec<(KernelSpec, Arc<Loaded>)>) -> Result<Executable> {
        let is_dynamic =
            |spec: &KernelSpec| matches!(spec.arguments, Arguments::ParamsMapsCounter { is_dynamic: true, .. });
        let needs_counters = kernels.iter().any(|(spec, _)| is_dynamic(spec));
        let tile_counters = match needs_counters {
            true => self.tile_counters()?,
            false => None,
        };
        Executable::new(&self.context, kernels, tile_counters, &self.device)
    }

    /// Compiles or takes from the pack or the cache, and loads a rendered kernel. It stays loaded
    /// as long as the result or an executable holds it.
    pub fn load(&self, source: &Source) -> Result<LoadedKernel> {
        let (loaded, origin) = modules::load(&self.context, &self.device, &self.cubins, source)?;
        Ok(LoadedKernel { loaded, origin })
    }

    /// Renders, compiles or takes from the pack or the cache, and loads a kernel that has no
    /// config.
    pub fn build_fixed(&self, spec: &FixedSpec) -> Result<FixedKernel> {
        FixedKernel::new(&self.context, &self.device, &self.cubins, spec)
    }

    /// None if the device has no memory for the counters now: the kernel then runs a fixed
    /// schedule. A later build tries again.
    fn tile_counters(&self) -> Result<Option<Arc<TileCounters>>> {
        let mut guard = self.tile_counters.lock().unwrap_or_else(PoisonError::into_inner);
        if guard.is_none() {
            *guard = match TileCounters::new(&self.context, &self.stream) {
                Ok(counters) => Some(Arc::new(counters)),
                Err(error) if error.status == Status::OutOfMemory => {
                    // Once per process: a device that stays full must not fill a server's log.
                    static ONCE: Once = Once::new();
                    ONCE.call_once(|| {
                        log::warn!(
                            "kernels that draw tiles from a counter run a fixed schedule, without tile counters: {error}"
                        )
                    });
                    None
                }
                Err(error) => return Err(error),
            };
        }
        Ok(guard.clone())
    }

    /// The bytes are uninitialised.
    pub fn allocate(&self, bytes: usize) -> Result<DeviceMemory> {
        DeviceMemory::allocate(&self.context, bytes)
    }

    /// Copies host bytes to the start of `memory`; returns when done.
    pub fn upload(&self, memory: &DeviceMemory, bytes: &[u8]) -> Result<()> {
        memory.upload(bytes, &self.stream)
    }

    /// Copies the start of `memory` to the host once all work queued on `stream()` is done.
    pub fn download(&self, memory: &DeviceMemory, bytes: &mut [u8]) -> Result<()> {
        memory.download(bytes, &self.stream)
    }

    /// Our own stream. Neither the caller's streams nor the default stream synchronise with it.
    pub fn stream(&self) -> Stream {
        self.stream.handle()
    }

    pub fn synchronize(&self) -> Result<()> {
        self.stream.synchronize()
    }

    /// Whether work on a stream would be captured into a graph. The stream is NULL or a live one of
    /// this context.
    #[expect(
        clippy::not_unsafe_ptr_arg_deref,
        reason = "a stream is a handle that the caller answers for, as in launch"
    )]
    pub fn is_capturing(&self, stream: Stream) -> Result<bool> {
        // SAFETY: the C face's contract for its `stream` is that of this call.
        unsafe { is_capturing(&self.context.enter()?, stream) }
    }

    /// Time of one run of `work` on `stream()`, between device events. With `cold` the L2 cache is
    /// overwritten first, which also keeps the device busy while `work` is enqueued, so that the
    /// host's speed is not in the span.
    pub fn time(&self, cold: bool, work: &mut dyn FnMut(Stream) -> Result<()>) -> Result<Elapsed> {
        let mut guard = self.clock.lock().unwrap_or_else(PoisonError::into_inner);
        let clock = match &mut *guard {
            Some(clock) => clock,
            empty => empty.insert(Clock {
                start: Event::new(&self.context)?,
                stop: Event::new(&self.context)?,
                flush: self.allocate((2 * self.device.l2_bytes as usize).max(32 << 20))?,
                sm_clock: SmClock::new(&self.context, &self.device, &self.cubins)
                    .inspect_err(|error| log::warn!("the SMs' clock is not known: {error}"))
                    .ok(),
            }),
        };
        let _current = self.context.enter()?;
        let sm_clock = clock.sm_clock.as_ref();
        sm_clock.map_or(Ok(()), |clock| clock.clear(&self.stream))?;
        if cold {
            clock.flush.fill(0, &self.stream)?;
        }
        sm_clock.map_or(Ok(()), |clock| clock.stamp_before(&self.stream))?;
        clock.start.record(&self.stream)?;
        work(self.stream.handle())?;
        clock.stop.record(&self.stream)?;
        sm_clock.map_or(Ok(()), |clock| clock.stamp_after(&self.stream))?;
        clock.stop.synchronize()?;
        let sm_clock_hz = sm_clock.map_or(Ok(None), |clock| clock.hz(&self.stream))?;
        Ok(Elapsed { time: clock.stop.since(&clock.start)?, sm_clock_hz })
    }
}
