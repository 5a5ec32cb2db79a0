#!/usr/bin/env python3
"""Times causal attention of many queries over keys in pages, beside the same keys contiguous, in
CUDA graphs on one GPU.

"pageN" is flashtune's flash_attn_with_kvcache over pages of N keys, with the lengths and the block
table on the device. Pages are in random order, or with --in-order in the order of the keys.
"lengths" is the same call over contiguous keys. "fa3pageN" is FlashAttention-3's, where it is
installed with PAGEDKV, and "flashinferpageN" is FlashInfer's (paged_peers.py). The others read
contiguous keys. Each call is captured into a graph. The order of the graphs changes from round to
round (order.py), and medians count.

Prints the microseconds of each call, then "pageN/dense", the time with pages over flashtune's
without, and the time of a peer with the same pages over flashtune's. "difference" is the largest
difference of an element between the two results of flashtune. Geometric means follow.
"""

import argparse

import loop
import machine
import paged_peers
import paged_prefill_cases
import peers
import report
import torch
from query_tensors import tensors
from timing import ROUNDS, captured, round_robin

# The largest difference of a peer's element from flashtune's, over the largest element.
PEERS_MAY_DIFFER = 0.05


def parser():
    parser = loop.parser(__doc__, list(paged_prefill_cases.SUITES), "autotune each problem first, with its pages and without", ROUNDS)

    def sizes(text):
        try:
            return paged_prefill_cases.page_sizes(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    default = ",".join(str(size) for size in paged_prefill_cases.PAGE_SIZES)
    parser.add_argument("--in-order", action="store_true", help="lay pages in the order of the keys")
    parser.add_argument("--pages", type=sizes, default=paged_prefill_cases.PAGE_SIZES, help=f"page sizes, default {default}")
    return parser


class Cache:
    """K and V of a problem in shuffled pages of one size."""

    def __init__(self, k, v, page_size, in_order):
        batch, keys = k.shape[:2]
        blocks = -(-keys // page_size)
        order = (torch.arange if in_order else torch.randperm)(batch * blocks, device=k.device)
        self.table = order.int().view(batch, blocks)
        self.lengths = torch.full((batch,), keys, dtype=torch.int32, device=k.device)
        self.k, self.v = (self.scattered(x, blocks, page_size, order) for x in (k, v))

    @staticmethod
    def scattered(x, blocks, page_size, order):
        padded = x.new_zeros(x.shape[0], blocks * page_size, *x.shape[2:])
        padded[:, : x.shape[1]] = x
        pages = torch.empty_like(padded).view(-1, page_size, *x.shape[2:])
        pages[order] = padded.view(pages.shape)
        return pages


def largest_difference(out, expected):
    out = out[0] if isinstance(out, tuple) else out
    return (out.float() - expected.float()).abs().max().item()


def reason_against(call, expected):
    """Why a peer's call is not timed, or None. A build without a kernel for a page size may launch
    none, and say nothing."""
    try:
        off = largest_difference(call(), expected)
    except Exception as error:
        return report.reason(error)
    return f"its result is off by {off:.1e}" if not off <= PEERS_MAY_DIFFER * expected.abs().max().item() else None


def calls_of(case, sizes, in_order, tune):
    """{name: a call without arguments}, {name: reason} of those that are not here, and the largest
    difference between flashtune's results with pages and without."""
    q, k, v = tensors(case)
    calls, refused, difference = {}, {}, 0.0
    found, missing = peers.load(["flashtune", "cudnn", "fa2", "fa3"])
    refused.update(missing)
    for name, attend in found.items():
        calls[name] = lambda attend=attend: attend(q, k, v, True, 0.0)
    import flashtune
    from flashtune.flash_attn_interface import flash_attn_with_kvcache

    if tune:
        flashtune.autotune(q, k, v, causal=True)
    dense = calls["flashtune"]()
    lengths = torch.full(k.shape[:1], k.shape[1], dtype=torch.int32, device=k.device)
    calls["lengths"] = lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True)
    for size in sizes:
        cache = Cache(k, v, size, in_order)
        if tune:
            flashtune.autotune(q, cache.k, cache.v, causal=True, block_table=cache.table, seqused_k=cache.lengths)

        def ours(cache=cache):
            return flash_attn_with_kvcache(
                q, cache.k, cache.v, cache_seqlens=cache.lengths, block_table=cache.table, causal=True
            )

        calls[f"page{size}"] = ours
        difference = max(difference, largest_difference(ours(), dense))
        for peer, made in paged_peers.PEERS.items():
            name = f"{peer}page{size}"
            try:
                call = made(q, cache)
            except Exception as error:
                refused[name] = report.reason(error)
                continue
            why = reason_against(call, dense)
            if why:
                refused[name] = why
            else:
                calls[name] = call
    return calls, refused, difference


def measure(case, arguments):
    """One row: seconds by name, reasons of calls without a time, and the ratios."""
    calls, refused, difference = calls_of(case, arguments.pages, arguments.in_order, arguments.tune)
    graphs = {}
    for name, call in calls.items():
        try:
            call()
            torch.cuda.synchronize()
            graphs[name] = captured(call)
        except Exception as error:
            refused[name] = report.reason(error)
    seconds = dict(zip(graphs, round_robin(list(graphs.values()), arguments.rounds)))
    ratios = paged_prefill_cases.ratios(seconds, arguments.pages)
    times = {name: time * 1e6 for name, time in seconds.items()}
    return dict(**case, us=times, ratio=ratios, refused=refused, difference=difference)


def show(suite, row):
    times = ", ".join(f"{name} {time:.0f}" for name, time in row["us"].items())
    ratios = ", ".join(f"{name} {ratio:.3f}" for name, ratio in row["ratio"].items())
    print(f"{suite:8}{paged_prefill_cases.label(row)}: us {times}; {ratios}; difference {row['difference']:.1e}", flush=True)


def main():
    arguments = parser().parse_args()
    measured_on = machine.describe()

    def rows_of(suite, case):
        row = dict(suite=suite, **measure(case, arguments))
        show(suite, row)
        return [row]

    def results(rows):
        return dict(machine=measured_on, rounds=arguments.rounds, tuned=arguments.tune, rows=rows, summary=report.of_each_ratio(rows, paged_prefill_cases.label))

    problems = [
        (suite, case) for suite in arguments.suites for case in paged_prefill_cases.cases(suite, arguments.quick)
    ]
    rows, skipped = loop.run(problems, rows_of, results, arguments)
    for name, entry in report.of_each_ratio(rows, paged_prefill_cases.label).items():
        print(f"{name}: geometric mean {entry['geometric_mean']:.3f}, least {entry['min']:.3f} ({entry['cells']} problems)")
    report.show_gaps(rows, paged_prefill_cases.label, skipped)


if __name__ == "__main__":
    main()
