//! The CPU backend: the same tiled online-softmax algorithm on host memory, multi-threaded.

use crate::backend::Stream;
use crate::call::Call;
use crate::config::Config;
use crate::device::Device;
use crate::error::Result;
use crate::problem::Problem;
use std::time::Duration;

pub struct Cpu;
pub struct Executable;
pub struct HostMemory;

impl Cpu {
    /// `num_threads` 0 means one per core that this process may use.
    pub fn new(_num_threads: usize) -> Result<Cpu> {
        unimplemented!()
    }
    pub fn device(&self) -> &Device {
        unimplemented!()
    }
    pub fn build(&self, _problem: &Problem, _config: &Config) -> Result<Executable> {
        unimplemented!()
    }
    pub fn allocate(&self, _bytes: usize) -> Result<HostMemory> {
        unimplemented!()
    }
    pub fn upload(&self, _memory: &HostMemory, _bytes: &[u8]) -> Result<()> {
        unimplemented!()
    }
    pub fn download(&self, _memory: &HostMemory, _bytes: &mut [u8]) -> Result<()> {
        unimplemented!()
    }
    pub fn time(&self, _cold: bool, _work: &mut dyn FnMut(Stream) -> Result<()>) -> Result<Duration> {
        unimplemented!()
    }
}

impl Executable {
    pub fn launch(&self, _call: &Call) -> Result<()> {
        unimplemented!()
    }
    pub fn kernel_name(&self) -> &str {
        unimplemented!()
    }
}

impl HostMemory {
    pub fn address(&self) -> *mut std::ffi::c_void {
        unimplemented!()
    }
    pub fn bytes(&self) -> usize {
        unimplemented!()
    }
}
