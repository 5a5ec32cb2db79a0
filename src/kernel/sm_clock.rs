//! SmClock: the clock that the SMs ran at during some work. A kernel before the work and one after
//! it store each SM's cycle counter and the GPU's timer.
//!
//! A GPU at its power limit changes its clock from kernel to kernel, faster than the driver or NVML
//! report. `tune::utilisation` needs this clock to know a kernel's best possible time. Measurements
//! use it, launches do not.

use super::constants::Value;
use super::cubins::Cubins;
use super::fixed::{FixedKernel, FixedSpec};
use crate::cuda::context::Context;
use crate::cuda::memory::DeviceMemory;
use crate::cuda::stream::OwnedStream;
use crate::device::Device;
use crate::error::Result;
use std::sync::Arc;

/// More slots than any GPU has SMs, whose numbers may have gaps.
const SLOTS: u32 = 1024;
/// A cycle count and nanoseconds, uint64 each: the twin of `Stamp` in `templates/sm_clock.cu.tera`.
const STAMP_BYTES: usize = 16;

pub(super) struct SmClock {
    kernel: FixedKernel,
    /// Stamps before the work and after it. A slot of zeros has no stamp.
    stamps: [DeviceMemory; 2],
}

/// The kernel that writes the stamps: CTAs of one thread, each of which stamps its SM.
pub fn spec() -> FixedSpec {
    FixedSpec { name: "sm_clock", threads: 1, class: Vec::new(), knobs: vec![("slots", Value::Integer(SLOTS))] }
}

impl SmClock {
    pub fn new(context: &Arc<Context>, device: &Device, cubins: &Cubins) -> Result<SmClock> {
        let kernel = FixedKernel::new(context, device, cubins, &spec())?;
        let stamps = || DeviceMemory::allocate(context, SLOTS as usize * STAMP_BYTES);
        Ok(SmClock { kernel, stamps: [stamps()?, stamps()?] })
    }

    pub fn clear(&self, stream: &OwnedStream) -> Result<()> {
        self.stamps.iter().try_for_each(|stamps| stamps.fill(0, stream))
    }

    pub fn stamp_before(&self, stream: &OwnedStream) -> Result<()> {
        self.stamp(&self.stamps[0], stream)
    }

    pub fn stamp_after(&self, stream: &OwnedStream) -> Result<()> {
        self.stamp(&self.stamps[1], stream)
    }

    fn stamp(&self, stamps: &DeviceMemory, stream: &OwnedStream) -> Result<()> {
        let grid = [self.kernel.sm_count(), 1, 1];
        // SAFETY: the kernel takes one address, of SLOTS stamps. They live until the stream's work
        // is done, since freeing them waits for it. The stream is of the kernel's context.
        unsafe { self.kernel.launch(grid, &stamps.address(), stream.handle()) }
    }

    /// Mean Hz between the two stamps, after all work on the stream is done. None if no SM has both
    /// stamps.
    pub fn hz(&self, stream: &OwnedStream) -> Result<Option<f64>> {
        let read = |memory: &DeviceMemory| -> Result<Vec<u8>> {
            let mut bytes = vec![0; memory.bytes()];
            memory.download(&mut bytes, stream)?;
            Ok(bytes)
        };
        Ok(mean_hz(&read(&self.stamps[0])?, &read(&self.stamps[1])?))
    }
}

/// The mean over the SMs that have a stamp in both.
fn mean_hz(before: &[u8], after: &[u8]) -> Option<f64> {
    let words = |stamp: &[u8]| {
        let word = |at: usize| u64::from_le_bytes(stamp[at..at + 8].try_into().expect("eight bytes"));
        [word(0), word(8)]
    };
    let hz: Vec<f64> = before
        .chunks_exact(STAMP_BYTES)
        .zip(after.chunks_exact(STAMP_BYTES))
        .map(|(before, after)| (words(before), words(after)))
        // The timer of some GPUs ticks once a microsecond, so it may stand still in a short span.
        .filter(|([_, from], [_, to])| *from > 0 && to > from)
        .map(|([from_cycle, from], [to_cycle, to])| to_cycle.wrapping_sub(from_cycle) as f64 * 1e9 / (to - from) as f64)
        .collect();
    (!hz.is_empty()).then(|| hz.iter().sum::<f64>() / hz.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_is_the_mean_over_sms_that_were_stamped_twice() {
        let bytes =
            |stamps: [[u64; 2]; 4]| -> Vec<u8> { stamps.into_iter().flatten().flat_map(u64::to_le_bytes).collect() };
        // 1500 and 1700 cycles in a microsecond; an SM without a second stamp, and one without any.
        let before = bytes([[100, 5000], [0, 5100], [7, 5000], [0, 0]]);
        let after = bytes([[1600, 6000], [1700, 6100], [0, 0], [0, 0]]);
        assert_eq!(mean_hz(&before, &after), Some(1.6e9));
        assert_eq!(mean_hz(&before, &before), None);
    }
}
