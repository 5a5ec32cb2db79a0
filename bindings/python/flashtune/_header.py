"""The C header's numbers and structs for ctypes, made from include/flashtune.h by `make header`.

Names are the header's without `flashtune_`. A pointer is c_void_p; a string is c_char_p.
"""

import ctypes
from ctypes import POINTER, c_char, c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p

VERSION_MAJOR = 0
VERSION_MINOR = 1
VERSION_PATCH = 0
STATUS_OK = 0
STATUS_INVALID_ARGUMENT = 1
STATUS_UNSUPPORTED = 2
STATUS_NOT_PREPARED = 3
STATUS_NO_DEVICE = 4
STATUS_NO_COMPILER = 5
STATUS_COMPILE_FAILED = 6
STATUS_CUDA = 7
STATUS_OUT_OF_MEMORY = 8
STATUS_WORKSPACE_TOO_SMALL = 9
STATUS_IO = 10
STATUS_CANCELLED = 11
STATUS_INTERNAL = 12
LOG_ERROR = 1
LOG_WARN = 2
LOG_INFO = 3
LOG_DEBUG = 4
BACKEND_AUTO = 0
BACKEND_CUDA = 1
BACKEND_CPU = 2
TUNING_RECORDS = 0
TUNING_TUNE = 1
PACK_NONE = 0
PACK_LOADED = 1
PACK_REFUSED = 2
DTYPE_FP16 = 1
DTYPE_BF16 = 2
DTYPE_FP32 = 3
DTYPE_E4M3 = 4
DTYPE_E5M2 = 5
DTYPE_INT8 = 6
DTYPE_INT4_GROUP32 = 7
DTYPE_INT4_GROUP64 = 8
ROTATION_NONE = 0
ROTATION_HADAMARD = 1
CAUSAL_NONE = 0
CAUSAL_BOTTOM_RIGHT = 1
CAUSAL_TOP_LEFT = 2
WINDOW_NONE = 0
WINDOW_BOTTOM_RIGHT = 1
WINDOW_TOP_LEFT = 2
FEATURE_ALIBI = 1
FEATURE_BIAS = 2
FEATURE_MASK = 4
FEATURE_SINKS = 8
FEATURE_CU_SEQLENS_Q = 16
FEATURE_CU_SEQLENS_K = 32
FEATURE_SEQUSED_Q = 64
FEATURE_SEQUSED_K = 128
FEATURE_DBIAS = 256
FEATURE_DLSE = 512
FEATURE_PAGED = 1024
FEATURE_MASK_BITS = 2048
FEATURE_BLOCK_MASK = 4096
FEATURE_CACHE_BATCH_IDX = 8192
FEATURE_LEFTPAD_K = 16384
APPEND_SLOTS = 1
SOURCE_PINNED = 1
SOURCE_PROCESS = 2
SOURCE_MACHINE = 3
SOURCE_SHIPPED = 4
SOURCE_NEAREST_GPU = 5
SOURCE_HEURISTIC = 6
SOURCE_PACK = 7
OPTIONAL_CAUSAL = 1
OPTIONAL_WINDOW = 2
OPTIONAL_SOFTCAP = 4
OPTIONAL_DROPOUT = 8


LOG_CALLBACK = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)


class ContextOptions(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint64),
        ("backend", c_int32),
        ("device_ordinal", c_int32),
        ("cuda_context", c_void_p),
        ("cache_dir", c_char_p),
        ("tuning_policy", c_int32),
        ("num_threads", c_int32),
        ("tuning_time_limit_seconds", c_double),
        ("pack", c_char_p),
    ]


class DeviceInfo(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint64),
        ("backend", c_int32),
        ("sm_count", c_uint32),
        ("name", c_char * 128),
        ("arch", c_char * 16),
        ("memory_bytes", c_uint64),
        ("driver_version", c_uint32),
        ("nvrtc_version", c_uint32),
    ]


class PackInfo(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint64),
        ("state", c_int32),
        ("num_kernels", c_uint32),
        ("num_plans", c_uint32),
        ("num_records", c_uint32),
        ("path", c_char * 256),
        ("reason", c_char * 256),
    ]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("stride_batch", c_int64),
        ("stride_seqlen", c_int64),
        ("stride_head", c_int64),
    ]


class ScoresTensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("stride_batch", c_int64),
        ("stride_head", c_int64),
        ("stride_seqlen_q", c_int64),
        ("stride_seqlen_k", c_int64),
    ]


class BlockMask(ctypes.Structure):
    _fields_ = [
        ("block_q", c_int64),
        ("block_k", c_int64),
        ("num_blocks", c_void_p),
        ("indices", c_void_p),
        ("full_num_blocks", c_void_p),
        ("full_indices", c_void_p),
        ("num_blocks_stride_batch", c_int64),
        ("num_blocks_stride_head", c_int64),
        ("indices_stride_batch", c_int64),
        ("indices_stride_head", c_int64),
        ("indices_stride_row", c_int64),
        ("max_blocks", c_int64),
    ]


class ForwardParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint64),
        ("dtype", c_int32),
        ("causal", c_int32),
        ("batch_size", c_int64),
        ("num_heads_q", c_int64),
        ("num_heads_kv", c_int64),
        ("seqlen_q", c_int64),
        ("seqlen_k", c_int64),
        ("head_dim", c_int64),
        ("head_dim_v", c_int64),
        ("softmax_scale", c_float),
        ("dropout_p", c_float),
        ("dropout_seed", c_uint64),
        ("dropout_offset", c_uint64),
        ("dropout_seed_ptr", c_void_p),
        ("dropout_offset_ptr", c_void_p),
        ("q", Tensor),
        ("k", Tensor),
        ("v", Tensor),
        ("out", Tensor),
        ("lse", c_void_p),
        ("features", c_uint64),
        ("window", c_int32),
        ("softcap", c_float),
        ("window_left", c_int64),
        ("window_right", c_int64),
        ("alibi_slopes", c_void_p),
        ("alibi_stride_batch", c_int64),
        ("bias", ScoresTensor),
        ("mask", ScoresTensor),
        ("sinks", c_void_p),
        ("cu_seqlens_q", c_void_p),
        ("cu_seqlens_k", c_void_p),
        ("seqused_q", c_void_p),
        ("seqused_k", c_void_p),
        ("total_q", c_int64),
        ("total_k", c_int64),
        ("block_table", c_void_p),
        ("block_table_stride", c_int64),
        ("page_size", c_int64),
        ("num_pages", c_int64),
        ("batch_invariant", c_int32),
        ("reserved", c_int32),
        ("block_mask", BlockMask),
        ("cache_batch_idx", c_void_p),
        ("leftpad_k", c_void_p),
        ("batch_size_cache", c_int64),
        ("num_splits", c_int64),
        ("kv_dtype", c_int32),
        ("out_dtype", c_int32),
        ("q_descale", Tensor),
        ("k_descale", Tensor),
        ("v_descale", Tensor),
        ("keys_per_descale", c_int64),
    ]


class PlanInfo(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint64),
        ("source", c_int32),
        ("kernel", c_char * 64),
        ("config", c_char * 256),
        ("reason", c_char * 256),
        ("registers", c_uint32),
        ("spill_bytes", c_uint32),
        ("smem_bytes", c_uint32),
        ("threads", c_uint32),
        ("measured_us", c_double),
        ("default_us", c_double),
    ]


class BackwardParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint64),
        ("dtype", c_int32),
        ("causal", c_int32),
        ("batch_size", c_int64),
        ("num_heads_q", c_int64),
        ("num_heads_kv", c_int64),
        ("seqlen_q", c_int64),
        ("seqlen_k", c_int64),
        ("head_dim", c_int64),
        ("head_dim_v", c_int64),
        ("softmax_scale", c_float),
        ("dropout_p", c_float),
        ("dropout_seed", c_uint64),
        ("dropout_offset", c_uint64),
        ("dropout_seed_ptr", c_void_p),
        ("dropout_offset_ptr", c_void_p),
        ("q", Tensor),
        ("k", Tensor),
        ("v", Tensor),
        ("out", Tensor),
        ("lse", c_void_p),
        ("dout", Tensor),
        ("dq", Tensor),
        ("dk", Tensor),
        ("dv", Tensor),
        ("deterministic", c_int32),
        ("reserved", c_int32),
        ("features", c_uint64),
        ("window", c_int32),
        ("softcap", c_float),
        ("window_left", c_int64),
        ("window_right", c_int64),
        ("alibi_slopes", c_void_p),
        ("alibi_stride_batch", c_int64),
        ("bias", ScoresTensor),
        ("mask", ScoresTensor),
        ("sinks", c_void_p),
        ("cu_seqlens_q", c_void_p),
        ("cu_seqlens_k", c_void_p),
        ("seqused_q", c_void_p),
        ("seqused_k", c_void_p),
        ("total_q", c_int64),
        ("total_k", c_int64),
        ("dbias", ScoresTensor),
        ("dsinks", c_void_p),
        ("dlse", c_void_p),
        ("block_mask", BlockMask),
    ]


class MergeParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint64),
        ("dtype", c_int32),
        ("partial_dtype", c_int32),
        ("num_partials", c_int64),
        ("batch_size", c_int64),
        ("seqlen", c_int64),
        ("num_heads", c_int64),
        ("head_dim_v", c_int64),
        ("partial_out", Tensor),
        ("partial_out_stride", c_int64),
        ("partial_lse", c_void_p),
        ("partial_lse_stride", c_int64),
        ("out", Tensor),
        ("lse", c_void_p),
    ]


class KvAppendParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint64),
        ("dtype", c_int32),
        ("reserved", c_int32),
        ("batch_size", c_int64),
        ("num_heads_kv", c_int64),
        ("seqlen_new", c_int64),
        ("seqlen_cache", c_int64),
        ("head_dim", c_int64),
        ("head_dim_v", c_int64),
        ("k_new", Tensor),
        ("v_new", Tensor),
        ("k_cache", Tensor),
        ("v_cache", Tensor),
        ("seqlens", c_void_p),
        ("seqused", c_void_p),
        ("block_table", c_void_p),
        ("block_table_stride", c_int64),
        ("page_size", c_int64),
        ("num_pages", c_int64),
        ("features", c_uint64),
        ("seqused_new", c_void_p),
        ("cache_batch_idx", c_void_p),
        ("batch_size_cache", c_int64),
        ("rotary_dim", c_int64),
        ("rotary_dtype", c_int32),
        ("rotary_interleaved", c_int32),
        ("rotary_q_at_one_position", c_int32),
        ("rotary_reserved", c_int32),
        ("rotary_cos", c_void_p),
        ("rotary_sin", c_void_p),
        ("rotary_stride", c_int64),
        ("seqlen_rotary", c_int64),
        ("seqlen_q", c_int64),
        ("num_heads_q", c_int64),
        ("q", Tensor),
        ("q_rotated", Tensor),
        ("cache_dtype", c_int32),
        ("computes_descale", c_int32),
        ("k_descale", Tensor),
        ("v_descale", Tensor),
        ("keys_per_descale", c_int64),
    ]


class QuantizeParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint64),
        ("dtype", c_int32),
        ("out_dtype", c_int32),
        ("batch_size", c_int64),
        ("seqlen", c_int64),
        ("num_heads", c_int64),
        ("head_dim", c_int64),
        ("x", Tensor),
        ("out", Tensor),
        ("descale", Tensor),
        ("keys_per_descale", c_int64),
        ("heads_per_descale", c_int64),
        ("computes_descale", c_int32),
        ("reserved", c_int32),
        ("rotation", c_int32),
        ("rotation_reserved", c_int32),
        ("rotation_seed", c_uint64),
    ]


class Range(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint64),
        ("forward", c_void_p),
        ("backward", c_void_p),
        ("least_batch_size", c_int64),
        ("least_seqlen_q", c_int64),
        ("least_seqlen_k", c_int64),
        ("optional_features", c_uint64),
        ("optional", c_uint64),
    ]


class RangeInfo(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint64),
        ("num_classes", c_uint64),
        ("num_configs", c_uint64),
        ("num_kernels", c_uint64),
        ("num_compiled", c_uint64),
        ("num_cached", c_uint64),
        ("workspace_bytes", c_uint64),
        ("milliseconds", c_double),
    ]


class Progress(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint64),
        ("phase", c_char_p),
        ("done", c_uint64),
        ("total", c_uint64),
        ("failed", c_uint64),
        ("best_config", c_char_p),
        ("best_us", c_double),
    ]


PROGRESS_CALLBACK = ctypes.CFUNCTYPE(c_int32, POINTER(Progress), c_void_p)


class AutotuneParams(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint64),
        ("forward", c_void_p),
        ("backward", c_void_p),
        ("time_limit_seconds", c_double),
        ("progress", PROGRESS_CALLBACK),
        ("progress_user", c_void_p),
        ("retune", c_int32),
        ("reserved", c_int32),
    ]
