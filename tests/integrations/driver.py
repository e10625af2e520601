"""How a script of cases is run: each case that the command line names, with what it found as one line of JSON."""

from __future__ import annotations

import argparse
import gc
import json
import os
from pathlib import Path

from accelerate.state import AcceleratorState, GradientState


def reset():
    """Between two cases that share nothing."""
    gc.collect()
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def main(cases, make_run):
    """cases: functions by name. make_run(plain, directory): what each is called with, beside its own arguments.

    --plain is for all cases, and an argument `plain` for one.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("cases", nargs="+", help="NAME=JSON: a function, and its arguments beside the run")
    given = parser.parse_args()
    for number, case in enumerate(given.cases):
        name, _, text = case.partition("=")
        arguments = json.loads(text or "{}")
        plain = arguments.pop("plain", given.plain)
        run = make_run(plain, given.out.parent / f"case-{number}{'-plain' * plain}")
        found = cases[name](run, **arguments)
        if os.environ["RANK"] == "0":
            with given.out.open("a") as file:
                file.write(json.dumps({"case": case, **found}) + "\n")
        reset()
