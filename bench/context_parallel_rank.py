"""One process of bench/context_parallel.py: one rank, which times every case that it is given.

Rank 0 appends one line of JSON for each finished case. A case that takes too long ends the process,
since a rank that waits in a collective cannot be freed otherwise.
"""

import contextlib
import datetime
import json
import os
import sys
import threading
import time
from pathlib import Path

VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_NVLS_ENABLE", "NCCL_MAX_P2P_NCHANNELS")
# Milliseconds of a measurement, and the largest number of calls in it.
MEASURED, MOST = 400.0, 20


class Messages:
    """Stands for `torch.distributed` in flashtune's module of messages.

    It lists the messages of a call, or leaves them out. Received tensors then keep the memory's old
    content, which in a repeated call is that of an earlier message.
    """

    def __init__(self, real):
        self._real, self.listed, self.leaves_out = real, None, False

    def __getattr__(self, name):
        return getattr(self._real, name)

    def _send(self, name, *tensors, **others):
        if self.listed is not None:
            self.listed.append((name, tensors, others))
        return () if self.leaves_out else getattr(self._real, name)(*tensors, **others)

    def batch_isend_irecv(self, operations):
        return self._send("batch_isend_irecv", operations)

    def all_gather(self, outputs, x, group=None):
        return self._send("all_gather", outputs, x, group=group)

    def reduce_scatter_tensor(self, output, x, group=None):
        return self._send("reduce_scatter_tensor", output, x, group=group)

    def all_reduce(self, x, group=None):
        return self._send("all_reduce", x, group=group)

    def all_to_all_single(self, output, x, group=None):
        return self._send("all_to_all_single", output, x, group=group)

    @contextlib.contextmanager
    def left_out(self):
        self.leaves_out = True
        try:
            yield
        finally:
            self.leaves_out = False

    def of(self, call):
        """A function that sends the messages of `call` again, one after the other."""
        self.listed = []
        call()
        listed, self.listed = self.listed, None

        def again():
            for name, tensors, others in listed:
                works = getattr(self._real, name)(*tensors, **others)
                for work in works if name == "batch_isend_irecv" else ():
                    work.wait()

        return again


class Rank:
    """Times functions on all ranks at once."""

    def __init__(self, asked):
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.asked = torch, dist, asked
        self.rank, self.is_cuda = asked["rank"], asked["device"] == "cuda"
        self.device = torch.device("cuda", self.rank) if self.is_cuda else torch.device("cpu")
        more = {}
        if self.is_cuda:
            torch.cuda.set_device(self.device)
            more["device_id"] = self.device
        else:
            torch.set_num_threads(1)
        dist.init_process_group(
            "nccl" if self.is_cuda else "gloo", init_method=f"tcp://127.0.0.1:{asked['port']}", rank=self.rank,
            world_size=asked["ranks"], timeout=datetime.timedelta(seconds=asked["seconds"] + 60), **more,
        )  # fmt: skip

    def milliseconds(self, function):
        """The time of a call on the slowest rank, after one call that is not counted."""
        self._run(function, 1)
        once = self._run(function, 1)
        count = min(MOST, round(MEASURED / max(once, 1e-3)))
        return self._run(function, count) if count > 1 else once

    def _run(self, function, count):
        torch, dist = self.torch, self.dist
        together = torch.ones(1, device=self.device)
        dist.all_reduce(together)
        if self.is_cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(count):
                function()
            end.record()
            end.synchronize()
            took = start.elapsed_time(end) / count
        else:
            began = time.perf_counter()
            for _ in range(count):
                function()
            took = (time.perf_counter() - began) * 1e3 / count
        longest = torch.tensor([took], device=self.device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        return longest.item()

    def case(self, case):
        """{pass: times}"""
        torch = self.torch
        generator = torch.Generator(self.device).manual_seed(1)
        head_dim, dtype = self.asked["head_dim"], torch.bfloat16
        shapes = [(1, case["tokens"], heads, head_dim) for heads in (case["heads"], case["heads_kv"], case["heads_kv"], case["heads"])]
        tensors = [torch.randn(shape, generator=generator, device=self.device, dtype=dtype) for shape in shapes]
        if case["method"] == "torch":
            return self._of_torch(tensors)
        import flashtune
        from flashtune import _collectives
        from flashtune import context_parallel as cp

        if not self.asked["head_start"]:
            _collectives._give_head_start = lambda device: None
        if case["method"] == "one":
            return self._passes(lambda q, k, v: flashtune.attention(q, k, v, causal=True), *tensors)
        *mine, dout = (cp.shard(x) for x in tensors)
        del tensors
        return self._passes(lambda q, k, v: cp.attention(q, k, v, causal=True, method=case["method"]), *mine, dout, sends=True)

    def _passes(self, attend, q, k, v, dout, sends=False):
        torch = self.torch
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]

        def forward():
            with torch.no_grad():
                return attend(q, k, v)

        def both():
            return torch.autograd.grad(attend(*leaves), leaves, dout)

        found = {}
        for name, call in (("forward", forward), ("both", both)):
            times = found[name] = {"ms": self.milliseconds(call)}
            if sends:
                times.update(self._apart(call))
        return found

    def _apart(self, call):
        """The times of the messages alone and of the computation alone."""
        from flashtune import _collectives

        messages, real = Messages(self.dist), _collectives.dist
        _collectives.dist = messages
        try:
            alone = self.milliseconds(messages.of(call))
            with messages.left_out():
                return {"alone ms": alone, "compute ms": self.milliseconds(call)}
        finally:
            _collectives.dist = real

    def _of_torch(self, tensors):
        torch = self.torch
        import torch.nn.functional as F
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.experimental import context_parallel
        from torch.nn.attention import SDPBackend, sdpa_kernel

        mesh = init_device_mesh(self.device.type, (self.asked["ranks"],))
        buffers = [x.transpose(1, 2).contiguous() for x in tensors]
        tensors.clear()
        is_grouped = buffers[0].shape[1] != buffers[1].shape[1]
        more = dict(enable_gqa=True) if is_grouped else {}
        with (
            sdpa_kernel(SDPBackend.FLASH_ATTENTION),
            context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)),
        ):
            return self._passes(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, **more), *buffers)


def limited(seconds):
    """A timer that ends this process."""

    def end():
        print(f"no result after {seconds} s", flush=True)
        os._exit(124)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    return timer


def described(torch):
    """What the times depend on besides the code."""
    if not torch.cuda.is_available():
        return dict(torch=torch.__version__)
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return dict(gpus=names, torch=torch.__version__, nccl=".".join(map(str, torch.cuda.nccl.version())))


def main():
    asked = json.loads(sys.argv[1])
    timer = limited(asked["seconds"])
    rank, results = Rank(asked), Path(asked["results"])
    if rank.rank == 0:
        (results.parent / "machine.json").write_text(json.dumps(described(rank.torch)))
    for case in asked["cases"]:
        timer.cancel()
        timer, began = limited(asked["seconds"]), time.monotonic()
        row = dict(case)
        try:
            row.update(rank.case(case))
        except Exception as error:
            # Another rank may wait for this one, so only errors that all ranks see go on.
            if case["method"] != "torch":
                raise
            row["refused"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        row["seconds"] = round(time.monotonic() - began, 1)
        print(json.dumps(row), flush=True)
        if rank.rank == 0:
            with open(results, "a") as file:
                file.write(json.dumps(row) + "\n")
        if rank.is_cuda:
            rank.torch.cuda.empty_cache()
    timer.cancel()
    rank.dist.barrier()
    rank.dist.destroy_process_group()


if __name__ == "__main__":
    main()
