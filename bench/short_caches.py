#!/usr/bin/env python3
"""Times one query over short caches, as the library splits the keys and unsplit, in CUDA graphs on
one GPU.

Each call is flash_attn_with_kvcache with the lengths on the device. "flashtune" has the library's
number of splits; "unsplit" and "two" have at most one and two. "pageN", with --page, has pages of N
keys in random order. With --random a sequence's length is an eighth of the cache or more.
"cudnn" reads all keys. L2 is warm: a graph is replayed again and again. The order of the graphs
changes from round to round (order.py), and medians count.

Prints the microseconds of each call, and the times of the others over flashtune's. Geometric means
follow. "grid" are 1, 2 and 8 sequences of 128 to 2,048 keys, "wave" batches whose K/V heads give
most SMs one CTA.
"""

import loop
import machine
import peers
import report
import torch
from query_tensors import tensors
from timing import ROUNDS, captured, round_robin

# (heads, heads_kv, head_dim)
HEADS = ((32, 8, 128), (32, 8, 64), (16, 16, 128))
# (batch, keys, heads, heads_kv, head_dim)
SUITES = {
    "grid": [(batch, keys, *heads) for heads in HEADS for batch in (1, 2, 8) for keys in (128, 512, 1024, 2048)],
    "wave": [
        (batch, keys, heads, heads_kv, dim)
        for batch, heads, heads_kv, dim in ((8, 16, 16, 128), (4, 32, 32, 128), (16, 32, 8, 128), (6, 16, 16, 128), (8, 16, 16, 64))
        for keys in (1024, 2048, 4096, 8192)
    ],
}  # fmt: skip
QUICK = 3  # problems of each suite with --quick
NAMES = ("batch", "keys", "heads", "heads_kv", "head_dim")


def parser():
    parser = loop.parser(__doc__, list(SUITES), None, ROUNDS)
    parser.add_argument("--page", type=int, default=0, help="time pages of so many keys, too")
    parser.add_argument("--random", action="store_true", help="lengths from an eighth of the cache on")
    return parser


def calls_of(case, arguments):
    """{name: a call without arguments} and {name: reason} of peers that are not here."""
    from flashtune.flash_attn_interface import flash_attn_with_kvcache

    q, k, v = tensors(case)
    batch, keys = case["batch"], case["keys"]
    generator = torch.Generator("cuda").manual_seed(keys + batch)
    lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    if arguments.random:
        lengths = torch.randint(keys // 8, keys + 1, (batch,), dtype=torch.int32, device="cuda", generator=generator)

    def ours(**options):
        return lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, **options)

    calls = {"flashtune": ours(), "unsplit": ours(num_splits=1), "two": ours(num_splits=2)}
    if arguments.page:
        pages = batch * keys // arguments.page
        table = torch.randperm(pages, dtype=torch.int32, device="cuda", generator=generator).view(batch, -1)
        k_pages, v_pages = (x.view(pages, arguments.page, *x.shape[2:]) for x in (k, v))
        calls[f"page{arguments.page}"] = lambda: flash_attn_with_kvcache(
            q, k_pages, v_pages, cache_seqlens=lengths, block_table=table
        )
    found, missing = peers.load(["cudnn"])
    calls |= {name: lambda attend=attend: attend(q, k, v, False, 0.0) for name, attend in found.items()}
    return calls, missing


def measure(case, arguments):
    """One row: microseconds by name, ratios to flashtune's, and reasons of calls without a time."""
    calls, refused = calls_of(case, arguments)
    graphs = {}
    for name, call in calls.items():
        try:
            call()
            torch.cuda.synchronize()
            graphs[name] = captured(call)
        except Exception as error:
            refused[name] = report.reason(error)
    seconds = dict(zip(graphs, round_robin(list(graphs.values()), arguments.rounds)))
    ratios = {name: time / seconds["flashtune"] for name, time in seconds.items() if name != "flashtune"}
    return dict(**case, us={name: time * 1e6 for name, time in seconds.items()}, ratio=ratios, refused=refused)


def label(case):
    return f"b{case['batch']} k{case['keys']} h{case['heads']}/{case['heads_kv']} d{case['head_dim']}"


def show(suite, row):
    times = ", ".join(f"{name} {time:.1f}" for name, time in row["us"].items())
    ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in row["ratio"].items())
    print(f"{suite:5} {label(row)}: us {times}; over flashtune {ratios}", flush=True)


def main():
    arguments = parser().parse_args()
    measured_on = machine.describe()

    def rows_of(suite, case):
        row = dict(suite=suite, **measure(case, arguments))
        show(suite, row)
        return [row]

    def results(rows):
        return dict(machine=measured_on, rounds=arguments.rounds, random=arguments.random, rows=rows, summary=report.of_each_ratio(rows, label))

    chosen = {suite: SUITES[suite][: QUICK if arguments.quick else None] for suite in arguments.suites}
    problems = [(suite, dict(zip(NAMES, sizes), queries=1)) for suite in chosen for sizes in chosen[suite]]
    rows, skipped = loop.run(problems, rows_of, results, arguments)
    for name, entry in report.of_each_ratio(rows, label).items():
        print(f"{name}/flashtune: geometric mean {entry['geometric_mean']:.3f}, least {entry['min']:.3f} at {entry['min_cell']} ({entry['cells']} problems)")
    report.show_gaps(rows, label, skipped)


if __name__ == "__main__":
    main()
