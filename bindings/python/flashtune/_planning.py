"""Calls that launch nothing: preparing, tuning, plans, and exchanging records.

Arrays give only their shapes, strides, dtype and device; no data is read.
"""

import ctypes

from . import _call, _features, _structs
from ._attention import features_of, module_of
from ._context import CPU, context
from ._errors import InvalidArgumentError

_SOURCES = {
    _structs.SOURCE_PINNED: "pinned",
    _structs.SOURCE_PROCESS: "process",
    _structs.SOURCE_MACHINE: "machine",
    _structs.SOURCE_SHIPPED: "shipped",
    _structs.SOURCE_NEAREST_GPU: "nearest-gpu",
    _structs.SOURCE_HEURISTIC: "heuristic",
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


def plan_info(
    q, k, v, *, causal=False, dropout_p=0.0, backward=False, deterministic=False, batch_invariant=False, **features
):
    """The plan for such arrays, as a dict; prepares it if necessary. Arguments as for `prepare`.

    kernel, config, reason: text.
    source: "pinned", "process", "machine", "shipped", "nearest-gpu" or "heuristic".
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
    wanted.retune = bool(retune)
    if progress is not None:
        wanted.progress = _structs.PROGRESS_CALLBACK(report)
    try:
        context(device).autotune(wanted)
    finally:
        if raised:
            raise raised[0]
    return plan_info(q, k, v, causal=causal, dropout_p=dropout_p, backward=backward, **features)


def export_records(path, device=None):
    """Writes this machine's tuning records to a file and returns their number.

    device: a CUDA ordinal; None means the CPU.
    """
    return context(CPU if device is None else device).export_records(path)


def import_records(path, device=None):
    """Imports the records of an exported file and returns the number of records that were accepted.

    device: a CUDA ordinal; None means the CPU.
    """
    return context(CPU if device is None else device).import_records(path)


def _pass(device, backward):
    return context(device).backward if backward else context(device).forward


def _describe(
    q, k, v, causal, dropout_p, backward, deterministic=False, batch_invariant=False, *,
    need_dbias=True, need_dlse=False, **features,
):  # fmt: skip
    opts = _call.options(causal, None, dropout_p, deterministic, batch_invariant)
    features = features_of(features)
    described = module_of(q).describe(q, k, v, opts, features, backward)
    device, dtype, sizes, (q_ref, k_ref, v_ref), packed, pages, blocks = described
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
        params = _call.forward(dtype, opts, sizes, seed, q_ref, k_ref, v_ref, null, 0, packed, pages, blocks)
    return device, params
