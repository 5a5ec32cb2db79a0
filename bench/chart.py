#!/usr/bin/env python3
"""Draws bench/attention.py's grid, an SVG for each pass: one panel for each head dim and mask, TFLOP/s over seqlen."""

import argparse
import json
from html import escape

COLOURS = {"flashtune": "#d1495b", "fa2": "#30638e", "cudnn": "#8d99ae", "efficient": "#c9ada7", "fa4": "#3a7d44"}
WIDTH, HEIGHT = 250, 170
LEFT, RIGHT, TOP, BOTTOM = 40, 10, 28, 24


def panel(title, series, lengths, top):
    """The SVG of one panel; series maps a peer to its TFLOP/s in the order of lengths, None where it has none."""
    inner_width, inner_height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(index):
        return LEFT + inner_width * index / max(1, len(lengths) - 1)

    def y(value):
        return TOP + inner_height * (1 - value / top)

    parts = [f'<text x="{LEFT}" y="{TOP - 10}" class="title">{escape(title)}</text>']
    for tick in range(0, int(top) + 1, max(50, int(top / 4) // 50 * 50)):
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 4}" y="{y(tick) + 3:.1f}" class="tick" text-anchor="end">{tick}</text>')
    for index, length in enumerate(lengths):
        name = f"{length // 1024}k" if length >= 1024 else str(length)
        parts.append(f'<text x="{x(index):.1f}" y="{HEIGHT - 8}" class="tick" text-anchor="middle">{name}</text>')
    for peer, values in series.items():
        points = " ".join(f"{x(i):.1f},{y(value):.1f}" for i, value in enumerate(values) if value is not None)
        colour, width = COLOURS.get(peer, "#555"), 2.5 if peer == "flashtune" else 1.5
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
    return "".join(parts)


def grid(results):
    """{pass: its rows of the grid}, of the passes that were measured."""
    rows = {}
    for row in results["rows"]:
        if row["suite"] == "grid":
            rows.setdefault(row["pass"], []).append(row)
    return rows


def draw(name, rows, machine):
    """The SVG of one pass."""
    lengths = sorted({row["seqlen"] for row in rows})
    # The bare call of flashtune's, without autograd, is no peer's.
    peers = [peer for peer in dict.fromkeys(peer for row in rows for peer in row["tflops"]) if peer != "call"]
    dims = sorted({row["head_dim"] for row in rows})
    masks = (False, True)
    top = 1.05 * max(rate for row in rows for rate in row["tflops"].values())
    panels = []
    for line, dim in enumerate(dims):
        for column, causal in enumerate(masks):
            cells = {
                row["seqlen"]: row["tflops"]
                for row in rows
                if (row["head_dim"], row["causal"]) == (dim, causal)
            }
            series = {peer: [cells.get(length, {}).get(peer) for length in lengths] for peer in peers}
            title = f"{name}, head_dim {dim}{', causal' if causal else ''}"
            place = f"translate({column * WIDTH},{line * HEIGHT})"
            panels.append(f'<g transform="{place}">{panel(title, series, lengths, top)}</g>')
    width, height = WIDTH * len(masks), HEIGHT * len(dims) + 48
    legend, at = [], LEFT
    for peer in peers:
        legend.append(f'<rect x="{at}" y="{height - 38}" width="14" height="4" fill="{COLOURS.get(peer, "#555")}"/>')
        legend.append(f'<text x="{at + 19}" y="{height - 32}" class="title">{escape(peer)}</text>')
        at += 100
    caption = f"{machine['gpu']}, bf16, 16k tokens, TFLOP/s over seqlen"
    legend.append(f'<text x="{LEFT}" y="{height - 12}" class="title">{escape(caption)}</text>')
    style = ".title{font:11px sans-serif;fill:#333}.tick{font:9px sans-serif;fill:#777}.grid{stroke:#e5e5e5}"
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"><style>{style}</style>'
    return frame + f'<rect width="{width}" height="{height}" fill="#fff"/>' + "".join(panels + legend) + "</svg>\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", help="what bench/attention.py --json wrote")
    parser.add_argument("prefix", help="of the charts, PREFIX_forward.svg and PREFIX_backward.svg")
    arguments = parser.parse_args()
    with open(arguments.json) as file:
        results = json.load(file)
    passes = grid(results)
    if not passes:
        print(f"{arguments.json} has no row of the suite grid; there is nothing to draw")
    for name, rows in passes.items():
        with open(f"{arguments.prefix}_{name}.svg", "w") as file:
            file.write(draw(name, rows, results["machine"]))


if __name__ == "__main__":
    main()
