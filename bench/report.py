"""The closing lines that benches of many problems share: means of ratios, and the reasons why a
peer has no time.

The module reads one field of a bench's rows, `refused`: {who: reason}.
"""

import math


def mean_and_least(rows, ratio, label):
    """The geometric mean of `ratio` over rows, the least ratio and its problem; `label` names a
    row's problem."""
    worst = min(rows, key=ratio)
    mean = math.exp(sum(math.log(ratio(row)) for row in rows) / len(rows))
    return dict(cells=len(rows), geometric_mean=mean, min=ratio(worst), min_cell=label(worst))


def of_each_ratio(rows, label):
    """`mean_and_least` of each name in the rows' "ratio", over the rows that have it."""
    names = dict.fromkeys(name for row in rows for name in row["ratio"])
    of = lambda name: [row for row in rows if name in row["ratio"]]  # noqa: E731
    return {name: mean_and_least(of(name), lambda row, name=name: row["ratio"][name], label) for name in names}


def reason(error):
    """An exception in one line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


def show_gaps(rows, label, skipped):
    """Prints one line for each pair of peer and reason, with the first problem that it concerns,
    and the number of skipped problems."""
    first = {}
    for row in rows:
        for name, why in row["refused"].items():
            first.setdefault((name, why), label(row))
    for (name, why), problem in first.items():
        print(f"{name} has no time for {problem}: {why}")
    if skipped:
        print(f"{skipped} problems were not started before the deadline")
