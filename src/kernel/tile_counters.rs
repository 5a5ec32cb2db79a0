//! Tile counters: the words in device memory from which the CTAs of a launch take their next tile.
//!
//! A launch's last CTA sets its counter to zero again, so launches in a row may share a counter,
//! and launches that may overlap must not. Launches of one stream never overlap, so a stream owns a
//! counter. Launches of a captured graph run whenever the graph is launched, on any stream, so each
//! captured launch keeps a counter of its own for good. Where none is left a launch gets NULL, and
//! its kernel runs a fixed schedule. Choosing a counter neither locks, allocates nor waits.

use crate::call::Stream;
use crate::cuda::context::{Context, Current};
use crate::cuda::memory::DeviceMemory;
use crate::cuda::stream::{self, OwnedStream};
use crate::error::Result;
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// The kernel's two words, {next tile, CTAs that are done}, and as many bytes again between
/// neighbours.
const SLOT_BYTES: usize = 16;
/// The streams that may ever launch; a process that makes a stream for each request may use them
/// up.
const STREAMS: usize = 4096;
/// The launches that may ever be captured: 80 layers in 67 batch sizes, ten times over.
const CAPTURES: usize = 61440;
/// A stream searches this many places for its slot; a longer search would cost more than the fixed
/// schedule loses.
const PROBES: usize = 32;

pub struct TileCounters {
    memory: DeviceMemory,
    slots: Slots,
}

impl TileCounters {
    pub fn new(context: &Arc<Context>, stream: &OwnedStream) -> Result<TileCounters> {
        let memory = DeviceMemory::zeroed(context, (STREAMS + CAPTURES) * SLOT_BYTES, stream)?;
        Ok(TileCounters { memory, slots: Slots::new(STREAMS, CAPTURES) })
    }

    /// The address of the counter for a launch that is about to be enqueued on `stream`; NULL where
    /// none is left.
    ///
    /// # Safety
    /// `stream` is a live CUstream of the current context, NULL, or one of the driver's special
    /// handles.
    pub unsafe fn next(&self, current: &Current<'_>, stream: Stream) -> Result<*mut c_void> {
        // SAFETY: the caller's promise.
        let slot = match unsafe { stream::is_capturing(current, stream) }? {
            true => self.slots.of_capture(),
            // SAFETY: as above.
            false => self.slots.of_stream(unsafe { stream::id(current, stream) }?),
        };
        Ok(slot.map_or(std::ptr::null_mut(), |slot| self.memory.address().wrapping_byte_add(slot * SLOT_BYTES)))
    }
}

/// Which stream owns which slot. Slots are never given back: no call tells whether a stream or a
/// graph still exists.
struct Slots {
    /// For each of the first slots the stream that owns it, as its number plus one; 0 where it is
    /// free.
    owners: Box<[AtomicU64]>,
    captures: usize,
    captured: AtomicUsize,
}

impl Slots {
    fn new(streams: usize, captures: usize) -> Slots {
        Slots { owners: (0..streams).map(|_| AtomicU64::new(0)).collect(), captures, captured: AtomicUsize::new(0) }
    }

    /// The slot of a stream, the same at every call. A stream takes the first free place from its
    /// home on, and finds it there ever after, since no place becomes free again.
    fn of_stream(&self, id: u64) -> Option<usize> {
        let owner = id.checked_add(1)?;
        // Fibonacci hashing (2^64 over the golden ratio) spreads numbers that follow each other.
        let home = (id.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize;
        (0..PROBES).map(|step| (home + step) % self.owners.len()).find(|slot| {
            let present = self.owners[*slot].load(Ordering::Relaxed);
            present == owner
                || present == 0
                    && match self.owners[*slot].compare_exchange(0, owner, Ordering::Relaxed, Ordering::Relaxed) {
                        Ok(_) => true,
                        // Another thread was first, perhaps for the same stream.
                        Err(other) => other == owner,
                    }
        })
    }

    /// A slot that no launch had before and none gets again.
    fn of_capture(&self) -> Option<usize> {
        let index = self.captured.fetch_add(1, Ordering::Relaxed);
        (index < self.captures).then(|| self.owners.len() + index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeMap, BTreeSet};

    #[test]
    fn streams_and_captures_never_share_a_slot_across_threads() {
        let slots = Slots::new(256, 256);
        // Every thread asks for the same streams, in another order, and captures in between.
        let found: Vec<(u64, usize)> = std::thread::scope(|scope| {
            let ask = |thread: u64| {
                let slots = &slots;
                move || {
                    let ids = (0..100).map(|nth| (nth * 37 + thread * 13) % 100);
                    let of_streams = ids.map(|id| (id, slots.of_stream(id).unwrap()));
                    let captured = (0..30).map(|nth| (1000 + thread * 30 + nth, slots.of_capture().unwrap()));
                    of_streams.chain(captured).collect::<Vec<_>>()
                }
            };
            let threads: Vec<_> = (0..8).map(|thread| scope.spawn(ask(thread))).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        let by_owner: BTreeMap<u64, usize> = found.iter().copied().collect();
        assert!(found.iter().all(|(owner, slot)| by_owner[owner] == *slot), "a stream keeps its slot");
        let slots: BTreeSet<usize> = by_owner.values().copied().collect();
        assert_eq!((by_owner.len(), slots.len()), (100 + 8 * 30, 100 + 8 * 30));
        assert!(slots.iter().all(|slot| *slot < 512));
    }

    #[test]
    fn a_stream_that_finds_all_slots_taken_gets_none_and_the_others_keep_theirs() {
        let slots = Slots::new(64, 3);
        let before: Vec<_> = (0..1000).map(|id| slots.of_stream(id)).collect();
        assert!(before.iter().flatten().count() <= 64);
        assert!(before[..8].iter().all(Option::is_some) && before.contains(&None));
        assert_eq!((0..1000).map(|id| slots.of_stream(id)).collect::<Vec<_>>(), before);
        assert_eq!([(); 5].map(|()| slots.of_capture()), [Some(64), Some(65), Some(66), None, None]);
        assert_eq!(slots.of_stream(u64::MAX), None);
    }
}
