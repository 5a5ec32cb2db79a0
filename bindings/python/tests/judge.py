"""The one rule by which these tests judge numeric errors.

An output may be off the exact result by what the same maths done naively in the input dtype is off, twice over (three
times for gradients), plus one rounding step; on average by half as much again as the naive result.
"""

import numpy as np

# The spacing of numbers just above 1.
STEP = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}
# In fp32 nothing but the order of sums and the LSE tells naive from ours: the naive order is one of many, and its luck is
# not ours; backward recomputes weights from an LSE rounded to fp32, off by up to |lse| steps, as every flash
# algorithm does. In 16-bit types the rounding of products drowns both.
LOOSER = {"float16": 1, "bfloat16": 1, "float32": 4}
# Fewer elements share a few roundings, and their mean is judged as the largest error is.
_ENOUGH = 256


def assert_close(name, actual, naive, exact, dtype, gradient=False):
    """All arrays as fp64 NumPy; `exact` from fp64 maths, `naive` from maths rounded to `dtype` at each step."""
    assert actual.shape == exact.shape, f"{name}: shape {actual.shape}, expected {exact.shape}"
    if exact.size == 0:
        return
    error, naive_error = np.abs(actual - exact), np.abs(naive - exact)
    assert np.isfinite(error).all(), f"{name}: {np.count_nonzero(~np.isfinite(error))} elements are not finite"
    looser = LOOSER[dtype]
    factor = 3 if gradient else 2
    allowed = looser * (factor * naive_error.max() + STEP[dtype] * np.abs(exact).max())
    worst = np.unravel_index(error.argmax(), error.shape)
    assert error.max() <= allowed, f"{name}{list(worst)}: {actual[worst]}, exactly {exact[worst]}; allowed {allowed}"
    mean, naive_mean = error.mean(), naive_error.mean()
    few = factor * naive_mean + STEP[dtype] * np.abs(exact).mean()
    allowed = looser * (1.5 * naive_mean if error.size >= _ENOUGH else few)
    assert mean <= allowed, f"{name}: mean error {mean}, allowed {allowed}, naive {naive_mean}"
