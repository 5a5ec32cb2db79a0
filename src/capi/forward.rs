//! The C functions of the forward pass. They name the params struct; `pass` does the work of both
//! passes.

use super::args::{self, Checked};
use super::context::flashtune_context;
use super::memory::Memory;
use super::operand::Data;
use super::params::Params;
use super::pass;
use super::plan_info::flashtune_plan_info;
use super::sized::SizedStruct;
use super::types::flashtune_forward_params;
use crate::error::Result;
use std::ffi::c_void;

// SAFETY: repr(C), a u64 first, then integers, floats and raw pointers. They have no invalid bytes.
unsafe impl SizedStruct for flashtune_forward_params {
    const NAME: &'static str = "flashtune_forward_params";
    const OLDEST: usize = 248;
}
// This size grows with the struct. OLDEST, the size in the first release, stays.
const _: () = assert!(size_of::<flashtune_forward_params>() == 712);

impl Params for flashtune_forward_params {
    type Checked = Checked;

    fn check(&self, data: Data, memory: Memory) -> Result<Checked> {
        args::forward(self, data, memory)
    }
}

/// Returns OK if this context can run this forward pass. Otherwise it returns a status, and
/// flashtune_last_error() has the reason. The call is cheap: it compiles and launches nothing. Data
/// pointers may be NULL. May be called from any thread, also during stream capture.
///
/// Statuses: OK, INVALID_ARGUMENT, UNSUPPORTED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_forward_supported(
    context: *mut flashtune_context,
    params: *const flashtune_forward_params,
) -> i32 {
    // SAFETY: the C caller promises what the header says. This holds for every function of this
    // file.
    unsafe { pass::supported(context, params) }
}

/// Writes to bytes the size of the largest workspace that flashtune_forward can need for these
/// params, whatever plan it uses. The size is a pure function of the params and the context's
/// device.
///
/// The workspace holds partial results over parts of the keys, V transposed, and K and V of 8 bits
/// and int4 widened to 16. The size is 0 on a CPU context. On a CUDA context it can be above 0 only
/// in these cases:
///
/// - Few queries: seqlen_q * num_heads_q / num_heads_kv is at most 96, or at most 192 with seqlen_q
///   up to 19. In addition, seqlen_k is at least 128, or batch_invariant is 1.
/// - Few query tiles: batch_size * num_heads_q * ceil(seqlen_q / 64) is at most 320, or at most
///   2112 with no feature but pages, cu_seqlens_k and seqused_k, and seqlen_k is at least 512. The
///   size is then at most 163840 * (head_dim_v + 5) bytes. With head dims up to 64 and seqlen_k at
///   least 8192, the product is at most 864, or 2112 with no feature but these, and the size is at
///   most 442368 * (head_dim_v + 5) bytes. With batch_invariant, the product is at most 288,
///   seqlen_k is above 1024, and there is no feature but these. The size is then at most 524288 *
///   (head_dim_v + 5) bytes.
/// - Short sequences over pages, with cu_seqlens_q or seqused_q: batch_size * num_heads_kv is at
///   most 132, num_heads_q / num_heads_kv at most 64, and seqlen_k at least 512. With up to 16
///   query heads for each K/V head, the size is then at most 16896 * (head_dim_v + 5) bytes. With
///   up to 32 it is at most twice as much, and with up to 64 four times.
/// - q, k and v in e4m3 with a head dim above 64, seqlen_q at least 128 and seqlen_k at least 256,
///   of sequences of one length without pages and a block mask. The size grows by at most
///   batch_size * (seqlen_k + 256) * num_heads_kv * head_dim_v + 12 bytes.
/// - k and v of 8 bits or int4 beside a q of 16 bits, on a GPU of compute capability 9.0. Head dims
///   are multiples of 16 up to 256, seqlen_q * num_heads_q / num_heads_kv is at least 256 and
///   seqlen_k at least 64. There is no block mask, and batch_invariant is 0. With int4, or if
///   keys_per_descale is not 0, dtype is bf16. Let n be batch_size * num_heads_kv times seqlen_k
///   rounded up to 16. The copies take n * 2 * (head_dim + head_dim_v) bytes, the lengths
///   batch_size * 4, and the factors n * 4 + 1024 more if keys_per_descale is not 0. The size grows
///   by these and at most 255, or by nothing if they are more than 1200 MiB.
///
/// Data pointers may be NULL. May be called from any thread, also during stream capture.
///
/// Statuses: OK, INVALID_ARGUMENT, UNSUPPORTED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_forward_workspace_size(
    context: *mut flashtune_context,
    params: *const flashtune_forward_params,
    bytes: *mut u64,
) -> i32 {
    // SAFETY: as above.
    unsafe { pass::workspace_size(context, params, bytes) }
}

/// Prepares the plan for these params: selects a config, then compiles and loads its kernels. Under
/// FLASHTUNE_TUNING_TUNE, a problem without a record is measured. This may take seconds.
///
/// After OK, flashtune_forward only enqueues for these params. The plan also serves another
/// softmax_scale, seed or nonzero dropout_p, and other data and strides of the same alignment.
/// Nearby sizes share the plan.
///
/// Another shape may need another config, which flashtune_forward then prepares. On a capturing
/// stream and in a sealed context preparing is not allowed. There flashtune_forward uses a config
/// that is loaded for another shape of the same class, or returns NOT_PREPARED if none fits. A
/// class is: pass, dtype, head dims, causal or not, dropout or not, features, and alignment of
/// addresses and strides. A deterministic problem uses its own config alone, and a batch_invariant
/// one takes only configs that give the same bits.
///
/// flashtune_autotune and flashtune_records_import may replace a plan. The old plan serves until
/// the new one is ready, so a prepared problem stays prepared.
///
/// Data pointers may be NULL; a NULL pointer counts as aligned to 16 bytes. May be called from any
/// thread, but not while a stream of this thread is capturing.
///
/// Statuses: OK, INVALID_ARGUMENT, UNSUPPORTED, NOT_PREPARED (the context is sealed), NO_COMPILER,
/// COMPILE_FAILED, CUDA, OUT_OF_MEMORY.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_forward_prepare(
    context: *mut flashtune_context,
    params: *const flashtune_forward_params,
) -> i32 {
    // SAFETY: as above.
    unsafe { pass::prepare(context, params) }
}

/// Runs one forward pass.
///
/// - stream: on a CUDA context the call enqueues the work on stream and returns. stream is a
///   CUstream or cudaStream_t of the context's device; NULL is the default stream. Buffers must
///   live until the work is done, and params only during the call. On a CPU context stream is
///   ignored, and the work is done on return.
/// - workspace: device memory (host memory on a CPU context), aligned to 256 bytes. It has
///   workspace_bytes bytes, at least what flashtune_forward_workspace_size says. NULL is allowed if
///   that is 0. Its contents need no initialisation and are not kept. Two calls that may run at
///   once must not share one.
/// - Overlap: out and lse must share no byte with another tensor.
/// - With a prepared plan, the call allocates, synchronises, compiles and locks nothing, and it
///   reads no file. The one exception: on a CPU context each thread allocates memory for one tile,
///   whatever the lengths.
/// - Without a plan, the call prepares one first, as flashtune_forward_prepare does. On a capturing
///   stream and in a sealed context preparing is not allowed; the documentation of
///   flashtune_forward_prepare says what the call does there.
/// - Capture: with a prepared plan, the call may be captured into a graph. The captured launch must
///   not run twice at a time: neither from two graph instances nor as two child nodes of one graph.
/// - Threads: any thread may call it, also several at once.
///
/// Statuses: those of flashtune_forward_prepare, and WORKSPACE_TOO_SMALL. NOT_PREPARED may also
/// come on a capturing stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_forward(
    context: *mut flashtune_context,
    params: *const flashtune_forward_params,
    workspace: *mut c_void,
    workspace_bytes: u64,
    stream: *mut c_void,
) -> i32 {
    // SAFETY: as above.
    unsafe { pass::launch(context, params, workspace, workspace_bytes, stream) }
}

/// Describes the plan that flashtune_forward uses for these params. A missing plan is prepared
/// first. The caller sets info->struct_size to sizeof(flashtune_plan_info). Data pointers may be
/// NULL. The rules for threads and capture are those of flashtune_forward_prepare.
///
/// Statuses: those of flashtune_forward_prepare. An empty problem is INVALID_ARGUMENT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn flashtune_forward_plan_info(
    context: *mut flashtune_context,
    params: *const flashtune_forward_params,
    info: *mut flashtune_plan_info,
) -> i32 {
    // SAFETY: as above.
    unsafe { pass::plan_info(context, params, info) }
}
