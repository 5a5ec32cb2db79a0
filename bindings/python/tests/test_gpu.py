"""Behaviour that only a GPU shows: streams, graph capture, the caller's context, memory, other
devices.
"""

import ctypes

import flashtune
import oracle
import pytest
import torch
from flashtune.flash_attn_interface import flash_attn_func
from oracle_torch import plain, random, with_gradients

pytestmark = pytest.mark.needs_gpu

SEQLEN = 128


def uniform(seqlen=SEQLEN, heads=2, dtype=torch.float16):
    """q, k, v whose output is the dropout mask: scores are equal, and v is the identity."""
    zeros = torch.zeros(1, seqlen, heads, 64, dtype=dtype, device="cuda")
    identity = torch.eye(seqlen, dtype=dtype, device="cuda").view(1, seqlen, 1, seqlen).repeat(1, 1, heads, 1)
    return zeros, zeros.clone(), identity


def test_the_dropout_mask_is_the_documented_one():
    q, k, v = uniform()
    seed = (1 << 50 | 3, 1 << 40 | 9)
    out = flashtune.attention(q, k, v, dropout_p=0.5, seed=seed)
    kept = torch.from_numpy(oracle.kept(1, 2, SEQLEN, SEQLEN, 0.5, *seed))
    assert torch.equal(out.cpu().transpose(1, 2) != 0, kept)


def test_a_captured_graph_draws_a_new_mask_at_each_replay_and_backward_sees_it():
    q, k, v = (x.requires_grad_() for x in uniform())
    ones = torch.ones(1, SEQLEN, 2, SEQLEN, dtype=q.dtype, device="cuda")

    def step():
        out = flashtune.attention(q, k, v, dropout_p=0.5)
        return out, *torch.autograd.grad(out, (q, k, v), ones)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, dq, dk, dv = step()

    masks = []
    torch.manual_seed(4)
    for _ in range(3):
        graph.replay()
        weights = out.transpose(1, 2).float()
        # dout is all ones, so dv = weights^T dout is the sum of each key's weights under this
        # replay's mask.
        sums = weights.sum(2).view(1, 2, SEQLEN, 1).expand(-1, -1, -1, SEQLEN).transpose(1, 2)
        torch.testing.assert_close(dv.float(), sums, rtol=5e-3, atol=5e-3)
        masks.append(weights != 0)
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])
    assert abs(torch.stack(masks).float().mean().item() - 0.5) < 0.01
    torch.manual_seed(4)
    graph.replay()
    assert torch.equal(out.transpose(1, 2) != 0, masks[0])


def test_a_captured_graph_reads_the_seed_that_memory_holds_at_replay():
    q, k, v = uniform()
    seed = torch.tensor([1, 0], device="cuda")
    flashtune.attention(q, k, v, dropout_p=0.5, seed=seed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashtune.attention(q, k, v, dropout_p=0.5, seed=seed)
    for numbers in ((5, 6), (7, 8)):
        seed.copy_(torch.tensor(numbers))
        graph.replay()
        assert torch.equal(out, flashtune.attention(q, k, v, dropout_p=0.5, seed=numbers))


def test_work_is_ordered_on_the_callers_stream():
    tensors = random(*[(2, 512, 4, 64)] * 3, dtype=torch.bfloat16, device="cuda")
    (dout,) = random((2, 512, 4, 64), dtype=torch.bfloat16, device="cuda", seed=1)
    expected = with_gradients(flashtune.attention, tensors, dout, causal=True)
    filled_late = [torch.zeros_like(x) for x in tensors]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        # The inputs stay zero until a sleep of about 50 ms ends; work on another stream would read
        # zeros.
        torch.cuda._sleep(100_000_000)
        for late, value in zip(filled_late, tensors):
            late.copy_(value)
        actual = with_gradients(flashtune.attention, filled_late, dout, causal=True)
    torch.cuda.synchronize()
    assert torch.equal(actual[0], expected[0])
    for tensor, wanted in zip(actual[1:], expected[1:]):
        torch.testing.assert_close(tensor, wanted)


def test_the_current_context_and_device_stay_as_they_were():
    driver = ctypes.CDLL("libcuda.so.1")

    def current():
        context = ctypes.c_void_p()
        assert driver.cuCtxGetCurrent(ctypes.byref(context)) == 0
        return context.value, torch.cuda.current_device()

    tensors = random(*[(1, 65, 2, 40)] * 4, dtype=torch.float16, device="cuda")
    torch.cuda.synchronize()
    before = current()
    with_gradients(flashtune.attention, tensors[:3], tensors[3])
    flashtune.plan_info(*tensors[:3])
    with pytest.raises((ValueError, NotImplementedError), match="head_dim is 513"):
        flashtune.attention(*[torch.ones(1, 8, 1, 513, dtype=torch.float16, device="cuda")] * 3)
    assert current() == before


def test_pages_of_fp32_give_the_result_of_the_same_keys_without_pages():
    q, k_pages, v_pages = random((1, 5, 2, 64), (3, 16, 1, 64), (3, 16, 1, 64), dtype=torch.float32, device="cuda")
    table, seqused_k = torch.tensor([[2, 0]], dtype=torch.int32).cuda(), torch.tensor([20], dtype=torch.int32).cuda()
    k, v = (pages[[2, 0]].reshape(1, 32, 1, 64)[:, :20] for pages in (k_pages, v_pages))
    k_pages[1], v_pages[0, 4:] = torch.nan, torch.nan  # not in the table, and behind the last key
    out = flashtune.attention_kvcache(q, k_pages, v_pages, block_table=table, seqused_k=seqused_k)
    torch.testing.assert_close(out, flashtune.attention_forward(q, k, v)[0], rtol=0, atol=1e-6)


def test_flash_attn_calls_accept_only_16_bit_dtypes_on_a_gpu():
    q = torch.ones(1, 8, 1, 64, device="cuda")
    with pytest.raises(NotImplementedError, match="q is torch.float32"):
        flash_attn_func(q, q, q)


def test_tensors_on_two_devices_are_refused():
    q = torch.ones(1, 8, 1, 64, dtype=torch.float16, device="cuda")
    with pytest.raises(ValueError, match="k is torch.float16 on cpu"):
        flashtune.attention(q, q.cpu(), q)
    with pytest.raises(ValueError, match="seed is"):
        flashtune.attention(q, q, q, dropout_p=0.1, seed=torch.tensor([1, 2]))


def test_memory_grows_with_seqlen_and_not_with_its_square():
    seqlen = 16384
    q, k, v, dout = random(*[(1, seqlen, 2, 64)] * 4, dtype=torch.bfloat16, device="cuda")
    with_gradients(flashtune.attention, (q, k, v), dout)
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with_gradients(flashtune.attention, (q, k, v), dout)
    torch.cuda.synchronize()
    # One matrix of scores in bf16 would take 1 GiB. Partial gradients of dK and dV take at most 66
    # MiB at this head dim, whatever the length; all else takes 34 MiB.
    assert torch.cuda.max_memory_allocated() - start < 128 << 20


def test_a_long_causal_row_equals_the_unmasked_result_on_its_prefix():
    q, k, v = random(*[(1, 2048, 4, 128)] * 3, dtype=torch.bfloat16, device="cuda")
    causal = flash_attn_func(q, k, v, causal=True)
    prefix = flash_attn_func(q[:, 1499:1500], k[:, :1500], v[:, :1500])
    torch.testing.assert_close(causal[:, 1499:1500], prefix, rtol=2e-2, atol=2e-3)


def test_plan_info_says_what_runs_and_why():
    q, k, v = random(*[(2, 256, 4, 64)] * 3, dtype=torch.bfloat16, device="cuda")
    for backward in (False, True):
        info = flashtune.plan_info(q, k, v, causal=True, backward=backward)
        assert info["kernel"].startswith("flashtune_sm") and info["reason"]
        assert info["registers"] > 0 and info["smem_bytes"] > 0


def test_a_tuned_plan_gives_the_same_result():
    tensors = random(*[(2, 300, 4, 96)] * 4, dtype=torch.bfloat16, device="cuda")
    expected = with_gradients(plain, [x.double() for x in tensors[:3]], tensors[3].double())
    for backward in (False, True):
        assert flashtune.autotune(*tensors[:3], backward=backward, time_limit=20)["config"]
    for actual, wanted in zip(with_gradients(flashtune.attention, tensors[:3], tensors[3]), expected):
        torch.testing.assert_close(actual.double(), wanted, rtol=0.05, atol=0.05)
