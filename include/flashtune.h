/*
 * flashtune: exact attention, forward and backward, on NVIDIA GPUs and on CPUs.
 *
 * On a GPU, the library renders kernels for each problem and compiles them with NVRTC. On a CPU, it
 * runs code of its own. It tunes on request: flashtune_autotune, or FLASHTUNE_TUNING_TUNE. This
 * header declares its whole C interface; docs/c-guide.md has complete programs.
 *
 * cbindgen generates this file from src/capi, src/xla and src/python; do not edit it. `make header`
 * makes it anew.
 *
 * Terms
 *   A problem is what the params of a call ask for: pass, dtype, sizes, mask and other features. A
 *   config says how a kernel computes it: the kernel family, tile sizes and other knobs. A plan is
 *   the config that the library chose for a problem, with its compiled kernels.
 *
 * Order of calls
 *   1. flashtune_context_create opens a device.
 *   2. flashtune_forward_supported says whether the context can run the problem.
 *   3. flashtune_forward_workspace_size gives the bytes of workspace that a launch needs.
 *   4. flashtune_forward_prepare selects a config, compiles the kernels and loads them.
 *   5. flashtune_forward launches the pass, any number of times.
 *   6. flashtune_context_destroy frees the context after all enqueued work is done.
 *   Steps 2 and 4 are optional: a launch whose problem has no plan makes the plan first. The
 *   backward pass has the same calls. Merging and appending have prepare and launch only.
 *   flashtune_prepare_range does step 4 for all problems that a server may meet.
 *
 * Conventions
 * - Statuses: most functions return a FLASHTUNE_STATUS_*, 0 for success. After any other status,
 *   all outputs are untouched, and flashtune_last_error() returns one sentence. It names the
 *   argument, its value and what is allowed. One exception: if the CUDA driver fails in the middle
 *   of a launch, outputs and workspace may be partly written.
 * - Structs: set the whole struct to zero, then struct_size to its sizeof, then the fields that
 *   apply. Zero is the default of every optional field.
 * - Versions: a struct may grow at its end. If a caller's struct is longer than the library's,
 *   the bytes that the library does not know must be zero. Numbers of statuses and enums never
 *   change and are never reused.
 * - Pointers: a pointer may be NULL only where its documentation says so. The functions named
 *   supported, workspace_size, prepare, plan_info and autotune do not touch tensor data, so data
 *   pointers may be NULL there.
 * - Memory: tensors are device memory on a CUDA context and host memory on a CPU context.
 * - Ownership: the library never frees what the caller passes in. It keeps a pointer only as long
 *   as the documentation says. Strings that it returns belong to the library.
 * - Threads: any number of threads may use one context at once.
 * - Stack: a call on a CPU context needs at most 128 KB of its thread's stack.
 * - Streams: on a CUDA context, a launch enqueues its work on a CUstream or cudaStream_t and
 *   returns. On a CPU context, the stream is ignored and the work is done on return.
 * - Capture: a launch whose plan is prepared may be captured into a graph. Without a plan it
 *   may return NOT_PREPARED on a capturing stream; see flashtune_forward_prepare. Other functions
 *   say whether they allow capture.
 * - Side effects: the library prints nothing, raises no signal or exception, and does not end the
 *   process. "Too little memory" and the handlers for XLA name the exceptions.
 * - Too little memory: a function returns OUT_OF_MEMORY where the system refuses memory whose size
 *   follows from the caller's numbers. For its small allocations, a function that makes a context,
 *   describes a GPU, prepares, tunes, exports or imports, and each launch on a CPU context, first
 *   asks the system for 2 to 48 MB, and returns OUT_OF_MEMORY if it refuses. A small allocation
 *   that is refused afterwards, because other threads took the memory meanwhile, ends the process.
 * - Fork: a context serves the process that made it; see flashtune_context.
 * - Unloading: the library stays in the process. dlclose succeeds and unmaps nothing.
 * - Varlen: cu_seqlens_* or seqused_* give each sequence its own length. Packed sequences lie end
 *   to end in one tensor, without a batch dimension.
 *
 * Function index
 *   Library
 *     flashtune_version                  returns the loaded library's version as a number
 *     flashtune_version_string           returns the loaded library's version as text
 *     flashtune_status_string            returns a status in words
 *     flashtune_last_error               returns the reason of this thread's last failure
 *     flashtune_set_log_callback         sets the process's log callback
 *   Contexts
 *     flashtune_context_create           opens a device
 *     flashtune_context_device           describes the device
 *     flashtune_context_pack             describes the pack of compiled kernels
 *     flashtune_context_seal             forbids further preparation
 *     flashtune_context_destroy          frees a context
 *   Forward pass
 *     flashtune_forward_supported        says whether the context can run the pass
 *     flashtune_forward_workspace_size   gives the bytes of workspace
 *     flashtune_forward_prepare          prepares the plan
 *     flashtune_forward_plan_info        describes the plan
 *     flashtune_forward                  launches the pass
 *   Backward pass
 *     flashtune_backward_params_from_forward  fills the parameters from those of the forward pass
 *     flashtune_backward_supported       says whether the context can run the pass
 *     flashtune_backward_workspace_size  gives the bytes of workspace
 *     flashtune_backward_prepare         prepares the plan
 *     flashtune_backward_plan_info       describes the plan
 *     flashtune_backward                 launches the pass
 *   Small operations
 *     flashtune_merge_prepare            prepares the kernel that merges partial results
 *     flashtune_merge                    merges partial results over parts of the keys
 *     flashtune_kv_append_prepare        prepares the kernel that writes a K/V cache
 *     flashtune_kv_append                writes new keys and values into a K/V cache
 *     flashtune_quantize_prepare         prepares the kernel that quantises a tensor
 *     flashtune_quantize                 quantises a tensor to 8 bits, or rotates its rows
 *   Ranges
 *     flashtune_prepare_range            prepares every problem of a range
 *   Tuning
 *     flashtune_autotune                 measures the candidates for one problem
 *     flashtune_records_export           writes this machine's records to a file
 *     flashtune_records_import           reads records from a file
 *   Handlers for XLA's foreign function interface
 *     flashtune_xla_cpu_forward          runs the forward pass on the CPU
 *     flashtune_xla_cpu_backward         runs the backward pass on the CPU
 *     flashtune_xla_cuda_forward         runs the forward pass on a GPU
 *     flashtune_xla_cuda_backward        runs the backward pass on a GPU
 *     flashtune_xla_cpu_quantize         quantises and rotates on the CPU
 *     flashtune_xla_cuda_quantize        quantises and rotates on a GPU
 *   The Python package
 *     flashtune_python_drafts            makes the functions that repeat calls on torch tensors
 */

#ifndef FLASHTUNE_H
#define FLASHTUNE_H

#include <stdint.h>

#define FLASHTUNE_VERSION_MAJOR 0
#define FLASHTUNE_VERSION_MINOR 1
#define FLASHTUNE_VERSION_PATCH 0
/** The version of this header, in the form in which flashtune_version() returns the library's. */
#define FLASHTUNE_VERSION \
  (FLASHTUNE_VERSION_MAJOR * 1000000 + FLASHTUNE_VERSION_MINOR * 1000 + FLASHTUNE_VERSION_PATCH)

/**
 * Success. After any other status all outputs are untouched, and flashtune_last_error() returns
 * the reason.
 */
#define FLASHTUNE_STATUS_OK 0

/**
 * An argument is wrong. The message names it, its value and what is allowed.
 */
#define FLASHTUNE_STATUS_INVALID_ARGUMENT 1

/**
 * The problem is valid, but this build, device or backend cannot run it.
 */
#define FLASHTUNE_STATUS_UNSUPPORTED 2

/**
 * The problem has no plan, and preparing one is not allowed now: the stream is capturing or the
 * context is sealed.
 */
#define FLASHTUNE_STATUS_NOT_PREPARED 3

/**
 * There is no usable device, or libcuda is missing. The message lists the places tried.
 */
#define FLASHTUNE_STATUS_NO_DEVICE 4

/**
 * No usable libnvrtc was found. It must be version 12.0 or later, and its major version at most
 * that of the CUDA version that the driver supports. The message lists the places tried.
 */
#define FLASHTUNE_STATUS_NO_COMPILER 5

/**
 * NVRTC rejected a kernel.
 */
#define FLASHTUNE_STATUS_COMPILE_FAILED 6

/**
 * The CUDA driver returned an error. If a launch had enqueued some of its kernels before, its
 * outputs and its workspace may be partly written.
 */
#define FLASHTUNE_STATUS_CUDA 7

/**
 * Host or device memory ran out, or the system refused a thread.
 */
#define FLASHTUNE_STATUS_OUT_OF_MEMORY 8

/**
 * The workspace has fewer bytes than this call needs.
 */
#define FLASHTUNE_STATUS_WORKSPACE_TOO_SMALL 9

/**
 * A file could not be read or written.
 */
#define FLASHTUNE_STATUS_IO 10

/**
 * The progress callback stopped the run. Completed measurements are kept.
 */
#define FLASHTUNE_STATUS_CANCELLED 11

/**
 * A bug in flashtune. Please report the message.
 */
#define FLASHTUNE_STATUS_INTERNAL 12

/**
 * A failure that the program will notice.
 */
#define FLASHTUNE_LOG_ERROR 1

/**
 * A degraded state, for example a cache folder that cannot be used.
 */
#define FLASHTUNE_LOG_WARN 2

/**
 * A decision: a device, a config or a record.
 */
#define FLASHTUNE_LOG_INFO 3

/**
 * Details for developers of flashtune.
 */
#define FLASHTUNE_LOG_DEBUG 4

/**
 * The GPU device_ordinal if it and its compiler or a pack can be used, else the CPU. A log line
 * gives the reason, and flashtune_context_device the backend. On the CPU a launch then checks its
 * tensors: a device pointer returns INVALID_ARGUMENT.
 */
#define FLASHTUNE_BACKEND_AUTO 0

/**
 * An NVIDIA GPU of compute capability 8.0 or later.
 */
#define FLASHTUNE_BACKEND_CUDA 1

/**
 * The cores of the host.
 */
#define FLASHTUNE_BACKEND_CPU 2

/**
 * A problem without a record uses the heuristic's config. Only flashtune_autotune measures.
 */
#define FLASHTUNE_TUNING_RECORDS 0

/**
 * A problem without a record is measured during prepare, within tuning_time_limit_seconds. The
 * record is kept.
 */
#define FLASHTUNE_TUNING_TUNE 1

/**
 * The context has no pack: none was named, and none lies beside the library. A CPU context never
 * has one.
 */
#define FLASHTUNE_PACK_NONE 0

/**
 * The context uses a pack.
 */
#define FLASHTUNE_PACK_LOADED 1

/**
 * The context refused the pack and goes on without it.
 */
#define FLASHTUNE_PACK_REFUSED 2

/**
 * IEEE half precision (CUDA and CPU backends).
 */
#define FLASHTUNE_DTYPE_FP16 1

/**
 * bfloat16 (CUDA and CPU backends).
 */
#define FLASHTUNE_DTYPE_BF16 2

/**
 * IEEE single precision (CUDA and CPU backends).
 *
 * The error against exact attention is bounded by that of plain fp32 attention, which rounds each
 * product and sum to fp32. Let E be the largest error of any element of plain fp32 attention:
 *
 * - Outputs are within 2 E plus one rounding step.
 * - Gradients are within 3 E plus one rounding step, plus 4 rounding steps at the magnitude of the
 *   terms that cancel in them.
 * - On a GPU, 2^-21 of the largest element is added to both bounds.
 *
 * A GPU computes each product as three tf32 products, which keep 22 of the 24 bits. Infinities in
 * v or dout may therefore give NaN on a GPU.
 */
#define FLASHTUNE_DTYPE_FP32 3

/**
 * 8 bits: sign, 4 of exponent, 3 of mantissa; the largest number is 448, and there is no infinity
 * (float8_e4m3fn). For k and v with q in fp16 or bf16, and for all three of q, k and v.
 *
 * A tensor of 8 bits holds x / scale, and its scales are fp32 (k_descale in
 * flashtune_forward_params). It is made by rounding to the nearest, ties to even. Numbers past the
 * largest, infinities too, become the largest. NaN stays NaN.
 */
#define FLASHTUNE_DTYPE_E4M3 4

/**
 * 8 bits: sign, 5 of exponent, 2 of mantissa; the largest finite number is 57344 (float8_e5m2).
 * For k and v with q in fp16 or bf16. Quantising never makes an infinity.
 */
#define FLASHTUNE_DTYPE_E5M2 5

/**
 * 8-bit integers from -127 to 127. For k and v with q in fp16 or bf16. There is no NaN:
 * quantising makes it 0.
 */
#define FLASHTUNE_DTYPE_INT8 6

/**
 * Rows of 4-bit numbers with their scales, for k and v with q in fp16 or bf16. A tensor has bytes
 * as elements, so strides count bytes. head_dim and head_dim_v must be multiples of 32.
 *
 * A row of d columns has d / 2 bytes of numbers from 0 to 15, column 2 i in the low half of byte
 * i and column 2 i + 1 in the high half. Behind them each 32 neighbouring columns have two fp16
 * numbers, a scale and a zero. The row ends at the next multiple of 16 bytes: 48 bytes for 64
 * columns, 80 for 128, 160 for 256. Bytes between the last zero and the end may hold anything.
 *
 * A number n stands for scale * n + zero, not rounded to fp16. Scales must be finite and above 0,
 * and zeros finite; the CPU backend refuses others.
 *
 * Quantising takes the least number of a group as its zero and a fifteenth of the distance to the
 * largest as its scale, or 1 where that rounds to 0. Magnitudes beyond 65408 become 65408, and a
 * NaN becomes the zero.
 */
#define FLASHTUNE_DTYPE_INT4_GROUP32 7

/**
 * The same with a scale and a zero for 64 columns, of which head_dim and head_dim_v must be
 * multiples: rows of 80 bytes for 128 columns, 112 for 192, 144 for 256.
 */
#define FLASHTUNE_DTYPE_INT4_GROUP64 8

/**
 * Rows are quantised as they are.
 */
#define FLASHTUNE_ROTATION_NONE 0

/**
 * A row x becomes H D x / sqrt(n), in fp32. n is the largest power of two that divides head_dim,
 * which must be a multiple of 8. H is the n x n Walsh-Hadamard matrix and serves each block of n
 * columns. D is a diagonal of signs.
 *
 * Column c's sign is -1 if and only if bit c mod 32 of word (c mod 128) / 32 of a draw is set. The
 * draw is Philox4x32-10 with the counter (c / 128, 0, 0, 0) and the key (low half, high half) of
 * rotation_seed.
 */
#define FLASHTUNE_ROTATION_HADAMARD 1

/**
 * Every query sees every key.
 */
#define FLASHTUNE_CAUSAL_NONE 0

/**
 * Query i sees key j if and only if j <= i + seqlen_k - seqlen_q. The last query sees the last
 * key.
 */
#define FLASHTUNE_CAUSAL_BOTTOM_RIGHT 1

/**
 * Query i sees key j if and only if j <= i. The first query sees the first key.
 */
#define FLASHTUNE_CAUSAL_TOP_LEFT 2

/**
 * There is no window: causal alone decides.
 */
#define FLASHTUNE_WINDOW_NONE 0

/**
 * Query i sees key j only if -window_left <= j - (i + seqlen_k - seqlen_q) <= window_right. The
 * last query's diagonal is the last key. With varlen, both lengths are the sequence's own.
 */
#define FLASHTUNE_WINDOW_BOTTOM_RIGHT 1

/**
 * Query i sees key j only if -window_left <= j - i <= window_right.
 */
#define FLASHTUNE_WINDOW_TOP_LEFT 2

/**
 * alibi_slopes is used.
 */
#define FLASHTUNE_FEATURE_ALIBI 1

/**
 * bias is used.
 */
#define FLASHTUNE_FEATURE_BIAS 2

/**
 * mask is used, and its elements are bytes.
 */
#define FLASHTUNE_FEATURE_MASK 4

/**
 * sinks is used. The backward pass also writes dsinks if it is not NULL.
 */
#define FLASHTUNE_FEATURE_SINKS 8

/**
 * q, out and their gradients hold packed sequences: cu_seqlens_q and total_q are used.
 */
#define FLASHTUNE_FEATURE_CU_SEQLENS_Q 16

/**
 * k, v and their gradients hold packed sequences: cu_seqlens_k and total_k are used.
 */
#define FLASHTUNE_FEATURE_CU_SEQLENS_K 32

/**
 * seqused_q is used.
 */
#define FLASHTUNE_FEATURE_SEQUSED_Q 64

/**
 * seqused_k is used.
 */
#define FLASHTUNE_FEATURE_SEQUSED_K 128

/**
 * Backward pass: dbias is written. Requires FLASHTUNE_FEATURE_BIAS.
 */
#define FLASHTUNE_FEATURE_DBIAS 256

/**
 * Backward pass: dlse is used.
 */
#define FLASHTUNE_FEATURE_DLSE 512

/**
 * Forward pass: k and v are pages, and block_table, page_size and num_pages are used.
 */
#define FLASHTUNE_FEATURE_PAGED 1024

/**
 * mask is used, and its elements are bits. Excludes FLASHTUNE_FEATURE_MASK.
 */
#define FLASHTUNE_FEATURE_MASK_BITS 2048

/**
 * block_mask is used.
 */
#define FLASHTUNE_FEATURE_BLOCK_MASK 4096

/**
 * Forward pass: cache_batch_idx and batch_size_cache are used.
 */
#define FLASHTUNE_FEATURE_CACHE_BATCH_IDX 8192

/**
 * Forward pass: leftpad_k is used.
 */
#define FLASHTUNE_FEATURE_LEFTPAD_K 16384

/**
 * Sequences are slots of a server: seqused_new and cache_batch_idx are used, and seqused may be
 * the array seqlens itself. The lengths then advance in place, so a captured graph needs no copy.
 */
#define FLASHTUNE_APPEND_SLOTS 1

/**
 * The program pinned the config to this problem. Only Rust programs can do that.
 */
#define FLASHTUNE_SOURCE_PINNED 1

/**
 * The config was measured in this process.
 */
#define FLASHTUNE_SOURCE_PROCESS 2

/**
 * The config comes from a record that an earlier process measured on this machine, or that was
 * imported.
 */
#define FLASHTUNE_SOURCE_MACHINE 3

/**
 * The config comes from a record for this GPU that ships with the library.
 */
#define FLASHTUNE_SOURCE_SHIPPED 4

/**
 * The config comes from a record of another GPU of the same architecture, with the nearest number
 * of multiprocessors. The record ships with the library or is one of this machine's. On a CPU
 * context it is a record of this machine with another number of threads.
 */
#define FLASHTUNE_SOURCE_NEAREST_GPU 5

/**
 * The heuristic chose the config without measurement, because no record serves. A config that was
 * loaded for another shape, and serves because preparing is not allowed, also has this source.
 */
#define FLASHTUNE_SOURCE_HEURISTIC 6

/**
 * The config comes from a record of the context's pack. It may also be the pack's best config for
 * the problem: if no NVRTC was found, or if the best config of all would have to be compiled and
 * is predicted to be at most 2 % faster.
 */
#define FLASHTUNE_SOURCE_PACK 7

/**
 * Some problems of the range have no causal mask.
 */
#define FLASHTUNE_OPTIONAL_CAUSAL 1

/**
 * Some problems of the range have no window.
 */
#define FLASHTUNE_OPTIONAL_WINDOW 2

/**
 * Some problems of the range have no softcap.
 */
#define FLASHTUNE_OPTIONAL_SOFTCAP 4

/**
 * Some problems of the range have no dropout.
 */
#define FLASHTUNE_OPTIONAL_DROPOUT 8

/**
 * A device, its plans and its records. flashtune_context_create makes it, and
 * flashtune_context_destroy frees it. Any number of threads may use one at once. A function whose
 * context is NULL returns INVALID_ARGUMENT, except flashtune_context_destroy.
 *
 * A context serves the process that made it. In a child process made by fork, a function returns
 * INVALID_ARGUMENT for it, except flashtune_context_destroy. A child may make CPU contexts of its
 * own. CUDA works in a child only if the parent had not used it before the fork. Otherwise a new
 * CUDA context returns NO_DEVICE, and FLASHTUNE_BACKEND_AUTO opens the CPU.
 */
typedef struct flashtune_context flashtune_context;

/**
 * Receives one log line: UTF-8 without a line feed, valid during the callback. level is a
 * FLASHTUNE_LOG_*.
 *
 * The library calls it on any thread, also on several at once. The callback must return normally.
 * It must call no flashtune function except flashtune_status_string and flashtune_version*.
 */
typedef void (*flashtune_log_callback)(int32_t level, const char *message, void *user);

/**
 * The options of a new context. Zero is the default of every field except struct_size.
 */
typedef struct flashtune_context_options {
  /**
   * sizeof(flashtune_context_options).
   */
  uint64_t struct_size;
  /**
   * A FLASHTUNE_BACKEND_*.
   */
  int32_t backend;
  /**
   * The GPU's number as the CUDA driver counts, from 0. Ignored with cuda_context and by the CPU
   * backend.
   */
  int32_t device_ordinal;
  /**
   * A CUcontext of the caller, which must outlive this context. NULL selects the device's
   * primary context, which the CUDA runtime uses too. Must be NULL for FLASHTUNE_BACKEND_CPU.
   */
  void *cuda_context;
  /**
   * Folder of records and compiled kernels. The folder must belong to this user alone. The
   * string is copied.
   *
   * - NULL selects $XDG_CACHE_HOME/flashtune or $HOME/.cache/flashtune.
   * - "" selects no folder: everything stays in memory.
   * - The environment variable FLASHTUNE_CACHE_DIR takes precedence over NULL and over a path,
   *   but not over "".
   */
  const char *cache_dir;
  /**
   * A FLASHTUNE_TUNING_*.
   */
  int32_t tuning_policy;
  /**
   * Threads of the CPU backend, 0 to 1024. 0 means one for each core that this process may use.
   * Ignored by the CUDA backend.
   */
  int32_t num_threads;
  /**
   * Limit in seconds for tuning one problem, up to 366 days. 0 means 20 seconds.
   */
  double tuning_time_limit_seconds;
  /**
   * A pack: a file of kernels that were compiled ahead of time (docs/packs.md). A pack that
   * cannot be used causes a log line, not a failure; flashtune_context_pack has the reason.
   * Ignored by the CPU backend. The string is copied.
   *
   * - NULL selects libflashtune.pack beside the library, if it exists. That file must belong to
   *   root, to this user or to the owner of the library, and nobody else may write to it.
   * - "" selects no pack.
   * - The environment variable FLASHTUNE_PACK takes precedence over NULL and over a path, but
   *   not over "".
   */
  const char *pack;
} flashtune_context_options;

/**
 * The device of a context. Text is UTF-8, ends in NUL, and is cut if it is too long.
 */
typedef struct flashtune_device_info {
  /**
   * sizeof(flashtune_device_info), set by the caller.
   */
  uint64_t struct_size;
  /**
   * FLASHTUNE_BACKEND_CUDA or FLASHTUNE_BACKEND_CPU.
   */
  int32_t backend;
  /**
   * Streaming multiprocessors of a GPU, or worker threads of the CPU backend.
   */
  uint32_t sm_count;
  /**
   * The device's name, for example "NVIDIA H200".
   */
  char name[128];
  /**
   * The architecture, for example "sm_90", or "cpu".
   */
  char arch[16];
  /**
   * Memory of the device in bytes.
   */
  uint64_t memory_bytes;
  /**
   * The CUDA version that the driver supports: 1000 * major + 10 * minor. 0 on the CPU.
   */
  uint32_t driver_version;
  /**
   * The version of the NVRTC in use, in the same form. 0 on the CPU, and where none is found.
   * The first flashtune_context_device on a GPU looks for it, unless an earlier call has.
   */
  uint32_t nvrtc_version;
} flashtune_device_info;

/**
 * The pack of a context. Text is UTF-8, ends in NUL, and is cut if it is too long.
 */
typedef struct flashtune_pack_info {
  /**
   * sizeof(flashtune_pack_info), set by the caller.
   */
  uint64_t struct_size;
  /**
   * A FLASHTUNE_PACK_*.
   */
  int32_t state;
  /**
   * Kernels for the device's architecture. 0 unless the state is FLASHTUNE_PACK_LOADED, as are
   * the two numbers that follow.
   */
  uint32_t num_kernels;
  /**
   * Problems whose plans were made for the device's architecture.
   */
  uint32_t num_plans;
  /**
   * Tuning records, of all architectures.
   */
  uint32_t num_records;
  /**
   * The pack's file. Empty if the state is FLASHTUNE_PACK_NONE.
   */
  char path[256];
  /**
   * Why the pack was refused, as one clause. Empty in other states.
   */
  char reason[256];
} flashtune_pack_info;

/**
 * The same for a tensor that is only read. The layout and the rules are those of flashtune_tensor,
 * but elements may overlap: a stride of 0 broadcasts, and views into one packed buffer are
 * allowed.
 */
typedef struct flashtune_const_tensor {
  const void *data;
  int64_t stride_batch;
  int64_t stride_seqlen;
  int64_t stride_head;
} flashtune_const_tensor;

/**
 * A view of a (batch, seqlen, heads, dim) tensor that is written. Its last dimension is
 * contiguous. The data is borrowed for the call, on a GPU until the enqueued work is done. It is
 * never freed.
 *
 * Strides are in elements, not bytes, and at least 0. The stride of a dimension of size 1 is
 * ignored. No two elements may overlap. With the dimensions sorted by stride, each stride must be
 * larger than the distance to the last element of the dimensions before it.
 *
 * data is device memory on a CUDA context and host memory on a CPU context, aligned to its
 * element. A pass runs fastest if addresses and strides are multiples of 16 bytes and head dims
 * are multiples of 8.
 *
 * data may be NULL if the tensor has no element. It may also be NULL in the calls that do not
 * touch data: supported, workspace_size, prepare, plan_info and autotune. In those calls, NULL
 * with all strides 0 stands for a packed tensor.
 */
typedef struct flashtune_tensor {
  void *data;
  int64_t stride_batch;
  int64_t stride_seqlen;
  int64_t stride_head;
} flashtune_tensor;

/**
 * The same for a tensor that is only read. The layout is that of flashtune_scores_tensor.
 */
typedef struct flashtune_const_scores_tensor {
  const void *data;
  int64_t stride_batch;
  int64_t stride_head;
  int64_t stride_seqlen_q;
  int64_t stride_seqlen_k;
} flashtune_const_scores_tensor;

/**
 * Lists of the blocks of scores that count. Forward, each block of queries lists the blocks of
 * keys that it sees. Backward, each block of keys lists the blocks of queries that see it (the
 * transpose).
 *
 * A score counts if its block is listed and causal, the window, mask and the other features allow
 * it. In a full block, mask is not applied; causal, the window and the other features are. A query
 * whose block lists nothing sees no key. The run time is proportional to the number of listed
 * blocks.
 *
 * FlexAttention's BlockMask holds the same lists:
 *
 * - Forward: kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices.
 * - Backward: q_num_blocks, q_indices, full_q_num_blocks, full_q_indices.
 *
 * Below, rows is ceil(seqlen_q / block_q) forward and ceil(seqlen_k / block_k) backward. The
 * entries of a list may have any order. A row must not name a block twice, neither in one list nor
 * across both.
 *
 * On a CPU context the lists are host memory, and a launch refuses wrong entries. On a CUDA
 * context they are device memory, and nothing checks them:
 *
 * - A count above max_blocks uses the first max_blocks entries.
 * - An entry that names no block is skipped.
 * - A block listed twice counts twice.
 *
 * Strides are in elements and at least 0. A stride of 0 shares the lists along that dimension.
 */
typedef struct flashtune_block_mask {
  /**
   * Queries of a block, a multiple of 16 up to 2048. Multiples of 128 run fastest. Each size has
   * its own kernel.
   */
  int64_t block_q;
  /**
   * Keys of a block, under the same rule.
   */
  int64_t block_k;
  /**
   * int32 (batch_size, num_heads_q, rows), read: the number of used entries of indices. The rows
   * dimension is contiguous.
   */
  const int32_t *num_blocks;
  /**
   * int32 (batch_size, num_heads_q, rows, max_blocks), read: block numbers. The max_blocks
   * dimension is contiguous.
   */
  const int32_t *indices;
  /**
   * The same for full blocks, with the same strides. Both are NULL if no block is full.
   */
  const int32_t *full_num_blocks;
  /**
   * See full_num_blocks.
   */
  const int32_t *full_indices;
  int64_t num_blocks_stride_batch;
  int64_t num_blocks_stride_head;
  int64_t indices_stride_batch;
  int64_t indices_stride_head;
  int64_t indices_stride_row;
  /**
   * Entries that a row of indices has room for, 0 to 2^31 - 1.
   */
  int64_t max_blocks;
} flashtune_block_mask;

/**
 * One forward pass: out = dropout(softmax(mask(softcap(softmax_scale * q k^T) + alibi + bias))) v.
 *
 * Set the whole struct to zero, then struct_size, then the fields that apply. Zero is the default
 * of every optional field.
 */
typedef struct flashtune_forward_params {
  /**
   * sizeof(flashtune_forward_params).
   */
  uint64_t struct_size;
  /**
   * A FLASHTUNE_DTYPE_*: the type of q, k, v and out, unless kv_dtype or out_dtype gives
   * another. Sums are fp32. On a GPU, sums of e4m3 products have fewer bits (docs/numerics.md).
   */
  int32_t dtype;
  /**
   * A FLASHTUNE_CAUSAL_*.
   */
  int32_t causal;
  /**
   * Batch entries, 0 to 2^31 - 1. With 0 the call does nothing. With cu_seqlens_q or
   * cu_seqlens_k, the number of sequences.
   *
   * Three products are limited as well. batch_size * num_heads_q is below 2^31. That product
   * times (4096 + the longer of seqlen_q and seqlen_k) is below 2^51. num_heads_q * total_q and
   * num_heads_q * total_k are below 2^51.
   *
   * On a GPU, a call of about 2^31 tiles or more is UNSUPPORTED. A tile holds at least 16
   * queries or keys of one head.
   */
  int64_t batch_size;
  /**
   * Heads of q and out, a multiple of num_heads_kv. The quotient of the two is the size of a GQA
   * group. Query head h reads K/V head h / (num_heads_q / num_heads_kv).
   */
  int64_t num_heads_q;
  /**
   * Heads of k and v, at least 1.
   */
  int64_t num_heads_kv;
  /**
   * Queries of a batch entry, 0 to 2^31 - 4096. With cu_seqlens_q, an upper bound of the
   * sequences' lengths; the launch is sized by it.
   */
  int64_t seqlen_q;
  /**
   * Keys of a batch entry, 0 to 2^31 - 4096. With cu_seqlens_k, an upper bound as for seqlen_q.
   * A query that sees no key has out = 0 and lse = -infinity (with a sink, lse is the sink's
   * score).
   */
  int64_t seqlen_k;
  /**
   * Dim of q and k, 1 to 512.
   */
  int64_t head_dim;
  /**
   * Dim of v and out, 1 to 512.
   */
  int64_t head_dim_v;
  /**
   * Factor of the scores, of a magnitude from 2^-100 to 2^100. 0 means 1/sqrt(head_dim).
   */
  float softmax_scale;
  /**
   * Probability of dropping (not of keeping) an attention weight: 0 <= dropout_p < 1. It is
   * rounded to a multiple of 1/65536, at most 65535/65536. Kept weights are divided by the
   * rounded probability of keeping.
   */
  float dropout_p;
  /**
   * The dropout mask is a pure function of (seed, offset, batch, head, query, key). It is equal
   * on every backend and in both passes. Seed and offset are ignored if dropout_p is 0.
   *
   * philox4x32_10 is defined by Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
   * 2011. / and % are those of integers, and low and high are the 32-bit halves of a value.
   * query and key are positions in their sequence, from 0. threshold is dropout_p * 65536,
   * rounded, at most 65535.
   *
   *     words = philox4x32_10(
   *         counter = {key / 16 * 4 + key % 8 / 2,
   *                    query / 16 * 8 + query % 8,
   *                    batch * num_heads_q + head,
   *                    offset low},
   *         key = {seed low, seed high ^ offset high})
   *     draw = words[query % 16 / 8 + 2 * (key % 16 / 8)] >> (16 * (key % 2)) & 0xffff
   *     dropped = draw < threshold
   */
  uint64_t dropout_seed;
  /**
   * See dropout_seed.
   */
  uint64_t dropout_offset;
  /**
   * NULL, or the address of 8 bytes that replace dropout_seed. The kernels read them when they
   * run, so each replay of a captured graph may have its own mask. They are device memory on a
   * CUDA context and host memory on a CPU context.
   */
  const uint64_t *dropout_seed_ptr;
  /**
   * The same for dropout_offset.
   */
  const uint64_t *dropout_offset_ptr;
  /**
   * (batch_size, seqlen_q, num_heads_q, head_dim), read. With cu_seqlens_q, q and all other
   * tensors of queries are (total_q, heads, dim), and stride_batch is ignored.
   */
  struct flashtune_const_tensor q;
  /**
   * (batch_size, seqlen_k, num_heads_kv, head_dim), read. With cu_seqlens_k, k and all other
   * tensors of keys are (total_k, heads, dim), and stride_batch is ignored.
   */
  struct flashtune_const_tensor k;
  /**
   * (batch_size, seqlen_k, num_heads_kv, head_dim_v), read.
   */
  struct flashtune_const_tensor v;
  /**
   * (batch_size, seqlen_q, num_heads_q, head_dim_v), written.
   */
  struct flashtune_tensor out;
  /**
   * fp32 (batch_size, num_heads_q, seqlen_q), with cu_seqlens_q (num_heads_q, total_q);
   * contiguous, written. It is the natural logarithm of the sum of the exponentials of the
   * softmax's inputs. NULL if not wanted. The backward pass needs it.
   */
  float *lse;
  /**
   * FLASHTUNE_FEATURE_* combined with |: the features whose data fields below are used.
   *
   * A used pointer must not be NULL at a launch; it may be NULL in the calls that do not touch
   * data. An unused pointer must be NULL. Unused sizes must be 0: total_q, total_k, page_size,
   * num_pages, batch_size_cache and block_mask's block_q, block_k and max_blocks.
   */
  uint64_t features;
  /**
   * A FLASHTUNE_WINDOW_*. With causal, the window must have the same alignment, and window_right
   * must be 0 or -1.
   */
  int32_t window;
  /**
   * Scores s become softcap * tanh(s / softcap), after softmax_scale and before alibi and bias
   * are added. 0 means no soft cap. Otherwise both softcap and |softmax_scale| / softcap are
   * from 2^-100 to 2^100.
   */
  float softcap;
  /**
   * With a window: how many keys before its diagonal a query sees, at most 2^31 - 4096; -1 means
   * all. seqlen_q + seqlen_k is then at most 2^31 - 4096 too. Without a window: 0 or -1.
   */
  int64_t window_left;
  /**
   * With a window: how many keys after its diagonal a query sees. The limits are those of
   * window_left.
   */
  int64_t window_right;
  /**
   * fp32, read: -slope * |i + seqlen_k - seqlen_q - j| is added to the score of query i and key
   * j. With varlen, both lengths are the sequence's own. The slope of batch entry b and query
   * head h is element b * alibi_stride_batch + h.
   */
  const float *alibi_slopes;
  /**
   * Elements from one batch entry's slopes to the next, at least 0. With 0, all batch entries
   * share num_heads_q slopes.
   */
  int64_t alibi_stride_batch;
  /**
   * Elements of dtype, read: added to the scores. -infinity hides a key.
   */
  struct flashtune_const_scores_tensor bias;
  /**
   * Read. With FLASHTUNE_FEATURE_MASK, elements are bytes: 0 hides a key, any other value shows
   * it.
   *
   * With FLASHTUNE_FEATURE_MASK_BITS, elements are bits, packed along the keys. The tensor is
   * (batch_size, num_heads_q, seqlen_q, ceil(seqlen_k / 8)) bytes. Bit j % 8 of byte j / 8
   * belongs to key j, where bit 0 is the lowest: 0 hides the key, 1 shows it. Little-endian
   * words of 32 bits have this layout. Strides are in bytes, and stride_seqlen_k is 1. Bits past
   * the last key may have any value.
   */
  struct flashtune_const_scores_tensor mask;
  /**
   * fp32 (num_heads_q), read: an extra score of each query head that belongs to no key. It takes
   * its share of the softmax, adds nothing to out, and is part of lse.
   */
  const float *sinks;
  /**
   * int32 (batch_size + 1), read: sequence b is rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of
   * q. The offsets begin at 0, do not decrease and are at most total_q. No sequence is longer
   * than seqlen_q. Rows that belong to no sequence are neither read nor written.
   *
   * Four arrays hold lengths: cu_seqlens_q, cu_seqlens_k, seqused_q and seqused_k. Each may be
   * used without the others. On a CPU context they are host memory, and a launch refuses wrong
   * values. On a CUDA context they are device memory, and nothing checks them. There, a sequence
   * longer than seqlen_q or seqlen_k uses its first rows up to that length. Any other wrong
   * value is undefined behaviour.
   */
  const int32_t *cu_seqlens_q;
  /**
   * int32 (batch_size + 1), read: the same for k and v, with total_k and seqlen_k.
   */
  const int32_t *cu_seqlens_k;
  /**
   * int32 (batch_size), read: the number of used rows of each sequence of q, counted from its
   * first. It is at least 0 and at most the sequence's length. The other rows are neither read
   * nor written, nor are their elements of lse.
   */
  const int32_t *seqused_q;
  /**
   * int32 (batch_size), read: the same for k and v.
   */
  const int32_t *seqused_k;
  /**
   * With cu_seqlens_q: rows of q, at most 2^31 - 4096.
   */
  int64_t total_q;
  /**
   * With cu_seqlens_k: rows of k, at most 2^31 - 4096.
   */
  int64_t total_k;
  /**
   * int32 (batch_size, ceil(seqlen_k / page_size)), read. Page block_table[b][i] of k and v
   * holds sequence b's keys from i * page_size on. Pages may be shared.
   *
   * k and v are then (num_pages, page_size, num_heads_kv, dim), and stride_batch leads from one
   * page to the next. A sequence has seqlen_k keys, or as many as seqused_k says. Entries and
   * pages past them are not read. All rows of a sequence's last page may be read; those past its
   * last key do not affect the result.
   *
   * On a CUDA context the table is device memory, and an entry that names no page stands for the
   * last page. On a CPU context it is host memory, and a launch refuses such an entry. Pages
   * exclude cu_seqlens_k and dropout. With pages, seqlen_q * num_heads_q / num_heads_kv is at
   * most 2^31 - 4096.
   */
  const int32_t *block_table;
  /**
   * Elements from one sequence's row of block_table to the next: at least ceil(seqlen_k /
   * page_size).
   */
  int64_t block_table_stride;
  /**
   * With block_table: keys of a page, at least 1. Each size has its own kernel.
   */
  int64_t page_size;
  /**
   * With block_table: pages that k and v hold, 1 to 2^31 - 1.
   */
  int64_t num_pages;
  /**
   * 0 or 1. With 1, a query's out and lse have the same bits alone and at any place in any
   * batch, in a prefill at once, in chunks of any lengths, and as the one query of a decoding
   * step. dropout_p must be 0. On a CUDA context k and v must not have 8 bits.
   *
   * The guarantee holds among calls with batch_invariant on one device, with one version of this
   * library and of NVRTC. These must be equal between the calls:
   *
   * - dtype, num_heads_q, num_heads_kv, head_dim and head_dim_v;
   * - causal, window, window_left and window_right;
   * - softmax_scale, softcap and other features than varlen and pages;
   * - the query's values, and the keys and values that it sees at their places in the sequence.
   *   Hidden keys must have finite values.
   *
   * These may differ:
   *
   * - which queries of the sequence are in the call, and keys that the query does not see;
   * - batch_size, the other sequences, and where they lie;
   * - the longest lengths, total_q and total_k;
   * - pages or none, page_size, and which pages hold a sequence's keys;
   * - addresses and strides.
   *
   * A block mask must be equal too. On GPUs of compute capability 9.0, calls of few and of
   * many queries agree because mma.sync and wgmma give the same bits. They do on an H200.
   *
   * The order of sums is fixed, and never follows from records or measurements. The mode
   * therefore gives up the time that another order would save.
   */
  int32_t batch_invariant;
  /**
   * Must be 0.
   */
  int32_t reserved;
  /**
   * For each block of queries, the blocks of keys that it sees. Excludes varlen, pages,
   * cache_batch_idx and leftpad_k.
   */
  struct flashtune_block_mask block_mask;
  /**
   * int32 (batch_size), read: the batch entry of k and v that holds each sequence's keys. k and
   * v are then (batch_size_cache, seqlen_k, num_heads_kv, dim). Several sequences may share an
   * entry. Excludes cu_seqlens_k and block_table.
   *
   * On a CUDA context it is device memory, and a number that names no entry stands for the last
   * entry. On a CPU context it is host memory, and a launch refuses such a number.
   */
  const int32_t *cache_batch_idx;
  /**
   * int32 (batch_size), read: the rows before each sequence's first key in its entry of k and v.
   * seqused_k counts from the entry's first row, so sequence b has seqused_k[b] - leftpad_k[b]
   * keys, or seqlen_k - leftpad_k[b]. Key 0 is row leftpad_k[b]: causal, the window, alibi, bias
   * and mask count from there. Excludes cu_seqlens_k and block_table.
   *
   * On a CUDA context it is device memory, and a number below 0 counts as 0, one above the
   * entry's used rows as their number. On a CPU context it is host memory, and a launch refuses
   * both.
   */
  const int32_t *leftpad_k;
  /**
   * With cache_batch_idx: batch entries of k and v, 1 to 2^31 - 1.
   */
  int64_t batch_size_cache;
  /**
   * 0: the config decides into how many parts the keys are split over CTAs. Otherwise the most
   * parts, at least 1. It changes neither the plan nor the workspace's size. With
   * batch_invariant it must be 0, since the places of the keys decide.
   */
  int64_t num_splits;
  /**
   * A FLASHTUNE_DTYPE_*: the type of k and v; 0 means dtype. With dtype FP16 or BF16 it may be
   * E4M3, E5M2, INT8, INT4_GROUP32 or INT4_GROUP64. With dtype E4M3 it is 0 or E4M3.
   *
   * With k and v of 8 bits, dropout_p must be 0. On a CUDA context their addresses, strides and
   * head dims must be multiples of 4 bytes; multiples of 16 bytes run fastest.
   *
   * With int4, dropout_p is 0, and k_descale and v_descale are NULL, since rows hold their
   * scales. On a CUDA context addresses and strides are the same multiples, head dims are at
   * most 256, and there is no block mask and no batch_invariant. The decode kernels read the
   * keys once for each 64 rows, queries times heads of a GQA group. On compute capability 9.0
   * with dtype BF16, the keys of prompts are first widened to 16 bits if the workspace has room.
   */
  int32_t kv_dtype;
  /**
   * The type of out, and of bias: 0 means dtype. With dtype E4M3 it must be FP16 or BF16.
   */
  int32_t out_dtype;
  /**
   * fp32 (batch_size, 1, num_heads_kv), read: the scales of q with dtype E4M3, else NULL. The
   * query heads of a GQA group share one. stride_seqlen is ignored.
   *
   * Strides of the three arrays of scales are in elements and at least 0. A stride of 0 shares
   * the scale along that dimension, so three strides of 0 make one scale for the tensor. An
   * element stands for its 8-bit number times its scale.
   *
   * Scales must be finite and above 0. On a CPU context a launch refuses others. On a CUDA
   * context nothing checks them: the heads and sequences that use such a scale have results
   * without meaning, and no others are affected.
   */
  struct flashtune_const_tensor q_descale;
  /**
   * fp32, read: the scales of k if it has 8 bits, else NULL. keys_per_descale says how many keys
   * share one:
   *
   * - 0: all keys of a sequence. The array is (batch_size, 1, num_heads_kv), and stride_seqlen
   *   is ignored.
   * - 1: each key has its own. The array has k's shape without the last dimension: (batch_size,
   *   seqlen_k, num_heads_kv), with cu_seqlens_k (total_k, num_heads_kv), with pages (num_pages,
   *   page_size, num_heads_kv). cache_batch_idx and leftpad_k apply to it too.
   * - 128: blocks of 128 keys, counted from each sequence's key 0. The array is (batch_size,
   *   ceil(seqlen_k / 128), num_heads_kv), also with pages and packed sequences.
   */
  struct flashtune_const_tensor k_descale;
  /**
   * The same for v.
   */
  struct flashtune_const_tensor v_descale;
  /**
   * 0, 1 or 128: see k_descale. With dtype E4M3 a CUDA context takes 0 and 128.
   */
  int64_t keys_per_descale;
} flashtune_forward_params;

/**
 * The description of a plan. Text is UTF-8, ends in NUL, and is cut if it is too long.
 */
typedef struct flashtune_plan_info {
  /**
   * sizeof(flashtune_plan_info), set by the caller.
   */
  uint64_t struct_size;
  /**
   * A FLASHTUNE_SOURCE_*: where the config comes from. One that was chosen by predicted time has
   * the source of the record that calibrates the prediction.
   */
  int32_t source;
  /**
   * The main kernel's name, for example "flashtune_sm80_forward".
   */
  char kernel[64];
  /**
   * The config, for example "sm80 block_m=128 block_n=64 num_stages=2 num_warps=4".
   */
  char config[256];
  /**
   * Why this config was chosen, as one sentence.
   */
  char reason[256];
  /**
   * Registers of a thread of the main kernel. 0 on a CPU context.
   */
  uint32_t registers;
  /**
   * Spilled bytes of a thread of the main kernel. 0 on a CPU context.
   */
  uint32_t spill_bytes;
  /**
   * Shared memory of a CTA of the main kernel, in bytes. 0 on a CPU context.
   */
  uint32_t smem_bytes;
  /**
   * Threads of a CTA of the main kernel. 0 on a CPU context.
   */
  uint32_t threads;
  /**
   * Median time of this config in microseconds, from the record. It was measured at the record's
   * shape, which may be a neighbour of this one, as reason says. 0 means not measured. It is
   * also 0 if this config is not the neighbour's, since it splits the keys differently or was
   * chosen by predicted time; reason then has the neighbour's time.
   */
  double measured_us;
  /**
   * The same for the config that the heuristic would have chosen.
   */
  double default_us;
} flashtune_plan_info;

/**
 * A view of a (batch_size, num_heads_q, seqlen_q, seqlen_k) tensor that is written: one element
 * for each score. Lifetime, memory and NULL rules are those of flashtune_tensor.
 *
 * Strides are in elements, not bytes, and at least 0. A stride of 0 shares the element along that
 * dimension. The stride of a dimension of size 1 is ignored. data is aligned to its element. With
 * varlen, elements past a sequence's last query or key are neither read nor written.
 */
typedef struct flashtune_scores_tensor {
  void *data;
  int64_t stride_batch;
  int64_t stride_head;
  int64_t stride_seqlen_q;
  int64_t stride_seqlen_k;
} flashtune_scores_tensor;

/**
 * One backward pass. A field with the name of a forward field means the same and must have the
 * value that the forward pass had. out and lse are the forward pass's results. Set the whole
 * struct to zero first, as for flashtune_forward_params.
 */
typedef struct flashtune_backward_params {
  /**
   * sizeof(flashtune_backward_params).
   */
  uint64_t struct_size;
  int32_t dtype;
  int32_t causal;
  int64_t batch_size;
  int64_t num_heads_q;
  int64_t num_heads_kv;
  int64_t seqlen_q;
  int64_t seqlen_k;
  int64_t head_dim;
  int64_t head_dim_v;
  float softmax_scale;
  float dropout_p;
  uint64_t dropout_seed;
  uint64_t dropout_offset;
  const uint64_t *dropout_seed_ptr;
  const uint64_t *dropout_offset_ptr;
  struct flashtune_const_tensor q;
  struct flashtune_const_tensor k;
  struct flashtune_const_tensor v;
  /**
   * (batch_size, seqlen_q, num_heads_q, head_dim_v), read: the forward pass's out.
   */
  struct flashtune_const_tensor out;
  /**
   * fp32, contiguous, read: the forward pass's lse, in its shape. Must not be NULL.
   */
  const float *lse;
  /**
   * (batch_size, seqlen_q, num_heads_q, head_dim_v), read: the gradient of out.
   */
  struct flashtune_const_tensor dout;
  /**
   * (batch_size, seqlen_q, num_heads_q, head_dim), written: the gradient of q. dq, dk and dv may
   * be views into one packed buffer if no two of them share an element.
   */
  struct flashtune_tensor dq;
  /**
   * (batch_size, seqlen_k, num_heads_kv, head_dim), written: the gradient of k.
   */
  struct flashtune_tensor dk;
  /**
   * (batch_size, seqlen_k, num_heads_kv, head_dim_v), written: the gradient of v.
   */
  struct flashtune_tensor dv;
  /**
   * 0 or 1. With 1, dq, dk, dv and dbias have the same bits at every run. Key tiles then add to
   * dq in a fixed order, which costs time and slightly more workspace.
   *
   * - A dbias that is summed along a dimension is UNSUPPORTED.
   * - The config follows from the problem, the device's architecture and the library's version
   *   alone, never from records. flashtune_autotune therefore refuses such a problem.
   *
   * With 0, on a GPU, the order of fp32 sums may change dq from run to run, and dbias where it
   * is summed. out, lse, dk, dv and dsinks have the same bits at every run.
   */
  int32_t deterministic;
  /**
   * Must be 0.
   */
  int32_t reserved;
  uint64_t features;
  int32_t window;
  float softcap;
  int64_t window_left;
  int64_t window_right;
  const float *alibi_slopes;
  int64_t alibi_stride_batch;
  struct flashtune_const_scores_tensor bias;
  struct flashtune_const_scores_tensor mask;
  const float *sinks;
  const int32_t *cu_seqlens_q;
  const int32_t *cu_seqlens_k;
  const int32_t *seqused_q;
  const int32_t *seqused_k;
  int64_t total_q;
  int64_t total_k;
  /**
   * fp32, added to, so set it to zero first: the gradient of bias. Elements along a stride of 0
   * are summed into one. No other two elements may share a place. With deterministic, the stride
   * of a dimension longer than 1 must not be 0.
   */
  struct flashtune_scores_tensor dbias;
  /**
   * fp32 (num_heads_q): the gradient of sinks, written unless the call does nothing. NULL if not
   * wanted.
   */
  float *dsinks;
  /**
   * fp32, contiguous, in the shape of lse, read: the gradient of lse.
   */
  const float *dlse;
  /**
   * For each block of keys, the blocks of queries that see it: the transpose of the forward
   * pass's lists. On a CUDA context it excludes deterministic.
   */
  struct flashtune_block_mask block_mask;
} flashtune_backward_params;

/**
 * Partial results to merge. Each partial is the attention of the same queries over another part of
 * the keys, and the result is their attention over all parts. Each partial is weighted by its
 * share of the sum of exponentials, which follows from its lse.
 *
 * Set the whole struct to zero, then struct_size, then the fields that apply.
 */
typedef struct flashtune_merge_params {
  /**
   * sizeof(flashtune_merge_params).
   */
  uint64_t struct_size;
  /**
   * A FLASHTUNE_DTYPE_*: the type of out.
   */
  int32_t dtype;
  /**
   * The type of partial_out: that of out, or FLASHTUNE_DTYPE_FP32. All sums are fp32.
   */
  int32_t partial_dtype;
  /**
   * Number of partials, at least 1.
   */
  int64_t num_partials;
  /**
   * Batch entries, 0 or more. For packed sequences it is 1, and seqlen is total_q. batch_size *
   * seqlen * num_heads is below 2^31.
   */
  int64_t batch_size;
  /**
   * Queries of a batch entry, 0 or more.
   */
  int64_t seqlen;
  /**
   * Heads of the queries, at least 1.
   */
  int64_t num_heads;
  /**
   * Dim of partial_out and out, 1 to 512.
   */
  int64_t head_dim_v;
  /**
   * (batch_size, seqlen, num_heads, head_dim_v), read: the first partial's out. Rows whose lse
   * is -infinity are not read.
   */
  struct flashtune_const_tensor partial_out;
  /**
   * Elements from one partial's out to the next, at least 0. Ignored if num_partials is 1.
   */
  int64_t partial_out_stride;
  /**
   * fp32 (batch_size, num_heads, seqlen), contiguous, read: the first partial's lse.
   */
  const float *partial_lse;
  /**
   * Elements from one partial's lse to the next, at least 0. Ignored if num_partials is 1.
   */
  int64_t partial_lse_stride;
  /**
   * (batch_size, seqlen, num_heads, head_dim_v), written. It is 0 where no partial has seen a
   * key.
   */
  struct flashtune_tensor out;
  /**
   * fp32 (batch_size, num_heads, seqlen), contiguous, written: the lse over all keys. It is
   * -infinity where no partial has seen a key. NULL if not wanted.
   */
  float *lse;
} flashtune_merge_params;

/**
 * New keys and values to write into a K/V cache behind those that each sequence has there. k_new
 * and v_new become rows seqlens[b] to seqlens[b] + seqlen_new of sequence b.
 *
 * A sequence gets none of its new keys in three cases: its length is negative, the new keys do not
 * all fit, or one of them has no page. The other sequences get theirs. Elements that are not
 * written keep their bits.
 *
 * Set the whole struct to zero, then struct_size, then the fields that apply.
 */
typedef struct flashtune_kv_append_params {
  /**
   * sizeof(flashtune_kv_append_params).
   */
  uint64_t struct_size;
  /**
   * A FLASHTUNE_DTYPE_*: the type of k_new and v_new, and of k_cache and v_cache unless
   * cache_dtype gives theirs. Elements are copied bit by bit, except those that are rotated or
   * quantised.
   */
  int32_t dtype;
  /**
   * Must be 0.
   */
  int32_t reserved;
  /**
   * Sequences, 0 to 2^31 - 1. With 0 the call does nothing. batch_size * seqlen_new *
   * num_heads_kv is at most 2^50. So are the cache's rows: batch_size * seqlen_cache *
   * num_heads_kv, with pages num_pages * page_size * num_heads_kv.
   */
  int64_t batch_size;
  /**
   * Heads of the keys and values, at least 1.
   */
  int64_t num_heads_kv;
  /**
   * New keys of each sequence, 0 to 2^31 - 4096. With 0 only seqused and q_rotated are written.
   */
  int64_t seqlen_new;
  /**
   * Keys that each sequence has room for, 0 to 2^31 - 4096. With pages, the room is in the pages
   * of its row of block_table.
   */
  int64_t seqlen_cache;
  /**
   * Dim of k_new and k_cache, 1 to 512.
   */
  int64_t head_dim;
  /**
   * Dim of v_new and v_cache, 1 to 512.
   */
  int64_t head_dim_v;
  /**
   * (batch_size, seqlen_new, num_heads_kv, head_dim), read.
   */
  struct flashtune_const_tensor k_new;
  /**
   * (batch_size, seqlen_new, num_heads_kv, head_dim_v), read.
   */
  struct flashtune_const_tensor v_new;
  /**
   * (batch_size, seqlen_cache, num_heads_kv, head_dim), written. With block_table it is
   * (num_pages, page_size, num_heads_kv, head_dim), and stride_batch leads from one page to the
   * next.
   */
  struct flashtune_tensor k_cache;
  /**
   * The same with head_dim_v.
   */
  struct flashtune_tensor v_cache;
  /**
   * int32 (batch_size), read: how many keys each sequence has before the call. Device memory on
   * a CUDA context and host memory on a CPU context. No length is refused on either.
   */
  const int32_t *seqlens;
  /**
   * int32 (batch_size), written: how many keys each sequence has after the call. That is
   * seqlens[b] plus the number of new keys. A sequence that got no keys keeps its length,
   * clamped to the range from 0 to seqlen_cache. NULL if not wanted. With FLASHTUNE_APPEND_SLOTS
   * it may be seqlens itself.
   */
  int32_t *seqused;
  /**
   * int32 (batch_size, ceil(seqlen_cache / page_size)), read: as in flashtune_forward_params.
   * NULL if page_size is 0.
   *
   * Only entries of pages that receive new keys are read. An entry that is negative, or
   * num_pages or more, names no page. Two sequences that share a page may write the same row.
   * That row may then hold parts of both.
   */
  const int32_t *block_table;
  /**
   * Elements from one sequence's row of block_table to the next. With several sequences it is at
   * least ceil(seqlen_cache / page_size).
   */
  int64_t block_table_stride;
  /**
   * Keys of a page, at least 1; 0 if the cache has no pages. One kernel serves all sizes.
   */
  int64_t page_size;
  /**
   * With block_table: pages that k_cache and v_cache hold, 1 to 2^31 - 1. Otherwise 0.
   */
  int64_t num_pages;
  /**
   * 0 or FLASHTUNE_APPEND_SLOTS.
   */
  uint64_t features;
  /**
   * With FLASHTUNE_APPEND_SLOTS: int32 (batch_size), read: how many of its seqlen_new new keys
   * each sequence has, from its first. The others are not written. NULL: all have seqlen_new.
   *
   * With 0 the sequence is idle: its cache and its length stay as they are. A captured graph may
   * therefore replay while some of its slots serve no request. A number below 0 counts as 0, and
   * one above seqlen_new as seqlen_new.
   */
  const int32_t *seqused_new;
  /**
   * With FLASHTUNE_APPEND_SLOTS and batch_size_cache: int32 (batch_size), read: the entry of
   * k_cache and v_cache that belongs to each sequence. A sequence whose entry does not exist
   * gets no keys. If two sequences name one entry, a row that both write may hold parts of both.
   * Excludes block_table.
   */
  const int32_t *cache_batch_idx;
  /**
   * With cache_batch_idx: entries of k_cache and v_cache, 1 to 2^31 - 1. Otherwise 0: there are
   * batch_size entries.
   */
  int64_t batch_size_cache;
  /**
   * Columns of the new keys and of q that are rotated by their position, from the first: even, 2
   * to head_dim. Half of a multiple of 16 keeps accesses wide. 0: nothing is rotated, and the
   * fields below must be 0.
   *
   * The new key at row r of its sequence in the cache has position r. With the cosine c and the
   * sine s of its position, a pair of columns (x, y) becomes (x c - y s, x s + y c), computed in
   * fp32 and rounded to dtype. Values are never rotated.
   */
  int64_t rotary_dim;
  /**
   * A FLASHTUNE_DTYPE_*: the type of rotary_cos and rotary_sin. It is dtype or fp32.
   */
  int32_t rotary_dtype;
  /**
   * 1: pair i is columns 2i and 2i + 1. 0: it is columns i and i + rotary_dim / 2.
   */
  int32_t rotary_interleaved;
  /**
   * 0: query i of sequence b has position seqlens[b] + i, as causal and windowed passes need. 1:
   * all of its queries have position seqlens[b].
   */
  int32_t rotary_q_at_one_position;
  /**
   * Must be 0.
   */
  int32_t rotary_reserved;
  /**
   * (seqlen_rotary, rotary_dim / 2), read: the cosines of pair i at each position. The last
   * dimension is contiguous.
   */
  const void *rotary_cos;
  /**
   * The same with the sines. Both may be halves of one table with rows of rotary_dim elements.
   */
  const void *rotary_sin;
  /**
   * Elements from one row of rotary_cos to the next, and of rotary_sin: at least rotary_dim / 2.
   */
  int64_t rotary_stride;
  /**
   * Rows of rotary_cos and of rotary_sin: at least 1 and seqlen_cache, at most 2^31 - 4096. A
   * position outside takes the nearest row.
   */
  int64_t seqlen_rotary;
  /**
   * Queries of each sequence, 0 to 2^31 - 4096. With 0 no query is rotated. batch_size *
   * seqlen_q * num_heads_q is at most 2^50.
   */
  int64_t seqlen_q;
  /**
   * Heads of q, at least 1; 0 if seqlen_q is 0.
   */
  int64_t num_heads_q;
  /**
   * (batch_size, seqlen_q, num_heads_q, head_dim) of dtype, read. All queries are rotated, also
   * those of sequences that get no keys.
   */
  struct flashtune_const_tensor q;
  /**
   * The same sizes, written: the rotated queries. It may be q itself, with the same strides.
   */
  struct flashtune_tensor q_rotated;
  /**
   * A FLASHTUNE_DTYPE_*: the type of k_cache and v_cache; 0 means dtype. With dtype FP16 or BF16
   * it may be E4M3, E5M2 or INT8. New rows are then rotated, divided by their scales and
   * rounded, as FLASHTUNE_DTYPE_E4M3 says. The division is x * (1 / scale) in fp32. It may be
   * INT4_GROUP32 or INT4_GROUP64 too, with k_descale and v_descale NULL: new rows are then
   * rotated and quantised as FLASHTUNE_DTYPE_INT4_GROUP32 says, with their scales and zeros.
   */
  int32_t cache_dtype;
  /**
   * With a cache of 8 bits, 0: k_descale and v_descale are read. 1: each new key and head gets
   * its own scale, its largest magnitude over the largest number of cache_dtype, and the scales
   * are written. A row of zeros gets the scale 1.
   */
  int32_t computes_descale;
  /**
   * fp32: the scales of k_cache, as flashtune_forward_params takes them. With keys_per_descale 1
   * they are (batch_size, seqlen_cache, num_heads_kv), with pages (num_pages, page_size,
   * num_heads_kv), with cache_batch_idx (batch_size_cache, seqlen_cache, num_heads_kv). With 0
   * they are (batch_size, 1, num_heads_kv). A stride of 0 shares a scale that is read.
   *
   * On a CPU context a launch refuses given scales that are not finite or not above 0. On a CUDA
   * context nothing checks them, and the rows that use such a scale hold anything.
   */
  struct flashtune_tensor k_descale;
  /**
   * The same for v_cache.
   */
  struct flashtune_tensor v_descale;
  /**
   * 0 or 1: see k_descale. It must be 1 with computes_descale.
   */
  int64_t keys_per_descale;
} flashtune_kv_append_params;

/**
 * A tensor to quantise: out holds x / scale in 8 bits, rounded as FLASHTUNE_DTYPE_E4M3 says. The
 * division is x * (1 / scale) in fp32. flashtune_forward takes out as q, k or v, and descale as
 * its scales.
 *
 * With a rotation, x above means the rotated rows. Rotate q and k by the same seed, which leaves
 * q k^T as it is. Do not rotate v. Outliers spread over the columns of their row, so that the
 * scale of q or k shrinks (docs/numerics.md).
 *
 * Set the whole struct to zero, then struct_size, then the fields that apply.
 */
typedef struct flashtune_quantize_params {
  /**
   * sizeof(flashtune_quantize_params).
   */
  uint64_t struct_size;
  /**
   * FLASHTUNE_DTYPE_FP16 or _BF16: the type of x.
   */
  int32_t dtype;
  /**
   * FLASHTUNE_DTYPE_E4M3, _E5M2 or _INT8: the type of out. With a rotation it may also be dtype.
   * out then holds the rotated rows, rounded to dtype, and descale.data, keys_per_descale,
   * heads_per_descale and computes_descale must be 0.
   */
  int32_t out_dtype;
  /**
   * Batch entries, 0 to 2^31 - 1. Packed sequences are one entry of all their rows. batch_size *
   * seqlen * num_heads is at most 2^50.
   */
  int64_t batch_size;
  /**
   * Rows of an entry, 0 to 2^31 - 4096. With 0 the call does nothing.
   */
  int64_t seqlen;
  /**
   * Heads of x and out, at least 1.
   */
  int64_t num_heads;
  /**
   * Dim of x and out, 1 to 512.
   */
  int64_t head_dim;
  /**
   * (batch_size, seqlen, num_heads, head_dim), read.
   */
  struct flashtune_const_tensor x;
  /**
   * (batch_size, seqlen, num_heads, head_dim), written.
   */
  struct flashtune_tensor out;
  /**
   * fp32 (batch_size, blocks, num_heads / heads_per_descale): the scales, written with
   * computes_descale, else read. Blocks are 1 with keys_per_descale 0, else ceil(seqlen /
   * keys_per_descale). On a CPU context a launch refuses given scales that are not finite or not
   * above 0. On a CUDA context nothing checks them, and out holds anything there.
   */
  struct flashtune_tensor descale;
  /**
   * Rows that share a scale: 0 (all of an entry), 1 or 128.
   */
  int64_t keys_per_descale;
  /**
   * Neighbouring heads that share a scale, a divisor of num_heads: 1 for k and v, and for q the
   * size of the GQA group.
   */
  int64_t heads_per_descale;
  /**
   * 0: descale is read. 1: it is written, as the largest magnitude of the elements that share it
   * over the largest number of out_dtype. NaN does not count, and zeros alone get the scale 1.
   */
  int32_t computes_descale;
  /**
   * Must be 0.
   */
  int32_t reserved;
  /**
   * A FLASHTUNE_ROTATION_*. A rotation spreads an infinity or a NaN over its block of columns.
   */
  int32_t rotation;
  /**
   * Must be 0.
   */
  int32_t rotation_reserved;
  /**
   * The seed of FLASHTUNE_ROTATION_HADAMARD's signs. It is not read without a rotation.
   */
  uint64_t rotation_seed;
} flashtune_quantize_params;

/**
 * A range of problems for flashtune_prepare_range: all problems between a largest one and the
 * least sizes, of one pass or of both.
 *
 * Each field of a problem belongs to the class, is rounded, or is free. A class has kernels of its
 * own. Rounded sizes decide which of them a launch takes. Free fields decide at most how many
 * splits a launch makes.
 *
 * - Class: pass, dtype, head_dim, head_dim_v, causal or not, deterministic, batch_invariant,
 *   dropout or not, softcap or not, and the features, of which cache_batch_idx and leftpad_k count
 *   as one. Also: a window on the left or not, on the right or not; page_size; block_q and block_k
 *   of a block mask; and the widest access of 16, 8, 4 or 2 bytes that all addresses, strides and
 *   head dims allow.
 * - One query without a window, causal to the bottom right and without cu_seqlens_q and seqused_q,
 *   is of the class without causal, unless it is batch_invariant.
 * - Rounded: batch_size, num_heads_q, num_heads_kv, seqlen_q, seqlen_k, window_left, window_right.
 *   cu_seqlens_q or seqused_q likewise decides which kernels a launch takes.
 * - Free: total_q, total_k, num_pages, the alignment of causal and the window, softmax_scale, the
 *   values of dropout_p and softcap, seeds, all other strides, and all data.
 *
 * docs/serving.md says how sizes are rounded. A problem is inside if it is of a class of the
 * range, has the range's heads and the alignment of its causal mask and window, gives lengths of
 * queries (cu_seqlens_q, seqused_q) if the largest does and only then, and has sizes between the
 * least and the largest. With cu_seqlens_q or cu_seqlens_k the sizes are the bounds that the call
 * states, not the lengths on the device.
 */
typedef struct flashtune_range {
  /**
   * sizeof(flashtune_range).
   */
  uint64_t struct_size;
  /**
   * The largest forward pass, or NULL. It has the largest batch_size, seqlen_q and seqlen_k, and
   * every feature that some problem of the range has. Data pointers may be NULL. It is borrowed
   * for the call, as is backward.
   */
  const struct flashtune_forward_params *forward;
  /**
   * The same for the backward pass, or NULL. One of the two must be set.
   */
  const struct flashtune_backward_params *backward;
  /**
   * The smallest batch_size of the range. 0 means 1.
   */
  int64_t least_batch_size;
  /**
   * The smallest seqlen_q of the range. 0 means 1.
   */
  int64_t least_seqlen_q;
  /**
   * The smallest seqlen_k of the range. 0 means 1.
   */
  int64_t least_seqlen_k;
  /**
   * FLASHTUNE_FEATURE_* combined with |: features that some problems have and others do not.
   * Each of them must be among the features of forward or backward.
   */
  uint64_t optional_features;
  /**
   * FLASHTUNE_OPTIONAL_* combined with |. With optional_features, a range has all combinations,
   * at most 64. Combinations that no call can have are left out.
   */
  uint64_t optional;
} flashtune_range;

/**
 * What flashtune_prepare_range prepared.
 */
typedef struct flashtune_range_info {
  /**
   * sizeof(flashtune_range_info), set by the caller.
   */
  uint64_t struct_size;
  /**
   * Classes of the range.
   */
  uint64_t num_classes;
  /**
   * Configs over all classes. Configs that differ in the number of splits share kernels.
   */
  uint64_t num_configs;
  /**
   * Kernels of these configs. 0 on a CPU context, which has none.
   */
  uint64_t num_kernels;
  /**
   * Kernels that this call compiled.
   */
  uint64_t num_compiled;
  /**
   * Kernels that this call read from the cache folder or a pack. The rest were loaded before.
   */
  uint64_t num_cached;
  /**
   * The largest workspace that a problem inside can need, in bytes.
   */
  uint64_t workspace_bytes;
  /**
   * The time of the call in milliseconds.
   */
  double milliseconds;
} flashtune_range_info;

/**
 * The progress of a tuning run. It belongs to the library and is valid during the callback.
 */
typedef struct flashtune_progress {
  /**
   * sizeof(flashtune_progress) of the library. A later field exists only if it lies within this
   * size.
   */
  uint64_t struct_size;
  /**
   * "compile", "check" or "measure".
   */
  const char *phase;
  /**
   * Candidates that this phase has finished.
   */
  uint64_t done;
  /**
   * All candidates of this phase.
   */
  uint64_t total;
  /**
   * Candidates that failed in any phase so far.
   */
  uint64_t failed;
  /**
   * The best config so far. NULL while there is none.
   */
  const char *best_config;
  /**
   * Its median time in microseconds. 0 while there is none.
   */
  double best_us;
} flashtune_progress;

/**
 * Receives the progress of flashtune_autotune, from time to time, on the calling thread. A result
 * other than 0 stops the run. The callback must return normally.
 */
typedef int32_t (*flashtune_progress_callback)(const struct flashtune_progress *progress, void *user);

/**
 * The problem to tune. Exactly one of forward and backward is set. It is borrowed for the call.
 * Its data pointers may be NULL and are not used, because tuning allocates buffers of its own.
 */
typedef struct flashtune_autotune_params {
  /**
   * sizeof(flashtune_autotune_params).
   */
  uint64_t struct_size;
  /**
   * The forward pass to tune, or NULL.
   */
  const struct flashtune_forward_params *forward;
  /**
   * The backward pass to tune, or NULL.
   */
  const struct flashtune_backward_params *backward;
  /**
   * Time limit in seconds, up to 366 days. 0 means 20 seconds. At the limit, the best config so
   * far is kept.
   */
  double time_limit_seconds;
  /**
   * Receives the progress. NULL if not wanted.
   */
  flashtune_progress_callback progress;
  /**
   * Passed to progress. May be NULL.
   */
  void *progress_user;
  /**
   * 0 or 1. With 0, a problem that has a record keeps it. With 1, it is measured again.
   */
  int32_t retune;
  /**
   * Must be 0.
   */
  int32_t reserved;
} flashtune_autotune_params;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Returns a status in words, for example "invalid argument". A number that is no status gives
 * "unknown status".
 *
 * The string is static: it is never NULL and must not be freed. May be called from any thread,
 * also during stream capture.
 */
const char *flashtune_status_string(int32_t status);

/**
 * Returns the version of the loaded library, to compare with FLASHTUNE_VERSION: major * 1000000 +
 * minor * 1000 + patch. May be called from any thread, also during stream capture.
 */
int32_t flashtune_version(void);

/**
 * Returns the version of the loaded library as text, for example "0.1.0".
 *
 * The string is static: it is never NULL and must not be freed. May be called from any thread,
 * also during stream capture.
 */
const char *flashtune_version_string(void);

/**
 * Returns why this thread's last flashtune call failed. The text is one UTF-8 sentence that names
 * the argument, its value and what is allowed. It is "" after success.
 *
 * The string belongs to the library and is never NULL. It stays valid until this thread's next
 * flashtune call that returns a status. May be called from any thread, also during stream capture.
 */
const char *flashtune_last_error(void);

/**
 * Sets the process's log callback; NULL removes it. user may be NULL. Each callback receives user,
 * which stays the caller's.
 *
 * When this function returns, the previous callback is not running and will not be called again.
 * May be called from any thread, but not from inside the callback.
 *
 * Statuses: OK, INVALID_ARGUMENT (called from inside the callback), UNSUPPORTED (a Rust program
 * linked to flashtune's rlib has its own logger, which gets the lines instead).
 */
int32_t flashtune_set_log_callback(flashtune_log_callback callback, void *user);

/**
 * Makes a context and writes it to context. The caller frees it with flashtune_context_destroy.
 * options may be NULL for all defaults.
 *
 * The default backend is FLASHTUNE_BACKEND_AUTO, which opens the CPU where no GPU can be used. A
 * program whose tensors are in device memory asks for FLASHTUNE_BACKEND_CUDA, and then learns the
 * reason here.
 *
 * The caller's current CUDA context is the same after this call, as after every other. A cache
 * folder or a pack that cannot be used causes a log line, not a failure. A missing libnvrtc fails
 * the first call that compiles a kernel, with NO_COMPILER. May be called from any thread, but not
 * during stream capture.
 *
 * Statuses: OK, INVALID_ARGUMENT, UNSUPPORTED (the GPU is too old), NO_DEVICE (the message lists
 * the places tried), CUDA, OUT_OF_MEMORY.
 */
int32_t flashtune_context_create(const struct flashtune_context_options *options,
                                 struct flashtune_context **context);

/**
 * Frees a context and all it holds, and ends its threads before it returns. NULL does nothing. No
 * other call may be using the context. On a GPU, all work that it enqueued must be done. May be
 * called from any thread, but not during stream capture. In a child process made by fork, the call
 * frees nothing and returns OK.
 *
 * Statuses: OK.
 */
int32_t flashtune_context_destroy(struct flashtune_context *context);

/**
 * Forbids further preparation: from now on, no call compiles or measures. A problem without a plan
 * uses a loaded config of its class or returns NOT_PREPARED, as flashtune_forward_prepare says.
 * This suits servers that prepare at start. It cannot be undone. May be called from any thread,
 * also during stream capture.
 *
 * Statuses: OK, INVALID_ARGUMENT.
 */
int32_t flashtune_context_seal(struct flashtune_context *context);

/**
 * Describes the device of the context. The caller sets info->struct_size to
 * sizeof(flashtune_device_info). May be called from any thread, also during stream capture. If
 * the process has not looked for NVRTC before, as where a pack has all kernels, the first call on
 * a GPU searches for it and loads it, which may take 0.2 s.
 *
 * Statuses: OK, INVALID_ARGUMENT, OUT_OF_MEMORY.
 */
int32_t flashtune_context_device(struct flashtune_context *context,
                                 struct flashtune_device_info *info);

/**
 * Describes the pack of a context: a file of kernels that were compiled ahead of time, and of
 * tuning records. docs/packs.md says how to make one. The caller sets info->struct_size to
 * sizeof(flashtune_pack_info). May be called from any thread, also during stream capture.
 *
 * Statuses: OK, INVALID_ARGUMENT.
 */
int32_t flashtune_context_pack(struct flashtune_context *context, struct flashtune_pack_info *info);

/**
 * Returns OK if this context can run this forward pass. Otherwise it returns a status, and
 * flashtune_last_error() has the reason. The call is cheap: it compiles and launches nothing. Data
 * pointers may be NULL. May be called from any thread, also during stream capture.
 *
 * Statuses: OK, INVALID_ARGUMENT, UNSUPPORTED.
 */
int32_t flashtune_forward_supported(struct flashtune_context *context,
                                    const struct flashtune_forward_params *params);

/**
 * Writes to bytes the size of the largest workspace that flashtune_forward can need for these
 * params, whatever plan it uses. The size is a pure function of the params and the context's
 * device.
 *
 * The workspace holds partial results over parts of the keys, V transposed, and K and V of 8 bits
 * and int4 widened to 16. The size is 0 on a CPU context. On a CUDA context it can be above 0 only
 * in these cases:
 *
 * - Few queries: seqlen_q * num_heads_q / num_heads_kv is at most 96, or at most 192 with seqlen_q
 *   up to 19. In addition, seqlen_k is at least 128, or batch_invariant is 1.
 * - Few query tiles: batch_size * num_heads_q * ceil(seqlen_q / 64) is at most 320, or at most
 *   2112 with no feature but pages, cu_seqlens_k and seqused_k, and seqlen_k is at least 512. The
 *   size is then at most 163840 * (head_dim_v + 5) bytes. With head dims up to 64 and seqlen_k at
 *   least 8192, the product is at most 864, or 2112 with no feature but these, and the size is at
 *   most 442368 * (head_dim_v + 5) bytes. With batch_invariant, the product is at most 288,
 *   seqlen_k is above 1024, and there is no feature but these. The size is then at most 524288 *
 *   (head_dim_v + 5) bytes.
 * - Short sequences over pages, with cu_seqlens_q or seqused_q: batch_size * num_heads_kv is at
 *   most 132, num_heads_q / num_heads_kv at most 64, and seqlen_k at least 512. With up to 16
 *   query heads for each K/V head, the size is then at most 16896 * (head_dim_v + 5) bytes. With
 *   up to 32 it is at most twice as much, and with up to 64 four times.
 * - q, k and v in e4m3 with a head dim above 64, seqlen_q at least 128 and seqlen_k at least 256,
 *   of sequences of one length without pages and a block mask. The size grows by at most
 *   batch_size * (seqlen_k + 256) * num_heads_kv * head_dim_v + 12 bytes.
 * - k and v of 8 bits or int4 beside a q of 16 bits, on a GPU of compute capability 9.0. Head dims
 *   are multiples of 16 up to 256, seqlen_q * num_heads_q / num_heads_kv is at least 256 and
 *   seqlen_k at least 64. There is no block mask, and batch_invariant is 0. With int4, or if
 *   keys_per_descale is not 0, dtype is bf16. Let n be batch_size * num_heads_kv times seqlen_k
 *   rounded up to 16. The copies take n * 2 * (head_dim + head_dim_v) bytes, the lengths
 *   batch_size * 4, and the factors n * 4 + 1024 more if keys_per_descale is not 0. The size grows
 *   by these and at most 255, or by nothing if they are more than 1200 MiB.
 *
 * Data pointers may be NULL. May be called from any thread, also during stream capture.
 *
 * Statuses: OK, INVALID_ARGUMENT, UNSUPPORTED.
 */
int32_t flashtune_forward_workspace_size(struct flashtune_context *context,
                                         const struct flashtune_forward_params *params,
                                         uint64_t *bytes);

/**
 * Prepares the plan for these params: selects a config, then compiles and loads its kernels. Under
 * FLASHTUNE_TUNING_TUNE, a problem without a record is measured. This may take seconds.
 *
 * After OK, flashtune_forward only enqueues for these params. The plan also serves another
 * softmax_scale, seed or nonzero dropout_p, and other data and strides of the same alignment.
 * Nearby sizes share the plan.
 *
 * Another shape may need another config, which flashtune_forward then prepares. On a capturing
 * stream and in a sealed context preparing is not allowed. There flashtune_forward uses a config
 * that is loaded for another shape of the same class, or returns NOT_PREPARED if none fits. A
 * class is: pass, dtype, head dims, causal or not, dropout or not, features, and alignment of
 * addresses and strides. A deterministic problem uses its own config alone, and a batch_invariant
 * one takes only configs that give the same bits.
 *
 * flashtune_autotune and flashtune_records_import may replace a plan. The old plan serves until
 * the new one is ready, so a prepared problem stays prepared.
 *
 * Data pointers may be NULL; a NULL pointer counts as aligned to 16 bytes. May be called from any
 * thread, but not while a stream of this thread is capturing.
 *
 * Statuses: OK, INVALID_ARGUMENT, UNSUPPORTED, NOT_PREPARED (the context is sealed), NO_COMPILER,
 * COMPILE_FAILED, CUDA, OUT_OF_MEMORY.
 */
int32_t flashtune_forward_prepare(struct flashtune_context *context,
                                  const struct flashtune_forward_params *params);

/**
 * Runs one forward pass.
 *
 * - stream: on a CUDA context the call enqueues the work on stream and returns. stream is a
 *   CUstream or cudaStream_t of the context's device; NULL is the default stream. Buffers must
 *   live until the work is done, and params only during the call. On a CPU context stream is
 *   ignored, and the work is done on return.
 * - workspace: device memory (host memory on a CPU context), aligned to 256 bytes. It has
 *   workspace_bytes bytes, at least what flashtune_forward_workspace_size says. NULL is allowed if
 *   that is 0. Its contents need no initialisation and are not kept. Two calls that may run at
 *   once must not share one.
 * - Overlap: out and lse must share no byte with another tensor.
 * - With a prepared plan, the call allocates, synchronises, compiles and locks nothing, and it
 *   reads no file. The one exception: on a CPU context each thread allocates memory for one tile,
 *   whatever the lengths.
 * - Without a plan, the call prepares one first, as flashtune_forward_prepare does. On a capturing
 *   stream and in a sealed context preparing is not allowed; the documentation of
 *   flashtune_forward_prepare says what the call does there.
 * - Capture: with a prepared plan, the call may be captured into a graph. The captured launch must
 *   not run twice at a time: neither from two graph instances nor as two child nodes of one graph.
 * - Threads: any thread may call it, also several at once.
 *
 * Statuses: those of flashtune_forward_prepare, and WORKSPACE_TOO_SMALL. NOT_PREPARED may also
 * come on a capturing stream.
 */
int32_t flashtune_forward(struct flashtune_context *context,
                          const struct flashtune_forward_params *params,
                          void *workspace,
                          uint64_t workspace_bytes,
                          void *stream);

/**
 * Describes the plan that flashtune_forward uses for these params. A missing plan is prepared
 * first. The caller sets info->struct_size to sizeof(flashtune_plan_info). Data pointers may be
 * NULL. The rules for threads and capture are those of flashtune_forward_prepare.
 *
 * Statuses: those of flashtune_forward_prepare. An empty problem is INVALID_ARGUMENT.
 */
int32_t flashtune_forward_plan_info(struct flashtune_context *context,
                                    const struct flashtune_forward_params *params,
                                    struct flashtune_plan_info *info);

/**
 * Writes to backward the parameters of the backward pass of a forward pass: every field that both
 * structs have. dout, dq, dk, dv, deterministic, dbias, dsinks and dlse become zero, and the
 * caller sets them afterwards. backward->struct_size is sizeof(flashtune_backward_params), set by
 * the caller. The call reads the struct alone: it follows no pointer and checks no field.
 *
 * Statuses: OK, INVALID_ARGUMENT (a struct is NULL or of an impossible size), UNSUPPORTED (forward
 * has pages or batch_invariant, which no backward pass has).
 */
int32_t flashtune_backward_params_from_forward(const struct flashtune_forward_params *forward,
                                               struct flashtune_backward_params *backward);

/**
 * The same as flashtune_forward_supported for the backward pass.
 */
int32_t flashtune_backward_supported(struct flashtune_context *context,
                                     const struct flashtune_backward_params *params);

/**
 * The same as flashtune_forward_workspace_size for the backward pass. On either backend the size
 * is proportional to batch_size * num_heads_q * seqlen_q * head_dim. With cu_seqlens_q it is
 * proportional to (total_q + 128 * batch_size) * num_heads_q * head_dim. On a CUDA context with
 * fewer than 529 tiles of 128 keys over all key-value heads, or without a mask up to 1056, the
 * size also has room for partial gradients: at most 540672 * (head_dim + head_dim_v) bytes, with
 * each head dim rounded up to 16.
 */
int32_t flashtune_backward_workspace_size(struct flashtune_context *context,
                                          const struct flashtune_backward_params *params,
                                          uint64_t *bytes);

/**
 * The same as flashtune_forward_prepare for the backward pass.
 */
int32_t flashtune_backward_prepare(struct flashtune_context *context,
                                   const struct flashtune_backward_params *params);

/**
 * Runs one backward pass. It writes dq, dk and dv in full, with zeros for queries that see no key
 * and keys that no query sees. Only rows that no sequence uses are left as they are. The rules of
 * flashtune_forward for stream, workspace, capture, threads and statuses apply.
 */
int32_t flashtune_backward(struct flashtune_context *context,
                           const struct flashtune_backward_params *params,
                           void *workspace,
                           uint64_t workspace_bytes,
                           void *stream);

/**
 * The same as flashtune_forward_plan_info for the backward pass.
 */
int32_t flashtune_backward_plan_info(struct flashtune_context *context,
                                     const struct flashtune_backward_params *params,
                                     struct flashtune_plan_info *info);

/**
 * Prepares the kernel that merges the partials of these params. This may take a second. After OK,
 * flashtune_merge only enqueues, for any sizes and for data and strides of the same alignment.
 *
 * Data pointers may be NULL, and then count as aligned to 16 bytes. May be called from any thread,
 * but not while a stream of this thread is capturing.
 *
 * Statuses: OK, INVALID_ARGUMENT, NOT_PREPARED (the context is sealed), NO_COMPILER,
 * COMPILE_FAILED, CUDA, OUT_OF_MEMORY.
 */
int32_t flashtune_merge_prepare(struct flashtune_context *context,
                                const struct flashtune_merge_params *params);

/**
 * Merges partial results, for example of attention over a shared prefix and over each sequence's
 * own keys. At most one of the partials may include attention sinks.
 *
 * The rules of flashtune_forward for stream, buffers, capture and threads apply. There is no
 * workspace. A missing kernel is prepared first; on a capturing stream and in a sealed context the
 * call returns NOT_PREPARED instead. out and lse must share no byte with another tensor.
 *
 * Statuses: those of flashtune_merge_prepare.
 */
int32_t flashtune_merge(struct flashtune_context *context,
                        const struct flashtune_merge_params *params,
                        void *stream);

/**
 * Prepares the kernel that appends the keys and values of these params. This may take a second.
 * After OK, flashtune_kv_append only enqueues, for any sizes and for data, strides and rows of the
 * same alignment. FLASHTUNE_APPEND_SLOTS and rotations have kernels of their own: one for each
 * dtype, rotary_dtype and rotary_interleaved, which serves slots too. So have caches of 8 bits
 * and int4: one for each dtype and cache_dtype, which serves slots and rotations too.
 *
 * Data pointers may be NULL, and then count as aligned to 16 bytes. May be called from any thread,
 * but not while a stream of this thread is capturing.
 *
 * Statuses: OK, INVALID_ARGUMENT, NOT_PREPARED (the context is sealed), NO_COMPILER,
 * COMPILE_FAILED, CUDA, OUT_OF_MEMORY.
 */
int32_t flashtune_kv_append_prepare(struct flashtune_context *context,
                                    const struct flashtune_kv_append_params *params);

/**
 * Writes new keys and values into a K/V cache. A decoding step calls it before its forward pass,
 * which takes seqused as its seqused_k.
 *
 * The rules of flashtune_forward for stream, buffers, capture and threads apply. There is no
 * workspace. A missing kernel is prepared first; on a capturing stream and in a sealed context the
 * call returns NOT_PREPARED instead. k_cache, v_cache, seqused and q_rotated must share no byte
 * with one another or with another tensor; seqused and q_rotated have one exception each.
 *
 * Statuses: those of flashtune_kv_append_prepare.
 */
int32_t flashtune_kv_append(struct flashtune_context *context,
                            const struct flashtune_kv_append_params *params,
                            void *stream);

/**
 * Prepares the kernel that quantises the tensor of these params. This may take a second. After OK,
 * flashtune_quantize only enqueues, for any sizes and for data and strides of the same alignment.
 *
 * Data pointers may be NULL, and then count as aligned to 16 bytes. May be called from any thread,
 * but not while a stream of this thread is capturing.
 *
 * Statuses: OK, INVALID_ARGUMENT, NOT_PREPARED (the context is sealed), NO_COMPILER,
 * COMPILE_FAILED, CUDA, OUT_OF_MEMORY.
 */
int32_t flashtune_quantize_prepare(struct flashtune_context *context,
                                   const struct flashtune_quantize_params *params);

/**
 * Quantises a tensor to 8 bits, by given scales or by those that it computes and writes. It may
 * rotate the rows first, or only rotate them.
 *
 * The rules of flashtune_forward for stream, buffers, capture and threads apply. There is no
 * workspace. A missing kernel is prepared first; on a capturing stream and in a sealed context the
 * call returns NOT_PREPARED instead. out must share no byte with another tensor. The same holds
 * for a descale that is written.
 *
 * Statuses: those of flashtune_quantize_prepare.
 */
int32_t flashtune_quantize(struct flashtune_context *context,
                           const struct flashtune_quantize_params *params,
                           void *stream);

/**
 * Prepares every problem of a range, so that no later launch of such a problem compiles. A call
 * chooses a few configs for each class, such that each shape has one that is expected to take at
 * most 5 % longer than its own choice. It compiles their kernels on all cores and measures
 * nothing, whatever the tuning policy.
 *
 * Afterwards a problem inside counts as prepared, also in a sealed context and on a capturing
 * stream, and never returns NOT_PREPARED. Its first launch chooses among the prepared configs,
 * which allocates host memory; flashtune_forward_prepare does the same ahead of a launch. A
 * deterministic or batch_invariant problem has its own config, as ever. Several ranges may be
 * prepared one after another.
 *
 * flashtune_merge and flashtune_kv_append have prepare functions of their own.
 *
 * info receives what was prepared; the caller sets info->struct_size. It may be NULL. May be
 * called from any thread, but not while a stream of this thread is capturing.
 *
 * Statuses: OK, INVALID_ARGUMENT (also for a range of more than 64 combinations, more than 128
 * kernels, or more than 65536 shapes of a deterministic pass), UNSUPPORTED, NOT_PREPARED (the
 * context is sealed), NO_COMPILER, COMPILE_FAILED, CUDA, OUT_OF_MEMORY.
 */
int32_t flashtune_prepare_range(struct flashtune_context *context,
                                const struct flashtune_range *range,
                                struct flashtune_range_info *info);

/**
 * Measures the candidates for one problem on the context's device and keeps the winner. This
 * context uses it from now on, and later processes find it in the cache folder. If the folder
 * cannot be written, the call still succeeds: a log line names the file and the reason, and the
 * record serves this context alone.
 *
 * The call allocates device memory for the problem's tensors, uses a stream of its own, and
 * returns when done. May be called from any thread, but not during stream capture. Other threads
 * may go on using the context.
 *
 * Statuses: OK, INVALID_ARGUMENT, UNSUPPORTED, NOT_PREPARED (the context is sealed), CANCELLED
 * (measurements are kept, and a later run resumes), NO_COMPILER, COMPILE_FAILED, CUDA,
 * OUT_OF_MEMORY.
 */
int32_t flashtune_autotune(struct flashtune_context *context,
                           const struct flashtune_autotune_params *params);

/**
 * Writes this machine's records to the file path and replaces what it held. The file has sorted
 * lines of JSON: the same records give the same bytes. The file appears whole or not at all. It
 * keeps the permissions of the file that it replaces; a new file is private to this user. count
 * receives the number of records; it may be NULL. May be called from any thread.
 *
 * Statuses: OK, INVALID_ARGUMENT, IO, OUT_OF_MEMORY.
 */
int32_t flashtune_records_export(struct flashtune_context *context,
                                 const char *path,
                                 uint64_t *count);

/**
 * Adds the records of a file that flashtune_records_export wrote to this machine's.
 *
 * A problem that this machine has measured itself keeps its own record. Two imported records of
 * the same device and problem compete. If only one of them tried the kernel family that this
 * library prefers for the problem, it wins. Otherwise the one with the lower median time wins.
 * Lines that this library does not understand are skipped, and so are records whose config it does
 * not accept on their device or whose times no device reaches. One log line says how many were
 * skipped.
 *
 * path must name a regular file. count receives the number of records taken; it may be NULL. May
 * be called from any thread.
 *
 * Statuses: OK, INVALID_ARGUMENT, IO (the records before the place that could not be read are
 * taken), OUT_OF_MEMORY.
 */
int32_t flashtune_records_import(struct flashtune_context *context,
                                 const char *path,
                                 uint64_t *count);

/**
 * The forward pass on the CPU, as a handler of XLA's foreign function interface. call_frame is an
 * XLA_FFI_CallFrame, and the result is an XLA_FFI_Error or NULL for success. Cast the function to
 * XLA_FFI_Handler to register it; XLA must be that of jaxlib 0.7 or later. The sources list the
 * arguments and results (src/xla/params.rs) and the attributes (src/xla/options.rs).
 *
 * The handlers make a context for each device at their first call and keep it. Their operands are
 * contiguous. Command buffers cannot record them. May be called from any thread.
 *
 * A handler reports a failure by XLA's own function for errors. A call that fails where XLA has no
 * such function, or where that function makes no error, ends the process: NULL would say that the
 * results are written.
 */
void *flashtune_xla_cpu_forward(void *call_frame);

/**
 * The backward pass on the CPU; see flashtune_xla_cpu_forward.
 */
void *flashtune_xla_cpu_backward(void *call_frame);

/**
 * The forward pass on a GPU, enqueued on XLA's stream; see flashtune_xla_cpu_forward. Registered
 * for the stage "initialize" too, the handler prepares the plan before the program runs. The
 * workspace comes from XLA's allocator.
 */
void *flashtune_xla_cuda_forward(void *call_frame);

/**
 * The backward pass on a GPU; see flashtune_xla_cuda_forward.
 */
void *flashtune_xla_cuda_backward(void *call_frame);

/**
 * Quantises a tensor to 8 bits, rotates it, or both, on the CPU; see flashtune_xla_cpu_forward.
 * The sources list the arguments and results (src/xla/quantize.rs).
 */
void *flashtune_xla_cpu_quantize(void *call_frame);

/**
 * The same on a GPU; see flashtune_xla_cuda_forward.
 */
void *flashtune_xla_cuda_quantize(void *call_frame);

/**
 * For flashtune's Python package: a new tuple of built-in functions (repeat, keep, alias, forget,
 * count), which share an empty set of drafts. settings is the tuple that
 * bindings/python/flashtune/_drafts.py makes. Returns NULL if the program has no CPython
 * or settings is not that tuple. The caller holds the GIL.
 */
void *flashtune_python_drafts(void *settings);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* FLASHTUNE_H */
