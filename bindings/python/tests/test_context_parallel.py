"""`flashtune.context_parallel` equals attention on one device.

Each number of ranks is one set of gloo processes, which run all cases and leave the whole results.
The geometry is tested by itself, with every pair of a query and a key counted once.
"""

import contextlib
import datetime
import functools
import os
import socket
import tempfile
from typing import NamedTuple

import flashtune
import flashtune.context_parallel as cp
import numpy as np
import oracle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from flashtune import _ring
from judge import assert_close
from oracle_torch import plain, random, with_gradients

HEADS = 4


class Setting(NamedTuple):
    """A backend's ranks, with problems of a size that suits it."""

    backend: str
    ranks: int
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    dim: int = 16
    scale: int = 1
    """Multiplies the lengths and windows of the cases."""

    @property
    def seqlen(self):
        return 48 * self.scale


SETTINGS = {
    "gloo-2": Setting("gloo", 2),
    "gloo-4": Setting("gloo", 4),
    # Each rank has 480 rows: several tiles, and chunks whose ends lie within a tile.
    "nccl-2": Setting("nccl", 2, "cuda", torch.bfloat16, 64, 20),
}
# method, layout, K/V heads, options
CASES = {
    "ring": ("ring", "zigzag", 2, {}),
    "ring-causal": ("ring", "zigzag", 2, dict(causal=True)),
    "ring-causal-contiguous": ("ring", "contiguous", 4, dict(causal=True, softcap=4.0)),
    "ring-causal-window": ("ring", "zigzag", 2, dict(causal=True, window=(7, None))),
    "ring-window": ("ring", "zigzag", 4, dict(window=(9, 14), softmax_scale=0.3)),
    "all_gather": ("all_gather", "zigzag", 2, {}),
    "all_gather-causal": ("all_gather", "zigzag", 2, dict(causal=True)),
    "all_gather-window": ("all_gather", "zigzag", 4, dict(window=(9, 14))),
    "all_gather-causal-window": ("all_gather", "contiguous", 1, dict(causal=True, window=(7, None))),
    "ulysses": ("ulysses", "zigzag", 4, dict(causal=True)),
    "ulysses-window": ("ulysses", "contiguous", 4, dict(window=(9, 14), softcap=4.0)),
    "ulysses-few-kv-heads": ("ulysses", "contiguous", 1, dict(causal=True)),
}
MASKS = {
    "full": {}, "causal": dict(causal=True), "window": dict(window=(9, 14)),
    "causal-window": dict(causal=True, window=(7, None)),
}  # fmt: skip
# A GPU is fast enough for every combination.
GRID = {
    f"{method}-{layout}-{heads_kv}-{mask}": (method, layout, heads_kv, options)
    for method in ("ring", "all_gather", "ulysses")
    for layout in ("zigzag", "contiguous")
    for heads_kv in (4, 2, 1)
    for mask, options in MASKS.items()
}
OFFSETS = [0, 11, 12, 40, 48]


def cases_of(setting):
    """The cases of a setting, with its windows."""
    cases = CASES | GRID if setting.backend == "nccl" else CASES
    return {name: (*case, scaled(options, setting.scale)) for name, (*case, options) in cases.items()}


def scaled(options, scale):
    window = options.get("window")
    return options if window is None else {**options, "window": tuple(x and x * scale for x in window)}


def inputs(setting, heads_kv, batch=2, device=None):
    shapes = [(batch, setting.seqlen, heads, setting.dim) for heads in (HEADS, heads_kv, heads_kv, HEADS)]
    return random(*shapes, dtype=setting.dtype, device=device or setting.device)


def run_ranks(rank, setting, port, folder):
    """What each process runs; rank 0 leaves the results in `folder`."""
    torch.set_num_threads(1)
    if setting.device == "cuda":
        torch.cuda.set_device(rank)
    address = f"tcp://127.0.0.1:{port}"
    wait = datetime.timedelta(seconds=120)
    dist.init_process_group(setting.backend, init_method=address, rank=rank, world_size=setting.ranks, timeout=wait)
    # First the refusals, since ranks on GPUs do not compare again what they have compared.
    results = {"refusals": refusals(setting, rank)}
    results.update((name, run_case(setting, *case)) for name, case in cases_of(setting).items())
    results["varlen"] = run_varlen(setting)
    results["short"] = run_short(setting)
    results["mesh"] = run_mesh(setting)
    results["changed"] = {method: run_changed(setting, method) for method in ("ring", "all_gather", "ulysses")}
    if rank == 0:
        torch.save(results, os.path.join(folder, "results.pt"))
    dist.barrier()
    dist.destroy_process_group()


def run_case(setting, method, layout, heads_kv, options):
    """out, lse and the gradients of q, k and v of a loss that depends on both."""
    q, k, v, dout = (cp.shard(x, layout=layout) for x in inputs(setting, heads_kv))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = cp.attention(*leaves, method=method, layout=layout, return_lse=True, **options)
    gradients = torch.autograd.grad((out * dout).sum() + lse.sum(), leaves)
    whole = [cp.unshard(x, layout=layout).cpu() for x in (out, *gradients)]
    return [whole[0], cp.unshard(lse, dim=2, layout=layout).cpu(), *whole[1:]]


def run_varlen(setting):
    q, k, v, dout = (cp.shard(x[0], dim=0, layout="contiguous") for x in inputs(setting, 4, batch=1))
    lengths, leaves = torch.tensor(OFFSETS, dtype=torch.int32) * setting.scale, [x.requires_grad_() for x in (q, k, v)]
    out = cp.attention(
        *leaves, method="ulysses", layout="contiguous", causal=True,
        cu_seqlens=lengths.to(q.device), max_seqlen=setting.seqlen,
    )  # fmt: skip
    return [cp.unshard(x, dim=0, layout="contiguous").cpu() for x in (out, *torch.autograd.grad(out, leaves, dout))]


def run_short(setting):
    """out and lse of two rows in each rank, whose order in memory looks like channels_last."""
    tensors = [cp.shard(x[:, : 2 * setting.ranks]) for x in inputs(setting, HEADS)[:3]]
    out, lse = cp.attention(*tensors, method="ulysses", return_lse=True)
    return cp.unshard(out).cpu(), cp.unshard(lse, dim=2).cpu()


def run_mesh(setting):
    """PyTorch's conventions: buffers that are cut in place, and SDPA within a block."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(setting.device, (setting.ranks,), mesh_dim_names=("cp",))
    buffers = [x.transpose(1, 2).contiguous() for x in inputs(setting, HEADS)[:3]]
    # The last one is a view: what lies beside it stays as it is.
    wide = torch.cat([buffers[2]] * 2, -1)
    buffers[2] = wide[..., : setting.dim]
    before, beside, strides = [x.clone() for x in buffers], wide.clone(), buffers[2].stride()
    with cp.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2]):
        assert buffers[0].shape[2] == setting.seqlen // setting.ranks
        out = F.scaled_dot_product_attention(*buffers, is_causal=True)
        with pytest.raises(NotImplementedError, match="context_parallel supports neither"):
            F.scaled_dot_product_attention(*buffers, dropout_p=0.1)
    assert all(torch.equal(x, y) for x, y in zip(buffers, before))
    assert torch.equal(wide, beside) and buffers[2].stride() == strides and buffers[2].data_ptr() == wide.data_ptr()
    return cp.unshard(out, dim=2).transpose(1, 2).cpu()


def run_changed(setting, method):
    """out and gradients, twice: the second time the options change before the backward pass."""
    q, k, v, dout = (cp.shard(x) for x in inputs(setting, HEADS))
    found = []
    for changes in (False, True):
        window, scale, cap = [9 * setting.scale, 14 * setting.scale], np.array(0.25), np.array(4.0)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = cp.attention(*leaves, method=method, window=window, softmax_scale=scale, softcap=cap, deterministic=True)
        if changes:
            window[:], scale[...], cap[...] = [1, 1], 1.0, 1.0
        found.append([x.detach().cpu() for x in (out, *torch.autograd.grad(out, leaves, dout))])
    return found


def refusals(setting, rank):
    """The messages of errors, each raised in every rank before a tensor is sent."""
    q, k, v, _ = (cp.shard(x) for x in inputs(setting, 2))

    def message(*tensors, call=cp.attention, **options):
        with pytest.raises((ValueError, NotImplementedError, TypeError)) as error:
            call(*tensors, **options)
        return str(error.value)

    shorter = [x[:, :-2] for x in (q, k, v)] if rank == 1 else (q, k, v)
    alone = dist.new_group([0])
    return {
        "uneven": message(*shorter),
        "odd": message(*(x[:, :-1] for x in (q, k, v))),
        "one rank's dtype": message(q, k.double() if rank == 1 else k, v),
        "one rank's nothing": message(q, k, None if rank == 1 else v),
        "one rank's method": message(q, k, v, method="ringg" if rank == 1 else "ring"),
        "heads": message(q[:, :, :3], k[:, :, :1], v[:, :, :1], method="ulysses"),
        "varlen": message(q[0], k[0], v[0], cu_seqlens=torch.tensor([0, 4], dtype=torch.int32)),
        "causal": message(q, k, v, causal="top-left"),
        "rows of the group": message(q[:, : setting.ranks * 2 - 1], call=cp.shard),
        # Rank 0 leaves the results of all, so rank 1 tells it what it has seen.
        "another group": told_by_1(rank, message(q, k, v, group=alone) if rank else None),
    }


def told_by_1(rank, message):
    told = [message if rank == 1 else None]
    dist.broadcast_object_list(told, src=1)
    return told[0]


@functools.lru_cache(maxsize=len(SETTINGS))
def results_of(setting):
    """What rank 0 of this setting's processes leaves."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_ranks, (setting, port, folder), nprocs=setting.ranks)
        return torch.load(os.path.join(folder, "results.pt"))


@pytest.fixture
def results(request):
    setting = SETTINGS[request.param]
    if setting.device == "cuda" and torch.cuda.device_count() < setting.ranks:
        pytest.skip(f"needs {setting.ranks} GPUs")
    return setting, results_of(setting)


in_each_setting = pytest.mark.parametrize("results", SETTINGS, indirect=True)


@functools.lru_cache(maxsize=32)
def one_device(setting, heads_kv, options):
    """out, lse and gradients of plain attention in the setting's dtype and in fp64."""
    *tensors, dout = inputs(setting, heads_kv, device="cpu")
    options = {"window": None, **dict(options)}

    def run(tensors):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out, lse = plain(*leaves, return_lse=True, **options)
        return [out, lse, *torch.autograd.grad((out * dout).sum() + lse.sum(), leaves)]

    return run(tensors), run([x.double() for x in tensors])


def judge_all(setting, labels, *versions):
    for label, *arrays in zip(labels, *versions):
        arrays = (x.detach().double().numpy() for x in arrays)
        assert_close(label, *arrays, str(setting.dtype).removeprefix("torch."), gradient=label.startswith("d"))


@pytest.mark.parametrize(
    "results, name", [(setting, name) for setting in SETTINGS for name in cases_of(SETTINGS[setting])], indirect=["results"]
)
def test_context_parallel_attention_equals_one_device(results, name):
    setting, ours = results
    *_, heads_kv, options = cases_of(setting)[name]
    judge_all(setting, ("out", "lse", "dq", "dk", "dv"), ours[name], *one_device(setting, heads_kv, tuple(options.items())))


@in_each_setting
def test_options_that_change_after_the_call_do_not_change_its_gradients(results):
    _, ours = results
    for method, (kept, changed) in ours["changed"].items():
        for label, x, y in zip(("out", "dq", "dk", "dv"), kept, changed):
            assert torch.equal(x, y), f"{method}: {label}"


@in_each_setting
def test_ulysses_takes_packed_sequences(results):
    setting, ours = results
    *tensors, dout = inputs(setting, 4, batch=1, device="cpu")
    lengths = [end - begin for begin, end in zip(OFFSETS, OFFSETS[1:])]
    lengths = [length * setting.scale for length in lengths]

    def apart(q, k, v):
        """Each sequence by itself."""
        parts = zip(*(x.split(lengths, 1) for x in (q, k, v)))
        return torch.cat([plain(*part, causal=True) for part in parts], 1)

    versions = [with_gradients(apart, given, dout) for given in (tensors, [x.double() for x in tensors])]
    judge_all(setting, ("out", "dq", "dk", "dv"), [x[None] for x in ours["varlen"]], *versions)


@in_each_setting
def test_ulysses_takes_two_rows_in_each_rank(results):
    setting, ours = results
    tensors = [x[:, : 2 * setting.ranks] for x in inputs(setting, HEADS, device="cpu")[:3]]
    versions = [plain(*given, return_lse=True) for given in (tensors, [x.double() for x in tensors])]
    judge_all(setting, ("out", "lse"), ours["short"], *versions)


@in_each_setting
def test_pytorchs_conventions_give_the_same(results):
    setting, ours = results
    tensors = inputs(setting, HEADS, device="cpu")[:3]
    versions = [[plain(*given, causal=True)] for given in (tensors, [x.double() for x in tensors])]
    judge_all(setting, ("out",), [ours["mesh"]], *versions)


@in_each_setting
def test_wrong_arguments_are_refused_in_all_ranks_before_anything_is_sent(results):
    setting, of = results[0], results[1]["refusals"]
    size, device = setting.ranks, "cpu" if setting.device == "cpu" else "cuda:0"
    assert "rank 1 has sizes and options" in of["uneven"] and "all must be the same" in of["uneven"]
    assert f"q has {setting.seqlen // size - 1} rows; the layout zigzag needs an even number" in of["odd"]
    dtype = str(setting.dtype)
    assert "rank 1: k is torch.float64 on" in of["one rank's dtype"]
    assert f"it must be {dtype} on {device.partition(':')[0]}" in of["one rank's dtype"]
    assert "v is a NoneType; it must be a torch tensor" in of["one rank's nothing"]
    assert of["one rank's method"] == "rank 1: method is 'ringg'; it must be one of 'ring', 'all_gather', 'ulysses'"
    assert f"q has 3 heads and k has 1; with {size} ranks ulysses needs a multiple of {size}" in of["heads"]
    assert "cu_seqlens is given; it needs" in of["varlen"]
    assert "causal is 'top-left'; it must be False or True" in of["causal"]
    assert f"{size} ranks with layout zigzag need a multiple of {2 * size}" in of["rows of the group"]
    assert of["another group"] == "this process is not in the process group"


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_wrong_rows_and_buffers_are_named(one_rank):
    x = torch.randn(1, 4, 2, 8)
    for call in (cp.shard, cp.unshard):
        for given in (None, [1.0], x.numpy()):
            with pytest.raises(TypeError, match="x is a .*; it must be a torch tensor"):
                call(given)
        for given, dim in ((x, 4), (x, -5), (x, 1 << 70), (x, 1.5), (x[0, 0, 0, 0], 0), (x, None)):
            with pytest.raises(ValueError, match=r"dim is .*; x of shape .* has no such dim"):
                call(given, dim=dim)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for buffer, words in ((x.clone().requires_grad_(), "requires a gradient"), ([1.0], "is a list")):
        with pytest.raises(ValueError, match=rf"buffers\[1\] {words}; it must be a tensor without gradient"):
            with cp.context_parallel(mesh, buffers=[x, buffer], buffer_seq_dims=[1, 1]):
                pass


def test_numbers_of_any_type_are_options(one_rank):
    x = torch.randn(1, 4, 2, 8)
    options = dict(softmax_scale=np.array(0.25), softcap=np.array(3.0), window=[np.int64(2), None], deterministic=1)
    expected = flashtune.attention(x, x, x, softmax_scale=0.25, softcap=3.0, window=(2, None))
    torch.testing.assert_close(cp.attention(x, x, x, **options), expected)


def test_without_a_process_group_the_error_says_so():
    q = torch.randn(1, 4, 2, 8)
    for call in (lambda: cp.attention(q, q, q), lambda: cp.shard(q), lambda: cp.unshard(q)):
        with pytest.raises(ValueError, match="there is no process group; call torch.distributed.init_process_group"):
            call()


@pytest.mark.parametrize("window", [None, (0, 0), (3, None), (None, 2), (5, 9), (40, 1)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_the_pieces_cover_each_visible_pair_once(layout, causal, window):
    size, rows = 3, 4
    seqlen = rows * size * (2 if layout == "zigzag" else 1)
    right = 0 if causal else None if window is None else window[1]
    window = None if window is None else (window[0], right)
    expected = oracle.seen(seqlen, seqlen, causal, window).astype(int)
    order = [_ring.chunks(rank, size, layout) for rank in range(size)]
    positions = [np.concatenate([np.arange(c * rows, (c + 1) * rows) for c in chunks]) for chunks in order]
    by_ring, by_gather = np.zeros_like(expected), np.zeros_like(expected)
    for rank, mine in enumerate(order):
        for owner, others in enumerate(order):
            found = _ring.pieces(mine, others, rows, causal, window)
            # A rank's own pieces are halved in the backward pass.
            for piece in found if rank != owner else sum(_ring.halves(found), []):
                count(by_ring, piece, positions[rank], positions[owner])
        for piece in _ring.pieces_of_whole(mine, size, len(positions[rank]), causal, window):
            count(by_gather, piece, positions[rank], np.arange(seqlen))
    assert (by_ring == expected).all()
    assert (by_gather == expected).all()


def count(counts, piece, queries, keys):
    queries, keys = queries[piece.queries], keys[piece.keys]
    counts[np.ix_(queries, keys)] += oracle.seen(len(queries), len(keys), piece.causal, piece.window)


def pairs_of(piece):
    """The number of pairs of a query and a key that a piece counts."""
    sizes = [part.stop - part.start for part in piece[:2]]
    return oracle.seen(*sizes, piece.causal, piece.window).sum()


def test_the_earlier_half_of_the_own_work_is_the_smaller_one():
    for layout, count in (("zigzag", 2), ("contiguous", 1)):
        mine = _ring.chunks(0, 2, layout)
        halves = _ring.halves(_ring.pieces(mine, mine, 8 // count, True, None))
        assert [sum(map(pairs_of, half)) for half in halves] == [10, 26]


def test_zigzag_ranks_have_the_same_work():
    work = []
    for rank in range(4):
        mine, total = _ring.chunks(rank, 4, "zigzag"), 0
        for owner in range(4):
            total += sum(map(pairs_of, _ring.pieces(mine, _ring.chunks(owner, 4, "zigzag"), 8, True, None)))
        work.append(total)
    assert len(set(work)) == 1
