"""Time to accuracy: every scheme under three regimes of slowness, three tasks, four optimizers, at its own best rate.

The simulator decides who computes on which weights, when it counts and what time it is; the gradients are real
(harness/side_by_side.py). Each scheme trains with the rate that is fastest for it on held-out fifths of the training
data, with other seeds than those that are shown.
"""

import json
import math
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import NamedTuple

import torch
from harness import record, regimes, side_by_side, stacked
from harness.schedule import Committed, schedule

from evenstep.schemes import parse_scheme
from evenstep.sim import Scenario

BASELINE = "lb-bsp"
SCHEMES = (
    "bsp", BASELINE, "dbs", "local-sgd", "asp", "ssp", "dssp", "ssp:load=lb-bsp", "dssp:load=lb-bsp", "grouped",
    "grouped:groups=4,inside=lb-bsp",
)  # fmt: skip
REGIMES = ("persistent", "episodic", "jitter")
EPOCH = 30
"""Global batches of an epoch: the data are gone through several times in it."""
SEEDS, TUNING_SEED = 3, 1000
HELD = 2
"""Evaluations running that must be at the target; time counts to the first of them."""
POINTS = 30
"""Of a curve in the record."""


class Task(NamedTuple):
    """`size`: a worker's samples at equal sizes. `target`: accuracy in per cent, or loss. `folds`: to tune on."""

    make: object
    size: int
    iterations: int
    every: float
    target: float
    folds: int


class Kind(NamedTuple):
    """An optimizer. `grid`: the rates that are tried, by task."""

    make: object
    grid: dict


TASKS = {
    "digits": Task(stacked.digits, 20, 150, 1.0, 95.0, 2),
    "letters": Task(stacked.letters, 20, 240, 2.0, 32.0, 2),
    "text": Task(stacked.text, 10, 180, 3.0, 2.4, 2),
}
MOMENTUM, NESTEROV = "SGD, momentum 0.9", "SGD, Nesterov 0.9"


def grid(first, count, factor=2**0.5):
    """So many rates, each so many times the one before."""
    return [float(f"{first * factor**number:.3g}") for number in range(count)]


KINDS = {
    MOMENTUM: Kind(
        lambda rates: side_by_side.sgd(rates, 0.9),
        {"digits": grid(0.1, 10), "letters": grid(0.2, 10), "text": grid(0.1, 6, 2)},
    ),
    NESTEROV: Kind(
        lambda rates: side_by_side.sgd(rates, 0.9, nesterov=True),
        {"digits": grid(0.1, 10), "letters": grid(0.2, 10), "text": grid(0.1, 6, 2)},
    ),
    "SGD": Kind(side_by_side.sgd, {"digits": grid(0.4, 10), "letters": grid(1.6, 10), "text": grid(0.4, 6, 2)}),
    "Adam": Kind(side_by_side.adam, {"digits": grid(0.008, 10), "letters": grid(0.016, 10), "text": grid(0.002, 6, 2)}),
}


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("--rows", type=Path, help="a folder that keeps each cell, to go on from when interrupted")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    options = parser.parse_args()
    # Where rows are on this machine is not part of the record's command.
    sys.argv = [word for before, word in pairwise(["", *sys.argv]) if "--rows" not in (before, word)]
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    began = time.monotonic()
    rows = []
    for task in options.tasks[:1] if options.quick else options.tasks:
        bench = Bench(task, options, KINDS)
        for regime in REGIMES[1:2] if options.quick else REGIMES:
            for scheme in (BASELINE, "asp", "local-sgd") if options.quick else SCHEMES:
                rows += _kept(options.rows, bench, regime, scheme)
    minutes = (time.monotonic() - began) / 60
    record.console.print(f"  {len(rows)} cells in {minutes:.1f} minutes")
    done = record.publish(
        "time_to_accuracy",
        f"Time to accuracy, {len(regimes.SPEEDS)} workers, real gradients in virtual time",
        options,
        config={
            "regimes": {name: regimes.REGIMES[name] for name in REGIMES}, "schemes": SCHEMES, "seeds": SEEDS,
            "epoch_global_batches": EPOCH, "target_held_for_evaluations": HELD,
            "tasks": {
                name: {
                    "source": task.make().source, "samples_per_worker": task.size, "global_batches": task.iterations,
                    "evaluated_every_global_batches": task.every, "target": task.target,
                    "tuned_on_fifths": task.folds, "grids": {kind: each.grid[name] for kind, each in KINDS.items()},
                }
                for name, task in TASKS.items()
            },
            "tuned": "by time to the target on held-out fifths of the training data, with other seeds",
            "communication": "takes no time",
        },
        figures=_figures(rows),
        tables=_tables(rows),
        raw=rows,
    )  # fmt: skip
    return 0 if done else 1


def _kept(folder, bench, regime, scheme):
    """The rows of a cell, one for each optimizer; from the folder where it has them."""
    path = folder and folder / f"{bench.name}-{regime}-{scheme.replace(':', '-')}.json"
    if path and path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    began = time.monotonic()
    rows = bench.cell(regime, scheme)
    record.console.print(f"  {bench.name}, {regime}, {scheme}: {time.monotonic() - began:.0f} s")
    if path:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rows), encoding="utf-8")
    return rows


class Bench:
    """Trains one task with optimizers by name. Schedules that differ in times alone are trained once."""

    def __init__(self, name, options, kinds):
        self.kinds = kinds
        self.name, self.spec, self.task = name, TASKS[name], TASKS[name].make()
        self.seeds = [options.seed + number for number in range(1 if options.quick else SEEDS)]
        self.folds = range(1 if options.quick else self.spec.folds)
        self.iterations = self.spec.iterations // (2 if options.quick else 1)
        self.known = {}

    def cell(self, regime, scheme):
        """A row for each optimizer: its rate, and for each seed the seconds to the target and the curve."""
        grids = {kind: each.grid[self.name] for kind, each in self.kinds.items()}
        on_held_out = [
            self.curves(regime, scheme, TUNING_SEED + fold, grids, self.task.held_out(fold)) for fold in self.folds
        ]
        rates = {kind: self._best(grids[kind], [each[kind] for each in on_held_out]) for kind in grids}
        by_seed = [
            self.curves(regime, scheme, seed, {kind: [rate] for kind, rate in rates.items()}, self.task)
            for seed in self.seeds
        ]
        return [
            {
                "task": self.name, "regime": regime, "scheme": scheme, "optimizer": kind, "rate": rate,
                "at_the_edge_of_the_grid": rate in (grids[kind][0], grids[kind][-1]),
                "seconds_to_target": [seconds_to(each[kind][0], self.spec.target) for each in by_seed],
                "final": [final(each[kind][0]) for each in by_seed],
                "curves": [_thinned(each[kind][0]) for each in by_seed],
            }
            for kind, rate in rates.items()
        ]  # fmt: skip

    def curves(self, regime, scheme, seed, rates, task):
        """For each optimizer a curve for each rate: pairs of seconds and what is measured, less the better."""
        batch = self.spec.size * len(regimes.SPEEDS)
        scenario = Scenario(
            cluster=regimes.cluster(regime, seed, batch), scheme=parse_scheme(scheme), global_batch_size=batch,
            iterations=self.iterations, epoch_samples=batch * EPOCH,
        )  # fmt: skip
        optimizers = [self.kinds[kind].make(each) for kind, each in rates.items()]
        if scenario.scheme.period:
            points = side_by_side.train_locally(task, scenario, self.spec.size, optimizers, seed)
        else:
            points = self._in_order(task, schedule(scenario), optimizers, seed)
        sign = 1.0 if task.measure == "loss" else -1.0
        columns = zip(*(values for _, values in points), strict=True)
        return {
            kind: [[(at, sign * value) for (at, _), value in zip(points, next(columns), strict=True)] for _ in each]
            for kind, each in rates.items()
        }

    def _in_order(self, task, events, optimizers, seed):
        same = tuple(event._replace(at=0.0) if isinstance(event, Committed) else event for event in events)
        key = seed, len(task.train[1]), str([each.rates.tolist() for each in optimizers]), same
        if key not in self.known:
            self.known[key] = side_by_side.train(task, events, optimizers, seed, self.spec.every)
        return [(events[number].at, values) for number, values in self.known[key]]

    def _best(self, grid, curves_by_fold):
        """The rate that is first at the target on held-out data, or where none is, the best in the end."""

        def rank(number):
            curves = [each[number] for each in curves_by_fold]
            # A run that does not get there counts as one that takes ten times as long.
            times = [seconds_to(curve, self.spec.target) or 10 * curve[-1][0] for curve in curves]
            return fmean(times), fmean(_finite(final(curve)) for curve in curves)

        return grid[min(range(len(grid)), key=rank)]


def seconds_to(curve, target):
    """Seconds until evaluations running began to be all at the target; None where none did.

    A curve has losses, or accuracies times -1; the target has neither sign.
    """
    limit = target if curve[0][1] > 0 else -target
    reached = [value <= limit for _, value in curve]
    for first in range(len(curve) - HELD + 1):
        if all(reached[first : first + HELD]):
            return curve[first][0]
    return None


def final(curve):
    """The mean of the last tenth."""
    return fmean(value for _, value in curve[-max(1, len(curve) // 10) :])


def _finite(value):
    return value if math.isfinite(value) else math.inf


def _thinned(curve):
    """As text, so that the record stays readable."""
    step = math.ceil(len(curve) / POINTS)
    return " ".join(f"{at:.4g}:{abs(value):.4g}" for at, value in curve[step - 1 :: step])


# What is shown.


def _seconds(row):
    """The median over the seeds; infinite where most did not get there."""
    return median(math.inf if each is None else each for each in row["seconds_to_target"])


def ratio(rows, row):
    """Seconds to the target over the baseline's, of the medians; None where either did not get there."""
    (base,) = (
        each
        for each in rows
        if each["scheme"] == BASELINE and all(each[key] == row[key] for key in ("task", "regime", "optimizer"))
    )
    over = _seconds(row) / _seconds(base) if math.isfinite(_seconds(base)) else math.inf
    return over if math.isfinite(over) else None


def _of(rows, **wanted):
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _figures(rows):
    """The goal: with momentum, under episodes and jitter, at least level with the baseline."""
    figures = []
    for row in _of(rows, optimizer=MOMENTUM):
        aimed = row["scheme"].partition(":")[0] in ("dssp", "grouped") and row["regime"] in ("episodic", "jitter")
        if aimed and (over := ratio(rows, row)) is not None:
            name = (
                f"{row['task']}, {row['regime']}, {MOMENTUM}: {row['scheme']}, seconds to the target over {BASELINE}'s"
            )
            figures.append(record.figure(name, [over], goal="<= 1"))
    return figures or [record.figure("cells", [len(rows)])]


def _tables(rows):
    tables = []
    for kind in dict.fromkeys(row["optimizer"] for row in rows):
        tables.append(_means(rows, kind))
        tables += [_table(rows, task, kind) for task in dict.fromkeys(row["task"] for row in rows)]
    return tables


def _means(rows, kind):
    """Over the tasks."""
    shown = list(dict.fromkeys(row["regime"] for row in rows))
    lines = []
    for scheme in dict.fromkeys(row["scheme"] for row in rows):
        ratios = [
            [ratio(rows, row) for row in _of(rows, optimizer=kind, scheme=scheme, regime=regime)] for regime in shown
        ]
        lines.append([scheme, *("never" if None in each else f"{geometric_mean(each):.2f}" for each in ratios)])
    title = f"{kind}: seconds to the target over {BASELINE}'s, geometric mean over the tasks"
    return record.table(title, ("scheme", *shown), lines)


def _table(rows, task, kind):
    here = _of(rows, task=task, optimizer=kind)
    unit = "loss" if TASKS[task].make is stacked.text else "accuracy %"
    shown = list(dict.fromkeys(row["regime"] for row in here))
    lines = []
    for scheme in dict.fromkeys(row["scheme"] for row in here):
        line = [scheme]
        for regime in shown:
            (row,) = _of(here, scheme=scheme, regime=regime)
            over = ratio(rows, row)
            line.append(f"{_seconds(row):.1f}" if math.isfinite(_seconds(row)) else "never")
            line.append("-" if over is None else f"{over:.2f}")
            line.append(f"{abs(fmean(row['final'])):.{2 if unit == 'loss' else 1}f}")
            line.append(f"{row['rate']:g}{' (edge)' if row['at_the_edge_of_the_grid'] else ''}")
        lines.append(line)
    columns = [
        f"{regime}: {what}" for regime in shown for what in ("median s", f"over {BASELINE}", f"final {unit}", "rate")
    ]
    target = f"{unit} {TASKS[task].target:g}"
    return record.table(f"{task}, {kind}: seconds to {target}", ("scheme", *columns), lines)


if __name__ == "__main__":
    sys.exit(main())
