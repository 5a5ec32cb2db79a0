"""flashtune: exact attention, forward and backward, tuned on the machine that runs it.

    out = flashtune.attention(q, k, v, causal=True)  # (batch, seqlen, heads, dim), NumPy or torch
"""

from ._attention import (
    attention,
    attention_backward,
    attention_forward,
    attention_fp8,
    attention_kvcache,
    attention_varlen,
    kv_append,
    merge,
    quantize,
    rotate,
)
from ._block_mask import BlockMask, block_mask
from ._context import use_pack
from ._eight import int4_row_bytes
from ._errors import FlashtuneError, InvalidArgumentError, UnsupportedError
from ._planning import (
    autotune,
    export_records,
    import_records,
    pack_info,
    plan_info,
    prepare,
    prepare_range,
    seal,
)
from ._version import __version__

__all__ = [
    "BlockMask",
    "FlashtuneError",
    "InvalidArgumentError",
    "UnsupportedError",
    "__version__",
    "attention",
    "attention_backward",
    "attention_forward",
    "attention_fp8",
    "attention_kvcache",
    "attention_varlen",
    "autotune",
    "block_mask",
    "export_records",
    "import_records",
    "int4_row_bytes",
    "kv_append",
    "merge",
    "pack_info",
    "plan_info",
    "prepare",
    "prepare_range",
    "quantize",
    "rotate",
    "seal",
    "use_pack",
]

_FRAMEWORKS = ("context_parallel", "jax", "serving", "torch", "transformers")
"""Modules that need other packages. Each is imported at its first use."""


def __getattr__(name):
    if name in _FRAMEWORKS:
        import importlib

        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
