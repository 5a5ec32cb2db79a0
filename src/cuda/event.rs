//! Events: points in a stream, and the device's time between two of them.

use super::context::Context;
use super::stream::OwnedStream;
use crate::error::Result;
use cudarc::driver::sys::CUevent;
use std::sync::Arc;
use std::time::Duration;

pub struct Event {
    context: Arc<Context>,
    raw: CUevent,
}

// SAFETY: a CUevent may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above; the driver orders concurrent calls.
unsafe impl Sync for Event {}

impl Event {
    pub fn new(context: &Arc<Context>) -> Result<Event> {
        let _setup = context.setup()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the context is current; destroyed in drop. Flags 0: it keeps time.
        unsafe { context.driver().event_create(&mut raw, 0) }?;
        Ok(Event { context: context.clone(), raw })
    }

    pub fn record(&self, stream: &OwnedStream) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: both are live and of the same context.
        unsafe { self.context.driver().event_record(self.raw, stream.raw()) }
    }

    pub fn synchronize(&self) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: a live event.
        unsafe { self.context.driver().event_synchronize(self.raw) }
    }

    /// The time from `start` to this event. Both must have completed.
    pub fn since(&self, start: &Event) -> Result<Duration> {
        let _current = self.context.enter()?;
        let mut milliseconds = 0.0f32;
        // SAFETY: live events of the same context; writes one float.
        unsafe { self.context.driver().event_elapsed_time(&mut milliseconds, start.raw, self.raw) }?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once.
        self.context.release(|driver| unsafe { driver.event_destroy(self.raw) });
    }
}
