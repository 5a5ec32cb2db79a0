//! Preparing a range: the C structs, their checks, and the C function that prepares every problem
//! of a range in one call.

use super::args::Checked;
use super::context::flashtune_context;
use super::memory::Memory;
use super::operand::Data;
use super::panic_boundary::enter;
use super::params::checked;
use super::pass;
use super::sized::{self, SizedStruct};
use super::types::{flashtune_backward_params, flashtune_forward_params};
use crate::cpu::require_available;
use crate::error::{Error, Result};
use crate::plan::{Optional, Prepared, Range, Sizes};

/// Some problems of the range have no causal mask.
pub const FLASHTUNE_OPTIONAL_CAUSAL: u64 = 1;
/// Some problems of the range have no window.
pub const FLASHTUNE_OPTIONAL_WINDOW: u64 = 2;
/// Some problems of the range have no softcap.
pub const FLASHTUNE_OPTIONAL_SOFTCAP: u64 = 4;
/// Some problems of the range have no dropout.
pub const FLASHTUNE_OPTIONAL_DROPOUT: u64 = 8;

/// A range of problems for flashtune_prepare_range: all problems between a largest one and the
/// least sizes, of one pass or of both.
///
/// Each field of a problem belongs to the class, is rounded, or is free. A class has kernels of its
/// own. Rounded sizes decide which of them a launch takes. Free fields decide at most how many
/// splits a launch makes.
///
/// - Class: pass, dtype, head_dim, head_dim_v, causal or not, deterministic, batch_invariant,
///   dropout or not, softcap or not, and the features, of which cache_batch_idx and leftpad_k count
///   as one. Also: a window on the left or not, on the right or not; page_size; block_q and block_k
///   of a block mask; and the widest access of 16, 8, 4 or 2 bytes that all addresses, strides and
///   head dims allow.
/// - One query without a window, causal to the bottom right and without cu_seqlens_q and seqused_q,
///   is of the class without causal, unless it is batch_invariant.
/// - Rounded: batch_size, num_heads_q, num_heads_kv, seqlen_q, seqlen_k, window_left, window_right.
///   cu_seqlens_q or seqused_q likewise decides which kernels a launch takes.
/// - Free: total_q, total_k, num_pages, the alignment of causal and the window, softmax_scale, the
///   values of dropout_p and softcap, seeds, all other strides, and all data.
///
/// docs/serving.md says how sizes are rounded. A problem is inside if it is of a class of the
/// range, has the range's heads and the alignment of its causal mask and window, gives lengths of
/// queries (cu_seqlens_q, seqused_q) if the largest does and only then, and has sizes between the
/// least and the largest. With cu_seqlens_q or cu_seqlens_k the sizes are the bounds that the call
/// states, not the lengths on the device.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct flashtune_range {
    /// sizeof(flashtune_range).
    pub struct_size: u64,
    /// The largest forward pass, or NULL. It has the largest batch_size, seqlen_q and seqlen_k, and
    /// every feature that some problem of the range has. Data pointers may be NULL. It is borrowed
    /// for the call, as is backward.
    pub forward: *const flashtune_forward_params,
    /// The same for the backward pass, or NULL. One of the two must be set.
    pub backward: *const flashtune_backward_params,
    /// The smallest batch_size of the range. 0 means 1.
    pub least_batch_size: i64,
    /// The smallest seqlen_q of the range. 0 means 1.
    pub least_seqlen_q: i64,
    /// The smallest seqlen_k of the range. 0 means 1.
    pub least_seqlen_k: i64,
    /// FLASHTUNE_FEATURE_* combined with |: features that some problems have and others do not.
    /// Each of them must be among the features of forward or backward.
    pub optional_features: u64,
    /// FLASHTUNE_OPTIONAL_* combined with |. With optional_features, a range has all combinations,
    /// at most 64. Combinations that no call can have are left out.
    pub optional: u64,
}

/// What flashtune_prepare_range prepared.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct flashtune_range_info {
    /// sizeof(flashtune_range_info), set by the caller.
    pub struct_size: u64,
    /// Classes of the range.
    pub num_classes: u64,
    /// Configs over all classes. Configs that differ in the number of splits share kernels.
    pub num_configs: u64,
    /// Kernels of these configs. 0 on a CPU context, which has none.
    pub num_kernels: u64,
    /// Kernels that this call compiled.
    pub num_compiled: u64,
    /// Kernels that this call read from the cache folder or a pack. The rest were loaded before.
    pub num_cached: u64,
    /// The largest workspace that a problem inside can need, in bytes.
    pub workspace_bytes: u64,
    /// The time of the call in milliseconds.
    pub milliseconds: f64,
}

// SAFETY: repr(C), a u64 first, then integers and raw pointers.
unsafe impl SizedStruct for flashtune_range {
    const NAME: &'static str = "flashtune_range";
    const OLDEST: usize = 64;
}
// This number grows with the struct. OLDEST stays.
const _: () = assert!(size_of::<flashtune_range>() == 64);

// SAFETY: repr(C), a u64 first, then integers and a float.
unsafe impl SizedStruct for flashtune_range_info {
    const NAME: &'static str = "flashtune_range_info";
    const OLDEST: usize = 64;
}
// This number grows with the struct. OLDEST stays.
const _: () = assert!(size_of::<flashtune_range_info>() == 64);

/// Prepares every problem of a range, so that no later launch of such a problem compiles. A call
/// chooses a few configs for each class, such that each shape has one that is expected to take at
/// most 5 % longer than its own choice. It compiles their kernels on all cores and measures
/// nothing, whatever the tuning policy.
///
/// Afterwards a problem inside counts as prepared, also in a sealed context and on a capturing
/// stream, and never returns NOT_PREPARED. Its first launch chooses among the prepared configs,
/// which allocates host memory; flashtune_forward_prepare does the same ahead of a launch. A
/// deterministic or batch_invariant problem has its own config, as ever. Several ranges may be
/// prepared one after another.
///
/// flashtune_merge and flashtune_kv_append have prepare functions of their own.
///
/// info receives what was prepared; the caller sets info->struct_size. It may be NULL. May be
/// called from any thread, but not while a stream of this thread is capturing.
///
/// Statuses: OK, INVALID_ARGUMENT (also for a range of more than 64 combinations, more than 128
/// kernels, or more than 65536 shapes of a deterministic pass), UNSUPPORTED, NOT_PREPARED (the
/// context is sealed), NO_COMPILER, COMPILE_FAILED, CUDA, OUT_OF_MEMORY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_prepare_range(
    context: *mut flashtune_context,
    range: *const flashtune_range,
    info: *mut flashtune_range_info,
) -> i32 {
    enter(|| {
        // SAFETY: the C caller promises a live context or NULL.
        let context = unsafe { flashtune_context::of(context)? };
        context.require_memory("preparing a range")?;
        // SAFETY: the C caller promises a struct of the size that it says.
        let range = unsafe { sized::read("range", range)? };
        let size = match info.is_null() {
            true => None,
            // SAFETY: as above.
            false => Some(unsafe { sized::output_size("info", info)? }),
        };
        // SAFETY: as above, for the params of both passes.
        let ranges = unsafe { ranges(context, &range)? };
        require_available(ranges.iter().map(Range::host_bytes).sum())
            .map_err(|error| error.context("preparing a range"))?;
        let prepared = context.engine.prepare_range(&ranges)?;
        if let Some(size) = size {
            let described = flashtune_range_info::of(&prepared, workspace_bytes(context, &ranges));
            // SAFETY: `size` came from this pointer.
            unsafe { sized::write(info, size, &described) };
        }
        Ok(())
    })
}

/// # Safety
/// The pointers to params are NULL or as `sized::read` wants them.
unsafe fn ranges(context: &flashtune_context, range: &flashtune_range) -> Result<Vec<Range>> {
    let known =
        FLASHTUNE_OPTIONAL_CAUSAL | FLASHTUNE_OPTIONAL_WINDOW | FLASHTUNE_OPTIONAL_SOFTCAP | FLASHTUNE_OPTIONAL_DROPOUT;
    if range.optional & !known != 0 {
        return Err(Error::invalid(format!(
            "range.optional is {:#x}: {:#x} is no FLASHTUNE_OPTIONAL_*",
            range.optional,
            range.optional & !known
        )));
    }
    // Each pass with its feature bits.
    let mut passes: Vec<(Checked, u64)> = Vec::new();
    if !range.forward.is_null() {
        // SAFETY: the C caller promises a struct of the size that it says.
        let checked = unsafe { checked(context, "range.forward", range.forward, Data::Optional)? };
        // SAFETY: as above.
        passes.push((checked, unsafe { sized::read("range.forward", range.forward)? }.features));
    }
    if !range.backward.is_null() {
        // SAFETY: as above.
        let checked = unsafe { checked(context, "range.backward", range.backward, Data::Optional)? };
        // SAFETY: as above.
        passes.push((checked, unsafe { sized::read("range.backward", range.backward)? }.features));
    }
    if passes.is_empty() {
        return Err(Error::invalid("range.forward and range.backward are both NULL; one of them must be set"));
    }
    let all = passes.iter().fold(0, |all, (_, bits)| all | bits);
    if range.optional_features & !all != 0 {
        return Err(Error::invalid(format!(
            "range.optional_features is {:#x}: {:#x} is in the features of neither forward nor backward, which name every feature that some problem has",
            range.optional_features,
            range.optional_features & !all
        )));
    }
    let optional = Optional {
        causal: range.optional & FLASHTUNE_OPTIONAL_CAUSAL != 0,
        window: range.optional & FLASHTUNE_OPTIONAL_WINDOW != 0,
        softcap: range.optional & FLASHTUNE_OPTIONAL_SOFTCAP != 0,
        dropout: range.optional & FLASHTUNE_OPTIONAL_DROPOUT != 0,
        features: range.optional_features,
    };
    let or_one = |size: i64| if size == 0 { 1 } else { size };
    let least = Sizes {
        batch_size: or_one(range.least_batch_size),
        seqlen_q: or_one(range.least_seqlen_q),
        seqlen_k: or_one(range.least_seqlen_k),
    };
    let mut ranges = Vec::new();
    for (checked, bits) in passes {
        let largest = checked.call.problem;
        pass::refuse_empty(&largest)?;
        let range = Range { largest, least };
        range.validate()?;
        ranges.extend(range.variants(bits, &optional)?);
    }
    Ok(ranges)
}

fn workspace_bytes(context: &flashtune_context, ranges: &[Range]) -> usize {
    let memory = Memory::of(context.engine.backend(), context.is_auto);
    ranges.iter().map(|range| range.largest_workspace(|problem| memory.workspace_bytes(problem))).max().unwrap_or(0)
}

impl flashtune_range_info {
    fn of(prepared: &Prepared, workspace_bytes: usize) -> Self {
        flashtune_range_info {
            struct_size: size_of::<Self>() as u64,
            num_classes: prepared.classes as u64,
            num_configs: prepared.configs as u64,
            num_kernels: prepared.kernels as u64,
            num_compiled: prepared.compiled as u64,
            num_cached: prepared.cached as u64,
            workspace_bytes: workspace_bytes as u64,
            milliseconds: prepared.time.as_secs_f64() * 1e3,
        }
    }
}
