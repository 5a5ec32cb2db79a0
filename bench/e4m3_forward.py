#!/usr/bin/env python3
"""Times forward passes with q, k and v in e4m3 on Hopper beside FlashAttention-3's and cuDNN's,
round by round on one GPU, and compares their errors.

Head dims 64, 128 and 256, sequences of 16k, 4k and 1k tokens, 16k tokens in all, 2048 / dim heads,
causal or not. Prints TFLOP/s and the ratio to the better peer. FA3 runs where flash_attn_interface
can be imported and was built with e4m3, cuDNN where its frontend can (nvidia-cudnn-frontend); it
writes O in e4m3 on Hopper.

Errors are the norm of O's error over the norm of O, against fp64 on the same numbers, for 16k keys
of three kinds: N(0, 1); N(0, 1) with a thousandth of N(0, 100) in q, k and v; and 1 + N(0, 1) in v.
"""

import argparse
import json
import math

import flashtune
import machine
import torch
from timing import captured, round_robin

TOKENS, WIDTH = 16384, 2048
SEQLENS, DIMS = (16384, 4096, 1024), (64, 128, 256)
KINDS = ("normal", "outliers", "offset")


def quantised(x):
    """(e4m3 numbers, scale of the tensor)"""
    scale = x.abs().amax() / 448
    return (x / scale).to(torch.float8_e4m3fn), scale


def values(kind, shape, is_v):
    x = torch.randn(shape, device="cuda")
    if kind == "outliers":
        x += 10 * torch.randn(shape, device="cuda") * (torch.rand(shape, device="cuda") < 0.001)
    return x + 1 if kind == "offset" and is_v else x


def flashtune_call(q, k, v, causal, scales):
    names = ("q_descale", "k_descale", "v_descale")
    return lambda: flashtune.attention_kvcache(q, k, v, causal=causal, **dict(zip(names, scales)))


def fa3_call(q, k, v, causal, scales):
    from flash_attn_interface import flash_attn_func

    def call():
        out = flash_attn_func(q, k, v, causal=causal, q_descale=scales[0], k_descale=scales[1], v_descale=scales[2])
        return out[0] if isinstance(out, tuple) else out

    return call


class CudnnCall:
    """cuDNN's fp8 forward pass, whose O is in e4m3 times `o_scale`."""

    def __init__(self, q, k, v, causal, scales, o_scale=1.0):
        import cudnn

        self.handle = cudnn.create_handle()
        fp8, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
        graph = cudnn.pygraph(io_data_type=fp8, intermediate_data_type=fp32, compute_data_type=fp32, handle=self.handle)
        by_head = lambda x: x.transpose(1, 2)
        tensor = lambda name, x: graph.tensor(name=name, dim=list(x.shape), stride=list(x.stride()), data_type=fp8)
        inputs = [tensor(name, by_head(x)) for name, x in zip("qkv", (q, k, v))]
        number = lambda name: graph.tensor(name=name, dim=[1] * 4, stride=[1] * 4, data_type=fp32)
        factors = [number(name) for name in ("q", "k", "v", "s", "s_scale", "o_scale")]
        results = graph.sdpa_fp8(*inputs, *factors, attn_scale=q.shape[3] ** -0.5, use_causal_mask=causal, generate_stats=False)
        self.out, self.o_scale = torch.empty_like(q), o_scale
        out = by_head(self.out)
        results[0].set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride())).set_data_type(fp8)
        self.pack = dict(zip(inputs, (q, k, v))) | {results[0]: self.out}
        given = [scale.flatten()[:1].clone() for scale in scales] + [torch.full((1,), x, device="cuda") for x in (1.0, 1.0, o_scale)]
        self.pack |= dict(zip(factors, given))
        for largest in results[2:]:
            if largest is not None:
                largest.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(fp32)
                self.pack[largest] = torch.ones(1, device="cuda")
        graph.validate(), graph.build_operation_graph(), graph.create_execution_plans([cudnn.heur_mode.A])
        graph.check_support(), graph.build_plans()
        self.graph, self.set_stream = graph, cudnn.set_stream
        self.workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device="cuda")

    def __call__(self):
        self.set_stream(handle=self.handle, stream=torch.cuda.current_stream().cuda_stream)
        self.graph.execute(self.pack, self.workspace, handle=self.handle)
        return self.out.float() / self.o_scale if not torch.cuda.is_current_stream_capturing() else self.out


PEERS = {"flashtune": flashtune_call, "FA3": fa3_call, "cuDNN": CudnnCall}


def calls(*arguments, **options):
    """{name: call} of flashtune and the peers that this machine has."""
    made = {}
    for name, make in PEERS.items():
        try:
            call = make(*arguments, **(options if name == "cuDNN" else {}))
            call()
            made[name] = call
        except Exception as error:
            if name == "flashtune":
                raise
            print(f"    without {name}: {type(error).__name__}: {str(error)[:80]}")
    torch.cuda.synchronize()
    return made


def exact(q, k, v):
    """softmax(q k^T / sqrt(dim)) v in fp64, of (1, tokens, 1, dim), some rows at a time."""
    q, k, v = (x[0, :, 0].double() for x in (q, k, v))
    rows = [torch.softmax(part @ k.T * q.shape[1] ** -0.5, -1) @ v for part in q.split(2048)]
    return torch.cat(rows)[None, :, None]


def errors(dim, kind):
    original = [values(kind, (1, TOKENS, 1, dim), i == 2) for i in range(3)]
    numbers, factors = zip(*[quantised(x) for x in original])
    reference = exact(*[x.float() * scale for x, scale in zip(numbers, factors)])
    scales = [scale.expand(1, 1).contiguous() for scale in factors]
    made = calls(*numbers, False, scales, o_scale=448 / reference.abs().max().item())
    norm = reference.norm()
    return {name: ((call().double() - reference).norm() / norm).item() for name, call in made.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="head dim 128 and 16k tokens alone")
    parser.add_argument("--json", metavar="FILE", help="write all rows to FILE")
    arguments = parser.parse_args()
    dims, seqlens = ((128,), (TOKENS,)) if arguments.quick else (DIMS, SEQLENS)
    results = dict(machine=machine.describe(), errors=[], times=[])
    torch.manual_seed(1)
    for dim in dims:
        for kind in KINDS:
            row = errors(dim, kind)
            results["errors"].append(dict(dim=dim, kind=kind, **row))
            print(f"error d{dim} {kind}: " + ", ".join(f"{name} {error:.4f}" for name, error in row.items()), flush=True)
    ratios = []
    for dim in dims:
        for causal in (False, True):
            for seqlen in seqlens:
                shape = (TOKENS // seqlen, seqlen, WIDTH // dim, dim)
                q, k, v = (torch.randn(shape, device="cuda").to(torch.float8_e4m3fn) for _ in range(3))
                one = torch.ones(shape[0], shape[2], device="cuda")
                made = calls(q, k, v, causal, [one] * 3)
                times = round_robin([captured(call) for call in made.values()])
                flops = 4 * TOKENS * WIDTH * seqlen * (0.5 if causal else 1)
                rates = {name: flops / seconds / 1e12 for name, seconds in zip(made, times)}
                best = max((rate for name, rate in rates.items() if name != "flashtune"), default=math.nan)
                ratios.append(rates["flashtune"] / best)
                results["times"].append(dict(dim=dim, causal=causal, seqlen=seqlen, **rates))
                row = ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
                print(f"d{dim} {'causal' if causal else 'full':6} {seqlen:5}: {row} TFLOP/s; {ratios[-1]:.2f}", flush=True)
    print(f"geometric mean over the better peer: {math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f}, least {min(ratios):.2f}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
