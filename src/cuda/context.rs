//! A CUDA context: the primary one of a device or the caller's own, and the guards that make it
//! current.
//!
//! Every driver call of flashtune happens inside `Context::enter` or `Context::setup`. Both restore
//! the caller's current context.

use super::driver::Driver;
use crate::error::Result;
use cudarc::driver::sys::{CUcontext, CUdevice, CUstreamCaptureMode};
use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::sync::Arc;

pub struct Context {
    driver: &'static Driver,
    raw: CUcontext,
    device: CUdevice,
    /// Whether it is the device's primary context, retained by us.
    retained: bool,
}

// SAFETY: a CUcontext may be used from any thread; which thread it is current on is the driver's,
// per-thread state.
unsafe impl Send for Context {}
// SAFETY: as above; the fields never change.
unsafe impl Sync for Context {}

impl Context {
    /// The primary context of a device: the one that the CUDA runtime, and so PyTorch, uses.
    pub fn primary(ordinal: i32) -> Result<Arc<Context>> {
        let driver = Driver::get()?;
        let device = super::device::at(driver, ordinal)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: a valid device; released in drop.
        unsafe { driver.primary_ctx_retain(&mut raw, device) }?;
        Ok(Arc::new(Context { driver, raw, device, retained: true }))
    }

    /// The caller's own context.
    ///
    /// # Safety
    /// `raw` is a CUcontext that outlives everything made from the result.
    pub unsafe fn of_caller(raw: *mut c_void) -> Result<Arc<Context>> {
        let driver = Driver::get()?;
        let mut context = Context { driver, raw: raw.cast(), device: 0, retained: false };
        let mut device = 0;
        {
            let _current = context.enter()?;
            // SAFETY: a context is current; writes one int.
            unsafe { driver.ctx_get_device(&mut device) }?;
        }
        context.device = device;
        Ok(Arc::new(context))
    }

    pub fn driver(&self) -> &'static Driver {
        self.driver
    }

    pub fn device(&self) -> CUdevice {
        self.device
    }

    /// Identifies the context among those alive.
    pub fn id(&self) -> usize {
        self.raw as usize
    }

    /// Makes the context current on this thread until the guard is dropped. If it is current
    /// already, as for a caller of the runtime API, that costs one query.
    pub fn enter(&self) -> Result<Current<'_>> {
        let mut current = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        unsafe { self.driver.ctx_get_current(&mut current) }?;
        let pushed = current != self.raw;
        if pushed {
            // SAFETY: a live context; popped by the guard, on this thread, since the guard is not
            // Send.
            unsafe { self.driver.ctx_push_current(self.raw) }?;
        }
        Ok(Current { context: self, pushed, _this_thread: PhantomData })
    }

    /// As `enter`, for work that allocates, loads or frees. It may go on while another stream of
    /// the process is being captured; the default capture mode would refuse such calls and break
    /// the capture.
    pub fn setup(&self) -> Result<Setup<'_>> {
        let current = self.enter()?;
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_int;
        // SAFETY: swaps this thread's mode with `mode`; the guard swaps back.
        unsafe { self.driver.exchange_capture_mode(&mut mode) }?;
        Ok(Setup { mode, current })
    }

    /// Gives something of the context back, as in `setup`. A driver call may fail because of work
    /// before it, so the way there is tried twice: nothing stays behind because of one failure.
    pub fn release(&self, give_back: impl FnOnce(&'static Driver) -> Result<()>) {
        let Ok(_setup) = self.setup().or_else(|_| self.setup()) else { return };
        // Given back once, whatever the driver says: it may report the failure of earlier work.
        let _ = give_back(self.driver);
    }

    fn is_current(&self) -> bool {
        let mut current = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        unsafe { self.driver.ctx_get_current(&mut current) }.is_ok() && current == self.raw
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.retained {
            // SAFETY: retained once in `primary`. An error (the driver is shutting down) leaves
            // nothing to do.
            let _ = unsafe { self.driver.primary_ctx_release(self.device) };
        }
    }
}

/// A guard: the context is current on this thread while this lives.
pub struct Current<'a> {
    context: &'a Context,
    pushed: bool,
    _this_thread: PhantomData<*const ()>,
}

impl Current<'_> {
    pub fn driver(&self) -> &'static Driver {
        self.context.driver
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if self.pushed {
            let pop = || {
                let mut popped = std::ptr::null_mut();
                // SAFETY: pushed by `enter` on this thread; guards are dropped in reverse order,
                // being scoped.
                unsafe { self.context.driver.ctx_pop_current(&mut popped) }
            };
            // The context below is another one, or `enter` would not have pushed ours.
            if pop().is_err() && self.context.is_current() {
                let _ = pop();
            }
        }
    }
}

/// A guard: the context is current on this thread, and the thread's capture mode relaxed, while
/// this lives.
pub struct Setup<'a> {
    mode: c_int,
    current: Current<'a>,
}

impl Drop for Setup<'_> {
    fn drop(&mut self) {
        let restore = |mut mode: c_int| {
            // SAFETY: swaps back what `setup` swapped in.
            unsafe { self.current.context.driver.exchange_capture_mode(&mut mode) }
        };
        // Setting it twice does no harm.
        let _ = restore(self.mode).or_else(|_| restore(self.mode));
    }
}
