#!/usr/bin/env python3
"""Measures what a caller pays besides kernel time: first calls, host time of a launch,
workspace, and the library's size."""

import argparse
import ctypes
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

# Runs in its own process: times the first forward and backward pass of a process, each until the
# GPU is done. Arguments: the head dim, whether the context may use a pack, and whether the passes
# go through autograd.
FIRST_CALLS = """
import json, sys, time
import torch
import flashtune
head_dim = int(sys.argv[1])
if sys.argv[2] == "without":
    flashtune.use_pack("")
q, k, v, dout = (torch.randn(2, 1024, 16, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
learns = sys.argv[3] == "autograd"
if learns:
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    torch.autograd.grad(q * 2, q, dout)  # Autograd starts its threads, and imports modules.
torch.cuda.synchronize()
def timed(call):
    start = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return time.perf_counter() - start, result
if learns:
    forward, out = timed(lambda: flashtune.attention(q, k, v, causal=True))
    backward, _ = timed(lambda: torch.autograd.grad(out, (q, k, v), dout))
else:
    forward, (out, lse) = timed(lambda: flashtune.attention_forward(q, k, v, causal=True))
    backward, _ = timed(lambda: flashtune.attention_backward(dout, q, k, v, out, lse, causal=True))
print(json.dumps({"forward_s": forward, "backward_s": backward, "pack": flashtune.pack_info(0)["state"]}))
"""

EMPTY_KERNEL = b".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry empty() { ret; }\n\0"
# Fewer launches than the driver queues before it blocks the host.
BURST = 200
BURSTS = 25


def first_calls():
    """{name: seconds of both passes}, each in a process of its own. Without a pack, a second
    process finds the kernels that the first one compiled. Times with a pack are left out where no
    pack lies beside the library and FLASHTUNE_PACK names none."""
    results = {}
    runs = (("with", "calls", ["empty"]), ("without", "calls", ["empty", "filled"]), ("without", "autograd", ["empty"]))
    for head_dim, (pack, passes, caches) in itertools.product((64, 128), runs):
        with tempfile.TemporaryDirectory() as folder:
            for cache in caches:
                command = [sys.executable, "-c", FIRST_CALLS, str(head_dim), pack, passes]
                environment = {**os.environ, "FLASHTUNE_CACHE_DIR": folder}
                process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                times = json.loads(process.stdout.splitlines()[-1])
                if (times.pop("pack") == "loaded") == (pack == "with"):
                    through = ", autograd" if passes == "autograd" else ""
                    results[f"head dim {head_dim}, {pack} a pack, {cache} cache{through}"] = times
    return results


def host_us(call, synchronize):
    """Median host microseconds of one call, over bursts that fit into the device's queue."""
    call()
    bursts = []
    for _ in range(BURSTS):
        synchronize()
        start = time.perf_counter()
        for _ in range(BURST):
            call()
        bursts.append((time.perf_counter() - start) / BURST * 1e6)
    synchronize()
    return statistics.median(bursts)


def empty_launch():
    """A function that launches an empty kernel through the driver on torch's current stream."""
    import torch

    driver = ctypes.CDLL("libcuda.so.1")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    torch.zeros(1, device="cuda")
    for status in (
        driver.cuModuleLoadData(ctypes.byref(module), EMPTY_KERNEL),
        driver.cuModuleGetFunction(ctypes.byref(function), module, b"empty"),
    ):
        if status:
            raise RuntimeError(f"the CUDA driver answered {status}")
    launch = driver.cuLaunchKernel
    unsigned, pointer = ctypes.c_uint, ctypes.c_void_p
    launch.argtypes = [pointer, *[unsigned] * 7, pointer, pointer, pointer]
    stream = torch.cuda.current_stream().cuda_stream
    return lambda: launch(function, 1, 1, 1, 32, 1, 1, 0, stream, None, None)


def launches():
    """{call: host microseconds} of the driver's launch, flashtune's C call, its Python calls, and
    PyTorch's. Shapes are small, so that the GPU is done before the host."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import flashtune
    from flashtune.flash_attn_interface import flash_attn_func

    q, k, v = (torch.randn(1, 128, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def sdpa(q, k, v):
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))

    calls = {"driver, empty kernel": empty_launch(), "flashtune_forward from C": _forward_from_c(q, k, v)}
    calls.update(_passes("flashtune.attention", flashtune.attention, q, k, v))
    calls.update(_passes("flash_attn_func", flash_attn_func, q, k, v))
    calls.update(_with_lengths())
    # A Function that launches nothing: autograd's own share.
    calls.update(_passes("autograd alone", _nothing().apply, q, k, v))
    times = {name: host_us(call, torch.cuda.synchronize) for name, call in calls.items()}
    for name, backend in (("FA2", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        # Entering this context takes host time too, so it is entered once.
        with sdpa_kernel(backend):
            for call, run in _passes(f"torch SDPA ({name})", sdpa, q, k, v).items():
                times[call] = host_us(run, torch.cuda.synchronize)
    return times


def _passes(name, attend, q, k, v):
    """{name: function} of a forward pass, one that records a gradient, and its backward pass."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return {
        name: lambda: attend(q, k, v),
        f"{name}, recording a gradient": lambda: attend(*leaves),
        f"{name}, backward": _backward(attend(*leaves), leaves),
    }


def _backward(out, leaves):
    import torch

    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def _nothing():
    import torch

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            ctx.save_for_backward(q, k, v)
            return torch.empty_like(q)

        @staticmethod
        def backward(ctx, dout):
            return ctx.saved_tensors

    return Nothing


def _forward_from_c(q, k, v):
    import torch

    import flashtune
    from flashtune import _call, _context, _torch_launch

    out, lse = flashtune.attention_forward(q, k, v)
    dims = _call.sizes(q.shape, k.shape, v.shape)
    refs = [_torch_launch.ref(x) for x in (q, k, v, out)]
    params = _call.forward(2, _call.options(False, None, 0.0), dims, _call.NO_SEED, *refs, lse.data_ptr())
    context = _context.context(0)
    launch, handle, stream = context.forward._launch, context.handle, torch.cuda.current_stream().cuda_stream
    keep = q, k, v, out, lse
    return lambda: launch(handle, params, None, 0, stream) if keep else None


def _with_lengths():
    """Decoding over pages, and packed sequences."""
    import torch

    from flashtune.flash_attn_interface import flash_attn_varlen_func, flash_attn_with_kvcache

    def draw(*shape):
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    q, k_cache, v_cache = draw(4, 1, 32, 128), draw(64, 64, 8, 128), draw(64, 64, 8, 128)
    table = torch.arange(64, device="cuda", dtype=torch.int32).view(4, 16)
    lengths = torch.full((4,), 500, device="cuda", dtype=torch.int32)
    x, offsets = draw(256, 8, 128), torch.arange(5, device="cuda", dtype=torch.int32) * 64
    leaves = [x.detach().requires_grad_() for _ in range(3)]

    def packed(q, k, v):
        return flash_attn_varlen_func(q, k, v, offsets, offsets, 64, 64, causal=True)

    return {
        "flash_attn_with_kvcache, pages": lambda: flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=lengths, block_table=table, causal=True
        ),
        "flash_attn_varlen_func": lambda: packed(x, x, x),
        "flash_attn_varlen_func, backward": _backward(packed(*leaves), leaves),
    }


def workspace():
    """Workspace bytes of each pass at 64k tokens, and the bytes of one of its tensors for
    comparison."""
    import torch

    import flashtune
    from flashtune import _call, _context, _torch_launch

    q, k, v = (torch.randn(1, 65536, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out, lse = flashtune.attention_forward(q, k, v)
    dims = _call.sizes(q.shape, k.shape, v.shape)
    refs = [_torch_launch.ref(x) for x in (q, k, v, out)]
    opts = _call.options(False, None, 0.0)
    forward = _call.forward(2, opts, dims, _call.NO_SEED, *refs, lse.data_ptr())
    gradients = [_torch_launch.ref(x) for x in (out, q.clone(), k.clone(), v.clone())]
    backward = _call.backward(2, opts, dims, _call.NO_SEED, *refs, lse.data_ptr(), *gradients)
    context = _context.context(0)
    return {
        "forward_bytes": context.forward.workspace_bytes(forward),
        "backward_bytes": context.backward.workspace_bytes(backward),
        "tensor_bytes": q.numel() * q.element_size(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write all figures to FILE")
    arguments = parser.parse_args()
    import machine
    from flashtune._library import candidates, library

    library()
    size = next(path for path in candidates() if path.is_file()).stat().st_size
    results = dict(machine=machine.describe(), first_calls=first_calls(), host_us=launches())
    results.update(workspace=workspace(), library_bytes=size)

    for name, times in results["first_calls"].items():
        print(f"first call, {name}: forward {times['forward_s'] * 1e3:.0f} ms, backward {times['backward_s'] * 1e3:.0f} ms")
    empty = results["host_us"]["driver, empty kernel"]
    for name, us in results["host_us"].items():
        print(f"host time of {name}: {us:.1f} us ({us - empty:+.1f} us over the driver's launch)")
    bytes_of = results["workspace"]
    print(
        f"workspace at 64k tokens (b1 h16 d128, a tensor has {bytes_of['tensor_bytes'] / 2**20:.0f} MiB): "
        f"forward {bytes_of['forward_bytes'] / 2**20:.1f} MiB, backward {bytes_of['backward_bytes'] / 2**20:.1f} MiB"
    )
    print(f"library: {size / 1e6:.2f} MB")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
