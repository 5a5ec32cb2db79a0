"""The library's functions that repeat calls, on an array type of these tests, without torch."""

import ctypes
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import flashtune
import numpy as np
import pytest
from flashtune import _call, _context, _drafts, _features, _library, _structs

FORWARD = 0
SHAPE = 2, 5, 3, 16
WORDS = tuple(getattr(_structs.ForwardParams, name).offset // 8 for name in ("q", "k", "v", "out", "lse"))


class Array:
    def __init__(self, values):
        self.values = np.asarray(values, np.float32)


class Subclass(Array):
    pass


def empty_like(array):
    return Array(np.full_like(array.values, np.nan))


def describe(array):
    values = array.values
    return (*values.shape, *values.strides, values.ctypes.data)


def no_stream(ordinal):
    raise AssertionError(f"the stream of device {ordinal} is asked for")


def functions(limit=8):
    made = _drafts.functions((Array,), None, describe, empty_like, no_stream, limit)
    if made is None:
        pytest.skip("this Python has not CPython's C API")
    return made


def inputs(seed):
    random = np.random.default_rng(seed)
    return [Array(random.standard_normal(SHAPE)) for _ in range(3)]


def expected(q, k, v):
    scores = np.einsum("bihd,bjhd->bhij", q.values, k.values) / np.sqrt(SHAPE[-1])
    weights = np.exp(scores)
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhij,bjhd->bihd", weights, v.values)


def ref(array):
    return (array.values.ctypes.data, *(stride // 4 for stride in array.values.strides[:3]))


def packed(q, k, v, out):
    b, s, h, d = SHAPE
    dims = b, h, h, s, s, d, d
    return _call.forward(_call.DTYPES["float32"], _call.options(False, None, 0.0), dims, _call.NO_SEED, *map(ref, (q, k, v, out)), 0)


def call(q, k, v, *more, before_launch=None, seed=None):
    return (FORWARD, before_launch, seed, q, k, v, *more)


def leave(keep, arguments, tensors, outputs=((WORDS[3], 0),), workspace=(None, 0)):
    """Keeps a draft for these arguments, whose first tensors are q, k and v."""
    params = packed(*tensors, empty_like(tensors[0]))
    keep(arguments, _context.context(_context.CPU).forward.handle, params, WORDS[: len(tensors)], outputs, *workspace, None)


def test_a_call_of_the_form_runs_on_its_own_arrays():
    repeat, keep, _alias, forget, count = functions()
    first, second = inputs(1), inputs(2)
    assert repeat(*call(*first)) is None and count() == 0
    leave(keep, call(*first), first)
    assert count() == 1
    for tensors in (second, first):
        (out,) = repeat(*call(*tensors))
        np.testing.assert_allclose(out.values, expected(*tensors), rtol=1e-5, atol=1e-6)
    forget()
    assert count() == 0 and repeat(*call(*first)) is None


@pytest.mark.parametrize(
    "kept, other",
    [
        ((1,), (2,)),
        ((1,), (1.0,)),
        ((1,), (True,)),
        ((0.0,), (-0.0,)),
        ((False,), (None,)),
        (((1, 2),), ((1, 3),)),
        (((1,), 2), ((1, 2),)),
        ((), (None,)),
        ((_features.Features(),), (_features.Features(softcap=1.0),)),
        ((), ("text",)),
        ((), (1 << 70,)),
        ((), ([1],)),
    ],
)
def test_another_argument_makes_another_form(kept, other):
    repeat, keep, _alias, _forget, count = functions()
    tensors = inputs(1)
    leave(keep, call(*tensors, *kept), tensors)
    assert count() == 1
    for _ in range(2):
        assert repeat(*call(*tensors, *other)) is None
    assert repeat(*call(*tensors, *kept)) is not None


def test_another_shape_or_stride_or_a_subclass_has_no_draft():
    repeat, keep, _alias, _forget, _count = functions()
    q, k, v = inputs(1)
    leave(keep, call(q, k, v), (q, k, v))
    others = q.values[:, :4], q.values[..., :8], np.asfortranarray(q.values)
    for other in others:
        changed = Array(0)
        changed.values = other
        assert repeat(*call(changed, k, v)) is None
    assert repeat(*call(Subclass(q.values), k, v)) is None
    assert repeat(*call(q, k, None)) is None


def test_the_value_of_a_seed_is_no_part_of_the_form():
    repeat, keep, _alias, _forget, count = functions()
    tensors = inputs(1)
    leave(keep, call(*tensors, seed=(1, 0)), tensors)
    assert repeat(*call(*tensors, seed=(2, (1 << 64) - 1))) is not None
    assert repeat(*call(*tensors)) is None
    assert repeat(*call(*tensors, seed=tensors[0])) is None
    assert repeat(*call(*tensors, seed=(1, 1 << 64))) is None
    assert repeat(*call(*tensors, seed=(1,))) is None
    assert count() == 1


def test_params_that_name_a_copy_leave_no_draft():
    _repeat, keep, _alias, _forget, count = functions()
    tensors, copies = inputs(1), inputs(1)
    leave(keep, call(*tensors), (tensors[0], copies[1], tensors[2]))
    assert count() == 0


@pytest.mark.parametrize(
    "outputs", [((WORDS[3], 3),), ((10_000, 0),), ((WORDS[3],),), (7,), ("out",), ((-1, 0),)], ids=str
)
def test_outputs_that_make_no_sense_leave_no_draft(outputs):
    _repeat, keep, _alias, _forget, count = functions()
    tensors = inputs(1)
    leave(keep, call(*tensors), tensors, outputs=outputs)
    assert count() == 0


def test_other_arguments_of_keep_that_make_no_sense_leave_no_draft():
    _repeat, keep, _alias, _forget, count = functions()
    tensors = inputs(1)
    params = packed(*tensors, empty_like(tensors[0]))
    handle = _context.context(_context.CPU).forward.handle
    right = [call(*tensors), handle, params, WORDS[:3], ((WORDS[3], 0),), None, 0, None]
    wrong = [("arguments", 0), (None, 0), ((), 0), (params[:-8], 2), ("params", 2), (WORDS[:2], 3), (None, 3), (-1, 6)]
    for value, at in wrong:
        keep(*right[:at], value, *right[at + 1 :])
        assert count() == 0, (value, at)
    keep()
    keep(*right[:-1])
    assert count() == 0
    keep(*right)
    assert count() == 1


def test_results_may_be_absent_or_given_or_made_by_a_function():
    repeat, keep, _alias, _forget, _count = functions()
    q, k, v = inputs(1)
    out = empty_like(q)
    made = Array(np.zeros(SHAPE))
    outputs = (3, None, (WORDS[4], lambda: made))
    params = packed(q, k, v, out)
    handle = _context.context(_context.CPU).forward.handle
    keep(call(q, k, v, out), handle, params, WORDS[:4], outputs, None, 0, None)
    results = repeat(*call(q, k, v, out))
    assert results[0] is out and results[1] is None and results[2] is made
    np.testing.assert_allclose(out.values, expected(q, k, v), rtol=1e-5, atol=1e-6)
    assert np.isfinite(made.values.ravel()[: SHAPE[0] * SHAPE[2] * SHAPE[1]]).all() and made.values.any()


def test_an_error_of_python_is_raised_and_leaves_the_draft():
    repeat, keep, _alias, _forget, count = functions()
    tensors = inputs(1)

    def fail():
        raise MemoryError("no memory")

    leave(keep, call(*tensors), tensors, outputs=((WORDS[3], fail),))
    with pytest.raises(MemoryError, match="no memory"):
        repeat(*call(*tensors))
    leave(keep, call(*tensors), tensors)
    with pytest.raises(MemoryError, match="no memory"):
        repeat(*call(*tensors, before_launch=fail))
    assert count() == 1 and repeat(*call(*tensors)) is not None


def test_a_refused_call_drops_its_draft_and_writes_nothing():
    repeat, keep, _alias, _forget, count = functions()
    tensors = inputs(1)
    handle = _context.context(_context.CPU).forward.handle
    called = []
    for before_launch in (None, lambda: called.append(1)):
        # Nothing makes an output, so its address stays that of q.
        keep(call(*tensors), handle, packed(*tensors, tensors[0]), WORDS[:3], (), None, 0, None)
        assert count() == 1
        assert repeat(*call(*tensors, before_launch=before_launch)) is None
        assert count() == 0 and called == []


def test_a_launch_that_fails_after_something_was_written_raises():
    repeat, keep, _alias, _forget, count = functions()
    q, k, v = inputs(1)
    lse = Array(np.zeros((SHAPE[0], SHAPE[2], SHAPE[1])))
    b, s, h, d = SHAPE
    gradients = [empty_like(q) for _ in range(3)]
    of_forward, of_backward = map(ref, (q, k, v, v)), map(ref, (q, *gradients))
    opts = _call.options(False, None, 0.0)
    dims = b, h, h, s, s, d, d
    params = _call.backward(
        _call.DTYPES["float32"], opts, dims, _call.NO_SEED, *of_forward, lse.values.ctypes.data, *of_backward
    )
    handle = _context.context(_context.CPU).backward.handle
    arguments = 1, None, None, q, k, v
    keep(arguments, handle, params, WORDS[:3], (None,), None, 0, None)
    called = []
    with pytest.raises(flashtune.InvalidArgumentError, match="workspace"):
        repeat(1, lambda: called.append(1), None, q, k, v)
    assert called == [1] and count() == 0


def test_an_error_of_the_function_that_describes_is_raised():
    answers = [KeyboardInterrupt("stop"), ()]

    def fail(array):
        answer = answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    made = _drafts.functions((Array,), None, fail, empty_like, no_stream, 8)
    if made is None:
        pytest.skip("this Python has not CPython's C API")
    repeat, keep, alias, _forget, count = made
    tensors = inputs(1)
    for function in (repeat, lambda *call: keep(call), lambda *call: alias(call, call)):
        with pytest.raises(KeyboardInterrupt, match="stop"):
            function(*call(*tensors))
    answers[0] = ()
    assert repeat(*call(*tensors)) is None and count() == 0


def test_an_alias_shares_the_draft_of_a_form_with_the_same_tensors_in_the_same_order():
    repeat, keep, alias, _forget, count = functions()
    q, k, v = inputs(1)

    def named(*tensors):
        return (7, None, None, *tensors, 3, (True,))

    alias(named(q, k, v), call(q, k, v))
    assert count() == 0 and repeat(*named(q, k, v)) is None
    leave(keep, call(q, k, v), (q, k, v))
    for tensors in ((k, q, v), (q, k), (q, k, v, v)):
        alias(named(*tensors), call(q, k, v))
        assert count() == 1 and repeat(*named(*tensors)) is None
    alias(named(q, k, v), call(q, k, v))
    assert count() == 2
    second = inputs(2)
    (out,) = repeat(*named(*second))
    np.testing.assert_allclose(out.values, expected(*second), rtol=1e-5, atol=1e-6)
    alias()
    alias(1, 2)
    assert count() == 2


def exit_beside_threads():
    """Returns while daemon threads repeat calls; the interpreter then ends them."""
    repeat, keep, _alias, _forget, _count = functions()
    tensors = inputs(1)
    leave(keep, call(*tensors), tensors)

    def work():
        while True:
            repeat(*call(*tensors))

    for _ in range(4):
        threading.Thread(target=work, daemon=True).start()
    time.sleep(0.05)


def test_the_interpreter_ends_beside_threads_that_repeat_calls():
    functions()
    script = "import test_drafts; test_drafts.exit_beside_threads()"
    path = os.pathsep.join([str(Path(flashtune.__file__).parents[1]), str(Path(__file__).parent)])
    for _ in range(3):
        subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}, check=True, timeout=60)


def test_one_more_than_the_limit_clears_the_drafts():
    repeat, keep, _alias, _forget, count = functions(limit=3)
    tensors = inputs(1)
    for number in range(4):
        leave(keep, call(*tensors, number), tensors)
    assert count() == 1 and repeat(*call(*tensors, 3)) is not None
    leave(keep, call(*tensors, 3), tensors)
    assert count() == 1


def test_settings_that_make_no_sense_make_no_functions():
    make = ctypes.PyDLL(None, handle=_library.library()._handle).flashtune_python_drafts
    make.argtypes, make.restype = [ctypes.py_object], ctypes.c_void_p
    for settings in (None, (), ((), empty_like, no_stream, _library.check, 3), (5, empty_like, no_stream, _library.check, "3")):
        assert make(settings) is None
