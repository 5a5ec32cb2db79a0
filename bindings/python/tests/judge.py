"""The rule by which the Python tests judge numeric errors.

The yardstick is the error of the same maths, done naively in the input dtype. A result may have
twice its largest error (three times for gradients) plus one rounding step, and 1.5 times its mean
error.
"""

import numpy as np

# The spacing of numbers just above 1.
STEP = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23}
# In fp32 only the order of sums and the LSE distinguish a result from the naive one, and the naive
# order is one of many. The backward pass recomputes weights from an LSE rounded to fp32, which is
# off by up to |lse| steps, as in every flash algorithm. In 16-bit dtypes the rounding of products
# hides both.
LOOSER = {"float16": 1, "bfloat16": 1, "float32": 4}
# Fewer elements share a few roundings, so their mean is judged like the largest error.
_ENOUGH = 256


def assert_close(name, actual, naive, exact, dtype, gradient=False):
    """All arrays are fp64 NumPy.

    `exact` comes from fp64 maths, `naive` from maths rounded to `dtype` at each step.
    """
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
