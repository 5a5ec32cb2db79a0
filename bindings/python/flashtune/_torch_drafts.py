"""Repeated calls on torch tensors: the form of a call, and the draft that its first call leaves.

The checks of a call, its packed params and its workspace follow from shapes, strides, dtypes,
devices and options: the call's form. Only addresses are left. The first call of a form takes the
whole way and keeps its params as a draft. Each later call writes its addresses into the draft and
launches. The library still checks the params at every launch. A draft has numbers alone, so it
keeps no tensor alive. Knows neither outputs nor launches, which are `_torch_launch`'s.
"""

import ctypes

import torch

from . import _structs
from ._features import Features

LIMIT = 512
"""The most drafts of one pass on one device. One more clears them."""

_Tensor = torch.Tensor
_TENSORS = {torch.Tensor, torch.nn.Parameter}
_BOUNDS = {int, type(None)}


def _word(structure, field):
    """The index of a field among the struct's words of 8 bytes."""
    offset = getattr(structure, field).offset
    assert offset % 8 == 0
    return offset // 8


# Both passes begin with the same fields.
Q, K, V, OUT, LSE = (_word(_structs.ForwardParams, name) for name in ("q", "k", "v", "out", "lse"))
SEED, OFFSET = _word(_structs.ForwardParams, "dropout_seed"), _word(_structs.ForwardParams, "dropout_offset")
SEED_PTR, OFFSET_PTR = _word(_structs.ForwardParams, "dropout_seed_ptr"), _word(_structs.ForwardParams, "dropout_offset_ptr")
DOUT, DQ, DK, DV, DLSE = (_word(_structs.BackwardParams, name) for name in ("dout", "dq", "dk", "dv", "dlse"))


def _feature_words(structure):
    """(position in Features, index of the address's word) of each feature that is one tensor."""
    no_array = {"window", "softcap", "block_mask", "num_splits", "q_descale", "k_descale", "v_descale"}
    fields = {name for name, _ in structure._fields_} - no_array
    named = [(at, "mask" if name == "mask_bits" else name) for at, name in enumerate(Features._fields)]
    return [(at, _word(structure, name)) for at, name in named if name in fields]


FORWARD_FEATURES, BACKWARD_FEATURES = _feature_words(_structs.ForwardParams), _feature_words(_structs.BackwardParams)


def form_of_forward(q, k, v, opts, seed, features, want_lse, out=None):
    """The form of a forward pass, or None if no other call may use this call's params.

    opts and the window are normalised, so that equal ones are accepted alike. A subclass of Tensor
    may differ from what its sizes and strides say, and its calls have no form.
    """
    if type(q) is not _Tensor or type(k) is not _Tensor or type(v) is not _Tensor:
        return None
    dtype, device = q.dtype, q.device
    # A call that is to be refused needs no form. Comparing is cheaper than a longer form.
    if k.dtype is not dtype or v.dtype is not dtype or k.device != device or v.device != device:
        return None
    form = (
        opts, want_lse, type(seed), dtype, device, q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride()
    )  # fmt: skip
    if out is not None:
        form += (out.stride(),)
    return form if features is None else _with_features(form, device, features)


def form_of_backward(dout, q, k, v, out, lse, opts, seed, features, gradients, dlse):
    """The form of a backward pass, or None as for `form_of_forward`."""
    if features is not None and not (features.bias is features.sinks is features.seqused_k is None):
        return None  # These have more outputs, or outputs to be filled.
    form = form_of_forward(q, k, v, opts, seed, features, True)
    if form is None or type(dout) is not _Tensor or type(out) is not _Tensor or type(lse) is not _Tensor:
        return None
    dtype, device = q.dtype, q.device
    if dout.dtype is not dtype or out.dtype is not dtype or lse.dtype is not torch.float32:
        return None
    if dout.device != device or out.device != device or lse.device != device:
        return None
    form += dout.shape, dout.stride(), out.shape, out.stride(), lse.shape, lse.stride()
    if dlse is gradients is None:
        return form
    for more in (dlse,) if gradients is None else (dlse, *gradients):
        if more is not None and type(more) is not _Tensor:
            return None
        form += (None,) if more is None else (more.shape, more.stride(), more.dtype, more.device)
    return form


def _with_features(form, device, features):
    (
        window, softcap, alibi_slopes, bias, mask, sinks, mask_bits, block_mask, cu_seqlens_q, cu_seqlens_k,
        seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, block_table, cache_batch_idx, leftpad_k, num_splits, *descales,
    ) = features  # fmt: skip
    if seqused_q is not None or block_mask is not None:
        return None  # Unused rows are to be filled. A block mask is many tensors.
    if descales != [None, None, None]:
        return None  # With 8 bits, types differ.
    if (cu_seqlens_q is not None and max_seqlen_q is None) or (cu_seqlens_k is not None and max_seqlen_k is None):
        return None  # The host reads the lengths of which no bound is given.
    # 64 equals 64.0, but only the first is a length.
    if type(max_seqlen_q) not in _BOUNDS or type(max_seqlen_k) not in _BOUNDS:
        return None
    more = [window, softcap, max_seqlen_q, max_seqlen_k]
    at = 0
    for tensor in (alibi_slopes, bias, mask, sinks, mask_bits, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table):
        at += 1
        if tensor is not None:
            if type(tensor) not in _TENSORS or tensor.device != device:
                return None
            more += at, tensor.dtype, tensor.shape, tensor.stride()
    if cache_batch_idx is leftpad_k is None and num_splits == 0:
        return (*form, *more)
    # Few calls come here, so that the others compare less.
    more.append(num_splits)
    for tensor in (cache_batch_idx, leftpad_k):
        at += 1
        if tensor is not None:
            if type(tensor) not in _TENSORS or tensor.device != device:
                return None
            more += at, tensor.dtype, tensor.shape, tensor.stride()
    return (*form, *more)


class Draft:
    """The params of a form and the size of its workspace.

    features: for each feature tensor its position in Features and its word.
    outputs: what `_torch_launch` keeps there of the outputs.
    """

    __slots__ = ("_params", "_spare", "features", "outputs", "workspace_bytes")

    def __init__(self, params, features, outputs, workspace_bytes):
        self._params = params
        self._spare = []
        self.features = features
        self.outputs = outputs
        self.workspace_bytes = workspace_bytes

    def take(self):
        """(params as words, their address), for one call until it gives them back.

        The library reads them while other threads run, so each call needs its own.
        """
        try:
            return self._spare.pop()
        except IndexError:
            words = (ctypes.c_uint64 * (len(self._params) // 8)).from_buffer_copy(self._params)
            return words, ctypes.addressof(words)

    def give_back(self, taken):
        self._spare.append(taken)


def write(words, draft, seed, features):
    """Writes the seed and the addresses of the features into a draft's params."""
    if seed is not None:
        if type(seed) is tuple:
            words[SEED], words[OFFSET] = seed
        else:
            address = seed.data_ptr()
            words[SEED_PTR], words[OFFSET_PTR] = address, address + 8
    for position, word in draft.features:
        words[word] = features[position].data_ptr()


def keep(drafts, form, params, workspace_bytes, outputs, given, features, feature_words):
    """Adds the draft of a call to its pass's drafts, if the call has read the caller's tensors.

    given: pairs of a word and a tensor. A call that copied a tensor first has the copy's address,
    and later calls of the form would need copies too.
    feature_words: `FORWARD_FEATURES` or `BACKWARD_FEATURES`.
    """
    present = [] if features is None else [at for at in feature_words if features[at[0]] is not None]
    draft = Draft(params, present, outputs, workspace_bytes)
    taken = draft.take()
    words, _ = taken
    if any(words[word] != tensor.data_ptr() for word, tensor in given):
        return
    if any(words[word] != features[position].data_ptr() for position, word in present):
        return
    draft.give_back(taken)
    if len(drafts) >= LIMIT:
        drafts.clear()
    drafts[form] = draft
