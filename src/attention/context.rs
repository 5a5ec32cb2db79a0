//! Contexts: a device of the C face, owned.

use super::pass::Launch;
use super::pass::sealed::Params;
use super::status::checked;
use super::tensor::Place;
use crate::capi::backward::{
    flashtune_backward, flashtune_backward_prepare, flashtune_backward_supported, flashtune_backward_workspace_size,
};
use crate::capi::context::*;
use crate::capi::forward::{
    flashtune_forward, flashtune_forward_prepare, flashtune_forward_supported, flashtune_forward_workspace_size,
};
use crate::cpu::HostMemory;
use crate::error::{Error, Result, Status};
use std::ffi::CString;
use std::path::PathBuf;
use std::ptr::{NonNull, null, null_mut};

/// A device, and what is prepared on it. Any number of threads may use a context at once. A context
/// serves the process that made it, and no child made by fork.
#[derive(Debug)]
pub struct Context {
    raw: NonNull<flashtune_context>,
    place: Place,
}

// SAFETY: the C face lets any thread use a context, and free it when no call is running.
unsafe impl Send for Context {}
// SAFETY: the C face lets any number of threads use a context at once.
unsafe impl Sync for Context {}

/// How a context is opened.
#[derive(Clone, Debug)]
pub struct ContextOptions {
    place: Place,
    device: i32,
    num_threads: usize,
    cache_dir: Option<PathBuf>,
    tunes: bool,
}

impl ContextOptions {
    /// The cores of the host.
    pub const fn cpu() -> Self {
        ContextOptions { place: Place::Host, device: 0, num_threads: 0, cache_dir: None, tunes: false }
    }

    /// The GPU of this number, as the CUDA driver counts. Its primary context is used, as the CUDA
    /// runtime and cudarc do.
    pub fn cuda(device: i32) -> Self {
        ContextOptions { place: Place::Device, device, ..Self::cpu() }
    }

    /// Threads of a CPU context; 0 is one for each core that the process may use.
    pub const fn num_threads(mut self, threads: usize) -> Self {
        self.num_threads = threads;
        self
    }

    /// The folder of records and compiled kernels. An empty path keeps everything in memory. The
    /// default is `flashtune` in the user's cache folder.
    pub fn cache_dir(mut self, folder: impl Into<PathBuf>) -> Self {
        self.cache_dir = Some(folder.into());
        self
    }

    /// Measures the candidates for a problem without a record when the problem is prepared, and
    /// keeps the fastest. This takes up to 20 seconds for each problem.
    pub const fn tune(mut self) -> Self {
        self.tunes = true;
        self
    }

    /// Opens the context.
    pub fn open(&self) -> Result<Context> {
        let folder = self.cache_dir.as_ref().map(|folder| CString::new(folder.as_os_str().as_encoded_bytes()));
        let folder = folder.transpose().map_err(|_| Error::invalid("cache_dir has a NUL; no folder is named so"))?;
        let is_cpu = self.place == Place::Host;
        let options = flashtune_context_options {
            struct_size: size_of::<flashtune_context_options>() as u64,
            backend: if is_cpu { FLASHTUNE_BACKEND_CPU } else { FLASHTUNE_BACKEND_CUDA },
            device_ordinal: self.device,
            cuda_context: null_mut(),
            cache_dir: folder.as_ref().map_or(null(), |folder| folder.as_ptr()),
            tuning_policy: if self.tunes { FLASHTUNE_TUNING_TUNE } else { FLASHTUNE_TUNING_RECORDS },
            num_threads: i32::try_from(self.num_threads).unwrap_or(i32::MAX),
            tuning_time_limit_seconds: 0.0,
            pack: null(),
        };
        let mut raw = null_mut();
        // SAFETY: a struct of the size that it says, whose string lives until the call returns.
        checked(unsafe { flashtune_context_create(&options, &mut raw) })?;
        let raw = NonNull::new(raw).expect("a created context is not NULL");
        Ok(Context { raw, place: self.place })
    }
}

impl Context {
    /// The cores of the host, with the default options.
    pub fn cpu() -> Result<Context> {
        ContextOptions::cpu().open()
    }

    /// The GPU of this number, with the default options.
    pub fn cuda(device: i32) -> Result<Context> {
        ContextOptions::cuda(device).open()
    }

    /// From now on, no call prepares anything. A problem that is not prepared then gets
    /// [`Status::NotPrepared`], or a config that is loaded for another shape of its class.
    pub fn seal(&self) -> Result<()> {
        // SAFETY: a live context.
        checked(unsafe { flashtune_context_seal(self.raw.as_ptr()) })
    }

    pub(super) fn place(&self) -> Place {
        self.place
    }

    pub(super) fn supported(&self, params: &Params) -> Result<()> {
        let context = self.raw.as_ptr();
        // SAFETY: a live context and a struct of the size that it says; no data is touched. This
        // holds for the three functions below too.
        checked(unsafe {
            match params {
                Params::Forward(params) => flashtune_forward_supported(context, params),
                Params::Backward(params) => flashtune_backward_supported(context, params),
            }
        })
    }

    pub(super) fn prepare(&self, params: &Params) -> Result<()> {
        let context = self.raw.as_ptr();
        // SAFETY: as above.
        checked(unsafe {
            match params {
                Params::Forward(params) => flashtune_forward_prepare(context, params),
                Params::Backward(params) => flashtune_backward_prepare(context, params),
            }
        })
    }

    pub(super) fn workspace_bytes(&self, params: &Params) -> Result<usize> {
        let (context, mut bytes) = (self.raw.as_ptr(), 0);
        // SAFETY: as above.
        checked(unsafe {
            match params {
                Params::Forward(params) => flashtune_forward_workspace_size(context, params, &mut bytes),
                Params::Backward(params) => flashtune_backward_workspace_size(context, params, &mut bytes),
            }
        })?;
        usize::try_from(bytes).map_err(|_| Error::new(Status::OutOfMemory, format!("a workspace of {bytes} bytes")))
    }

    /// Launches a pass of checked tensors.
    ///
    /// # Safety
    /// The params come from views of this context's memory, which live until the work is done.
    pub(super) unsafe fn launch(&self, params: &Params, launch: &Launch) -> Result<()> {
        let own = match self.place {
            Place::Host => Some(self.workspace_bytes(params)?).filter(|bytes| *bytes > 0),
            Place::Device => None,
        };
        let own = own.map(HostMemory::new).transpose()?;
        let (workspace, bytes) = match &own {
            Some(memory) => (memory.address(), memory.bytes()),
            None => (launch.workspace, launch.workspace_bytes),
        };
        let (context, bytes, stream) = (self.raw.as_ptr(), bytes as u64, launch.stream);
        // SAFETY: the caller's promise for the tensors, and that of `Launch::on_stream` for the
        // stream and the workspace.
        checked(unsafe {
            match params {
                Params::Forward(params) => flashtune_forward(context, params, workspace, bytes, stream),
                Params::Backward(params) => flashtune_backward(context, params, workspace, bytes, stream),
            }
        })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: made by `open` and freed once. No call is running, since calls borrow the
        // context, and `Launch::on_stream` has the promise that a GPU's work is done.
        unsafe { flashtune_context_destroy(self.raw.as_ptr()) };
    }
}
