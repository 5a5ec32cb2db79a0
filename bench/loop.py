"""The command line and the loop that benches of many problems share.

The loop measures problem after problem until a deadline. It writes the results after each one, so
that an aborted run leaves its finished part. It knows nothing of problems and rows.
"""

import argparse
import json
import math
import time

import torch


def parser(description, suites, tune_help, rounds, default=None):
    """A parser of the shared arguments; `suites` are names, of which `default` (None: all) are
    measured unless others are named. `rounds` is the default number of timing rounds. There is no
    --tune if `tune_help` is None."""
    default = list(suites if default is None else default)
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def suite_names(text):
        unknown = [name for name in text.split(",") if name not in suites]
        if unknown:
            raise argparse.ArgumentTypeError(f"no suite is called {unknown[0]}; the suites are {', '.join(suites)}")
        return text.split(",")

    def positive(text):
        if not text.isdecimal() or not int(text):
            raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
        return int(text)

    names, defaults = ", ".join(suites), "all" if default == list(suites) else ", ".join(default)
    parser.add_argument("--suites", type=suite_names, default=default, help=f"comma-separated, from: {names}; default: {defaults}")
    parser.add_argument("--quick", action="store_true", help="measure only a few problems of each suite")
    if tune_help is not None:
        parser.add_argument("--tune", action="store_true", help=tune_help)
    parser.add_argument("--rounds", type=positive, default=rounds, help=f"timing rounds of each problem, default {rounds}")
    parser.add_argument("--deadline", type=float, default=math.inf, metavar="SECONDS", help="start no problem after this time")
    parser.add_argument("--json", metavar="FILE", help="write all rows and the summary to FILE")
    return parser


def run(problems, rows_of, results_of, arguments):
    """All rows, and the number of problems that the deadline kept from starting.

    `rows_of` gets the parts of a problem and returns its rows. `results_of` turns all rows so far
    into the JSON to write.
    """
    began, rows = time.monotonic(), []
    for done, problem in enumerate(problems):
        if time.monotonic() - began > arguments.deadline:
            return rows, len(problems) - done
        rows.extend(rows_of(*problem))
        if arguments.json:
            with open(arguments.json, "w") as file:
                json.dump(results_of(rows), file, indent=1)
        torch.cuda.empty_cache()
    return rows, 0
