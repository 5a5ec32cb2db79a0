"""What happens before a launch, on request: preparing, tuning, looking at a plan, carrying records.

Arrays are handed in for their shapes, strides, dtype and device; no data is read.
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
    """Looks up, compiles and loads what a call on such arrays launches, so that no later call waits for it.

    The pass is the forward one, or with `backward` the backward one, `deterministic` or not. A CUDA graph capture needs it, or
    one call before. features: the keyword arguments of `attention_varlen` from cu_seqlens_q on and from window on, and
    `attention`'s block_mask; of the forward pass also block_table, with k and v in pages; of the backward pass also need_dbias
    (True: the bias has a gradient) and need_dlse (False: lse has none).
    """
    device, params = _describe(q, k, v, causal, dropout_p, backward, deterministic, batch_invariant, **features)
    _pass(device, backward).prepare(params)


def plan_info(
    q, k, v, *, causal=False, dropout_p=0.0, backward=False, deterministic=False, batch_invariant=False, **features
):
    """What a call on such arrays runs and why, as a dict; prepares it where that is still to do. Arguments as of `prepare`.

    kernel, config and reason are text; source is pinned, process, machine, shipped, nearest-gpu or heuristic;
    registers, spill_bytes, smem_bytes and threads are 0 on the CPU, measured_us and default_us 0 where not measured. features,
    block_mask among them, are those of `prepare`.
    """
    device, params = _describe(q, k, v, causal, dropout_p, backward, deterministic, batch_invariant, **features)
    info = _pass(device, backward).plan_info(params)
    values = {name: getattr(info, name) for name, _ in info._fields_ if name != "struct_size"}
    values["source"] = _SOURCES.get(info.source, f"source {info.source}")
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


def autotune(
    q, k, v, *, causal=False, dropout_p=0.0, backward=False, time_limit=0.0, retune=False, progress=None, **features
):
    """Measures the candidates for such arrays on their device, keeps the winner, and returns its `plan_info`.

    time_limit is in seconds (0: the library's default). progress is called with a dict (phase, done, total, failed,
    best_config, best_us) and stops the run by returning True. What has a record is measured again only with `retune`.
    features, block_mask among them, are those of `prepare`.
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
        except BaseException as error:  # KeyboardInterrupt too: it must not be lost inside a C callback.
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
    """Writes this machine's tuning records to a file and returns their number. device: a CUDA ordinal; None: the CPU."""
    return context(CPU if device is None else device).export_records(path)


def import_records(path, device=None):
    """Takes the records of an exported file into this machine's and returns how many were taken."""
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
        raise InvalidArgumentError("deterministic is True and backward False; a forward pass always is: leave it out")
    if batch_invariant and backward:
        raise InvalidArgumentError("batch_invariant is True and backward True; it is of the forward pass: leave it out")
    seed, null = _call.NO_SEED, _call.NULL
    # Outputs, which do not exist yet, stand as packed and unplaced.
    if backward:
        wants_dbias = need_dbias and features is not None and features.bias is not None
        more = _features.with_gradients(packed, _features.NO_SCORES, 0, 0, wants_dbias, need_dlse)
        params = _call.backward(dtype, opts, sizes, seed, q_ref, k_ref, v_ref, null, 0, null, null, null, null, *more, blocks)
    else:
        params = _call.forward(dtype, opts, sizes, seed, q_ref, k_ref, v_ref, null, 0, packed, pages, blocks)
    return device, params
