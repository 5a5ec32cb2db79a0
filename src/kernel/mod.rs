//! Kernels on the GPU: render a template, compile it, keep the cubin, load it, launch it.

pub mod cache_dir;
pub mod geometry;
mod params;

pub use params::KernelParams;

use crate::backend::{Resources, Stream};
use crate::call::Call;
use crate::config::Config;
use crate::device::Device;
use crate::error::Result;
use crate::problem::Problem;
use std::time::Duration;

pub struct Gpu;
pub struct Executable;
pub struct DeviceMemory;

impl Gpu {
    pub unsafe fn open(
        _ordinal: i32,
        _cuda_context: *mut std::ffi::c_void,
        _cache_dir: Option<std::path::PathBuf>,
    ) -> Result<Gpu> {
        Err(crate::error::Error::new(crate::error::Status::NoDevice, "no CUDA in this placeholder"))
    }
    pub fn is_capturing(&self, _stream: Stream) -> Result<bool> {
        unimplemented!()
    }
    pub fn device(&self) -> &Device {
        unimplemented!()
    }
    pub fn build(&self, _problem: &Problem, _config: &Config) -> Result<Executable> {
        unimplemented!()
    }
    pub fn allocate(&self, _bytes: usize) -> Result<DeviceMemory> {
        unimplemented!()
    }
    pub fn upload(&self, _memory: &DeviceMemory, _bytes: &[u8]) -> Result<()> {
        unimplemented!()
    }
    pub fn download(&self, _memory: &DeviceMemory, _bytes: &mut [u8]) -> Result<()> {
        unimplemented!()
    }
    pub fn stream(&self) -> Stream {
        unimplemented!()
    }
    pub fn synchronize(&self) -> Result<()> {
        unimplemented!()
    }
    pub fn time(&self, _cold: bool, _work: &mut dyn FnMut(Stream) -> Result<()>) -> Result<Duration> {
        unimplemented!()
    }
}

impl Executable {
    pub fn launch(&self, _call: &Call, _stream: Stream) -> Result<()> {
        unimplemented!()
    }
    pub fn resources(&self) -> Resources {
        unimplemented!()
    }
    pub fn kernel_name(&self) -> &str {
        unimplemented!()
    }
}

impl DeviceMemory {
    pub fn address(&self) -> *mut std::ffi::c_void {
        unimplemented!()
    }
    pub fn bytes(&self) -> usize {
        unimplemented!()
    }
}
