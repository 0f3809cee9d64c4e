"""The record of a run: figures against goals, on the terminal and as JSON."""

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from statistics import median

import numpy
import torch
from rich.console import Console
from rich.table import Table

import evenstep
from harness.changed import changed, git

LARGEST_OVERRUN_SHARE = 0.02
MANY_VARIANTS = 10
NAME_WIDTH = 36
"""Characters that a table on the terminal leaves at least for what a row is about."""
ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
console = Console(highlight=False, width=110)


def arguments(description):
    """The parser that every benchmark begins with."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a smoke run: too short to conclude anything from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the JSON goes (default: results/NAME.json beside this script)")
    # The commit at the start: another one may be made while the benchmark runs.
    parser.set_defaults(commit=git(ROOT, "rev-parse", "HEAD"))
    return parser


def figure(name, values, *, goal=None, unit=""):
    """One figure: the median of one value per repetition; `goal` is such as `>= 0.95`, or None where there is none."""
    middle = median(values)
    met = None
    if goal is not None:
        sign, limit = goal.split()
        met = bool(middle >= float(limit)) if sign == ">=" else bool(middle <= float(limit))
    return {
        "figure": name, "median": middle, "least": min(values), "largest": max(values), "unit": unit, "goal": goal,
        "met": met, "repetitions": list(values),
    }  # fmt: skip


def overruns(segments):
    """By variant, the share of iterations in which the real work of any worker overran its emulated time."""
    shares = {
        name: sum(s["overrun_iterations"] for s in each) / sum(s["iterations"] for s in each)
        for name, each in segments.items()
    }
    return {
        "largest_allowed": LARGEST_OVERRUN_SHARE,
        "by_variant": shares,
        "counts": all(share < LARGEST_OVERRUN_SHARE for share in shares.values()),
    }


def table(title, headings, rows):
    """A table of texts to be shown below the figures; the first column says what a row is about."""
    return {"title": title, "headings": list(headings), "rows": [list(row) for row in rows]}


def publish(name, title, options, *, config, figures, raw, overrun=None, tables=()):
    """Print the figures, write the JSON, and return whether every goal was met in a run that counts."""
    _show(title, figures, overrun)
    for each in tables:
        _print_table(each)
    path = options.out or (RESULTS / "quick" if options.quick else RESULTS) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "name": name,
        "title": title,
        "quick": options.quick,
        "seed": options.seed,
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "config": config,
        "environment": environment(options.commit, Path(sys.argv[0]).stem),
        "figures": figures,
        "tables": list(tables),
        "overruns": overrun,
        "raw": raw,
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    console.print(f"written: {os.path.relpath(path)}")
    return all(each["met"] is not False for each in figures) and (overrun is None or overrun["counts"])


def _show(title, figures, overrun):
    _print_table(table(title, ("figure", "median", "least to largest", "goal", "met"), map(row, figures)))
    if overrun is not None:
        console.print(verdict(overrun))


def _print_table(each):
    shown = Table(title=each["title"], title_justify="left")
    name_width = min(NAME_WIDTH, max(len(cells[0]) for cells in each["rows"]))
    for number, heading in enumerate(each["headings"]):
        shown.add_column(heading, justify="right" if number else "left", min_width=None if number else name_width)
    for cells in each["rows"]:
        shown.add_row(*cells)
    console.print(shown)


def verdict(overrun):
    """Whether the run counts, in a sentence."""
    by_variant = overrun["by_variant"]
    shares = ", ".join(f"{name} {share:.1%}" for name, share in by_variant.items())
    if len(by_variant) > MANY_VARIANTS:
        worst = max(by_variant, key=by_variant.get)
        shares = f"{by_variant[worst]:.1%} at most ({worst}, of {len(by_variant)} variants)"
    counts = "the run counts" if overrun["counts"] else "THE RUN DOES NOT COUNT: the machine was too slow or too busy"
    return f"Iterations in which real work overran its emulated time: {shares}; {counts}."


def row(each):
    """A figure as cells of text."""
    unit = f" {each['unit']}" if each["unit"] else ""
    met = {True: "yes", False: "NO", None: ""}[each["met"]]
    return [
        each["figure"],
        f"{each['median']:.4g}{unit}",
        f"{each['least']:.4g} to {each['largest']:.4g}",
        each["goal"] or "",
        met,
    ]


def environment(commit, script):
    """Where and on which code figures came about; `git_changes`: what the script judges is not as it is at `commit`."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "evenstep": evenstep.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu_count": os.cpu_count(),
        "git_commit": commit,
        "git_changes": commit is not None and bool(changed(ROOT, commit, script)),
    }
