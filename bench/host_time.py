#!/usr/bin/env python3
"""Measures what a caller pays besides kernel time: first calls, host time of a launch,
workspace, and the library's size."""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

# Runs in its own process: times the first forward and backward pass of a process, each until the
# GPU is done.
FIRST_CALLS = """
import json, time
import torch
import flashtune
q, k, v = (torch.randn(2, 1024, 16, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
torch.cuda.synchronize()
def timed(call):
    start = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return time.perf_counter() - start, result
forward, (out, lse) = timed(lambda: flashtune.attention_forward(q, k, v, causal=True))
backward, _ = timed(lambda: flashtune.attention_backward(out, q, k, v, out, lse, causal=True))
print(json.dumps({"forward_s": forward, "backward_s": backward}))
"""

EMPTY_KERNEL = b".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry empty() { ret; }\n\0"
# Fewer launches than the driver queues before it blocks the host.
BURST = 200
BURSTS = 25


def first_calls():
    """{name: seconds of both passes}. "cold" starts with an empty cache folder, "warm" is a new
    process with the same folder."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "FLASHTUNE_CACHE_DIR": folder}
        results = {}
        for name in ("cold", "warm"):
            process = subprocess.run(
                [sys.executable, "-c", FIRST_CALLS], env=environment, capture_output=True, text=True, check=True
            )
            results[name] = json.loads(process.stdout.splitlines()[-1])
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
    """{call: host microseconds} of the driver's launch, flashtune's C call, its Python calls,
    and PyTorch's."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import flashtune
    from flashtune import _call, _context, _torch_launch

    q, k, v = (torch.randn(1, 128, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out, lse = flashtune.attention_forward(q, k, v)
    dims = _call.sizes(q.shape, k.shape, v.shape)
    refs = [_torch_launch.ref(x) for x in (q, k, v, out)]
    params = _call.forward(2, (0, 0.0, 0.0, 0), dims, _call.NO_SEED, *refs, lse.data_ptr())
    context = _context.context(0)
    launch, handle = context.forward._launch, context.handle
    stream = torch.cuda.current_stream().cuda_stream
    grad_q = q.clone().requires_grad_()

    def sdpa(queries):
        return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (queries, k, v)))

    calls = {
        "driver, empty kernel": empty_launch(),
        "flashtune_forward from C": lambda: launch(handle, params, None, 0, stream),
        "flashtune.attention": lambda: flashtune.attention(q, k, v),
        "flashtune.attention, recording a gradient": lambda: flashtune.attention(grad_q, k, v),
        "torch SDPA (FA2)": lambda: sdpa(q),
        "torch SDPA (FA2), recording a gradient": lambda: sdpa(grad_q),
    }
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return {name: host_us(call, torch.cuda.synchronize) for name, call in calls.items()}


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
    forward = _call.forward(2, (0, 0.0, 0.0, 0), dims, _call.NO_SEED, *refs, lse.data_ptr())
    gradients = [_torch_launch.ref(x) for x in (out, q.clone(), k.clone(), v.clone())]
    backward = _call.backward(2, (0, 0.0, 0.0, 0), dims, _call.NO_SEED, *refs, lse.data_ptr(), *gradients)
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
        print(f"{name} first call: forward {times['forward_s'] * 1e3:.0f} ms, backward {times['backward_s'] * 1e3:.0f} ms")
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
