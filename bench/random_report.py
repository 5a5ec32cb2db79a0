#!/usr/bin/env python3
"""The report of bench/random_shapes.py's JSON: a table of ratios by kind and pass, the problems at
which a peer is ahead, and a chart.

A ratio is the time of the fastest peer over flashtune's, so flashtune is faster above 1. Behind
counts ratios below 0.98.
"""

import argparse
import json
import math

from chart import document, panel, stroke
from random_cases import KINDS, NAMED_KINDS, label
from report import mean_and_least

PASSES = ("forward", "backward")
OURS = ("flashtune", "tuned")
LEVEL = 0.98
COLOURS = {"many": "#30638e", "few": "#d1495b", "gqa": "#3a7d44", "cross": "#edae49", "short": "#8d99ae", "unusual": "#7d3c98"}
WIDTH, HEIGHT = 420, 240


def best_peer(row):
    """(name, microseconds) of the fastest peer; None if none ran."""
    peers = {name: us for name, us in row["us"].items() if name not in OURS}
    return min(peers.items(), key=lambda item: item[1]) if peers else None


def ratio(row):
    return best_peer(row)[1] / row["us"]["flashtune"]


def compared(rows, kind=None, name=None):
    """The rows of a kind and a pass that have a ratio; None takes all."""
    chosen = [row for row in rows if kind in (None, row["kind"]) and name in (None, row["pass"])]
    return [row for row in chosen if "flashtune" in row["us"] and best_peer(row)]


def kinds_of(rows):
    """The kinds that a bench draws by itself, and the others that these rows have."""
    return [kind for kind in NAMED_KINDS if kind in KINDS or compared(rows, kind)]


def table(rows):
    """Markdown: geometric mean, least ratio and problems behind of each kind, a column a pass."""
    lines = ["| kind | forward: mean, least, behind | backward |", "|---|---|---|"]
    for kind in [*kinds_of(rows), None]:
        cells = []
        for name in PASSES:
            found = compared(rows, kind, name)
            if not found:
                cells.append("")
                continue
            mean = mean_and_least(found, ratio, label)
            behind = sum(ratio(row) < LEVEL for row in found)
            cells.append(f"{mean['geometric_mean']:.2f}, {mean['min']:.2f}, {behind} of {len(found)}")
        lines.append(f"| {kind or 'all'} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def behind(rows):
    """A line for each problem at which a peer is ahead, the worst first."""
    found = sorted((row for row in compared(rows) if ratio(row) < LEVEL), key=ratio)
    lines = []
    for row in found:
        name, us = best_peer(row)
        lines.append(
            f"{ratio(row):.2f} {row['pass']} {row['kind']} {label(row)}: {row['us']['flashtune']:.1f} us, {name} {us:.1f}; {row['config']}"
        )
    return "\n".join(lines)


def tuned(rows):
    """How long the default takes beside the tuned config; empty if nothing was tuned."""
    lines = []
    for name in PASSES:
        over = [
            row["us"]["flashtune"] / row["us"]["tuned"] for row in rows if row["pass"] == name and set(OURS) <= set(row["us"])
        ]
        if over:
            mean = math.exp(sum(map(math.log, over)) / len(over))
            lines.append(
                f"{name}: the default takes {mean:.3f} of the tuned config's time (most {max(over):.2f}, {len(over)} problems)"
            )
    return "\n".join(lines)


def chart(rows, gpu):
    """The SVG: sorted ratios, a panel a pass and a line a kind."""
    all_ratios = [ratio(row) for row in compared(rows)]
    low, high = min(0.9, *all_ratios) - 0.02, max(1.1, *all_ratios) + 0.02
    ticks = [tick / 10 for tick in range(int(low * 10) + 1, int(high * 10) + 1)]
    panels, points = [], 101
    for name in PASSES:
        lines = []
        for kind in kinds_of(rows):
            values = sorted(ratio(row) for row in compared(rows, kind, name))
            if values:
                at = [values[round(i * (len(values) - 1) / (points - 1))] for i in range(points)]
                lines.append((at, stroke(COLOURS[kind], 2)))
        panels.append(panel(name, lines, [], (WIDTH, HEIGHT), ticks, low, high, points))
    legend = [(kind, stroke(COLOURS[kind], 2)) for kind in kinds_of(rows)]
    caption = f"{gpu}, bf16: flashtune's speed over the best peer, problems of each kind sorted"
    return document(panels, (WIDTH, HEIGHT), len(panels), legend, caption)


def text(results):
    rows = results["rows"]
    return "\n\n".join(part for part in (table(rows), tuned(rows), behind(rows)) if part)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", nargs="+", help="files that bench/random_shapes.py --json wrote")
    parser.add_argument("--chart", metavar="SVG", help="also draw the ratios")
    arguments = parser.parse_args()
    results = []
    for path in arguments.json:
        with open(path) as file:
            results.append(json.load(file))
    together = dict(machine=results[0]["machine"], rows=[row for result in results for row in result["rows"]])
    print(text(together))
    if arguments.chart:
        with open(arguments.chart, "w") as file:
            file.write(chart(together["rows"], together["machine"]["gpu"]))


if __name__ == "__main__":
    main()
