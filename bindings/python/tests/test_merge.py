"""Merging partial results on NumPy arrays and, with PyTorch, on its tensors: attention over parts
of the keys merges into attention over all of them.
"""

import flashtune
import numpy as np
import pytest
from flashtune import InvalidArgumentError

DEVICES = ["numpy", "cpu", pytest.param("cuda", marks=pytest.mark.needs_gpu)]


def arrays(kind, *shapes):
    """Normal arrays, fp32 on the host and bf16 on a GPU, and the tolerance for that dtype."""
    random = np.random.default_rng(4)
    made = [random.standard_normal(shape, np.float32) for shape in shapes]
    if kind == "numpy":
        return made, 1e-5
    torch = pytest.importorskip("torch")
    made = [torch.from_numpy(x) for x in made]
    return (made, 1e-5) if kind == "cpu" else ([x.to("cuda", torch.bfloat16) for x in made], 0.03)


def on_host(x):
    return x if isinstance(x, np.ndarray) else x.float().cpu().numpy()


@pytest.mark.parametrize("kind", DEVICES)
def test_halves_of_the_keys_merge_into_attention_over_all_of_them(kind):
    (q, k, v), tolerance = arrays(kind, (2, 3, 4, 40), (2, 90, 2, 40), (2, 90, 2, 40))
    parts = [slice(0, 30), slice(30, 31), slice(31, 90)]
    partials = [flashtune.attention_forward(q, k[:, part], v[:, part]) for part in parts]
    out, lse = flashtune.merge(*zip(*partials))
    expected, expected_lse = flashtune.attention_forward(q, k, v)
    assert out.dtype == q.dtype and out.shape == expected.shape
    np.testing.assert_allclose(on_host(out), on_host(expected), atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(on_host(lse), on_host(expected_lse), atol=1e-4)


@pytest.mark.parametrize("kind", DEVICES)
def test_stacks_of_packed_sequences_merge_and_empty_parts_have_no_weight(kind):
    (outs, lses), tolerance = arrays(kind, (3, 7, 2, 5), (3, 2, 7))
    lses = lses.astype(np.float32) if kind == "numpy" else lses.float()
    nothing = float("-inf")
    lses[1] = lses[:, :, 4] = nothing
    outs[1] = float("nan")
    out, lse = flashtune.merge(outs, lses)
    weights = np.exp(on_host(lses)[[0, 2]]).transpose(0, 2, 1)[..., None]
    total = weights.sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        expected = (weights * on_host(outs)[[0, 2]]).sum(0) / total
        expected[4] = 0
        np.testing.assert_allclose(on_host(lse), np.log(total[..., 0]).T, atol=1e-4)
    np.testing.assert_allclose(on_host(out), expected, atol=tolerance, rtol=tolerance)


def test_fp32_partials_give_the_requested_dtype():
    random = np.random.default_rng(6)
    outs, lses = random.standard_normal((2, 1, 5, 2, 8), np.float32), random.standard_normal((2, 1, 2, 5), np.float32)
    out, _ = flashtune.merge(outs, lses, dtype=np.float16)
    assert out.dtype == np.float16
    np.testing.assert_allclose(out, flashtune.merge(outs, lses)[0], atol=2e-3)


@pytest.mark.parametrize(
    "outs, lses, message",
    [
        ((2, 5, 8), (2, 5), "outs has shape (2, 5, 8)"),
        ((2, 1, 5, 2, 8), (2, 1, 5, 2), "lses has shape (2, 1, 5, 2); it must be (2, 1, 2, 5)"),
        ((0, 1, 5, 2, 8), (0, 1, 2, 5), "num_partials is 0"),
    ],
)
def test_mismatched_partials_are_refused(outs, lses, message):
    with pytest.raises(InvalidArgumentError) as caught:
        flashtune.merge(np.zeros(outs, np.float32), np.zeros(lses, np.float32))
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", ["numpy", "cpu"])
def test_a_wrong_dtype_is_named(kind):
    (outs, lses), _ = arrays(kind, (2, 1, 5, 2, 8), (2, 1, 2, 5))
    module = np if kind == "numpy" else pytest.importorskip("torch")
    wide = outs.astype(np.float64) if kind == "numpy" else outs.double()
    with pytest.raises(InvalidArgumentError, match=r"^outs is (torch\.)?float64; it must be"):
        flashtune.merge(wide, lses, dtype=module.float16)
    with pytest.raises(InvalidArgumentError, match=r"^dtype is (torch\.)?int32; it must be"):
        flashtune.merge(outs, lses, dtype=module.int32)
    if kind == "numpy":
        # NumPy learns the names of ml_dtypes when that is imported.
        with pytest.raises(InvalidArgumentError, match=r"^dtype is 'bfloat17'; it must be a NumPy dtype, or one of ml_dtypes once that is imported$"):
            flashtune.merge(outs, lses, dtype="bfloat17")


@pytest.mark.parametrize("kind", ["numpy", "cpu"])
@pytest.mark.parametrize(
    "outs, lses, message",
    [
        ([], [], "outs is []; it must be a sequence of at least one array"),
        ([0], [], "lses is []; it must be a sequence"),
        (5, [0], "outs is 5; it must be a sequence"),
        ([0, 1], [0, 0], "outs[1] is float32 of shape (1, 4, 2, 8); it must be float32 of shape (1, 5, 2, 8), as outs[0] is"),
        ([0, 2], [0, 0], "outs[1] is float16 of shape (1, 5, 2, 8); it must be float32 of shape"),
        ([0, 0], [0, 1], "lses[1] is float32 of shape (1, 2, 4); it must be"),
        ([0, 0], [0], "lses has shape (1, 1, 2, 5); it must be (2, 1, 2, 5)"),
    ],
)
def test_parts_of_different_shape_or_dtype_are_refused(kind, outs, lses, message):
    all_outs = [np.ones((1, 5, 2, 8), np.float32), np.ones((1, 4, 2, 8), np.float32), np.ones((1, 5, 2, 8), np.float16)]
    all_lses = [np.ones((1, 2, 5), np.float32), np.ones((1, 2, 4), np.float32)]
    if kind == "cpu":
        torch = pytest.importorskip("torch")
        all_outs, all_lses = ([torch.from_numpy(x) for x in arrays] for arrays in (all_outs, all_lses))
    outs, lses = (
        [arrays[i] for i in picked] if isinstance(picked, list) else picked
        for arrays, picked in ((all_outs, outs), (all_lses, lses))
    )
    with pytest.raises(InvalidArgumentError) as caught:
        flashtune.merge(outs, lses)
    assert message in str(caught.value).replace("torch.", "")


def test_other_types_and_dtypes_are_refused_by_name():
    out, lse = np.ones((2, 1, 5, 2, 8), np.float32), np.ones((2, 1, 2, 5), np.float32)
    for outs, lses, dtype, message in (
        (out, lse.astype(complex), None, "lses is complex128; it must be float32"),
        (np.array(1.0, np.float32), lse, None, r"outs has shape \(\); it must be \(partials"),
        (out, np.float32(1), None, "lses is .*; it must be a sequence of at least one array"),
        (out, lse, "x", "dtype is 'x'; it must be a NumPy dtype"),
        (out, lse, "int8", "dtype is int8; it must be float16"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            flashtune.merge(outs, lses, dtype=dtype)
    torch = pytest.importorskip("torch")
    for dtype in ("float32", [], torch.int8):
        with pytest.raises(InvalidArgumentError, match="dtype is .*; it must be torch.float16"):
            flashtune.merge(torch.from_numpy(out), torch.from_numpy(lse), dtype=dtype)


def test_non_arrays_are_refused():
    with pytest.raises(TypeError, match="outs is a list"):
        flashtune.merge([[1.0]], [[1.0]])
    with pytest.raises(TypeError, match=r"lses\[0\] is a list; it must be a NumPy array, as outs\[0\] is"):
        flashtune.merge([np.ones((1, 5, 2, 8), np.float32)], [[1.0]])
