#!/usr/bin/env python3
"""Reports a result of bench/attention.py: rows, a summary of ratios, and Markdown tables for the
docs.

A ratio is a peer's time over flashtune's in the same run, so flashtune is faster where it is above
1. "best" is the fastest peer of each cell in that run. Needs neither a GPU nor PyTorch: given a
JSON file, it prints the report again.
"""

import argparse
import json

import cases
import report

TITLES = {
    "cudnn": "cuDNN",
    "fa2": "FA2",
    "efficient": "memory-efficient",
    "fa3": "FA3",
    "fa4": "FA4",
    "math": "math",
    "best": "best peer",
}
PASSES = ("forward", "backward")
# flashtune through PyTorch, and flashtune_backward alone; neither is a peer.
OURS = ("flashtune", "call")
# Ratios below this round to 0.99 or less, which is how the tables show them.
BEHIND = 0.995


def row_of(suite, case, name, seconds, refused):
    """The row of one pass of a case. `seconds` is {peer: time of a call}, `refused` is {peer and
    pass: reason}."""
    row = dict(suite=suite, **case)
    row["pass"] = name
    row["us"] = {peer: time * 1e6 for peer, time in seconds.items()}
    row["tflops"] = {peer: cases.flops(case, name == "backward") / time / 1e12 for peer, time in seconds.items()}
    others = {peer: time for peer, time in seconds.items() if peer not in OURS}
    row["best_peer"] = min(others, key=others.get) if others else None
    row["ratio"] = {}
    if others and "flashtune" in seconds:
        others["best"] = others[row["best_peer"]]
        row["ratio"] = {rival: time / seconds["flashtune"] for rival, time in others.items()}
    row["refused"] = refused
    return row


def rivals_of(names):
    """The columns of ratios: the best peer, then each peer among `names`."""
    return ["best", *(name for name in names if name not in OURS)]


def header(names):
    columns = [*names, *(f"x {rival}" for rival in rivals_of(names))]
    return f"{'suite':8}{'problem':32}{'pass':9}" + "".join(f"{column:>11}" for column in columns)


def line(row, names):
    """One row as text: TFLOP/s by name, then ratios."""
    rates = "".join(f"{row['tflops'][name]:11.0f}" if name in row["tflops"] else f"{'-':>11}" for name in names)
    ratios = "".join(
        f"{row['ratio'][rival]:11.3f}" if rival in row["ratio"] else f"{'-':>11}" for rival in rivals_of(names)
    )
    return f"{row['suite']:8}{cases.label(row):32}{row['pass']:9}{rates}{ratios}"


def summary(rows, names):
    """One entry for each suite, pass, head dim (None for all together) and rival that has a
    ratio there."""
    found = []
    for suite in dict.fromkeys(row["suite"] for row in rows):
        for name in PASSES:
            members = [row for row in rows if (row["suite"], row["pass"]) == (suite, name)]
            for head_dim in (None, *sorted({row["head_dim"] for row in members})):
                of_dim = [row for row in members if head_dim in (None, row["head_dim"])]
                for rival in rivals_of(names):
                    found += entry_of(suite, name, head_dim, rival, of_dim)
    return found


def entry_of(suite, name, head_dim, rival, rows):
    """A list of one summary entry, or of none where no row has the ratio."""
    rows = [row for row in rows if rival in row["ratio"]]
    if not rows:
        return []
    entry = dict(suite=suite, head_dim=head_dim, rival=rival)
    entry["pass"] = name
    entry.update(report.mean_and_least(rows, lambda row: row["ratio"][rival], cases.label))
    entry["behind"] = sum(row["ratio"][rival] < BEHIND for row in rows)
    return [entry]


def summary_text(entries):
    lines = [f"{'suite':9}{'pass':10}{'head dim':10}{'over':11}{'geomean':>8}{'least':>7}{'behind':>10}  cell of the least"]
    for entry in entries:
        behind = f"{entry['behind']} of {entry['cells']}"
        lines.append(
            f"{entry['suite']:9}{entry['pass']:10}{entry['head_dim'] or 'all':<10}{entry['rival']:11}"
            f"{entry['geometric_mean']:8.3f}{entry['min']:7.3f}{behind:>10}  {entry['min_cell']}"
        )
    return "\n".join(lines)


def conditions(results):
    """One sentence about what was measured, where and how."""
    machine, rounds = results["machine"], results["rounds"]
    version = machine["cudnn"]
    cudnn = f"{version // 10000}.{version // 100 % 100}.{version % 100}"
    peers = ", ".join(TITLES.get(name, name) for name in results["peers"] if name not in OURS)
    tuned = "tuned before" if results["tuned"] else "not tuned before"
    return (
        f"{machine['gpu']}, PyTorch {machine['torch']}, cuDNN {cudnn}, bf16. One run of {rounds} rounds,"
        f" peers {peers}; flashtune {tuned} the run."
    )


def markdown(results):
    """Two kinds of tables: the summary of each suite, and for each pass every cell's ratio to
    its best peer."""
    rows, entries = results["rows"], summary(results["rows"], results["peers"])
    parts = [conditions(results)]
    for suite in dict.fromkeys(row["suite"] for row in rows):
        of_suite = [entry for entry in entries if entry["suite"] == suite]
        if of_suite:
            parts += [f"**{suite}**", summary_table(of_suite)]
        for name in PASSES:
            cells = [row for row in rows if (row["suite"], row["pass"]) == (suite, name) and row["ratio"]]
            if cells:
                parts += [f"{suite}, {name}: speed over the best peer, and that peer", cell_table(cells)]
    return "\n\n".join(parts)


def summary_table(entries):
    """A row for each pass and head dim: the ratios to the best peer, then the geometric mean
    over each peer."""
    peers = [rival for rival in dict.fromkeys(entry["rival"] for entry in entries) if rival != "best"]
    titles = [f"over {TITLES.get(peer, peer)}" for peer in peers]
    lines = table_head(["pass", "head dim", "over the best peer", "least", "cells behind", *titles])
    for best in (entry for entry in entries if entry["rival"] == "best"):
        of_row = {
            entry["rival"]: entry
            for entry in entries
            if (entry["pass"], entry["head_dim"]) == (best["pass"], best["head_dim"])
        }
        means = [f"{of_row[peer]['geometric_mean']:.2f}" if peer in of_row else "" for peer in peers]
        figures = [f"{best['geometric_mean']:.2f}", f"{best['min']:.2f}", f"{best['behind']} of {best['cells']}"]
        lines.append(table_row([best["pass"], best["head_dim"] or "all", *figures, *means]))
    return "\n".join(lines)


def cell_table(rows):
    """A row for each head dim and mask, a column for each length."""
    lengths = sorted({row["seqlen"] for row in rows})
    cells = {}
    for row in rows:
        text = f"{row['ratio']['best']:.2f} {TITLES.get(row['best_peer'], row['best_peer'])}"
        cells.setdefault((row["head_dim"], row["causal"]), {})[row["seqlen"]] = text
    lines = table_head(["head dim", "causal", *map(length_name, lengths)])
    for (head_dim, causal), of_length in sorted(cells.items()):
        figures = [of_length.get(length, "") for length in lengths]
        lines.append(table_row([head_dim, "yes" if causal else "no", *figures]))
    return "\n".join(lines)


def length_name(length):
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)


def table_head(titles):
    return [table_row(titles), "|" + "---|" * len(titles)]


def table_row(values):
    return f"| {' | '.join(map(str, values))} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", help="a file that bench/attention.py --json wrote")
    parser.add_argument("--markdown", action="store_true", help="print the Markdown tables alone")
    arguments = parser.parse_args()
    with open(arguments.json) as file:
        results = json.load(file)
    if not arguments.markdown:
        names = results["peers"]
        print(header(names), *(line(row, names) for row in results["rows"]), sep="\n")
        print(f"\n{summary_text(summary(results['rows'], names))}\n")
    print(markdown(results))


if __name__ == "__main__":
    main()
