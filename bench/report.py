"""What a bench of many problems says at its end: means of its ratios, and why a peer has no time. It knows no bench's rows
but for `refused`, {who: reason}."""

import math


def mean_and_least(rows, ratio, label):
    """The geometric mean of `ratio` over rows, the least one and where it is; `label` names a row's problem."""
    worst = min(rows, key=ratio)
    mean = math.exp(sum(math.log(ratio(row)) for row in rows) / len(rows))
    return dict(cells=len(rows), geometric_mean=mean, min=ratio(worst), min_cell=label(worst))


def reason(error):
    """An exception in one line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


def show_gaps(rows, label, skipped):
    """Prints a line for each reason why somebody has no time (who, the reason, and the problem where it came first), and how
    many problems were skipped."""
    first = {}
    for row in rows:
        for name, why in row["refused"].items():
            first.setdefault((name, why), label(row))
    for (name, why), problem in first.items():
        print(f"{name} cannot do {problem}: {why}")
    if skipped:
        print(f"{skipped} problems were not started before the deadline")
