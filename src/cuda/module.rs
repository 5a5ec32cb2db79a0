//! Loaded cubins, their functions, and the launch.

use super::context::{Context, Current};
use crate::error::Result;
use cudarc::driver::sys::{
    CUfunction, CUfunction_attribute as Attribute, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchAttributeValue,
    CUlaunchConfig, CUmodule,
};
use std::ffi::{CStr, c_int, c_void};
use std::sync::Arc;

pub struct Module {
    context: Arc<Context>,
    raw: CUmodule,
}

// SAFETY: a CUmodule may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above; it does not change once loaded.
unsafe impl Sync for Module {}

impl Module {
    /// Loads a cubin into the context. The image is copied.
    pub fn load(context: &Arc<Context>, cubin: &[u8]) -> Result<Arc<Module>> {
        let _setup = context.setup()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the context is current; an ELF image carries its own length. Unloaded in drop.
        unsafe { context.driver().module_load_data(&mut raw, cubin.as_ptr().cast()) }?;
        Ok(Arc::new(Module { context: context.clone(), raw }))
    }

    /// A kernel of the module, with its code on the device and its limit of dynamic shared memory
    /// raised to `smem_bytes`. A later launch then does nothing that a stream capture would refuse.
    pub fn function(self: &Arc<Module>, name: &CStr, smem_bytes: u32) -> Result<Function> {
        let _setup = self.context.setup()?;
        let driver = self.context.driver();
        let mut raw = std::ptr::null_mut();
        // SAFETY: a live module and a C string.
        unsafe { driver.module_get_function(&mut raw, self.raw, name.as_ptr()) }
            .map_err(|error| error.context(name.to_string_lossy()))?;
        // SAFETY: a function of the live module. Under lazy loading its code would come with the
        // first launch.
        unsafe { driver.func_load(raw) }?;
        let function = Function { module: self.clone(), raw };
        // Two executables may share a function and so its limit: another may need more than this
        // one.
        if smem_bytes > function.attribute(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)? {
            let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as c_int;
            // SAFETY: as above; the driver refuses what the device does not have.
            unsafe { driver.func_set_attribute(raw, attribute, smem_bytes as c_int) }.map_err(|error| {
                error.context(format_args!("{} with {smem_bytes} bytes of shared memory", name.to_string_lossy()))
            })?;
        }
        Ok(function)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded in `load`, unloaded once, after the last Function: each holds the module.
        self.context.release(|driver| unsafe { driver.module_unload(self.raw) });
    }
}

pub struct Function {
    module: Arc<Module>,
    raw: CUfunction,
}

// SAFETY: a CUfunction may be launched from any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Function {
    pub fn registers(&self) -> Result<u32> {
        self.attribute(Attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)
    }

    /// Static shared memory in bytes.
    pub fn static_smem_bytes(&self) -> Result<u32> {
        self.attribute(Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)
    }

    fn attribute(&self, attribute: Attribute) -> Result<u32> {
        let context = &self.module.context;
        let _current = context.enter()?;
        let mut value = 0;
        // SAFETY: a function of a live module; writes one int.
        unsafe { context.driver().func_get_attribute(&mut value, attribute as c_int, self.raw) }?;
        Ok(value.max(0) as u32)
    }

    /// Enqueues the kernel with the addresses of its arguments. It allocates nothing and takes no
    /// lock of ours. A kernel that `waits` for the kernel before it
    /// (`templates/device/schedule/previous_kernel.cuh`) may start while that one ends.
    ///
    /// # Safety
    /// `arguments` point to values of the kernel's parameter types, in its order, which live until
    /// this returns; what they in turn point to is valid on the device until the stream's work is
    /// done; `stream` is a stream of the context that `_current` has made current.
    #[allow(clippy::too_many_arguments)] // the launch as the driver takes it, and whether the kernel waits
    pub unsafe fn launch(
        &self,
        _current: &Current<'_>,
        grid: [u32; 3],
        threads: u32,
        smem_bytes: u32,
        stream: *mut c_void,
        waits: bool,
        arguments: &mut [*mut c_void],
    ) -> Result<()> {
        let mut may_overlap = CUlaunchAttribute {
            id: CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: smem_bytes,
            hStream: stream.cast(),
            attrs: &mut may_overlap,
            numAttrs: u32::from(waits),
        };
        let driver = self.module.context.driver();
        // SAFETY: the driver reads the config and copies the arguments before it returns, and
        // writes to neither; the rest is the caller's.
        unsafe { driver.launch_kernel_ex(&config, self.raw, arguments.as_mut_ptr(), std::ptr::null_mut()) }
    }
}
