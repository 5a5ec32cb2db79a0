"""Features beyond plain attention on torch tensors: gradients of bias and sinks.

The same tests run on the CPU and on a GPU.
"""

import flashtune
import pytest
import torch
from oracle_torch import judge, plain, random, with_gradients
from test_torch import DEVICES, TYPED_DEVICES, working_dtype
from torch._dynamo.testing import CompileCounterWithBackend

BATCH, HEADS, SEQLEN_Q, SEQLEN_K = 2, 4, 100, 130
SLOPES = torch.tensor([0.5, 0.1, 0.02, 0.0])


def inputs(dtype, device, *more, seed=0):
    shapes = [(BATCH, rows, heads, 64) for rows, heads in ((SEQLEN_Q, HEADS), (SEQLEN_K, 2), (SEQLEN_K, 2), (SEQLEN_Q, HEADS))]
    return random(*shapes, *more, dtype=dtype, device=device, seed=seed)


@pytest.mark.parametrize(
    "shape", [(BATCH, HEADS, SEQLEN_Q, SEQLEN_K), (1, HEADS, SEQLEN_Q, SEQLEN_K), (SEQLEN_K,), (BATCH, 1, 1, SEQLEN_K)], ids=str
)
@pytest.mark.parametrize("device, dtype", TYPED_DEVICES)
def test_the_gradient_of_a_broadcast_bias_is_summed(device, dtype, shape):
    q, k, v, dout, bias = inputs(dtype, device, shape)

    def attend(q, k, v, bias):
        return flashtune.attention(q, k, v, bias=bias, causal=True)

    judge(attend, (q, k, v, bias), dout, names=("q", "k", "v", "bias"), causal=True)


@pytest.mark.parametrize("device, dtype", TYPED_DEVICES)
def test_all_features_together_give_all_gradients(device, dtype):
    q, k, v, dout, bias, sinks = inputs(dtype, device, (1, HEADS, SEQLEN_Q, SEQLEN_K), (HEADS,))
    generator = torch.Generator().manual_seed(2)
    mask = (torch.rand(BATCH, 1, SEQLEN_Q, SEQLEN_K, generator=generator) < 0.8).to(device)
    options = dict(window=(40, 12), softcap=2.0, alibi_slopes=SLOPES.to(device), mask=mask)

    def attend(q, k, v, bias, sinks):
        return flashtune.attention(q, k, v, bias=bias, sinks=sinks, **options)

    judge(attend, (q, k, v, bias, sinks), dout, names=("q", "k", "v", "bias", "sinks"), **options)


@pytest.mark.parametrize("device", DEVICES)
def test_a_bit_mask_equals_its_byte_mask(device):
    q, k, v, dout = inputs(working_dtype(device), device)
    mask = torch.rand(BATCH, 1, SEQLEN_Q, SEQLEN_K, generator=torch.Generator().manual_seed(2)) < 0.7
    eights = torch.nn.functional.pad(mask, (0, -SEQLEN_K % 8)).unflatten(-1, (-1, 8))
    bits = (eights * 2 ** torch.arange(8)).sum(-1).to(torch.uint8).to(device)

    def results(function, **options):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = function(*leaves, **options)
        return (out, *torch.autograd.grad(out, leaves, dout))

    compiled = torch.compile(flashtune.attention, fullgraph=True, backend="aot_eager")
    expected = results(flashtune.attention, mask=mask.to(device))
    for function in (flashtune.attention, compiled):
        for actual, wanted in zip(results(function, mask_bits=bits), expected):
            # dq is summed in any order.
            torch.testing.assert_close(actual, wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_only_tensors_that_require_a_gradient_get_one(device):
    q, k, v, dout, bias, sinks = inputs(working_dtype(device), device, (SEQLEN_K,), (HEADS,))
    expected = with_gradients(plain, [x.double() for x in (q, k, v, bias, sinks)], dout)
    for index in (3, 4):
        tensors = [q, k, v, bias, sinks]
        tensors[index] = tensors[index].clone().requires_grad_()
        out = flashtune.attention(*tensors[:3], bias=tensors[3], sinks=tensors[4])
        out.backward(dout)
        assert [x.grad is not None for x in tensors] == [i == index for i in range(5)]
        assert _largest_error(tensors[index].grad, expected[index + 1]) < _allowed(q.dtype)


def _compiled(function, mode):
    torch.compiler.reset()  # what other tests compiled counts towards the limit after which torch no longer compiles
    return function if mode == "eager" else torch.compile(function, backend="aot_eager", fullgraph=mode == "fullgraph")


@pytest.mark.parametrize("mode", ["eager", "compiled", "fullgraph"])
@pytest.mark.parametrize("shape", [(SEQLEN_K,), (1, HEADS, SEQLEN_Q, SEQLEN_K), (BATCH, HEADS, 1, SEQLEN_K)], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_a_deterministic_gradient_of_a_broadcast_bias_is_refused_before_anything_runs(device, shape, mode):
    q, k, v, dout, bias = inputs(working_dtype(device), device, shape)
    attend = _compiled(flashtune.attention, mode)
    leaf = bias.clone().requires_grad_()
    with pytest.raises(flashtune.UnsupportedError, match=rf"bias, of shape \({shape[0]}.*use bias.expand\({BATCH}, {HEADS}"):
        attend(q, k, v, bias=leaf, deterministic=True)
    # Without a gradient nothing is summed. The remedy that the message proposes gives the same
    # result.
    learning = q.clone().requires_grad_()
    attend(learning, k, v, bias=bias, deterministic=True).backward(dout)
    with torch.no_grad():
        attend(q, k, v, bias=leaf, deterministic=True)
    whole = leaf.expand(BATCH, HEADS, SEQLEN_Q, SEQLEN_K)
    attend(q, k, v, bias=whole, deterministic=True).backward(dout)
    expected = bias.clone().requires_grad_()
    flashtune.attention(q, k, v, bias=expected).backward(dout)
    assert _largest_error(leaf.grad, expected.grad.double()) < _allowed(q.dtype)


@pytest.mark.parametrize("mode", ["eager", "compiled", "fullgraph"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_deterministic_gradient_of_a_varlen_bias_is_refused(device, mode):
    q, k, v, _ = (x[0] for x in inputs(working_dtype(device), device))
    begins_q, begins_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 60, 100], [0, 77, 130]))
    lengths = dict(cu_seqlens_q=begins_q, cu_seqlens_k=begins_k, max_seqlen_q=60, max_seqlen_k=77)
    bias = torch.zeros(HEADS, 60, 77, dtype=q.dtype, device=device, requires_grad=True)
    with pytest.raises(flashtune.UnsupportedError, match=rf"use bias.expand\(2, {HEADS}, 60, 77\)"):
        _compiled(flashtune.attention_varlen, mode)(q, k, v, bias=bias, deterministic=True, **lengths)


@pytest.mark.parametrize("device", DEVICES)
def test_lse_carries_a_gradient_to_sinks_and_bias(device):
    q, k, v, dout, bias, sinks = inputs(working_dtype(device), device, (SEQLEN_K,), (HEADS,))
    (dlse,) = random((BATCH, HEADS, SEQLEN_Q), dtype=torch.float32, device=device, seed=9)

    def gradients(function, dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v, bias, sinks)]
        out, lse = function(*leaves)
        return torch.autograd.grad((out, lse), leaves, (dout.to(out.dtype), dlse.to(lse.dtype)))

    actual = gradients(lambda q, k, v, b, s: flashtune.attention(q, k, v, bias=b, sinks=s, return_lse=True), q.dtype)
    exact = gradients(lambda *tensors: plain(*tensors, return_lse=True), torch.float64)
    for gradient, wanted in zip(actual, exact):
        assert _largest_error(gradient, wanted) < _allowed(q.dtype)


def _largest_error(actual, exact):
    """Relative to the largest exact value, or to 1 if all are zero."""
    return (actual.double() - exact).abs().max() / exact.abs().max()


def _allowed(dtype):
    return 1e-4 if dtype == torch.float32 else 3e-2


@pytest.mark.parametrize("device", DEVICES)
def test_varlen_batches_leave_unused_rows_at_zero(device):
    q, k, v, dout = inputs(working_dtype(device), device)
    used_q = torch.tensor([37, 100], dtype=torch.int32, device=device)
    used_k = torch.tensor([130, 5], dtype=torch.int32, device=device)
    for tensor, used in ((q, used_q), (k, used_k), (v, used_k), (dout, used_q)):
        for b in range(BATCH):
            tensor[b, int(used[b]) :] = float("nan")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = flashtune.attention_varlen(*leaves, seqused_q=used_q, seqused_k=used_k, causal=True, return_lse=True)
    gradients = torch.autograd.grad(out, leaves, dout)
    # Other kernels round in other places.
    close = {} if q.dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)
    for b in range(BATCH):
        rows, keys = int(used_q[b]), int(used_k[b])
        alone = [x.detach()[b : b + 1, :count].clone().requires_grad_() for x, count in zip((q, k, v), (rows, keys, keys))]
        expected = flashtune.attention(*alone, causal=True)
        torch.testing.assert_close(out[b, :rows], expected[0], **close)
        assert torch.count_nonzero(out[b, rows:]) == 0 and lse[b, :, rows:].isneginf().all()
        for gradient, wanted in zip(gradients, torch.autograd.grad(expected, alone, dout[b : b + 1, :rows])):
            torch.testing.assert_close(gradient[b, : wanted.shape[1]], wanted[0], **close)
            assert torch.count_nonzero(gradient[b, wanted.shape[1] :]) == 0


@pytest.mark.parametrize("device", DEVICES)
def test_torch_compile_traces_features_without_a_break(device):
    q, k, v, dout, bias, sinks = inputs(working_dtype(device), device, (1, HEADS, SEQLEN_Q, SEQLEN_K), (HEADS,))
    slopes = SLOPES.to(device)

    def layer(q, k, v, bias, sinks):
        out, lse = flashtune.attention(
            q * 2, k, v, window=(30, 9), softcap=3.0, alibi_slopes=slopes, bias=bias, sinks=sinks, return_lse=True
        )
        return out * lse.mean().to(out.dtype)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    tensors = (q, k, v, bias, sinks)
    for actual, wanted in zip(with_gradients(compiled, tensors, dout), with_gradients(layer, tensors, dout)):
        torch.testing.assert_close(actual, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_torch_compile_traces_packed_sequences(device):
    q, k, v, dout = (x[0] for x in inputs(working_dtype(device), device))
    begins_q, begins_k = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 60, 100], [0, 77, 130]))

    def layer(q, k, v):
        lengths = dict(cu_seqlens_q=begins_q, cu_seqlens_k=begins_k, max_seqlen_q=60, max_seqlen_k=77)
        return flashtune.attention_varlen(q, k, v, causal=True, **lengths)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for actual, wanted in zip(with_gradients(compiled, (q, k, v), dout), with_gradients(layer, (q, k, v), dout)):
        torch.testing.assert_close(actual, wanted)


def test_torch_compile_compiles_varlen_once_for_all_longest_sequences():
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def layer(q, begins, longest):
        lengths = dict(cu_seqlens_q=begins, cu_seqlens_k=begins, max_seqlen_q=longest, max_seqlen_k=longest)
        return flashtune.attention_varlen(q, q, q, causal=True, **lengths)

    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for longest in range(16, 21):
        q, begins = torch.randn(2 * longest, 2, 32), torch.tensor([0, longest, 2 * longest], dtype=torch.int32)
        torch.testing.assert_close(compiled(q, begins, longest), layer(q, begins, longest))
    # Once for the first shape, and once for all shapes when the second comes.
    assert counter.frame_count == 2


@pytest.mark.parametrize("device, dtype", TYPED_DEVICES)
def test_a_flex_attention_block_mask_works_unchanged_and_carries_gradients(device, dtype):
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    q, k, v, dout = random(*[(BATCH, 400, heads, 64) for heads in (HEADS, 2, 2, HEADS)], dtype=dtype, device=device)
    document = (torch.arange(400, device=device) // 150).contiguous()

    def mask_mod(b, h, row, key):
        return (row >= key) & (document[row] == document[key])

    block_mask = flex.create_block_mask(mask_mod, None, None, 400, 400, device=device, BLOCK_SIZE=128)
    mask = (document[:, None] == document)[None, None]

    def attend(q, k, v):
        return flashtune.attention(q, k, v, causal=True, mask=mask, block_mask=block_mask)

    judge(attend, (q, k, v), dout, names=("q", "k", "v"), causal=True, mask=mask)


@pytest.mark.parametrize("device", DEVICES)
def test_block_mask_makes_the_same_lists_as_flex_attention(device):
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    blocks = (torch.rand(BATCH, HEADS, 5, 7, generator=torch.Generator().manual_seed(3)) < 0.5).to(device)
    made = flashtune.block_mask(blocks, block_size=64)
    theirs = flex.BlockMask.from_kv_blocks(made.kv_num_blocks, made.kv_indices, BLOCK_SIZE=64)
    assert (theirs.q_num_blocks == made.q_num_blocks).all()
    assert (theirs.to_dense() != 0).equal(blocks)
    listed = torch.arange(made.q_indices.shape[-1], device=device) < made.q_num_blocks[..., None]
    assert (theirs.q_indices == made.q_indices)[listed].all()


def test_a_block_mask_is_refused_with_deterministic_on_a_gpu_before_anything_runs():
    # Every device except the CPU is refused. Every machine has the meta device, which has no data
    # to run on.
    block_mask = flashtune.block_mask(torch.ones(1, 1, dtype=torch.bool), block_size=16)
    elsewhere, here = (torch.ones(1, 16, 2, 8, device=device, requires_grad=True) for device in ("meta", "cpu"))
    with pytest.raises(flashtune.UnsupportedError, match="deterministic is True and block_mask is given"):
        flashtune.attention(elsewhere, elsewhere, elsewhere, deterministic=True, block_mask=block_mask)
    flashtune.attention(here, here, here, deterministic=True, block_mask=block_mask).sum().backward()
    assert here.grad is not None


def _block_masks(device):
    """A block mask with full blocks, and FlexAttention's, for BATCH times 96 by 128 scores."""
    generator = torch.Generator().manual_seed(3)
    blocks, full = ((torch.rand(BATCH, 1, 6, 8, generator=generator) < p).to(device) for p in (0.6, 0.2))
    made = flashtune.block_mask(blocks, full, block_size=16)
    flex = pytest.importorskip("torch.nn.attention.flex_attention", reason="PyTorch has no FlexAttention")
    lists = (made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices)
    return made, flex.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=16)


class _Layer(torch.nn.Module):
    def __init__(self, block_mask):
        super().__init__()
        self.block_mask = block_mask

    def forward(self, q, k, v):
        return flashtune.attention(q * 2, k, v, causal=True, block_mask=self.block_mask)


@pytest.mark.parametrize("kind", ["flashtune", "flex_attention"])
@pytest.mark.parametrize("device", DEVICES)
def test_torch_compile_traces_block_masks_without_a_break(device, kind):
    layer = _Layer(_block_masks(device)[kind == "flex_attention"])
    shapes = [(BATCH, 96, HEADS, 64), (BATCH, 128, 2, 64), (BATCH, 128, 2, 64), (BATCH, 96, HEADS, 64)]
    *tensors, dout = random(*shapes, dtype=working_dtype(device), device=device)
    compiled = _compiled(layer, "fullgraph")
    for actual, wanted in zip(with_gradients(compiled, tensors, dout), with_gradients(layer, tensors, dout)):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_torch_export_keeps_attention_as_one_operator(device):
    layer = _Layer(_block_masks(device)[0])
    tensors = random((BATCH, 96, HEADS, 64), *[(BATCH, 128, 2, 64)] * 2, dtype=working_dtype(device), device=device)
    program = torch.export.export(layer, tuple(tensors))
    assert "flashtune.attention_forward" in str(program.graph)
    torch.testing.assert_close(program.module()(*tensors), layer(*tensors))


@pytest.mark.parametrize("mode", ["compiled", "fullgraph"])
def test_a_wrong_block_mask_is_named_in_compiled_code(mode):
    ones, made = torch.ones(1, 16, 2, 8), flashtune.block_mask(torch.ones(1, 1, dtype=torch.bool), block_size=16)
    compiled = _compiled(lambda q, block_mask: flashtune.attention(q, q, q, block_mask=block_mask), mode)
    with pytest.raises(flashtune.InvalidArgumentError, match="block_mask.kv_indices is None"):
        compiled(ones, made._replace(kv_indices=None))


@pytest.mark.parametrize(
    "change, exception, words",
    [
        (dict(bias=[[1.0]]), TypeError, "bias is a list"),
        (dict(bias=torch.ones(4, 4, dtype=torch.float64)), ValueError, "bias is torch.float64 on cpu"),
        (dict(bias=torch.ones(4, 5)), ValueError, "bias has shape"),
        (dict(mask=torch.ones(4, 4)), ValueError, "mask is torch.float32 on cpu; it must be torch.bool or torch.uint8"),
        (dict(sinks=torch.ones(3)), ValueError, "sinks has shape"),
        (dict(alibi_slopes=torch.ones(2, dtype=torch.float16)), ValueError, "alibi_slopes is torch.float16"),
        (dict(window="all"), ValueError, "window is 'all'"),
    ],
)
def test_a_wrong_feature_is_named(change, exception, words):
    ones = torch.ones(1, 4, 2, 8)
    with pytest.raises(exception, match=words):
        flashtune.attention(ones, ones, ones, **change)


@pytest.mark.needs_gpu
def test_lengths_on_a_gpu_need_a_bound_and_cannot_be_on_the_host():
    q, begins = torch.ones(4, 2, 64, dtype=torch.float16, device="cuda"), torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="max_seqlen_q is None"):
        flashtune.attention_varlen(q, q, q, cu_seqlens_q=begins.cuda(), cu_seqlens_k=begins.cuda())
    with pytest.raises(ValueError, match="cu_seqlens_q is torch.int32 on cpu"):
        flashtune.attention_varlen(q, q, q, cu_seqlens_q=begins, cu_seqlens_k=begins, max_seqlen_q=4, max_seqlen_k=4)
