"""The oracle itself: published vectors, and gradients against finite differences."""

import numpy as np
import oracle
import pytest


def test_philox_gives_the_published_vectors():
    # Random123, kat_vectors, philox4x32 10.
    counter = [np.array([x], np.uint64) for x in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)]
    words = oracle.philox(counter, [0xA4093822, 0x299F31D0])
    assert [int(word[0]) for word in words] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("has_features", [False, True])
def test_gradients_agree_with_finite_differences(has_features):
    generator = np.random.default_rng(1)
    q, k, v = (generator.standard_normal(shape) for shape in ((1, 3, 2, 2), (1, 4, 1, 2), (1, 4, 1, 3)))
    dout, dlse = generator.standard_normal((1, 3, 2, 3)), generator.standard_normal((1, 2, 3))
    options = dict(causal=True, dropout_p=0.3, seed=(5, 9))
    if has_features:
        bias, sinks, slopes = (generator.standard_normal(shape) for shape in ((1, 2, 1, 4), (2,), (2,)))
        options |= dict(window=(2, None), softcap=1.5, alibi_slopes=slopes, bias=bias, sinks=sinks)
    else:
        dlse = dlse * 0
    result = oracle.attention(q, k, v, dout, dlse=dlse, **options)

    def loss():
        result = oracle.attention(q, k, v, **options)
        return (result.out * dout).sum() + (result.lse * dlse).sum()

    checked = [(q, result.dq), (k, result.dk), (v, result.dv)]
    if has_features:
        checked += [(bias, result.dbias), (sinks, result.dsinks)]
    for tensor, gradient in checked:
        for index in np.ndindex(tensor.shape):
            value, ends = tensor[index], []
            for step in (1e-6, -1e-6):
                tensor[index] = value + step
                ends.append(loss())
            tensor[index] = value
            assert abs((ends[0] - ends[1]) / 2e-6 - gradient[index]) < 1e-7
