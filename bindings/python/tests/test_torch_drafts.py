"""Repeated calls on torch tensors: the draft of an earlier call serves calls of its form alone.

A call with a draft and the same call without one run the same kernel, so their bits are equal. The
same tests run on the CPU and on a GPU.
"""

import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import flashtune
import pytest
import torch
from flashtune import _call, _context, _kvcache, _torch_drafts, _torch_launch
from flashtune.flash_attn_interface import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from repeated_calls import BATCH, DIM, HEADS, SEQLEN, assert_equal, fresh, gradients, tensors, varlen
from test_torch import DEVICES


@pytest.fixture(autouse=True)
def no_drafts():
    _torch_drafts.start()


def count():
    return _torch_drafts.count()


@pytest.mark.parametrize("device", DEVICES)
def test_a_repeated_call_packs_no_params_and_gives_the_same_bits(device, monkeypatch):
    leaves = [[x.requires_grad_() for x in tensors(device, seed=seed)] for seed in (1, 2)]

    def both(q, k, v):
        out = flashtune.attention(q, k, v, causal=True, deterministic=True)
        return out, *gradients(out, (q, k, v))

    expected = [fresh(lambda: both(*inputs)) for inputs in leaves]
    both(*leaves[0])

    def refuse(*_args, **_named):
        raise AssertionError("params were packed")

    monkeypatch.setattr(_call, "forward", refuse)
    monkeypatch.setattr(_call, "backward", refuse)
    for inputs, results in zip(leaves, expected):
        assert_equal(both(*inputs), results)
    assert not torch.equal(expected[0][0], expected[1][0])


@pytest.mark.parametrize(
    "change",
    [
        dict(causal=True),
        dict(causal="top-left"),
        dict(softmax_scale=0.5),
        dict(window=(8, None)),
        dict(window=(8, 3)),
        dict(softcap=2.0),
        dict(deterministic=True),
        dict(batch_invariant=True),
        dict(return_lse=True),
        dict(dropout_p=0.5, seed=3),
        dict(dropout_p=0.5, seed=(3, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", DEVICES)
def test_a_call_with_another_option_does_not_use_the_draft(device, change):
    q, k, v = tensors(device)
    flashtune.attention(q, k, v)
    expected = fresh(lambda: flashtune.attention(q, k, v, **change))
    for _ in range(2):
        assert_equal(flashtune.attention(q, k, v, **change), expected)
    assert count() == 2


@pytest.mark.parametrize("device", DEVICES)
def test_a_call_with_other_strides_or_sizes_or_dtype_does_not_use_the_draft(device):
    q, k, v = tensors(device)
    narrow = torch.float16 if device == "cpu" else torch.bfloat16

    def heads_first(x):
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    wide = torch.cat([k, k], dim=-1)
    calls = [
        (q, k, v),
        (heads_first(q), k, v),
        (q, heads_first(k), v),
        (q, k, heads_first(v)),
        (q, wide[..., :DIM], v),
        (q[:, :17], k, v),
        (q, k[:, :17], v[:, :17]),
        (q, k[:, :, :2], v[:, :, :2]),
        (q, k, v[..., :16]),
        [x.to(narrow) for x in (q, k, v)],
    ]
    for inputs in calls + calls:
        assert_equal(flashtune.attention(*inputs), fresh(lambda: flashtune.attention(*inputs)))
    # Equal dtypes make equal forms on a GPU.
    assert count() == len(calls) - (device != "cpu")


@pytest.mark.parametrize("device", DEVICES)
def test_a_copied_tensor_leaves_no_draft(device):
    q, k, v = tensors(device)
    # The last dim has gaps, so the call reads a copy.
    apart = [torch.stack([given, given], dim=-1)[..., 0] for given in (k, -k, k)]
    results = [flashtune.attention(q, given, v) for given in apart]
    assert count() == 0
    for result, given in zip(results, (k, -k, k)):
        assert_equal(result, flashtune.attention(q, given, v))


@pytest.mark.parametrize("device", DEVICES)
def test_a_tensor_starts_to_require_a_gradient_between_two_calls(device):
    q, k, v = tensors(device)
    plain = flashtune.attention(q, k, v)
    assert not flashtune.attention(q, k, v).requires_grad
    v.requires_grad_()
    out = flashtune.attention(q, k, v)
    assert out.requires_grad and torch.equal(out, plain)
    (dv,) = gradients(out, (v,))
    assert dv.abs().sum() > 0
    with torch.no_grad():
        assert not flashtune.attention(q, k, v).requires_grad
    out, lse = flashtune.attention_forward(q, k, v)
    assert not out.requires_grad and not lse.requires_grad


@pytest.mark.parametrize(
    "wrong, error",
    [
        (dict(deterministic=1.0), "deterministic is 1.0"),
        (dict(window=(4.0, 4)), "window is"),
        (dict(softcap="0.0"), "softcap is"),
        (dict(dropout_p=False, seed=None, causal=2), "causal is 2"),
        (dict(q=lambda q, k, v: q.double()), "k is torch"),
        (dict(k=lambda q, k, v: k.to(torch.float64)), "k is torch.float64"),
        (dict(v=lambda q, k, v: v[:, :, :2]), "v has shape"),
        (dict(q=lambda q, k, v: q[0]), "q has shape"),
        (dict(k=lambda q, k, v: k.float().numpy(force=True)), "k is a ndarray"),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_a_wrong_argument_is_refused_after_a_right_call(device, wrong, error):
    q, k, v = tensors(device)
    right = dict(window=(4, 4), deterministic=True)
    flashtune.attention(q, k, v, **right)
    arguments = dict(q=q, k=k, v=v)
    arguments.update({name: value(q, k, v) if callable(value) else value for name, value in wrong.items()})
    for _ in range(2):
        with pytest.raises((ValueError, TypeError), match=error):
            flashtune.attention(**{**right, **arguments})
    assert count() == 1


@pytest.mark.parametrize("device", DEVICES)
def test_a_wrong_tensor_of_the_backward_pass_is_refused_after_a_right_call(device):
    q, k, v, dout = tensors(device, *((BATCH, SEQLEN, HEADS, DIM),) * 4)
    out, lse = flashtune.attention_forward(q, k, v)
    right = dict(dout=dout, q=q, k=k, v=v, out=out, lse=lse)
    flashtune.attention_backward(**right)
    wrong = dict(dout=dout[:, 1:], out=out.double(), lse=lse[:, :, 1:], dlse=lse.double(), k=k.double(), v=v[:, 1:])
    for name, value in wrong.items():
        with pytest.raises(ValueError, match=f"{name} (is|has)"):
            flashtune.attention_backward(**{**right, name: value})
    assert_equal(flashtune.attention_backward(**right, deterministic=True), flashtune.attention_backward(**right, deterministic=True))


@pytest.mark.parametrize("device", DEVICES)
def test_each_call_reads_its_own_feature_tensors(device):
    q, k, v = tensors(device)
    generator = torch.Generator().manual_seed(4)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(device)

    def call(features):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = flashtune.attention(*leaves, return_lse=True, deterministic=True, **features)
        return out, lse, *torch.autograd.grad((out, lse), leaves, (q, lse.detach()))

    draws = [
        lambda: dict(alibi_slopes=draw(HEADS).abs()),
        lambda: dict(alibi_slopes=draw(BATCH, HEADS).abs(), softcap=1.5),
        lambda: dict(bias=draw(HEADS, SEQLEN, SEQLEN).to(q.dtype)),
        lambda: dict(mask=draw(SEQLEN, SEQLEN) > 0),
        lambda: dict(mask=draw(BATCH, 1, SEQLEN, SEQLEN) > 0),
        lambda: dict(mask_bits=(draw(SEQLEN, SEQLEN // 8) * 90).to(torch.uint8)),
        lambda: dict(sinks=draw(HEADS)),
    ]
    seen = []
    for one in draws:
        for _ in range(3):
            features = one()
            seen.append((call(features), features))
    for results, features in seen:
        assert_equal(results, fresh(lambda: call(features)))
        assert_equal(call(features), results)


@pytest.mark.parametrize("device", DEVICES)
def test_each_varlen_call_reads_its_own_lengths(device):
    q, k, v, _ = varlen(device)
    for first in (25, 10, 59, 25):
        lengths = torch.tensor([0, first, 60], dtype=torch.int32, device=device)

        def call():
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = flash_attn_varlen_func(*leaves, lengths, lengths, 60, 60, causal=True, deterministic=True)
            return out, *gradients(out, leaves)

        assert_equal(call(), fresh(call))
    # Each pass has the form of its user's call too.
    assert count() == 4


def test_lengths_that_the_host_reads_leave_no_draft():
    q, k, v, _ = varlen("cpu")
    for first in (25, 50):
        lengths = torch.tensor([0, first, 60], dtype=torch.int32)

        def call():
            return flashtune.attention_varlen(q, k, v, cu_seqlens_q=lengths, cu_seqlens_k=lengths)

        assert_equal(call(), fresh(call))
    assert count() == 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_wrong_length_is_refused_after_a_right_call(device):
    q, k, v, lengths = varlen(device)

    def call(**change):
        arguments = dict(cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=60, max_seqlen_k=60)
        return flashtune.attention_varlen(q, k, v, **{**arguments, **change})

    call()
    for name in ("max_seqlen_q", "max_seqlen_k"):
        with pytest.raises(ValueError, match=f"{name} is 60.0"):
            call(**{name: 60.0})
    with pytest.raises(ValueError, match="cu_seqlens_q is torch.int64"):
        call(cu_seqlens_q=lengths.long())
    with pytest.raises(ValueError, match="they must agree"):
        call(cu_seqlens_q=lengths[:2])
    if device == "cpu":
        falling = torch.tensor([0, 61, 60], dtype=torch.int32)
        for _ in range(2):
            with pytest.raises(ValueError, match="cu_seqlens_k"):
                call(cu_seqlens_k=falling)
        assert_equal(call(), fresh(call))


@pytest.mark.parametrize("device", DEVICES)
def test_each_paged_call_reads_its_own_table_and_appends_its_own_keys(device):
    dtype = torch.bfloat16
    pages, page_size, capacity = 12, 16, 3
    lengths = torch.tensor([5, 20], dtype=torch.int32, device=device)

    def call(seed, with_new):
        q, k_cache, v_cache, k, v = tensors(
            device, (BATCH, 1, HEADS, DIM), *((pages, page_size, 2, DIM),) * 2, *((BATCH, 1, 2, DIM),) * 2, dtype=dtype, seed=seed
        )  # fmt: skip
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))[: BATCH * capacity]
        table = order.view(BATCH, capacity).int().to(device)
        new = dict(k=k, v=v) if with_new else {}
        out = flash_attn_with_kvcache(q, k_cache, v_cache, **new, cache_seqlens=lengths, block_table=table, causal=True)
        return out, k_cache, v_cache

    for seed in range(3):
        for with_new in (False, True):
            assert_equal(call(seed, with_new), fresh(lambda: call(seed, with_new)))
    assert count() == 1


@pytest.mark.parametrize("device", DEVICES)
def test_a_wrong_cache_is_refused_after_a_right_call(device, monkeypatch):
    # As on a GPU, where no lengths are read. A repeated call then skips the checks of the cache.
    monkeypatch.setattr(_kvcache, "_is_on_host", lambda given: not isinstance(given, torch.Tensor))
    q, k_cache, v_cache = tensors(device, (BATCH, 1, HEADS, DIM), *((6, 16, 2, DIM),) * 2, dtype=torch.bfloat16)
    lengths = torch.tensor([5, 20], dtype=torch.int32, device=device)
    table = torch.arange(6, dtype=torch.int32, device=device).view(BATCH, 3)
    right = dict(q=q, k_cache=k_cache, v_cache=v_cache, cache_seqlens=lengths, block_table=table)
    expected = flash_attn_with_kvcache(**right)
    assert_equal(flash_attn_with_kvcache(**right), expected)
    assert_equal(flash_attn_with_kvcache(**right, return_softmax_lse=True)[:1], [expected])
    wrong = [
        (dict(q=q[0]), "q has shape"),
        (dict(q=q[:1]), "block_table has shape"),
        (dict(k_cache=k_cache[:0], v_cache=v_cache[:0]), "must have pages"),
        (dict(k_cache=k_cache.float()), "k_cache is torch.float32|k is torch.float32|must be 16-bit"),
        (dict(cache_seqlens=lengths.long()), "cache_seqlens is torch.int64"),
        (dict(cache_seqlens=lengths[:1]), "cache_seqlens has shape"),
        (dict(cache_seqlens=49), "cache_seqlens is 49"),
        (dict(block_table=table.long()), "block_table is torch.int64"),
        (dict(block_table=table[:1]), "block_table has shape"),
        (dict(window_size=(4.0, 4)), "window_size is"),
        (dict(num_splits=-2), "num_splits is -2"),
    ]
    for change, message in wrong:
        with pytest.raises((ValueError, NotImplementedError), match=message):
            flash_attn_with_kvcache(**{**right, **change})
    # Two forms of the pass, and one of the function, which its second call leaves.
    assert count() == 3


@pytest.mark.parametrize("device", DEVICES)
def test_caches_that_overlap_are_refused_before_a_write_after_a_right_call(device):
    dtype = torch.bfloat16
    q, k, v, k_cache, v_cache = tensors(
        device, *((BATCH, 1, HEADS, DIM),) * 3, *((BATCH, 16, HEADS, DIM),) * 2, dtype=dtype
    )  # fmt: skip
    lengths = torch.full((BATCH,), 3, dtype=torch.int32, device=device)
    flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths)
    before = k_cache.clone()
    with pytest.raises(ValueError, match="overlap|share"):
        flash_attn_with_kvcache(q, k_cache, k_cache, k, v, cache_seqlens=lengths)
    assert torch.equal(k_cache, before)


@pytest.mark.parametrize("device", DEVICES)
def test_each_call_drops_by_its_own_seed(device):
    q, k, v = (x.requires_grad_() for x in tensors(device))

    def call(seed):
        out = flashtune.attention(q, k, v, dropout_p=0.5, seed=seed, deterministic=True)
        return out, *gradients(out, (q, k, v))

    seeds = [1, 2, (1, 7), (1 << 64) - 1]
    seeds += [torch.tensor(pair, dtype=torch.int64, device=device) for pair in ((1, 0), (2, 0), (1, 7))]
    results = [call(seed) for seed in seeds]
    for seed, result in zip(seeds, results):
        assert_equal(call(seed), result)
        assert_equal(result, fresh(lambda: call(seed)))
    for i, same in ((0, 4), (1, 5), (2, 6)):
        assert_equal(results[i], results[same])
    assert not torch.equal(results[0][0], results[1][0])


@pytest.mark.parametrize("device", DEVICES)
def test_a_subclass_leaves_no_draft(device):
    class Tagged(torch.Tensor):
        pass

    q, k, v = tensors(device)
    expected = fresh(lambda: flashtune.attention(q, k, v))
    for _ in range(2):
        out = flashtune.attention(q.as_subclass(Tagged), k, v)
        assert torch.equal(out.as_subclass(torch.Tensor), expected)
    assert count() == 0


def test_saved_tensors_may_come_back_with_other_strides():
    q, k, v = (x.requires_grad_() for x in tensors("cpu"))

    def run():
        out = flashtune.attention(q, k, v)
        return gradients(out, (q, k, v))

    expected = run()

    def unpack(saved):
        return saved.transpose(0, 1).contiguous().transpose(0, 1)

    with torch.autograd.graph.saved_tensors_hooks(torch.clone, unpack):
        found = run()
    for one, other in zip(found, expected):
        assert torch.equal(one, other)


FLASH_ATTN_OPTIONS = [
    dict(causal=True),
    dict(softmax_scale=0.5),
    dict(window_size=(8, 3)),
    dict(softcap=2.0),
    dict(deterministic=True),
    dict(return_attn_probs=True),
]


def packed_calls(device):
    q, k, v, lengths = varlen(device)
    slopes = torch.ones(HEADS, device=device)
    bf16 = [x.to(torch.bfloat16) for x in (q, k, v)]
    used = lengths.diff()
    return [
        lambda **options: flash_attn_func(*(x[None] for x in bf16), **options),
        lambda **options: flash_attn_func(*(x[None] for x in bf16), alibi_slopes=slopes, **options),
        lambda **options: flash_attn_varlen_func(*bf16, lengths, lengths, 60, 60, **options),
        lambda **options: flash_attn_varlen_func(*bf16, lengths, lengths, 60, 60, seqused_k=used, **options),
        # One tensor for all.
        lambda **options: flash_attn_varlen_func(*bf16[:1] * 3, lengths, lengths, 60, 60, **options),
    ]


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("device", DEVICES)
def test_a_call_of_flash_attn_is_repeated_before_its_arguments_are_checked(device, number, monkeypatch):
    call = packed_calls(device)[number]
    with torch.no_grad():
        expected = [fresh(lambda: call(**options)) for options in ({}, *FLASH_ATTN_OPTIONS)]
        for _ in range(2):
            for options, results in zip(({}, *FLASH_ATTN_OPTIONS), expected):
                found = call(**options)
                assert_equal(found[:2] if options.get("return_attn_probs") else found, results[:2] if isinstance(results, tuple) else results)

        def refuse(*_args, **_named):
            raise AssertionError("arguments were checked")

        monkeypatch.setattr(_call, "options", refuse)
        for options, results in zip(({}, *FLASH_ATTN_OPTIONS), expected):
            found = call(**options)
            assert_equal(found[:2] if isinstance(found, tuple) else found, results[:2] if isinstance(results, tuple) else results)
        for wrong in (dict(causal=1), dict(window_size=(8.0, 3)), dict(softcap=2), dict(return_attn_probs=1)):
            with pytest.raises((AssertionError, ValueError)):
                call(**wrong)


@pytest.mark.parametrize("device", DEVICES)
def test_a_call_of_flash_attn_that_learns_is_not_repeated_as_one_that_does_not(device):
    q, k, v = tensors(device, dtype=torch.bfloat16)
    for _ in range(2):
        plain = flash_attn_func(q, k, v)
        assert not plain.requires_grad
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = flash_attn_func(*leaves)
        assert torch.equal(out, plain) and all(x is not None for x in gradients(out, leaves))
        with torch.no_grad():
            assert not flash_attn_func(*leaves).requires_grad


def test_dropout_of_flash_attn_draws_a_new_mask_in_each_call():
    q, k, v = tensors("cpu", dtype=torch.bfloat16)
    assert not torch.equal(*(flash_attn_func(q, k, v, dropout_p=0.5) for _ in range(2)))


def test_the_number_of_drafts_is_limited(monkeypatch):
    monkeypatch.setattr(_torch_drafts, "LIMIT", 3)
    _torch_drafts.start()
    q, k, v = tensors("cpu")
    for seqlen in range(1, 12):
        for _ in range(2):
            assert_equal(flashtune.attention(q[:, :seqlen], k, v), fresh(lambda: flashtune.attention(q[:, :seqlen], k, v)))
        assert 1 <= count() <= 3


def test_a_draft_keeps_no_tensor_alive():
    inputs = [x.requires_grad_() for x in tensors("cpu")]
    slopes = torch.ones(HEADS)
    results = []
    for _ in range(2):
        out = flashtune.attention(*inputs, alibi_slopes=slopes)
        results += [out, *gradients(out, inputs)]
    alive = [weakref.ref(x) for x in (*inputs, *results, slopes)]
    assert count() == 2
    del inputs, results, slopes, out
    gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive)


def test_a_draft_that_the_library_refuses_is_replaced(monkeypatch):
    q, k, v, dout = tensors("cpu", *((BATCH, SEQLEN, HEADS, DIM),) * 4)
    out, lse = flashtune.attention_forward(q, k, v)
    expected = flashtune.attention_backward(dout, q, k, v, out, lse)
    _torch_drafts.start()
    workspace_bytes = _context.Pass.workspace_bytes
    sizes = []

    def too_small(run, params):
        sizes.append(workspace_bytes(run, params))
        return sizes[-1]

    keep = _torch_drafts.keep
    monkeypatch.setattr(_context.Pass, "workspace_bytes", too_small)
    monkeypatch.setattr(_torch_drafts, "keep", lambda *call: keep(*call[:-2], 8, call[-1]))
    flashtune.attention_backward(dout, q, k, v, out, lse)
    monkeypatch.setattr(_torch_drafts, "keep", keep)
    assert sizes[0] > 8
    # The first of these finds the draft with 8 bytes, takes the whole way and leaves another.
    for number in (2, 2):
        assert_equal(flashtune.attention_backward(dout, q, k, v, out, lse), expected)
        assert len(sizes) == number and count() == 1


def test_threads_share_a_draft():
    expected = []
    for seed in range(4):
        leaves = [x.requires_grad_() for x in tensors("cpu", seed=seed)]
        out = flashtune.attention(*leaves)
        expected.append((leaves, out, gradients(out, leaves)))
    failures = []

    def work(leaves, out, derivatives):
        try:
            for _ in range(30):
                again = flashtune.attention(*leaves)
                assert_equal((again, *gradients(again, leaves)), (out, *derivatives))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=each) for each in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and count() == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_has_no_drafts():
    q, k, v = tensors("cpu")
    flashtune.attention(q, k, v)
    assert count() == 1
    child = os.fork()
    if child == 0:
        os._exit(count())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert count() == 1


FORKED = """
import os, signal, threading
import flashtune, torch
from flashtune import _torch_drafts

start, inside, forked = _torch_drafts.start, threading.Event(), threading.Event()
q = torch.ones(1, 4, 2, 8)

def start_after_the_fork():
    inside.set()
    forked.wait()
    start()

_torch_drafts.start = start_after_the_fork
thread = threading.Thread(target=flashtune.attention, args=(q, q, q))
thread.start()
inside.wait()
child = os.fork()
if child == 0:
    signal.alarm(30)
    _torch_drafts.start = start
    os._exit(0 if torch.equal(flashtune.attention(q, q, q), q) else 1)
_, status = os.waitpid(child, 0)
forked.set()
thread.join()
print(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_that_was_forked_while_a_thread_started_the_drafts_starts_its_own():
    """The thread that holds the lock is not in the child."""
    environment = {**os.environ, "PYTHONPATH": str(Path(flashtune.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], env=environment, capture_output=True, text=True, timeout=90)
    assert done.stdout == "0\n", done.stderr


def test_an_error_of_the_function_that_writes_is_raised_and_leaves_the_draft():
    q, k, v = tensors("cpu", dtype=torch.bfloat16)
    opts = _call.options(False, None, 0.0)
    expected = _torch_launch.launch_forward(q, k, v, opts, None)

    def fail():
        raise RuntimeError("not written")

    with pytest.raises(RuntimeError, match="not written"):
        _torch_launch.launch_forward(q, k, v, opts, None, before_launch=fail)
    assert count() == 1
    assert_equal(_torch_launch.launch_forward(q, k, v, opts, None), expected)


def test_meta_tensors_have_not_the_form_of_cpu_tensors():
    empty = [x[:0] for x in tensors("cpu")]
    assert flashtune.attention(*empty).numel() == 0
    with pytest.raises(NotImplementedError, match="meta"):
        flashtune.attention(*(x.to("meta") for x in empty))


def test_tensors_of_8_bits_leave_no_draft():
    # A scale that is not given is a tensor of its call.
    q, k, v = (x.to(torch.float8_e4m3fn) for x in tensors("cpu"))
    for inputs in ((q, k, v), (q.to(torch.bfloat16), k, v)):
        for _ in range(2):
            assert flashtune.attention(*inputs).dtype is torch.bfloat16
        assert count() == 0
