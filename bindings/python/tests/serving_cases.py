"""Random batches over pages for the tests of serving engines, and their judgement by the oracle."""

import dataclasses

import numpy as np
import oracle
import torch
from judge import assert_close

HEADS, HEADS_KV, DIM = 4, 2, 16
ROUNDED = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

# (new queries, keys with the new ones) of each sequence.
MIXED = [(5, 5), (1, 40), (1, 1), (17, 33), (3, 64), (1, 18)]
DECODE = [(1, 40), (1, 1), (1, 64), (1, 17), (1, 33)]

OPTIONS = {
    "plain": {},
    "window": {"window": 9},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": np.linspace(-1, 2, HEADS, dtype=np.float32)},
    "window, softcap and sinks": {"window": 7, "softcap": 3.0, "sinks": np.zeros(HEADS, np.float32)},
}
"""window: the keys that a query sees, itself included."""


@dataclasses.dataclass
class Case:
    """q, k and v of the new tokens of all sequences, end to end, and each sequence's keys and
    values.
    """

    sizes: list
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    keys: list
    values: list

    @property
    def queries(self):
        return [count for count, _ in self.sizes]

    @property
    def lengths(self):
        return [length for _, length in self.sizes]

    def to(self, device):
        moved = {name: getattr(self, name).to(device) for name in "qkv"}
        return dataclasses.replace(self, **moved)

    def starts(self):
        return np.cumsum([0, *self.queries])


def case(sizes, dtype, seed=0):
    random = np.random.default_rng(seed)

    def made(heads, rows):
        return torch.from_numpy(random.standard_normal((rows, heads, DIM), np.float32)).to(dtype)

    keys, values = ([made(HEADS_KV, length) for _, length in sizes] for _ in range(2))
    k, v = (torch.cat([x[len(x) - count :] for x, (count, _) in zip(of_all, sizes)]) for of_all in (keys, values))
    return Case(sizes, made(HEADS, sum(count for count, _ in sizes)), k, v, keys, values)


def judge(case, out, causal=True, window=None, scale=None, **options):
    """out: (tokens, heads, dim)."""
    window = None if window is None else (window - 1, 0 if causal else window - 1)
    options.update(causal=causal, window=window, softmax_scale=scale)
    for b, start in enumerate(case.starts()[:-1]):
        rows = slice(start, start + case.queries[b])
        arrays = [x.float().numpy()[None] for x in (case.q[rows].cpu(), case.keys[b], case.values[b])]
        dtype = ROUNDED[case.q.dtype]
        exact = oracle.attention(*arrays, **options).out[0]
        naive = naive_of(arrays, dtype, options)
        assert_close(f"sequence {b}", out[rows].double().cpu().numpy(), naive, exact, dtype)


def naive_of(arrays, dtype, options):
    if dtype == "float32":
        return oracle.attention(*arrays, rounded_to=np.float32, **options).out[0].astype(np.float64)
    import oracle_torch

    options = {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    tensors = [torch.from_numpy(x).to(getattr(torch, dtype)) for x in arrays]
    if options.get("sinks") is not None:
        options["sinks"] = options["sinks"].to(tensors[0].dtype)
    return oracle_torch.plain(*tensors, **options)[0].double().numpy()


def tables(lengths, page_size, pages, seed=1):
    """(block table, row of each key among the rows of all pages) with pages in a random order.

    Page 0 belongs to nobody. Entries behind a sequence's keys are 0.
    """
    order = 1 + np.random.default_rng(seed).permutation(pages - 1)
    counts = [-(-length // page_size) for length in lengths]
    table = np.zeros((len(lengths), max(counts) + 2), np.int32)
    rows, taken = [], 0
    for b, (count, length) in enumerate(zip(counts, lengths)):
        table[b, :count] = order[taken : taken + count]
        taken += count
        at = np.arange(length)
        rows.append(torch.from_numpy(table[b, at // page_size].astype(np.int64) * page_size + at % page_size))
    return torch.from_numpy(table), rows
