"""An `attn_implementation` for the models of Hugging Face transformers 5.

    import flashtune
    flashtune.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="tuned_attention")

The implementation has two functions. `attend` runs one layer's attention. `make_mask` describes the
mask that all layers share: without it, a model would hand no mask to `attend`, and causality would
be lost in silence. Importing this module registers nothing.
"""

import functools

import torch

from . import _attention, _transformers_mask
from ._errors import FlashtuneError, InvalidArgumentError, UnsupportedError

__all__ = ["NAME", "register", "unregister"]

NAME = "tuned_attention"
"""The default name. transformers takes names with "flash" in them for kernels of its hub."""

_FIRST = 5


def register(name=NAME):
    """Registers the implementation and returns its name, for `attn_implementation`.

    A second call with the same name changes nothing. UnsupportedError: transformers is older than
    5. InvalidArgumentError: the name contains "flash" or "|", which have a meaning in transformers,
    or it belongs to another implementation.
    """
    attention, masks = _interfaces()
    if not isinstance(name, str) or not name or "flash" in name.lower() or "|" in name:
        raise InvalidArgumentError(
            f'name is {name!r}; it must be text without "|" and without "flash", which transformers takes for a kernel of its hub'
        )
    found = attention._global_mapping.get(name), masks._global_mapping.get(name)
    if any(function not in (None, ours) for function, ours in zip(found, (attend, make_mask))) or name == "eager":
        raise InvalidArgumentError(f"name is {name!r}, which is another implementation's")
    attention.register(name, attend)
    masks.register(name, make_mask)
    return name


def unregister(name=NAME):
    """Removes the implementation. Does nothing if it is not registered under this name."""
    for interface, ours in zip(_interfaces(), (attend, make_mask)):
        if interface._global_mapping.get(name) is ours:
            del interface._global_mapping[name]


def make_mask(**arguments):
    """The mask of all layers of one kind, from the arguments of transformers' `sdpa_mask`.

    None, a tensor as `sdpa_mask` returns it, or a `_transformers_mask.LazyMask`.
    """
    return _transformers_mask.make(arguments)


def attend(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, sliding_window=None, softcap=None,
    s_aux=None, position_bias=None, cache=None, cu_seq_lens_q=None, cu_seq_lens_k=None, max_length_q=None,
    max_length_k=None, **_,
):  # fmt: skip
    """(out, None): out is (batch, seqlen, heads, dim). transformers calls it for each layer.

    query is (batch, heads, seqlen, dim), key and value (batch, heads_kv, seqlen_k, dim).

    attention_mask: what `make_mask` returned, or a mask of (batch, 1 or heads, seqlen, seqlen_k):
        bool, True for a key that counts, or floats to add to the scores. None: causal if the module
        is and there is more than one query; then the first query sees the first key.
    sliding_window: the number of keys that a causal query sees, itself included.
    softcap, s_aux, position_bias: flashtune's softcap, sinks and bias.
    cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: the packed sequences of a batch of 1,
        as transformers' DataCollatorWithFlattening makes them. They replace attention_mask.
    """
    if cache is not None:
        raise UnsupportedError("cache is given; continuous batching with paged caches is not supported")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    features = {"softmax_scale": scaling, "dropout_p": dropout, "softcap": softcap or 0.0, "sinks": s_aux}
    packed = _packed(query, key, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    if packed is None and isinstance(attention_mask, _transformers_mask.LazyMask):
        packed = attention_mask.packed
    if packed is not None:
        if position_bias is not None:
            raise UnsupportedError("position_bias is given with packed sequences, which is not supported")
        if isinstance(attention_mask, _transformers_mask.LazyMask) and attention_mask.packed is not None:
            # The mask itself is causal, whatever the module says.
            is_causal, sliding_window = True, attention_mask.window
        features |= packed | {"causal": bool(is_causal), "window": _window(sliding_window if is_causal else None)}
        return _attend_packed(query, key, value, features), None
    features |= _mask_features(query, key, attention_mask, is_causal, sliding_window, position_bias)
    out = _attention.attention(*(x.transpose(1, 2) for x in (query, key, value)), **features)
    return out, None


def _mask_features(query, key, attention_mask, is_causal, sliding_window, position_bias):
    """causal, window, mask and bias as `flashtune.attention` takes them."""
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    bias = None if position_bias is None else position_bias[..., :seqlen_k].to(query.dtype)
    if attention_mask is None:
        # One query sees every key, as the last of many does.
        is_causal = bool(is_causal) and seqlen_q > 1
        causal = ("top-left" if seqlen_k > seqlen_q else True) if is_causal else False
        return {"causal": causal, "window": _window(sliding_window if is_causal else None), "bias": bias}
    if isinstance(attention_mask, _transformers_mask.LazyMask):
        if attention_mask.is_causal and tuple(attention_mask.shape[2:]) == (seqlen_q, seqlen_k):
            keys = attention_mask.keys
            return {"causal": True, "window": _window(attention_mask.window), "mask": keys, "bias": bias}
        attention_mask = attention_mask.dense()
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 4:
        found = type(attention_mask).__name__
        if isinstance(attention_mask, torch.Tensor):
            found = f"{attention_mask.dtype} of shape {tuple(attention_mask.shape)}"
        raise InvalidArgumentError(
            f"attention_mask is {found}; it must be a tensor of (batch, heads or 1, {seqlen_q}, {seqlen_k}), of bool or of floats"
        )
    attention_mask = attention_mask[..., :seqlen_k]
    if attention_mask.dtype == torch.bool:
        return {"mask": attention_mask, "bias": bias}
    added = attention_mask.to(query.dtype)
    return {"bias": added if bias is None else bias + added}


def _window(sliding_window):
    return None if sliding_window is None else (sliding_window - 1, None)


def _packed(query, key, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k):
    """The lengths of packed sequences as `flashtune.attention_varlen` takes them, or None."""
    given = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    if all(argument is None for argument in given):
        return None
    if any(argument is None for argument in given):
        raise InvalidArgumentError("cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k must be given together")
    if query.shape[0] != 1 or key.shape[0] != 1:
        raise InvalidArgumentError(f"cu_seq_lens_q is given and the batch is {query.shape[0]}; packed sequences need a batch of 1")
    return {
        "cu_seqlens_q": cu_seq_lens_q.to(query.device, torch.int32), "max_seqlen_q": int(max_length_q),
        "cu_seqlens_k": cu_seq_lens_k.to(query.device, torch.int32), "max_seqlen_k": int(max_length_k),
    }  # fmt: skip


def _attend_packed(query, key, value, features):
    batch, _, seqlen, _ = query.shape
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    return _attention.attention_varlen(*rows, **features).unflatten(0, (batch, seqlen))


@functools.cache
def _interfaces():
    """(AttentionInterface, AttentionMaskInterface), after a check of transformers' version."""
    try:
        import transformers
    except ImportError as error:
        raise FlashtuneError(f"transformers could not be imported: {error}") from error
    _expect_version(transformers.__version__)
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    return AttentionInterface, AttentionMaskInterface


def _expect_version(version):
    if int(version.split(".")[0]) < _FIRST:
        raise UnsupportedError(f"this is transformers {version}; flashtune.transformers needs transformers 5.0 or later")
