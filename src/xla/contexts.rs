//! The contexts of the handlers: one for the CPU and one for each GPU that XLA uses. Each is made
//! at its first call and lives as long as the process.
//!
//! A call cannot bring a context along: XLA may store compiled programs on disk, with their
//! attributes.

use super::failure::{Result, check};
use crate::capi::context::{
    FLASHTUNE_BACKEND_CPU, FLASHTUNE_BACKEND_CUDA, FLASHTUNE_TUNING_RECORDS, flashtune_context,
    flashtune_context_create, flashtune_context_options,
};
use crate::fork;
use std::collections::HashMap;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Device {
    Cpu,
    /// The number by which XLA and the CUDA driver know the GPU.
    Cuda(i32),
}

/// The contexts of a process. A forked child makes a table of its own: a thread of the parent may
/// hold the lock of the parent's, and the child has no such thread.
struct Table {
    generation: u32,
    addresses: Mutex<HashMap<Device, usize>>,
}

static TABLE: AtomicPtr<Table> = AtomicPtr::new(null_mut());

fn table() -> &'static Table {
    let generation = fork::generation();
    loop {
        let current = TABLE.load(Ordering::Acquire);
        // SAFETY: null, or a table that was leaked below and is never freed.
        if let Some(table) = unsafe { current.as_ref() }
            && table.generation == generation
        {
            return table;
        }
        let fresh = Box::into_raw(Box::new(Table { generation, addresses: Mutex::default() }));
        if TABLE.compare_exchange(current, fresh, Ordering::AcqRel, Ordering::Acquire).is_err() {
            // SAFETY: no other thread has seen it.
            drop(unsafe { Box::from_raw(fresh) });
        }
    }
}

pub fn context(device: Device) -> Result<*mut flashtune_context> {
    // A context under construction keeps others waiting: two of one device would compile twice.
    let mut contexts = table().addresses.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(address) = contexts.get(&device) {
        return Ok(std::ptr::with_exposed_provenance_mut(*address));
    }
    let (backend, device_ordinal) = match device {
        Device::Cpu => (FLASHTUNE_BACKEND_CPU, 0),
        Device::Cuda(ordinal) => (FLASHTUNE_BACKEND_CUDA, ordinal),
    };
    let options = flashtune_context_options {
        struct_size: size_of::<flashtune_context_options>() as u64,
        backend,
        device_ordinal,
        cuda_context: null_mut(),
        cache_dir: null(),
        tuning_policy: FLASHTUNE_TUNING_RECORDS,
        num_threads: 0,
        tuning_time_limit_seconds: 0.0,
        pack: null(),
    };
    let mut made = null_mut();
    // SAFETY: both live during the call.
    check(unsafe { flashtune_context_create(&options, &mut made) })?;
    contexts.insert(device, made.expose_provenance());
    Ok(made)
}
