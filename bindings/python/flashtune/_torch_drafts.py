"""Repeated calls on torch tensors: the form of a call, and the draft that its first call leaves.

The checks of a call, its packed params and its workspace follow from shapes, strides, dtypes,
devices and options: the call's form. Only addresses are left. The first call of a form takes the
whole way and keeps its params as a draft. Each later call writes its addresses into a copy of them
and launches. The library still checks the params at every launch. A draft has numbers alone, so it
keeps no tensor alive.
"""

import functools
import os
import threading

import torch

from . import _call, _context, _drafts, _structs
from ._features import Features

LIMIT = 2048
"""The most drafts of the process. One more clears them."""

FORWARD, BACKWARD = 0, 1
DENSE, PACKED, CACHED = 2, 3, 4
"""The functions of flash-attn whose calls are repeated before their arguments are checked."""
RECORDED = 5
"""With FORWARD or BACKWARD added, a pass of those functions where autograd records it."""

if hasattr(torch._C, "_cuda_getCurrentRawStream"):
    # It takes a tenth of the time of torch.cuda.current_stream(), which builds a Stream object.
    current_stream = torch._C._cuda_getCurrentRawStream
else:

    def current_stream(device):
        return torch.cuda.current_stream(device).cuda_stream


def _word(structure, field):
    """The index of a field among the struct's words of 8 bytes."""
    offset = getattr(structure, field).offset
    assert offset % 8 == 0
    return offset // 8


# Both passes begin with the same fields.
Q, K, V, OUT, LSE = (_word(_structs.ForwardParams, name) for name in ("q", "k", "v", "out", "lse"))
DOUT, DQ, DK, DV, DLSE = (_word(_structs.BackwardParams, name) for name in ("dout", "dq", "dk", "dv", "dlse"))


def _feature_words(structure):
    """(position in Features, index of the address's word) of each feature that is one tensor."""
    no_array = {"window", "softcap", "block_mask", "num_splits", "q_descale", "k_descale", "v_descale"}
    fields = {name for name, _ in structure._fields_} - no_array
    named = [(at, "mask" if name == "mask_bits" else name) for at, name in enumerate(Features._fields)]
    return [(at, _word(structure, name)) for at, name in named if name in fields]


_FEATURE_WORDS = _feature_words(_structs.ForwardParams), _feature_words(_structs.BackwardParams)


def _described(tensor):
    """A tensor as ints, its address last, with torch before 2.10."""
    device = tensor.is_cpu, tensor.is_cuda, tensor.get_device()
    try:
        return (id(tensor.dtype), *device, *tensor.shape, *tensor.stride(), tensor.data_ptr())
    except RuntimeError:
        return ()  # It has no strides or no memory.


def start():
    """Begins with no drafts."""
    global repeat, alias, forget, count, _keep
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    kinds = torch.Tensor, torch.nn.Parameter
    made = _drafts.functions(kinds, exchange, _described, torch.empty_like, current_stream, LIMIT)
    repeat, _keep, alias, forget, count = made or [lambda *_: None] * 5


_lock = threading.Lock()


def _first_repeat(*call):
    with _lock:
        if repeat is _first_repeat:
            start()
    return repeat(*call)


repeat = _first_repeat
"""The results of (pass, before_launch or None, seed, *arguments) if its form has a draft.

None otherwise, and then nothing is launched and before_launch is not called. It raises if the
launch fails after before_launch. The library's function replaces this one at the first call.
"""


def alias(call, other):
    """Lets calls of the form of `call` use the draft of `other`; both are arguments of `repeat`.

    They have the same tensors in the same order. The first is a call as its user makes it, before
    its arguments are checked, and begins with a number of its function.
    """


def forget():
    """Drops all drafts."""


def _forget():
    # The contexts of a forked child are new, and a thread of the parent may have held the lock.
    global _lock
    _lock = threading.Lock()
    forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def can_repeat(number, features):
    """Whether the params of a pass follow from a form with these features."""
    if features is None:
        return True
    if features.seqused_q is not None or features.block_mask is not None:
        return False  # Unused rows are to be filled. A block mask is many tensors.
    if number == BACKWARD and not (features.bias is features.sinks is features.seqused_k is None):
        return False  # These have more outputs, or outputs to be filled.
    # The host reads the lengths of which no bound is given.
    return all(
        lengths is None or bound is not None
        for lengths, bound in ((features.cu_seqlens_q, features.max_seqlen_q), (features.cu_seqlens_k, features.max_seqlen_k))
    )


def keep(call, run, params, words, features, outputs, workspace_bytes, device):
    """Leaves a draft of a call, if later calls of its form may use its params.

    call: the arguments of `repeat`.
    words: of the tensors among them, in their order, without those of the features.
    outputs: for each result None, the number of the argument's tensor that is the result, or (word,
        how it is made): the number of a tensor that it is like, or a function.
    """
    number, *_ = call
    if not can_repeat(number, features):
        return
    if features is not None:
        # A feature that the pass does not take is refused before.
        words = words + [word for at, word in _FEATURE_WORDS[number] if features[at] is not None]
    on_gpu = device != _context.CPU
    make = None
    if workspace_bytes:
        # torch's CPU allocator promises less alignment than a workspace needs.
        size = workspace_bytes if on_gpu else workspace_bytes + _call.WORKSPACE_ALIGNMENT
        make = _new((size,), (1,), torch.uint8, torch.device("cuda", device) if on_gpu else torch.device("cpu"))
    _keep(call, run.handle, params, tuple(words), tuple(outputs), make, workspace_bytes, device if on_gpu else None)


def made(output, like=None, number=0):
    """How an output is made anew: like the tensor `like` of this number, or by a function."""
    if like is not None and output.shape == like.shape and output.stride() == like.stride() and output.dtype is like.dtype:
        return number
    return _new(output.shape, output.stride(), output.dtype, output.device)


def _new(shape, strides, dtype, device):
    # torch.empty takes twice the time.
    return functools.partial(torch.empty_strided, tuple(shape), strides, dtype=dtype, device=device)
