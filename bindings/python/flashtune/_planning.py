"""Calls that launch nothing: preparing, tuning, plans, and exchanging records.

Arrays give only their shapes, strides, dtype and device; no data is read.
"""

import ctypes
import operator

from . import _call, _features, _structs
from ._attention import features_of, module_of, refuse_forward_only
from ._context import CPU, context
from ._errors import InvalidArgumentError, shown

_SOURCES = {
    _structs.SOURCE_PINNED: "pinned",
    _structs.SOURCE_PROCESS: "process",
    _structs.SOURCE_MACHINE: "machine",
    _structs.SOURCE_SHIPPED: "shipped",
    _structs.SOURCE_NEAREST_GPU: "nearest-gpu",
    _structs.SOURCE_HEURISTIC: "heuristic",
    _structs.SOURCE_PACK: "pack",
}
_PACK_STATES = {_structs.PACK_NONE: "none", _structs.PACK_LOADED: "loaded", _structs.PACK_REFUSED: "refused"}

_OPTIONAL = {
    "causal": _structs.OPTIONAL_CAUSAL,
    "window": _structs.OPTIONAL_WINDOW,
    "softcap": _structs.OPTIONAL_SOFTCAP,
    "dropout_p": _structs.OPTIONAL_DROPOUT,
}
_OPTIONAL_FEATURES = {
    "cu_seqlens_q": _structs.FEATURE_CU_SEQLENS_Q,
    "cu_seqlens_k": _structs.FEATURE_CU_SEQLENS_K,
    "seqused_q": _structs.FEATURE_SEQUSED_Q,
    "seqused_k": _structs.FEATURE_SEQUSED_K,
    "alibi_slopes": _structs.FEATURE_ALIBI,
    "bias": _structs.FEATURE_BIAS,
    "mask": _structs.FEATURE_MASK | _structs.FEATURE_MASK_BITS,
    "sinks": _structs.FEATURE_SINKS,
    "block_table": _structs.FEATURE_PAGED,
    "cache_batch_idx": _structs.FEATURE_CACHE_BATCH_IDX,
    "leftpad_k": _structs.FEATURE_LEFTPAD_K,
    "block_mask": _structs.FEATURE_BLOCK_MASK,
    "need_dbias": _structs.FEATURE_DBIAS,
    "need_dlse": _structs.FEATURE_DLSE,
}


def prepare(
    q, k, v, *, causal=False, dropout_p=0.0, backward=False, deterministic=False, batch_invariant=False, **features
):
    """Looks up, compiles and loads the kernels for such arrays, so that no later call waits.

    backward: False prepares the forward pass, True the backward pass, deterministic or not.
    features: the keyword arguments of `attention_varlen` from cu_seqlens_q on and from window on,
        and block_mask of `attention`. The forward pass also takes block_table, with k and v in
        pages. The backward pass also takes need_dbias (default True: the bias has a gradient) and
        need_dlse (default False: lse has none).

    A CUDA graph capture needs this call, or one ordinary call, before it.
    """
    device, params = _describe(q, k, v, causal, dropout_p, backward, deterministic, batch_invariant, **features)
    _pass(device, backward).prepare(params)


def prepare_range(
    q, k, v, *, largest, least=(1, 1, 1), optional=(), causal=False, dropout_p=0.0, backward=False,
    deterministic=False, batch_invariant=False, **features,
):  # fmt: skip
    """Prepares every call of a range, so that none of them waits for a compiler; measures nothing.

    q, k, v: arrays as in the calls, for dtype, heads and head dims; their lengths are not used.
        Calls are expected to have addresses and strides of multiples of 16 bytes.
    largest, least: (batch_size, seqlen_q, seqlen_k) of the largest and the smallest call.
    optional: names of what some calls have and others lack: "causal", "window", "softcap",
        "dropout_p", or a keyword of `features`. All combinations are prepared, at most 64.
    Other arguments as for `prepare`. They have everything that some call has.

    Returns a dict: classes, configs, kernels, compiled (by this call), cached (from the cache
    folder), workspace_bytes (the most that a call inside needs) and milliseconds.
    """
    device, params = _describe(q, k, v, causal, dropout_p, backward, deterministic, batch_invariant, **features)
    kind = _structs.BackwardParams if backward else _structs.ForwardParams
    wanted = kind.from_buffer_copy(params)
    wanted.batch_size, wanted.seqlen_q, wanted.seqlen_k = _three("largest", largest)
    # Tensors of the largest sizes need not exist: NULL without strides is a packed tensor.
    for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv"):
        if hasattr(wanted, name):
            setattr(wanted, name, _structs.Tensor())
    if not backward:
        wanted.block_table, wanted.block_table_stride = None, 0
    asked = _structs.Range(struct_size=ctypes.sizeof(_structs.Range))
    setattr(asked, "backward" if backward else "forward", ctypes.addressof(wanted))
    asked.least_batch_size, asked.least_seqlen_q, asked.least_seqlen_k = _three("least", least)
    if isinstance(optional, str) or not hasattr(optional, "__iter__"):
        raise InvalidArgumentError(f"optional is {shown(optional)}; it must be a sequence of names")
    for name in optional:
        if name not in _OPTIONAL and name not in _OPTIONAL_FEATURES:
            allowed = ", ".join([*_OPTIONAL, *_OPTIONAL_FEATURES])
            raise InvalidArgumentError(f"optional has {name!r}; it may have {allowed}")
        asked.optional |= _OPTIONAL.get(name, 0)
        asked.optional_features |= _OPTIONAL_FEATURES.get(name, 0) & wanted.features
    info = context(device).prepare_range(asked)
    values = {name.removeprefix("num_"): getattr(info, name) for name, _ in info._fields_}
    del values["struct_size"]
    return values


def seal(device=None):
    """Forbids further preparation on a device: from now on no call compiles or measures.

    A call that was not prepared raises FlashtuneError. This cannot be undone.

    device: a CUDA ordinal; None means the CPU.
    """
    _of(device).seal()


def plan_info(
    q, k, v, *, causal=False, dropout_p=0.0, backward=False, deterministic=False, batch_invariant=False, **features
):
    """The plan for such arrays, as a dict; prepares it if necessary. Arguments as for `prepare`.

    kernel, config, reason: text.
    source: "pinned", "process", "machine", "shipped", "nearest-gpu", "heuristic" or "pack".
    registers, spill_bytes, smem_bytes, threads: of the main kernel; 0 on the CPU.
    measured_us, default_us: times in microseconds; 0 if not measured.
    """
    device, params = _describe(q, k, v, causal, dropout_p, backward, deterministic, batch_invariant, **features)
    info = _pass(device, backward).plan_info(params)
    values = {name: getattr(info, name) for name, _ in info._fields_ if name != "struct_size"}
    values["source"] = _SOURCES.get(info.source, f"source {info.source}")
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


def autotune(
    q, k, v, *, causal=False, dropout_p=0.0, backward=False, time_limit=0.0, retune=False, progress=None, **features
):
    """Measures candidate configs for such arrays, keeps the fastest, returns its `plan_info`.

    time_limit: in seconds; 0 means the library's default.
    retune: True measures a problem again that has a record.
    progress: called with a dict (phase, done, total, failed, best_config, best_us). Returning True
        stops the run.
    features: as for `prepare`.
    """
    time_limit = _call.number("time_limit", time_limit, "a number of seconds")
    if progress is not None and not callable(progress):
        raise TypeError(f"progress is a {type(progress).__name__}; it must be a function, or None")
    retune = _call.flag("retune", retune)
    device, params = _describe(q, k, v, causal, dropout_p, backward, **features)
    raised = []

    def report(seen, _user):
        seen = seen.contents
        best = seen.best_config.decode() if seen.best_config else None
        try:
            return bool(
                progress(
                    dict(
                        phase=seen.phase.decode(),
                        done=seen.done,
                        total=seen.total,
                        failed=seen.failed,
                        best_config=best,
                        best_us=seen.best_us if best else None,
                    )
                )
            )
        except BaseException as error:  # includes KeyboardInterrupt, which a C callback would lose
            raised.append(error)
            return True

    wanted = _structs.AutotuneParams(struct_size=ctypes.sizeof(_structs.AutotuneParams))
    buffer = ctypes.create_string_buffer(params, len(params))
    setattr(wanted, "backward" if backward else "forward", ctypes.addressof(buffer))
    wanted.time_limit_seconds = time_limit
    wanted.retune = retune
    if progress is not None:
        wanted.progress = _structs.PROGRESS_CALLBACK(report)
    try:
        context(device).autotune(wanted)
    finally:
        if raised:
            raise raised[0]
    return plan_info(q, k, v, causal=causal, dropout_p=dropout_p, backward=backward, **features)


def pack_info(device=None):
    """The pack of a device's context, as a dict.

    device: a CUDA ordinal; None means the CPU, which has no pack.

    state: "none", "loaded" or "refused".
    num_kernels, num_plans: for the device's architecture. num_records: of all architectures.
    path, reason: text; reason says why the pack was refused.
    """
    info = _of(device).pack_info()
    values = {name: getattr(info, name) for name, _ in info._fields_ if name != "struct_size"}
    values["state"] = _PACK_STATES.get(info.state, f"state {info.state}")
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


def export_records(path, device=None):
    """Writes this machine's tuning records to a file and returns their number.

    device: a CUDA ordinal; None means the CPU.
    """
    return _of(device).export_records(path)


def import_records(path, device=None):
    """Imports the records of an exported file and returns the number of records that were accepted.

    device: a CUDA ordinal; None means the CPU.
    """
    return _of(device).import_records(path)


def _of(device):
    """The context of a CUDA ordinal, or of the CPU for None."""
    if device is None:
        return context(CPU)
    try:
        ordinal = -1 if isinstance(device, bool) else operator.index(device)
    except TypeError:
        ordinal = -1
    if not 0 <= ordinal < 1 << 31:
        raise InvalidArgumentError(f"device is {shown(device)}; it must be the number of a GPU, from 0, or None for the CPU")
    return context(ordinal)


def _three(name, sizes):
    try:
        batch_size, seqlen_q, seqlen_k = (operator.index(size) for size in sizes)
        # ctypes would keep the low 64 bits of a larger number.
        if not all(0 <= size < 1 << 63 for size in (batch_size, seqlen_q, seqlen_k)):
            raise ValueError
    except (TypeError, ValueError):
        expected = "(batch_size, seqlen_q, seqlen_k), three integers from 0 to 2**63 - 1"
        raise InvalidArgumentError(f"{name} is {shown(sizes)}; it must be {expected}") from None
    return batch_size, seqlen_q, seqlen_k


def _pass(device, backward):
    return context(device).backward if backward else context(device).forward


def _describe(
    q, k, v, causal, dropout_p, backward, deterministic=False, batch_invariant=False, *,
    need_dbias=True, need_dlse=False, **features,
):  # fmt: skip
    opts = _call.options(causal, None, dropout_p, deterministic, batch_invariant)
    for name, flag in (("backward", backward), ("need_dbias", need_dbias), ("need_dlse", need_dlse)):
        _call.flag(name, flag)
    features = features_of(features)
    if backward:
        refuse_forward_only(features)
    described = module_of(q).describe(q, k, v, opts, features, backward)
    device, dtype, sizes, (q_ref, k_ref, v_ref), packed, pages, blocks, key_starts, eight = described
    if deterministic and not backward:
        raise InvalidArgumentError("deterministic is True and backward False; the forward pass is always deterministic: leave it out")
    if batch_invariant and backward:
        raise InvalidArgumentError("batch_invariant is True and backward True; only the forward pass has it: leave it out")
    seed, null = _call.NO_SEED, _call.NULL
    # Outputs do not exist yet; NULL describes them as packed tensors.
    if backward:
        wants_dbias = need_dbias and features is not None and features.bias is not None
        more = _features.with_gradients(packed, _features.NO_SCORES, 0, 0, wants_dbias, need_dlse)
        params = _call.backward(dtype, opts, sizes, seed, q_ref, k_ref, v_ref, null, 0, null, null, null, null, *more, blocks)
    else:
        params = _call.forward(dtype, opts, sizes, seed, q_ref, k_ref, v_ref, null, 0, packed, pages, blocks, key_starts, eight)
    return device, params
