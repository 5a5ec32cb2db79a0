#!/usr/bin/env python3
"""Times causal batch-invariant attention beside the default, in CUDA graphs on one GPU.

"default" and "invariant" are flashtune's forward pass without and with batch_invariant. With
--before FILE an older library's batch-invariant pass is timed, too, and "same bits" says whether
its O and LSE have the bits of this library's. The order of the graphs changes from round to round
(order.py), and medians count.

Prints microseconds, the time over the default's, the rows and splits of the tiles, and the largest
difference from the default. Geometric means follow. "prompts" are whole prompts. "chunks" are
chunks over longer keys with too few tiles for a GPU. "long" are longer chunks. "pages" are chunks
over pages of 64 and 16 keys. "tokens" are single queries.
"""

import os

import loop
import machine
import report
import torch
from timing import ROUNDS, captured, round_robin

BF16, FP16 = "bfloat16", "float16"
# (batch, queries, keys, heads, heads_kv, head_dim, dtype, page_size)
SUITES = {
    "prompts": (
        (8, 2048, 2048, 16, 16, 128, BF16, 0),
        (1, 8192, 8192, 32, 8, 128, BF16, 0),
        (4, 4096, 4096, 16, 16, 96, BF16, 0),
        (2, 4096, 4096, 16, 16, 256, BF16, 0),
        (8, 2048, 2048, 32, 32, 64, BF16, 0),
        (1, 512, 512, 32, 8, 128, BF16, 0),
        (1, 2048, 2048, 32, 8, 128, BF16, 0),
    ),
    "chunks": (
        (1, 128, 4096, 32, 8, 128, BF16, 0),
        (1, 256, 8192, 32, 8, 128, BF16, 0),
        (1, 384, 8192, 32, 8, 128, BF16, 0),
        (1, 128, 32768, 32, 8, 128, BF16, 0),
        (2, 128, 8192, 32, 8, 128, BF16, 0),
        (1, 256, 8192, 32, 8, 64, BF16, 0),
        (1, 256, 8192, 16, 8, 256, BF16, 0),
        (1, 256, 8192, 32, 8, 128, FP16, 0),
        (1, 2048, 8192, 4, 4, 128, BF16, 0),
    ),
    "long": (
        (1, 512, 8192, 32, 8, 128, BF16, 0),
        (1, 1024, 8192, 32, 8, 128, BF16, 0),
        (1, 2048, 16384, 32, 8, 128, BF16, 0),
        (2, 1024, 4096, 32, 8, 128, BF16, 0),
    ),
    "pages": (
        (1, 128, 4096, 32, 8, 128, BF16, 64),
        (1, 256, 8192, 32, 8, 128, BF16, 64),
        (1, 256, 8192, 32, 8, 128, BF16, 16),
        (1, 512, 8192, 32, 8, 128, BF16, 64),
        (1, 2048, 16384, 32, 8, 128, BF16, 64),
    ),
    "tokens": (
        (64, 1, 8192, 32, 8, 128, BF16, 0),
        (8, 1, 2048, 32, 8, 128, BF16, 0),
        (1, 1, 8192, 32, 8, 128, BF16, 0),
    ),
}
QUICK = 2  # problems of each suite with --quick
NAMES = ("batch", "queries", "keys", "heads", "heads_kv", "head_dim", "dtype", "page_size")


def parser():
    parser = loop.parser(__doc__, list(SUITES), None, ROUNDS)
    parser.add_argument("--before", metavar="FILE", help="an older libflashtune, whose times and bits are compared")
    return parser


class Side:
    """A copy of the library, and the contexts that it made."""

    def __init__(self, path):
        from flashtune import _library

        if path:
            os.environ["FLASHTUNE_LIBRARY"] = os.path.abspath(path)
        _library._library = None
        self.library, self.contexts = _library.library(), {}

    def use(self):
        """Makes this copy the one that the package calls. Drafts of the copy before would repeat
        its calls."""
        from flashtune import _context, _library, _torch_drafts

        _library._library, _context._contexts = self.library, self.contexts
        _torch_drafts.start()


def arguments_of(case):
    """q, k and v, and the options of a call. Keys in pages are shuffled, with the lengths on the
    device."""
    dtype = getattr(torch, case["dtype"])
    generator = torch.Generator("cuda").manual_seed(3)
    batch, keys, size = case["batch"], case["keys"], case["page_size"]

    def normal(seqlen, heads):
        shape = (batch, seqlen, heads, case["head_dim"])
        return torch.randn(shape, device="cuda", dtype=dtype, generator=generator)

    q, k, v = normal(case["queries"], case["heads"]), normal(keys, case["heads_kv"]), normal(keys, case["heads_kv"])
    if not size:
        return (q, k, v), {}
    order = torch.randperm(batch * keys // size, device="cuda", generator=generator)
    pages = [torch.empty_like(x).view(-1, size, *x.shape[2:]) for x in (k, v)]
    for into, x in zip(pages, (k, v)):
        into[order] = x.view(into.shape)
    lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    return (q, *pages), dict(block_table=order.int().view(batch, -1), seqused_k=lengths)


def bits(result):
    return [x.view(torch.int16 if x.element_size() == 2 else torch.int32) for x in result]


def tile(tensors, options):
    """The rows and splits of a plan's tiles."""
    import flashtune

    config = flashtune.plan_info(*tensors, causal=True, **options)["config"]
    knobs = dict(word.split("=") for word in config.split() if "=" in word)
    return f"{knobs.get('block_m', '?')}/{knobs.get('num_splits', '1')}"


def measure(case, sides):
    """One row. `sides` are this library and, if there is one, the older one."""
    import flashtune

    tensors, options = arguments_of(case)
    results, graphs, tiles = {}, {}, {}
    for name, side, invariant in [("default", sides[0], False), *zip(("invariant", "before"), sides, (True, True))]:
        side.use()
        own = dict(options, batch_invariant=invariant)
        call = lambda own=own: flashtune.attention_forward(*tensors, causal=True, **own)  # noqa: E731
        results[name] = call()
        torch.cuda.synchronize()
        graphs[name] = captured(call)
        tiles[name] = tile(tensors, own)
    row = dict(**case, tiles=tiles, refused={})
    if "before" in results:
        pairs = zip(bits(results["invariant"]), bits(results["before"]))
        row["same_bits"] = all(torch.equal(now, before) for now, before in pairs)
    row["difference"] = (results["invariant"][0].float() - results["default"][0].float()).abs().max().item()
    return row, graphs


def timed(row, graphs, rounds):
    seconds = dict(zip(graphs, round_robin(list(graphs.values()), rounds)))
    row["us"] = {name: time * 1e6 for name, time in seconds.items()}
    row["ratio"] = {f"{name}/default": seconds[name] / seconds["default"] for name in seconds if name != "default"}
    return row


def label(case):
    pages = f" pages of {case['page_size']}" if case["page_size"] else ""
    heads = f"{case['heads']}/{case['heads_kv']}"
    return f"b{case['batch']} q{case['queries']} k{case['keys']} h{heads} d{case['head_dim']} {case['dtype']}{pages}"


def show(suite, row):
    times = ", ".join(f"{name} {time:.1f} ({row['tiles'][name]})" for name, time in row["us"].items())
    ratios = ", ".join(f"{name} {ratio:.3f}" for name, ratio in row["ratio"].items())
    same = f"; same bits {row['same_bits']}" if "same_bits" in row else ""
    print(f"{suite:8}{label(row)}: us {times}; {ratios}{same}; difference {row['difference']:.1e}", flush=True)


def summary(rows):
    """The geometric mean and the least of each ratio, by suite."""
    groups = {}
    for row in rows:
        for name in row["ratio"]:
            groups.setdefault((row["suite"], name), []).append(row)
    return {
        f"{suite}, {name}": report.mean_and_least(members, lambda row, name=name: row["ratio"][name], label)
        for (suite, name), members in groups.items()
    }


def main():
    arguments = parser().parse_args()
    measured_on = machine.describe()
    sides = [Side(path) for path in (os.environ.get("FLASHTUNE_LIBRARY"), arguments.before)[: 2 if arguments.before else 1]]

    def rows_of(suite, case):
        row = dict(suite=suite, **timed(*measure(case, sides), arguments.rounds))
        show(suite, row)
        return [row]

    def results(rows):
        return dict(machine=measured_on, rounds=arguments.rounds, rows=rows, summary=summary(rows))

    chosen = {suite: SUITES[suite][: QUICK if arguments.quick else None] for suite in arguments.suites}
    problems = [(suite, dict(zip(NAMES, case))) for suite in chosen for case in chosen[suite]]
    rows, skipped = loop.run(problems, rows_of, results, arguments)
    for name, entry in summary(rows).items():
        print(f"{name}: geometric mean {entry['geometric_mean']:.3f} ({entry['cells']} problems)")
    report.show_gaps(rows, label, skipped)


if __name__ == "__main__":
    main()
