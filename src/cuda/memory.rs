//! Device memory, owned: allocated, copied to and from, freed on drop.

use super::context::Context;
use super::stream::OwnedStream;
use crate::error::{Error, Result};
use cudarc::driver::sys::CUdeviceptr;
use std::ffi::c_void;
use std::sync::Arc;

pub struct DeviceMemory {
    context: Arc<Context>,
    address: CUdeviceptr,
    bytes: usize,
}

impl DeviceMemory {
    /// The bytes are not initialised. The driver has no empty allocation: 0 bytes give a null
    /// address.
    pub fn allocate(context: &Arc<Context>, bytes: usize) -> Result<DeviceMemory> {
        let mut address = 0;
        if bytes > 0 {
            let _setup = context.setup()?;
            // SAFETY: the context is current; freed in drop.
            unsafe { context.driver().mem_alloc(&mut address, bytes) }
                .map_err(|error| error.context(format_args!("allocating {bytes} bytes of device memory")))?;
        }
        Ok(DeviceMemory { context: context.clone(), address, bytes })
    }

    /// All zeros. Returns when they are written, so every stream sees them.
    pub fn zeroed(context: &Arc<Context>, bytes: usize, stream: &OwnedStream) -> Result<DeviceMemory> {
        // The guard spans the wait too: in the default capture mode another stream's capture
        // refuses it.
        let _setup = context.setup()?;
        let memory = DeviceMemory::allocate(context, bytes)?;
        memory.fill(0, stream)?;
        stream.synchronize()?;
        Ok(memory)
    }

    pub fn address(&self) -> *mut c_void {
        self.address as *mut c_void
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies host bytes to the start, in the order of `stream`, and waits.
    pub fn upload(&self, bytes: &[u8], stream: &OwnedStream) -> Result<()> {
        self.check_length("upload", bytes.len())?;
        if !bytes.is_empty() {
            let _current = self.context.enter()?;
            let driver = self.context.driver();
            // SAFETY: the allocation holds that many bytes; `bytes` outlives the wait below.
            unsafe { driver.memcpy_to_device(self.address, bytes.as_ptr().cast(), bytes.len(), stream.raw()) }?;
        }
        stream.synchronize()
    }

    /// Copies the start to host bytes once all work queued on `stream` is done.
    pub fn download(&self, bytes: &mut [u8], stream: &OwnedStream) -> Result<()> {
        self.check_length("download", bytes.len())?;
        if !bytes.is_empty() {
            let _current = self.context.enter()?;
            let driver = self.context.driver();
            // SAFETY: as in `upload`.
            unsafe { driver.memcpy_to_host(bytes.as_mut_ptr().cast(), self.address, bytes.len(), stream.raw()) }?;
        }
        stream.synchronize()
    }

    /// Overwrites all bytes, in the order of `stream`. Does not wait.
    pub fn fill(&self, value: u8, stream: &OwnedStream) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: the allocation holds that many bytes and lives until the stream's work is done:
        // freeing waits.
        unsafe { self.context.driver().memset(self.address, value, self.bytes, stream.raw()) }
    }

    fn check_length(&self, what: &str, length: usize) -> Result<()> {
        match length <= self.bytes {
            true => Ok(()),
            false => Err(Error::invalid(format!("{what} of {length} bytes; the allocation has {} bytes", self.bytes))),
        }
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.address == 0 {
            return;
        }
        // SAFETY: allocated in `allocate`, freed once. cuMemFree waits for work that uses it.
        self.context.release(|driver| unsafe { driver.mem_free(self.address) });
    }
}
