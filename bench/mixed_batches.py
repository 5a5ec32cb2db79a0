#!/usr/bin/env python3
"""Times one varlen call over pages, whose batch mixes chunks of prompts and single tokens, beside
its parts, in CUDA graphs on one GPU.

"one call" is flash_attn_varlen_func over pages in random order, with lengths and block table on the
device. "prefill" is the same chunks over contiguous keys, and "pages" over those pages, which tells
what pages cost without any mixing. "decode" is flash_attn_with_kvcache of the single tokens over
the same pages. Each call is captured into a graph. The order of the graphs changes from round to
round (order.py), and medians count. With --range a range of all batches (docs/serving.md) is
prepared first, and calls over pages run its kernels.

Prints microseconds, and the time of one call over the sum of its parts. "difference" is the largest
difference of an element of one call from the parts.
"""

import itertools

import loop
import machine
import mixed_cases
import report
import torch
from timing import ROUNDS, captured, round_robin


def parser():
    parser = loop.parser(__doc__, mixed_cases.SUITES, None, ROUNDS)
    parser.add_argument("--mixes", type=int, default=1, metavar="SEED", help="seed of the random mixes, default 1")
    parser.add_argument("--range", action="store_true", help="prepare a range of batches first")
    return parser


def starts(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")


class Batch:
    """Q of a case's tokens, and K and V contiguous and in shuffled pages."""

    def __init__(self, case):
        generator = torch.Generator("cuda").manual_seed(sum(case["keys"]))
        shape = case["heads_kv"], case["head_dim"]

        def normal(rows, heads):
            return torch.randn(rows, heads, shape[1], device="cuda", dtype=torch.bfloat16, generator=generator)

        self.q = normal(sum(case["queries"]), case["heads"])
        self.k, self.v = (normal(sum(case["keys"]), case["heads_kv"]) for _ in range(2))
        size = case["page_size"]
        pages = [-(-keys // size) for keys in case["keys"]]
        order = torch.randperm(sum(pages), device="cuda", generator=generator)
        self.table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device="cuda")
        self.k_pages, self.v_pages = (x.new_zeros(sum(pages), size, *shape) for x in (self.k, self.v))
        first_page = first_key = 0
        for row, (count, keys) in enumerate(zip(pages, case["keys"])):
            own = order[first_page : first_page + count]
            self.table[row, :count] = own
            for x, into in ((self.k, self.k_pages), (self.v, self.v_pages)):
                padded = x.new_zeros(count * size, *shape)
                padded[:keys] = x[first_key : first_key + keys]
                into[own] = padded.view(count, size, *shape)
            first_page, first_key = first_page + count, first_key + keys
        self.lengths = torch.tensor(case["keys"], dtype=torch.int32, device="cuda")
        self.starts_q, self.starts_k = starts(case["queries"]), starts(case["keys"])


def calls_of(case):
    from flashtune.flash_attn_interface import flash_attn_varlen_func, flash_attn_with_kvcache

    batch, chunks = Batch(case), mixed_cases.chunks_of(case)
    queries, keys = case["queries"], case["keys"]
    of_chunks = sum(queries[:chunks])

    def over_pages(count, rows):
        """One call of the first sequences, which have so many rows of Q."""
        return flash_attn_varlen_func(
            batch.q[:rows], batch.k_pages, batch.v_pages, batch.starts_q[: count + 1], batch.starts_k[: count + 1],
            max(queries[:count]), max(keys[:count]), causal=True, block_table=batch.table[:count],
            seqused_k=batch.lengths[:count],
        )  # fmt: skip

    calls = {"one call": lambda: over_pages(len(queries), len(batch.q))}
    if chunks:
        q, rows = batch.q[:of_chunks], sum(keys[:chunks])
        k, v = batch.k[:rows], batch.v[:rows]
        starts_q, starts_k = batch.starts_q[: chunks + 1], batch.starts_k[: chunks + 1]
        longest = max(queries), max(keys[:chunks])
        calls["prefill"] = lambda: flash_attn_varlen_func(q, k, v, starts_q, starts_k, *longest, causal=True)
        calls["pages"] = lambda: over_pages(chunks, of_chunks)
    if chunks < len(queries):
        tokens, table, lengths = batch.q[of_chunks:, None], batch.table[chunks:], batch.lengths[chunks:]

        def decode():
            return flash_attn_with_kvcache(
                tokens, batch.k_pages, batch.v_pages, cache_seqlens=lengths, block_table=table, causal=True
            )

        calls["decode"] = decode
    return calls


def prepare_range_of(case):
    """Prepares every batch of up to 256 sequences, chunks of up to 8192 tokens and 16384 keys, with
    the case's heads and pages."""
    import flashtune

    empty = dict(device="cuda", dtype=torch.bfloat16)
    q = torch.empty(1, case["heads"], case["head_dim"], **empty)
    pages = torch.empty(1, case["page_size"], case["heads_kv"], case["head_dim"], **empty)
    one = torch.ones(1, device="cuda", dtype=torch.int32)
    flashtune.prepare_range(
        q, pages, pages, largest=(256, 8192, 16384), optional=("cu_seqlens_q",), causal=True,
        cu_seqlens_q=starts([1]), max_seqlen_q=1, block_table=one[:, None], seqused_k=one,
    )  # fmt: skip


def measure(case, rounds):
    calls = calls_of(case)
    results = {name: call().float() for name, call in calls.items()}
    parts = torch.cat([results[name].flatten(0, -3) for name in ("prefill", "decode") if name in results])
    difference = (results["one call"] - parts).abs().max().item()
    graphs = {name: captured(call) for name, call in calls.items()}
    seconds = dict(zip(graphs, round_robin(list(graphs.values()), rounds)))
    times = {name: time * 1e6 for name, time in seconds.items()}
    return dict(**case, us=times, ratio=mixed_cases.ratio(seconds), difference=difference)


def name_of(row):
    return row["name"]


def show(row):
    times = ", ".join(f"{name} {time:.0f}" for name, time in row["us"].items())
    heads = f"h{row['heads']}/{row['heads_kv']} d{row['head_dim']} pages of {row['page_size']}"
    print(f"{row['name']}, {heads}: us {times}; ratio {row['ratio']:.3f}; difference {row['difference']:.1e}", flush=True)


def main():
    arguments = parser().parse_args()
    measured_on = machine.describe()

    def rows_of(suite, case):
        if arguments.range:
            prepare_range_of(case)
        row = dict(suite=suite, **measure(case, arguments.rounds))
        show(row)
        return [row]

    def results(rows):
        return dict(machine=measured_on, rounds=arguments.rounds, seed=arguments.mixes, rows=rows)

    problems = [
        (suite, case)
        for suite in arguments.suites
        for case in mixed_cases.cases(suite, arguments.mixes, arguments.quick)
    ]
    rows, _ = loop.run(problems, rows_of, results, arguments)
    for suite in arguments.suites:
        ratios = [row for row in rows if row["suite"] == suite]
        if ratios:
            entry = report.mean_and_least(ratios, lambda row: row["ratio"], name_of)
            most = max(row["ratio"] for row in ratios)
            print(f"{suite}: geometric mean {entry['geometric_mean']:.3f}, most {most:.3f} ({entry['cells']} problems)")


if __name__ == "__main__":
    main()
