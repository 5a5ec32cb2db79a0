//! The devices that the driver shows, described as `device::Device`.

use super::driver::Driver;
use crate::device::{Arch, Device};
use crate::error::{Error, Result, Status};
use cudarc::driver::sys::{CUdevice, CUdevice_attribute as Attribute};
use std::ffi::{CStr, c_int};

/// The number of devices that this process sees.
pub fn count(driver: &Driver) -> Result<i32> {
    let mut count = 0;
    // SAFETY: writes one int.
    unsafe { driver.device_get_count(&mut count) }?;
    Ok(count)
}

/// The device with this ordinal.
pub fn at(driver: &Driver, ordinal: i32) -> Result<CUdevice> {
    let count = count(driver)?;
    if !(0..count).contains(&ordinal) {
        return Err(no_such_device(ordinal, count));
    }
    let mut device = 0;
    // SAFETY: the ordinal is in range; writes one int.
    unsafe { driver.device_get(&mut device, ordinal) }?;
    Ok(device)
}

/// The device as the driver describes it. The NVRTC version is left (0, 0), since the driver does
/// not know it.
pub fn describe(driver: &Driver, device: CUdevice) -> Result<Device> {
    let attribute = |attribute: Attribute| -> Result<u32> {
        let mut value = 0;
        // SAFETY: a device got from the driver; writes one int.
        unsafe { driver.device_get_attribute(&mut value, attribute as c_int, device) }?;
        Ok(value.max(0) as u32)
    };
    let mut name = [0; 256];
    // SAFETY: the driver writes at most the length given, NUL included.
    unsafe { driver.device_get_name(name.as_mut_ptr(), name.len() as c_int, device) }?;
    name[255] = 0;
    // SAFETY: NUL-terminated within the array.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    let mut memory_bytes = 0;
    // Twice the clock, since memory moves data at both edges. Some virtual GPUs do not tell, and no
    // choice depends on it.
    let memory_khz = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE).unwrap_or(0);
    let memory_bits = attribute(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH).unwrap_or(0);
    // SAFETY: writes one size_t.
    unsafe { driver.device_total_mem(&mut memory_bytes, device) }?;
    Ok(Device {
        name,
        arch: Arch::Sm(
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        sm_count: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        smem_per_block: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        smem_per_sm: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?,
        registers_per_sm: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR)?,
        threads_per_sm: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR)?,
        l2_bytes: u64::from(attribute(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?),
        memory_bytes: memory_bytes as u64,
        memory_bytes_per_second: 2 * 1000 * u64::from(memory_khz) * u64::from(memory_bits) / 8,
        driver_version: driver.version()?,
    })
}

/// An error that names the argument with no device.
fn no_such_device(ordinal: i32, count: i32) -> Error {
    let present = match count {
        0 => "this process sees no CUDA device".to_owned(),
        1 => "this process sees one CUDA device, 0".to_owned(),
        _ => format!("this process sees the CUDA devices 0 to {}", count - 1),
    };
    Error::new(Status::NoDevice, format!("device_ordinal is {ordinal}; {present}"))
}
