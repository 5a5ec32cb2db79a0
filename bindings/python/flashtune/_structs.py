"""The C header's structs and numbers, mirrored by hand for ctypes.

What `include/flashtune.h` declares and this package uses, in the same order and under the same names, and nothing
else. A test compiles a C program against the header and compares sizes, offsets and constants with these.
"""

import ctypes
import struct
from ctypes import POINTER, c_char, c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p

BACKEND_CUDA, BACKEND_CPU = 1, 2
DTYPE_FP16, DTYPE_BF16, DTYPE_FP32 = 1, 2, 3
CAUSAL_NONE, CAUSAL_BOTTOM_RIGHT, CAUSAL_TOP_LEFT = 0, 1, 2
WINDOW_NONE, WINDOW_BOTTOM_RIGHT, WINDOW_TOP_LEFT = 0, 1, 2
FEATURE_ALIBI, FEATURE_BIAS, FEATURE_MASK, FEATURE_SINKS = 1, 2, 4, 8
FEATURE_CU_SEQLENS_Q, FEATURE_CU_SEQLENS_K, FEATURE_SEQUSED_Q, FEATURE_SEQUSED_K = 16, 32, 64, 128
FEATURE_DBIAS, FEATURE_DLSE, FEATURE_PAGED, FEATURE_MASK_BITS, FEATURE_BLOCK_MASK = 256, 512, 1024, 2048, 4096
SOURCE_PINNED, SOURCE_PROCESS, SOURCE_MACHINE, SOURCE_SHIPPED, SOURCE_NEAREST_GPU, SOURCE_HEURISTIC = 1, 2, 3, 4, 5, 6


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


# Params in the parts that are packed apart: what both passes open with, the backward pass's own, the features, which both
# have and most calls do not use, what each has of them alone, and what is the forward pass's own.
PROBLEM = [
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
]
GRADIENTS = [
    ("dout", Tensor),
    ("dq", Tensor),
    ("dk", Tensor),
    ("dv", Tensor),
    ("deterministic", c_int32),
    ("reserved", c_int32),
]
FEATURES = [
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
]
FEATURE_GRADIENTS = [
    ("dbias", ScoresTensor),
    ("dsinks", c_void_p),
    ("dlse", c_void_p),
]
PAGES = [
    ("block_table", c_void_p),
    ("block_table_stride", c_int64),
    ("page_size", c_int64),
    ("num_pages", c_int64),
]
BATCH = [
    ("batch_invariant", c_int32),
    ("reserved", c_int32),
]

BLOCK_MASK = [("block_mask", BlockMask)]


class ForwardParams(ctypes.Structure):
    _fields_ = PROBLEM + FEATURES + PAGES + BATCH + BLOCK_MASK


class BackwardParams(ctypes.Structure):
    _fields_ = PROBLEM + GRADIENTS + FEATURES + FEATURE_GRADIENTS + BLOCK_MASK


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
        *PAGES,
    ]


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


_FORMATS = {c_int32: "i", c_int64: "q", c_uint64: "Q", c_float: "f", c_double: "d", c_void_p: "P"}


def _format(fields):
    return "".join(_FORMATS.get(kind) or _format(kind._fields_) for _, kind in fields)


def packer(fields):
    """A `struct.Struct` of these fields of a params struct, the size of which is a multiple of 8.

    One `pack` fills all fields in the time that ctypes takes for three, and the bytes it returns belong to one call,
    so threads share nothing.
    """
    packed = struct.Struct("@" + _format(fields))
    assert packed.size % 8 == 0
    return packed
