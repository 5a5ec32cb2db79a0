//! The C function that describes a context's pack. The option that names the pack is in `context`.

use super::context::flashtune_context;
use super::panic_boundary::enter;
use super::sized::{self, SizedStruct};
use super::text::fixed;
use crate::backend::Backend;
use crate::kernel::pack::PackStatus;
use std::ffi::c_char;

/// The context has no pack: none was named, and none lies beside the library. A CPU context never
/// has one.
pub const FLASHTUNE_PACK_NONE: i32 = 0;
/// The context uses a pack.
pub const FLASHTUNE_PACK_LOADED: i32 = 1;
/// The context refused the pack and goes on without it.
pub const FLASHTUNE_PACK_REFUSED: i32 = 2;

/// The pack of a context. Text is UTF-8, ends in NUL, and is cut if it is too long.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct flashtune_pack_info {
    /// sizeof(flashtune_pack_info), set by the caller.
    pub struct_size: u64,
    /// A FLASHTUNE_PACK_*.
    pub state: i32,
    /// Kernels for the device's architecture. 0 unless the state is FLASHTUNE_PACK_LOADED, as are
    /// the two numbers that follow.
    pub num_kernels: u32,
    /// Problems whose plans were made for the device's architecture.
    pub num_plans: u32,
    /// Tuning records, of all architectures.
    pub num_records: u32,
    /// The pack's file. Empty if the state is FLASHTUNE_PACK_NONE.
    pub path: [c_char; 256],
    /// Why the pack was refused, as one clause. Empty in other states.
    pub reason: [c_char; 256],
}

// SAFETY: repr(C), a u64 first, then integers.
unsafe impl SizedStruct for flashtune_pack_info {
    const NAME: &'static str = "flashtune_pack_info";
    const OLDEST: usize = 536;
}
// This number grows with the struct. OLDEST stays.
const _: () = assert!(size_of::<flashtune_pack_info>() == 536);

/// Describes the pack of a context: a file of kernels that were compiled ahead of time, and of
/// tuning records. docs/packs.md says how to make one. The caller sets info->struct_size to
/// sizeof(flashtune_pack_info). May be called from any thread, also during stream capture.
///
/// Statuses: OK, INVALID_ARGUMENT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_context_pack(
    context: *mut flashtune_context,
    info: *mut flashtune_pack_info,
) -> i32 {
    enter(|| {
        // SAFETY: the C caller promises a live context or NULL.
        let context = unsafe { flashtune_context::of(context)? };
        // SAFETY: the C caller promises a struct of the size that it says.
        let size = unsafe { sized::output_size("info", info)? };
        let described = flashtune_pack_info::of(context.engine.backend());
        // SAFETY: `size` came from this pointer.
        unsafe { sized::write(info, size, &described) };
        Ok(())
    })
}

impl flashtune_pack_info {
    fn of(backend: &Backend) -> Self {
        let none = flashtune_pack_info {
            struct_size: size_of::<Self>() as u64,
            state: FLASHTUNE_PACK_NONE,
            num_kernels: 0,
            num_plans: 0,
            num_records: 0,
            path: [0; 256],
            reason: [0; 256],
        };
        match backend.pack() {
            PackStatus::None => none,
            PackStatus::Loaded(pack) => {
                let arch = backend.device().arch;
                flashtune_pack_info {
                    state: FLASHTUNE_PACK_LOADED,
                    num_kernels: pack.kernels(arch).count() as u32,
                    num_plans: pack.plans(arch).count() as u32,
                    num_records: pack.manifest().records.len() as u32,
                    path: fixed(&pack.path().to_string_lossy()),
                    ..none
                }
            }
            PackStatus::Refused(refusal) => flashtune_pack_info {
                state: FLASHTUNE_PACK_REFUSED,
                path: fixed(&refusal.path.to_string_lossy()),
                reason: fixed(&refusal.reason),
                ..none
            },
        }
    }
}
