"""What the benches of many problems have in common: arguments, and problem after problem until a deadline, with the results
written after each, so that a run that is ended leaves what it has. It knows nothing of problems and rows."""

import argparse
import json
import math
import time

import torch


def parser(description, suites, tune_help):
    """A parser of the arguments that all of them take; `suites` are names."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def of_suites(text):
        unknown = [name for name in text.split(",") if name not in suites]
        if unknown:
            raise argparse.ArgumentTypeError(f"no suite is called {unknown[0]}; there are {', '.join(suites)}")
        return text.split(",")

    parser.add_argument("--suites", type=of_suites, default=list(suites), help=f"of {', '.join(suites)}; all if not given")
    parser.add_argument("--quick", action="store_true", help="a few problems of each suite")
    parser.add_argument("--tune", action="store_true", help=tune_help)
    parser.add_argument("--deadline", type=float, default=math.inf, metavar="SECONDS", help="start no problem after this")
    parser.add_argument("--json", metavar="FILE", help="write all rows and the summary there")
    return parser


def run(problems, rows_of, results_of, arguments):
    """The rows of all problems, each a tuple that `rows_of` takes, and how many were not started before the deadline.
    `results_of` makes of rows what is written."""
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
