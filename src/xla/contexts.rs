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
use std::sync::{Mutex, PoisonError};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Device {
    Cpu,
    /// The number by which XLA and the CUDA driver know the GPU.
    Cuda(i32),
}

/// Addresses of contexts, by device and process.
static CONTEXTS: Mutex<Option<HashMap<(Device, u32), usize>>> = Mutex::new(None);

pub fn context(device: Device) -> Result<*mut flashtune_context> {
    // A context under construction keeps others waiting: two of one device would compile twice.
    let mut contexts = CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner);
    let contexts = contexts.get_or_insert_default();
    let key = (device, fork::generation());
    if let Some(address) = contexts.get(&key) {
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
    contexts.insert(key, made.expose_provenance());
    Ok(made)
}
