#!/usr/bin/env python3
"""Draws the suite "grid" of bench/attention.py's JSON as SVG files, with lengths along the x axis.

PREFIX_forward.svg and PREFIX_backward.svg show TFLOP/s, a panel for each head dim and mask and a
line for each peer. PREFIX_ratio.svg shows flashtune's speed over the best peer, a panel for each
pass and a line for each head dim and mask.
"""

import argparse
import json
from html import escape

from attention_report import PASSES, TITLES, length_name

COLOURS = {
    "flashtune": "#d1495b",
    "fa2": "#30638e",
    "cudnn": "#8d99ae",
    "efficient": "#c9ada7",
    "fa3": "#edae49",
    "fa4": "#3a7d44",
}
DIM_COLOURS = {64: "#30638e", 128: "#3a7d44", 256: "#d1495b"}
OTHER_COLOUR = "#555"
WIDTH, HEIGHT = 250, 170
RATIO_WIDTH, RATIO_HEIGHT = 400, 220
LEFT, RIGHT, TOP, BOTTOM = 40, 14, 28, 24
STYLE = ".title{font:11px sans-serif;fill:#333}.tick{font:9px sans-serif;fill:#777}.grid{stroke:#e5e5e5}.one{stroke:#999}"


def panel(title, lines, lengths, size, ticks, low, high, points=None):
    """The SVG of one panel. `lines` are (values, None for a gap; SVG attributes). The values stand
    in the order of `lengths`, which name the x axis, or are `points` without names."""
    width, height = size
    last = (points or len(lengths)) - 1

    def x(index):
        return LEFT + (width - LEFT - RIGHT) * index / max(1, last)

    def y(value):
        return TOP + (height - TOP - BOTTOM) * (high - value) / (high - low)

    parts = [f'<text x="{LEFT}" y="{TOP - 10}" class="title">{escape(title)}</text>']
    for tick in ticks:
        style = "one" if tick == 1 else "grid"
        parts.append(f'<line x1="{LEFT}" x2="{width - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" class="{style}"/>')
        parts.append(f'<text x="{LEFT - 4}" y="{y(tick) + 3:.1f}" class="tick" text-anchor="end">{tick}</text>')
    for index, length in enumerate(lengths):
        name = length_name(length)
        parts.append(f'<text x="{x(index):.1f}" y="{height - 8}" class="tick" text-anchor="middle">{name}</text>')
    for values, attributes in lines:
        points = " ".join(f"{x(i):.1f},{y(value):.1f}" for i, value in enumerate(values) if value is not None)
        parts.append(f'<polyline points="{points}" fill="none" {attributes}/>')
    return "".join(parts)


def stroke(colour, width=1.5, is_dashed=False):
    return f'stroke="{colour}" stroke-width="{width}"' + (' stroke-dasharray="4 3"' if is_dashed else "")


def document(panels, size, columns, legend, caption):
    """The whole SVG: panels in rows of `columns`, then a legend of (text, SVG attributes), then
    a caption."""
    width, height = size[0] * columns, size[1] * (-(-len(panels) // columns)) + 48
    parts = []
    for index, drawn in enumerate(panels):
        place = f"translate({index % columns * size[0]},{index // columns * size[1]})"
        parts.append(f'<g transform="{place}">{drawn}</g>')
    for index, (text, attributes) in enumerate(legend):
        at = LEFT + index * (width - LEFT) // len(legend)
        parts.append(f'<line x1="{at}" x2="{at + 16}" y1="{height - 36}" y2="{height - 36}" {attributes}/>')
        parts.append(f'<text x="{at + 21}" y="{height - 32}" class="title">{escape(text)}</text>')
    parts.append(f'<text x="{LEFT}" y="{height - 12}" class="title">{escape(caption)}</text>')
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"><style>{STYLE}</style>'
    return frame + f'<rect width="{width}" height="{height}" fill="#fff"/>' + "".join(parts) + "</svg>\n"


def classes(rows):
    """(head dim, causal) of the rows in order."""
    return sorted({(row["head_dim"], row["causal"]) for row in rows})


def values_of(rows, head_dim, causal, lengths, value):
    """`value(row)` at each length, None where that cell was not measured."""
    found = {row["seqlen"]: value(row) for row in rows if (row["head_dim"], row["causal"]) == (head_dim, causal)}
    return [found.get(length) for length in lengths]


def lengths_of(rows):
    return sorted({row["seqlen"] for row in rows})


def rate_chart(name, rows, gpu):
    """TFLOP/s of one pass."""
    lengths = lengths_of(rows)
    # "call" is flashtune without autograd, a second line for flashtune.
    peers = [peer for peer in dict.fromkeys(peer for row in rows for peer in row["tflops"]) if peer != "call"]
    strokes = {peer: stroke(COLOURS.get(peer, OTHER_COLOUR), 2.5 if peer == "flashtune" else 1.5) for peer in peers}
    high = 1.05 * max(rate for row in rows for rate in row["tflops"].values())
    ticks = range(0, int(high) + 1, max(50, int(high / 4) // 50 * 50))
    panels = []
    for head_dim, causal in classes(rows):
        lines = [
            (values_of(rows, head_dim, causal, lengths, lambda row, peer=peer: row["tflops"].get(peer)), strokes[peer])
            for peer in peers
        ]
        title = f"{name}, head_dim {head_dim}{', causal' if causal else ''}"
        panels.append(panel(title, lines, lengths, (WIDTH, HEIGHT), ticks, 0, high))
    legend = [(TITLES.get(peer, peer), strokes[peer]) for peer in peers]
    return document(panels, (WIDTH, HEIGHT), 2, legend, f"{gpu}, bf16, 16k tokens, TFLOP/s over seqlen")


def ratio_chart(passes, gpu):
    """flashtune's speed over the best peer of each cell, in all passes."""
    ratios = [row["ratio"]["best"] for rows in passes.values() for row in rows]
    low, high = min(0.9, *ratios) - 0.02, max(1.1, *ratios) + 0.02
    ticks = [tick / 10 for tick in range(int(low * 10) + 1, int(high * 10) + 1)]
    panels, strokes = [], {}
    for name, rows in passes.items():
        lengths, lines = lengths_of(rows), []
        for head_dim, causal in classes(rows):
            attributes = stroke(DIM_COLOURS.get(head_dim, OTHER_COLOUR), 2, causal)
            strokes[f"d{head_dim}{' causal' if causal else ''}"] = attributes
            lines.append((values_of(rows, head_dim, causal, lengths, lambda row: row["ratio"]["best"]), attributes))
        panels.append(panel(name, lines, lengths, (RATIO_WIDTH, RATIO_HEIGHT), ticks, low, high))
    caption = f"{gpu}, bf16, 16k tokens: flashtune's speed over the best peer of each cell, over seqlen"
    return document(panels, (RATIO_WIDTH, RATIO_HEIGHT), len(panels), list(strokes.items()), caption)


def charts(results):
    """{file name's end: SVG} of all charts for which the results have rows."""
    rows, gpu = [row for row in results["rows"] if row["suite"] == "grid"], results["machine"]["gpu"]
    of_pass = {name: [row for row in rows if row["pass"] == name] for name in PASSES}
    drawn = {name: rate_chart(name, cells, gpu) for name, cells in of_pass.items() if cells}
    compared = {name: [row for row in cells if row["ratio"]] for name, cells in of_pass.items()}
    compared = {name: cells for name, cells in compared.items() if cells}
    if compared:
        drawn["ratio"] = ratio_chart(compared, gpu)
    return drawn


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", help="a file that bench/attention.py --json wrote")
    parser.add_argument("prefix", help="how the names of the SVG files begin")
    arguments = parser.parse_args()
    with open(arguments.json) as file:
        drawn = charts(json.load(file))
    if not drawn:
        print(f"{arguments.json} has no row of the suite grid; there is nothing to draw")
    for name, svg in drawn.items():
        with open(f"{arguments.prefix}_{name}.svg", "w") as file:
            file.write(svg)


if __name__ == "__main__":
    main()
