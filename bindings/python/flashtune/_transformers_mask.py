"""Masks of transformers' models in a form that the kernels compute themselves.

`make` recognises causal masks, sliding windows, padding and packed sequences. It keeps them as a
`LazyMask`, a tensor that has its elements only when somebody reads them. `transformers.py` hands
such a mask to the kernels as options. All else becomes the tensor that transformers makes for SDPA.
"""

import torch


class LazyMask(torch.Tensor):
    """A mask of (batch, 1, seqlen_q, seqlen_k) bool that is made when an operation reads it.

    transformers passes masks on untouched if they are tensors of four dims. Any operation on this
    one, also a copy to another device, sees and returns plain tensors.

    is_causal: whether the mask is bottom-right causal with `window` and `keys`.
    window: the number of keys that a query sees, itself included; None is all.
    keys: (batch, 1, 1, seqlen_k) bool, False for keys that no query sees; None hides no key.
    packed: the lengths of packed sequences as `attention_varlen` takes them, each causal with
        `window`, over the flattened batch; None if nothing is packed.
    """

    @staticmethod
    def __new__(cls, shape, device, build, is_causal=False, window=None, keys=None, packed=None):
        mask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask._build, mask._dense = build, None
        mask.is_causal, mask.window, mask.keys, mask.packed = is_causal, window, keys, packed
        return mask

    def __init__(self, *_, **__):
        pass

    def dense(self):
        """The mask as a plain tensor, made once."""
        if self._dense is None:
            self._dense = self._build()
        return self._dense

    def __repr__(self, **_):
        return f"LazyMask(shape={tuple(self.shape)}, is_causal={self.is_causal}, window={self.window})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = torch.utils._pytree.tree_map_only(cls, cls.dense, (args, kwargs or {}))
        return function(*args, **kwargs)


def make(arguments):
    """The mask from the arguments of transformers' `sdpa_mask`, by name."""
    from transformers import masking_utils

    def build():
        return masking_utils.sdpa_mask(**arguments)

    def build_whole():
        return masking_utils.sdpa_mask(**{**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})

    sizes = [arguments.get(name) for name in ("batch_size", "q_length", "kv_length", "q_offset", "kv_offset")]
    # Under torch.compile and torch.export, and with a static cache, sizes may be tensors.
    if torch.compiler.is_compiling() or not all(isinstance(size, int) for size in sizes):
        return build()
    batch, q_length, kv_length, q_offset, kv_offset = sizes
    device, rule = torch.device(arguments.get("device", "cpu")), arguments.get("mask_function", masking_utils.causal_mask_function)
    shape = (batch, 1, q_length, kv_length)
    packed = _packed(rule)
    if packed is not None:
        sequences, each = packed
        window = _window(each, masking_utils)
        if window is not False and q_length == kv_length and sequences.shape == (batch, q_length) and not (q_offset or kv_offset):
            return LazyMask(shape, device, build_whole, window=window, packed=_lengths(sequences))
        return build()
    window = _window(rule, masking_utils)
    if window is False or q_offset + q_length != kv_offset + kv_length:
        return build()
    padding = arguments.get("attention_mask")
    if padding is not None and (padding.dim() != 2 or padding.shape[1] < kv_offset + kv_length):
        return build()
    keys = None if padding is None else padding[:, kv_offset : kv_offset + kv_length].bool()
    keys = None if keys is None or bool(keys.all()) else keys[:, None, None]
    return LazyMask(shape, device, build_whole, is_causal=True, window=window, keys=keys)


def _window(rule, masking_utils):
    """The window of a causal rule, None for all keys, or False for any other rule."""
    if rule is masking_utils.causal_mask_function:
        return None
    parts = _parts(rule)
    if len(parts) == 2 and _is(parts[0], "sliding_window_overlay") and parts[1] is masking_utils.causal_mask_function:
        size = _closed_over(parts[0]).get("sliding_window")
        return size if isinstance(size, int) else False
    return False


def _packed(rule):
    """(the number of each token's sequence, the rule of each sequence) if the rule packs sequences.

    The numbers are (batch, seqlen). transformers 5.17 gives the rule on positions of the whole row,
    5.23 on those of a sequence. Causal rules and windows say the same on both.
    """
    parts = _parts(rule)
    if len(parts) != 2:
        return None
    packing, each = parts if _is(parts[0], "packed_sequence_mask_function") else parts[::-1]
    if not _is(packing, "packed_sequence_mask_function"):
        return None
    each = _closed_over(each).get("mask_function") if _is(each, "remap_positions_for_packed_sequence") else each
    return _closed_over(packing).get("packed_sequence_mask"), each


def _parts(rule):
    """The rules that a rule of transformers is made of; none for a rule that is not."""
    if _is(rule, "and_masks"):
        return tuple(_closed_over(rule).get("mask_functions", ()))
    return ()


def _is(rule, maker):
    return getattr(rule, "__module__", "") == "transformers.masking_utils" and rule.__qualname__.startswith(f"{maker}.<locals>.")


def _closed_over(rule):
    return dict(zip(rule.__code__.co_freevars, (cell.cell_contents for cell in rule.__closure__ or ())))


def _lengths(sequences):
    """cu_seqlens and the longest length over the flattened batch. A batch row ends its sequence."""
    begins = torch.ones_like(sequences, dtype=torch.bool)
    begins[:, 1:] = sequences[:, 1:] != sequences[:, :-1]
    at = begins.flatten().nonzero().flatten()
    offsets = torch.cat([at, at.new_tensor([sequences.numel()])]).int()
    longest = int(offsets.diff().max())
    return {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": longest, "max_seqlen_k": longest}
