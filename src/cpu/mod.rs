//! The CPU backend: exact tiled attention with online softmax on host memory, multi-threaded.
//!
//! `Cpu` is the machine and `Executable` a pass with its tile size; `forward` and `backward` hold
//! the algorithm. This backend runs without a GPU and is the reference that GPU results are tested
//! against, so it follows every rule of the numbers exactly. It knows nothing of records, the
//! search or C. A launch trusts its Call, as `call` says.

mod amx;
mod backward;
mod block_map;
mod dropout;
mod eight;
mod element;
mod float_environment;
mod forward;
mod host;
mod mask;
mod memory;
mod pairs;
mod product;
mod read_only;
mod scores;
mod sequence;
mod simd;
mod softmax;
mod tile;
#[cfg(test)]
mod tile_unit;
mod transpose;
mod vector;
mod workers;

pub use element::{Element, Tensor};
pub use memory::{FOR_SMALL_ALLOCATIONS, HostMemory, require_available};
pub use sequence::Place;
pub use tile::{BLOCK_STEP, MAX_BLOCK};
pub use workers::{Workers, take};

use crate::call::Call;
use crate::call::Stream;
use crate::config::{Config, Family};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::family;
use crate::problem::{Dtype, Pass, Problem};
use amx::TileUnit;
use half::{bf16, f16};
pub use simd::Level;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tile::TileSize;

/// No host has more hardware threads; a larger number is a mistake.
const MAX_THREADS: usize = 4096;

pub struct Cpu {
    device: Device,
    workers: Arc<Workers>,
    /// `l2_bytes` long and empty until the first cold measurement, each of which writes it.
    cache_filler: Mutex<Vec<u8>>,
}

/// A pass with its tile size, for every shape of its class.
pub struct Executable {
    pass: Pass,
    dtype: Dtype,
    tile_size: TileSize,
    level: Level,
    /// Multiplies bf16 tiles, if the processor has such a unit.
    tile_unit: Option<TileUnit>,
    workers: Arc<Workers>,
}

impl Cpu {
    /// `num_threads` 0 means one per core that this process may use.
    pub fn new(num_threads: usize) -> Result<Cpu> {
        if num_threads > MAX_THREADS {
            return Err(Error::invalid(format!("num_threads is {num_threads}; it must be from 0 to {MAX_THREADS}")));
        }
        let num_threads = match num_threads {
            0 => std::thread::available_parallelism().map_or(1, |count| count.get().min(MAX_THREADS)),
            given => given,
        };
        let workers = Arc::new(Workers::new(num_threads)?);
        Ok(Cpu { device: host::describe(num_threads), workers, cache_filler: Mutex::default() })
    }

    /// Another one with the same threads.
    pub fn beside(&self) -> Cpu {
        Cpu { device: self.device.clone(), workers: self.workers.clone(), cache_filler: Mutex::default() }
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    pub fn build(&self, problem: &Problem, config: &Config) -> Result<Executable> {
        if config.family != Family::Cpu {
            return Err(Error::unsupported(format!("config \"{config}\" is not for the CPU")));
        }
        let tile_size = family::cpu::tile_size(config)?;
        for (knob, value) in [("block_m", tile_size.m), ("block_n", tile_size.n)] {
            if value == 0 || !value.is_multiple_of(BLOCK_STEP as usize) || value > MAX_BLOCK as usize {
                return Err(Error::unsupported(format!(
                    "{knob} is {value}; it must be a multiple of {BLOCK_STEP} up to {MAX_BLOCK}"
                )));
            }
        }
        Ok(Executable {
            pass: problem.pass,
            dtype: problem.dtype,
            tile_size,
            level: Level::detect(),
            tile_unit: wants_tile_unit(problem, tile_size).then(TileUnit::detect).flatten(),
            workers: self.workers.clone(),
        })
    }

    /// The threads that small operations run on beside the passes.
    pub fn workers(&self) -> &Arc<Workers> {
        &self.workers
    }

    pub fn allocate(&self, bytes: usize) -> Result<HostMemory> {
        HostMemory::new(bytes)
    }

    pub fn upload(&self, memory: &HostMemory, bytes: &[u8]) -> Result<()> {
        memory.upload(bytes)
    }

    pub fn download(&self, memory: &HostMemory, bytes: &mut [u8]) -> Result<()> {
        memory.download(bytes)
    }

    pub fn time(&self, cold: bool, work: &mut dyn FnMut(Stream) -> Result<()>) -> Result<Duration> {
        if cold {
            let mut filler = self.cache_filler.lock().unwrap_or_else(PoisonError::into_inner);
            filler.resize(self.device.l2_bytes as usize, 0);
            filler.iter_mut().for_each(|byte| *byte = byte.wrapping_add(1));
            std::hint::black_box(&*filler);
        }
        let start = Instant::now();
        work(std::ptr::null_mut())?;
        Ok(start.elapsed())
    }
}

impl Executable {
    /// Returns when the outputs are written. May run on many threads at once; their tasks share the
    /// workers.
    pub fn launch(&self, call: &Call) -> Result<()> {
        match self.dtype {
            Dtype::Fp16 => self.run::<f16>(call),
            Dtype::Bf16 => self.run::<bf16>(call),
            Dtype::Fp32 => self.run::<f32>(call),
        }
    }

    pub fn kernel_name(&self) -> &str {
        match self.pass {
            Pass::Forward => "flashtune_cpu_forward",
            Pass::Backward => "flashtune_cpu_backward",
        }
    }

    fn run<E: element::Element>(&self, call: &Call) -> Result<()> {
        debug_assert_eq!((call.problem.pass, call.problem.dtype), (self.pass, self.dtype));
        eight::check_scales(call)?;
        match self.pass {
            Pass::Forward => forward::run::<E>(call, self.tile_size, self.level, self.tile_unit, &self.workers),
            Pass::Backward => backward::run::<E>(call, self.tile_size, self.level, self.tile_unit, &self.workers),
        }
    }
}

/// Whether the pass multiplies bf16 numbers as they are, in whole chunks. Only then is the unit's
/// permission asked for.
fn wants_tile_unit(problem: &Problem, tile_size: TileSize) -> bool {
    let is_plain = problem.dtype == Dtype::Bf16 && problem.key_format() == 0;
    is_plain && tile_size.n.is_multiple_of(pairs::CHUNK)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Status;

    #[test]
    fn a_config_that_cannot_run_is_refused_with_the_knob_and_its_value() {
        let problem = Problem::dense(Pass::Forward, Dtype::Fp32, 1, 1, 8, 8);
        let cpu = Cpu::new(1).unwrap();
        let error = |config| cpu.build(&problem, &config).err().expect("refused");
        let blocks = |m, n| Config::new(Family::Cpu, [("block_m", m), ("block_n", n)]);
        assert!(error(blocks(24, 32)).message.contains("block_m is 24"));
        assert!(error(blocks(32, 2048)).message.contains("block_n is 2048"));
        assert!(
            error(Config::new(Family::Cpu, [("block_m", 32)])).message.contains("block_n (keys of a tile) is missing")
        );
        assert_eq!(error(Config::new(Family::Sm80, [])).status, Status::Unsupported);
        assert!(cpu.build(&problem, &blocks(16, 16)).is_ok());
    }

    #[test]
    fn the_number_of_threads_is_as_asked_and_bounded() {
        assert_eq!(Cpu::new(3).unwrap().device().sm_count, 3);
        assert!(Cpu::new(0).unwrap().device().sm_count >= 1);
        assert_eq!(Cpu::new(MAX_THREADS + 1).err().unwrap().status, Status::InvalidArgument);
    }

    #[test]
    fn a_failing_launch_is_not_timed() {
        let cpu = Cpu::new(1).unwrap();
        let mut runs = 0;
        let mut work = |_| {
            runs += 1;
            if runs == 2 { Err(Error::unsupported("on purpose")) } else { Ok(()) }
        };
        assert!(cpu.time(true, &mut work).is_ok());
        assert!(cpu.time(false, &mut work).is_err());
    }
}
